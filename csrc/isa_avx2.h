// Sixteen float lanes in two AVX2 registers; bf16 widened by shift and mask, products by FMA. Sums of bytes by AVX-VNNI where
// the file that includes this is compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define WAGER_INLINE inline __attribute__((always_inline))

namespace wager::WAGER_NS {

constexpr int kTileRows = 5, kTileCols = 1, kFewRows = 1, kWideRows = 2;
#ifdef __AVXVNNI__
constexpr int kBlockRows = 4, kHeldRows = 1, kManyRows = 4, kManyByteRows = 4, kBlockCols = 1;
#else
#define WAGER_SHORT_SUMS  // sums of products of bytes are 16 bits wide at first
constexpr int kBlockRows = 4, kHeldRows = 4, kManyRows = 32, kManyByteRows = 4, kBlockCols = 1;
#endif
// How far ahead of its reading a panel is prefetched that one tile reads. Its columns are read one after the other: of this many
// bytes it reads half meanwhile.
constexpr int kPrefetchBytes = kHeldRows > 1 ? 12288 : 4096;
constexpr int kQkRows = 4, kQkCols = 1;
constexpr int kPvRows = 4, kPvCols = 1;
using Factor = float;  // what attention multiplies keys and values with: widening bf16 for each block takes a third of its time
constexpr int kExpBlocks = 2;  // attention: sixteens of scores whose exponentials are taken together

struct F {
    __m256 a, b;
};
struct Pair {
    __m256i a, b;
};
struct U {
    __m256i a, b;
};
struct Bytes {
    __m256i a, b;
};
struct Sums {
    __m256i a, b;
};

WAGER_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
WAGER_INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
WAGER_INLINE F splat_at(const float* p) { return {_mm256_broadcast_ss(p), _mm256_broadcast_ss(p)}; }
WAGER_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
WAGER_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
WAGER_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
WAGER_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
WAGER_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
WAGER_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
WAGER_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
WAGER_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
WAGER_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

WAGER_INLINE F keep(F x, F other, int lo, int hi) {
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), eight = _mm256_set1_epi32(8);
    const __m256i above = _mm256_set1_epi32(lo - 1), below = _mm256_set1_epi32(hi);
    const __m256i upper = _mm256_add_epi32(lanes, eight);
    const __m256i ma = _mm256_and_si256(_mm256_cmpgt_epi32(lanes, above), _mm256_cmpgt_epi32(below, lanes));
    const __m256i mb = _mm256_and_si256(_mm256_cmpgt_epi32(upper, above), _mm256_cmpgt_epi32(below, upper));
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(ma)),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(mb))};
}

WAGER_INLINE __m256 without_below(__m256 x, __m256 least) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_and_ps(x, _mm256_cmp_ps(size, least, _CMP_NLT_UQ));
}
WAGER_INLINE F without_below(F x, float least) {
    const __m256 limit = _mm256_set1_ps(least);
    return {without_below(x.a, limit), without_below(x.b, limit)};
}

WAGER_INLINE __m256 power(__m256 biased) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(biased), _mm256_set1_epi32(0x4B400000 - 127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
WAGER_INLINE F times_power(F x, F biased) {
    return {_mm256_mul_ps(x.a, power(biased.a)), _mm256_mul_ps(x.b, power(biased.b))};
}

WAGER_INLINE float sum(F x) {
    const __m256 b = _mm256_add_ps(x.a, x.b);
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
WAGER_INLINE float max_lane(F x) {
    const __m256 b = _mm256_max_ps(x.a, x.b);
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

WAGER_INLINE Pair load_pairs(const uint16_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
WAGER_INLINE Pair splat_pair(const uint16_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
WAGER_INLINE __m256 first(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
WAGER_INLINE __m256 second(__m256i pair) {
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
WAGER_INLINE __m256 dot_half(__m256 acc, __m256i x, __m256i y) {
    return _mm256_fmadd_ps(first(x), first(y), _mm256_fmadd_ps(second(x), second(y), acc));
}
WAGER_INLINE F add_exact(F acc, F x, F y) { return fma(x, y, acc); }  // x * y has no more than 24 bits
WAGER_INLINE void widen_pairs(Pair x, F& low, F& high) {
    low = {first(x.a), first(x.b)};
    high = {second(x.a), second(x.b)};
}
WAGER_INLINE F dot(F acc, Pair x, Pair y) { return {dot_half(acc.a, x.a, y.a), dot_half(acc.b, x.b, y.b)}; }
WAGER_INLINE F widen(const uint16_t* p) {
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
    return {first(a), first(b)};
}
WAGER_INLINE __m256i round_bf16(__m256 x) {  // to nearest even, in the upper halves; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(nan), is_nan);
    return _mm256_castps_si256(chosen);
}
WAGER_INLINE void narrow(uint16_t* p, F x) {
    x = without_below(x, kLeastBf16);
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(round_bf16(x.a), 16), _mm256_srli_epi32(round_bf16(x.b), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
WAGER_INLINE F rounded(F x) {
    x = without_below(x, kLeastBf16);
    return {second(round_bf16(x.a)), second(round_bf16(x.b))};
}
WAGER_INLINE void narrow_two(float* p, F low, F high) {
    store(p, rounded(low));
    store(p + 16, rounded(high));
}
WAGER_INLINE void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
WAGER_INLINE void fetch_once(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA); }

WAGER_INLINE uint32_t bits_of(__m256 a, __m256 b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(a)) | static_cast<uint32_t>(_mm256_movemask_ps(b)) << 8;
}
WAGER_INLINE uint32_t not_finite(F x) {  // x - x is zero for finite x alone
    const __m256 zero = _mm256_setzero_ps();
    return bits_of(_mm256_cmp_ps(_mm256_sub_ps(x.a, x.a), zero, _CMP_NEQ_UQ),
                   _mm256_cmp_ps(_mm256_sub_ps(x.b, x.b), zero, _CMP_NEQ_UQ));
}
WAGER_INLINE uint32_t at_most(F x, F y) {
    return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ));
}
WAGER_INLINE __m256 picked(__m256 lo, __m256 hi, bool odd) {
    const __m256 mixed = odd ? _mm256_shuffle_ps(lo, hi, 0xDD) : _mm256_shuffle_ps(lo, hi, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xD8));
}
WAGER_INLINE void split(const float* p, F& even, F& odd) {
    const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
    const __m256 c = _mm256_loadu_ps(p + 16), d = _mm256_loadu_ps(p + 24);
    even = {picked(a, b, false), picked(c, d, false)};
    odd = {picked(a, b, true), picked(c, d, true)};
}

WAGER_INLINE U splat_u(uint32_t x) {
    const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
    return {v, v};
}
WAGER_INLINE U count_from(uint32_t x) {
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(x))),
            _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(x + 8)))};
}
WAGER_INLINE U load_u(const int32_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
WAGER_INLINE U exor(U x, U y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
WAGER_INLINE void multiply_half(__m256i x, __m256i m, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
WAGER_INLINE void multiply(U x, uint32_t factor, U& high, U& low) {
    const __m256i m = _mm256_set1_epi64x(factor);
    multiply_half(x.a, m, high.a, low.a);
    multiply_half(x.b, m, high.b, low.b);
}
WAGER_INLINE F upper_bits(U x) {
    return {_mm256_cvtepi32_ps(_mm256_srli_epi32(x.a, 8)), _mm256_cvtepi32_ps(_mm256_srli_epi32(x.b, 8))};
}

WAGER_INLINE Bytes load_bytes(const uint8_t* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
WAGER_INLINE Bytes either(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
WAGER_INLINE Bytes chosen(Bytes mask, Bytes x, Bytes y) {  // bytes of `mask` are 0 or 255
    return {_mm256_blendv_epi8(y.a, x.a, mask.a), _mm256_blendv_epi8(y.b, x.b, mask.b)};
}
WAGER_INLINE void interleave(Bytes lower, Bytes upper, Pair& low, Pair& high) {
    low = {_mm256_unpacklo_epi8(lower.a, upper.a), _mm256_unpacklo_epi8(lower.b, upper.b)};
    high = {_mm256_unpackhi_epi8(lower.a, upper.a), _mm256_unpackhi_epi8(lower.b, upper.b)};
}
template <int Left>
WAGER_INLINE __m256i shifted_half(__m256i x, __m256i mask) {
    constexpr int kLeft = Left >= 0 ? Left : 0, kRight = Left < 0 ? -Left : 0;
    return _mm256_and_si256(Left >= 0 ? _mm256_slli_epi16(x, kLeft) : _mm256_srli_epi16(x, kRight), mask);
}
template <int Left>
WAGER_INLINE Bytes shifted(Bytes x, int mask) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    return {shifted_half<Left>(x.a, m), shifted_half<Left>(x.b, m)};
}
struct Lookup {
    __m256i v;
};
WAGER_INLINE Lookup load_lookup(const uint8_t* p) {
    return {_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)))};
}
WAGER_INLINE Bytes looked_up(Bytes codes, Lookup in) { return {_mm256_shuffle_epi8(in.v, codes.a), _mm256_shuffle_epi8(in.v, codes.b)}; }
WAGER_INLINE Sums splat_sum(const int32_t* p) { return {_mm256_set1_epi32(*p), _mm256_set1_epi32(*p)}; }
WAGER_INLINE Sums no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
struct Quad {
    __m256i v;
};
template <int quad>
WAGER_INLINE Quad load_quad(const int8_t* values) {
    int32_t four;
    std::memcpy(&four, values + 4 * quad, 4);
    return {_mm256_set1_epi32(four)};
}
#ifdef __AVXVNNI__
WAGER_INLINE Sums dot_bytes(Sums acc, Bytes w, Quad x) {
    return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x.v), _mm256_dpbusd_avx_epi32(acc.b, w.b, x.v)};
}
constexpr int kByteOffset = 128;
WAGER_INLINE Sums dot_any_bytes(Sums acc, Bytes w, Quad x) { return dot_bytes(acc, w, x); }
#else
struct ShortSums {  // per lane two int16
    __m256i a, b;
};
WAGER_INLINE ShortSums short_sums(Bytes w, Quad x) { return {_mm256_maddubs_epi16(w.a, x.v), _mm256_maddubs_epi16(w.b, x.v)}; }
WAGER_INLINE ShortSums add(ShortSums x, ShortSums y) {
    ShortSums both{_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
    asm("" : "+x"(both.a), "+x"(both.b));  // GCC would add the products of two quads first, and keep more of them than there are registers
    return both;
}
WAGER_INLINE Sums add_up(Sums acc, ShortSums x) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, one)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, one))};
}
WAGER_INLINE void now(Sums& x) { asm("" : "+x"(x.a), "+x"(x.b)); }  // for the same reason, where weights are in memory
// 2 * 128 * 127 fits 16 bits, 2 * 255 * 127 would not. So weights above 7 bits are taken as signed ones, and their sign goes to the
// activations.
constexpr int kByteOffset = 0;
WAGER_INLINE __m256i signed_sums(__m256i w, __m256i x) {
    const __m256i value = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
}
WAGER_INLINE ShortSums short_any_sums(Bytes w, Quad x) { return {signed_sums(w.a, x.v), signed_sums(w.b, x.v)}; }
#endif
WAGER_INLINE F to_float(Sums x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
WAGER_INLINE F load_halves(const uint8_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
WAGER_INLINE F load_unsigned(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
WAGER_INLINE __m256 powers_of(__m128i bytes) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000)));
}
WAGER_INLINE F load_powers(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {powers_of(bytes), powers_of(_mm_srli_si128(bytes, 8))};
}
WAGER_INLINE F load_signed(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
WAGER_INLINE F load_low_nibbles(const uint8_t* p) {
    const __m128i bytes = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(15));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
WAGER_INLINE F load_high_nibbles(const uint8_t* p) {
    const __m128i words = _mm_srli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), 4), bytes = _mm_and_si128(words, _mm_set1_epi8(15));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
WAGER_INLINE F magnitude(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
WAGER_INLINE F store_rounded(int8_t* p, F x) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
}
WAGER_INLINE F whole(F x) {  // the bits of an int32
    return {_mm256_castsi256_ps(_mm256_cvtps_epi32(x.a)), _mm256_castsi256_ps(_mm256_cvtps_epi32(x.b))};
}

// 32 whole numbers in bf16, which holds them exactly.
WAGER_INLINE __m256i bytes_to_bf16(const int8_t* from) {
    const __m256i n = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(n)), 16);
}
WAGER_INLINE void widen_bytes(uint16_t* p, const int8_t* from) {
    for (int i = 0; i < 32; i += 16) {
        const __m256i packed = _mm256_packus_epi32(bytes_to_bf16(from + i), bytes_to_bf16(from + i + 8));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), _mm256_permute4x64_epi64(packed, 0xD8));
    }
}

}  // namespace wager::WAGER_NS

#include "lanes.h"
