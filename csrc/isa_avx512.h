// Sixteen float lanes in one AVX-512 register; products of bf16 pairs by vdpbf16ps.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define WAGER_INLINE inline __attribute__((always_inline))

namespace wager::WAGER_NS {

// Products with float weights: rows x 16 outputs held in registers; up to how many rows all of a panel's outputs are; and from how many
// on activations are widened to floats beforehand.
constexpr int kTileRows = 14, kTileCols = 2, kFewRows = 0, kWideRows = 99;
// Products of quantised weights: rows whose accumulators are in registers; those that are multiplied, kHeldRows at a time, with a
// block's unpacked weights; and those of weights of 8 bits, which need no unpacking, with accumulators in memory.
constexpr int kBlockRows = 6, kHeldRows = 1, kManyRows = 16, kManyByteRows = 8, kBlockCols = 2;
constexpr int kPrefetchBytes = 4096;  // how far ahead of its reading a panel is prefetched that one tile reads
constexpr int kQkRows = 6, kQkCols = 4;      // attention: row-heads x key blocks
constexpr int kPvRows = 6, kPvCols = 4;       // attention: row-heads x 16 dimensions
using Factor = uint16_t;  // what attention multiplies keys and values with
constexpr int kExpBlocks = 4;  // attention: sixteens of scores whose exponentials are taken together

struct F {
    __m512 v;
};
struct Pair {  // per lane two bf16
    __m512i v;
};
struct U {
    __m512i v;
};
struct Bytes {
    __m512i v;
};
struct Sums {  // per lane one int32
    __m512i v;
};

WAGER_INLINE F zero() { return {_mm512_setzero_ps()}; }
WAGER_INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
// One float from memory in every lane. By name: GCC loads four neighbours at once and shuffles them, where shuffles are scarce.
WAGER_INLINE F splat_at(const float* p) {
    F all;
    asm("vbroadcastss %1, %0" : "=v"(all.v) : "m"(*p));
    return all;
}
WAGER_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
WAGER_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
WAGER_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
WAGER_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
WAGER_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
WAGER_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
WAGER_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
WAGER_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
WAGER_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }

// a in lanes [lo, hi), other elsewhere.
WAGER_INLINE F keep(F a, F other, int lo, int hi) {
    const uint32_t below_hi = hi >= 16 ? 0xFFFFu : hi <= 0 ? 0u : (1u << hi) - 1u;
    const uint32_t below_lo = lo >= 16 ? 0xFFFFu : lo <= 0 ? 0u : (1u << lo) - 1u;
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(below_hi & ~below_lo), other.v, a.v)};
}

// 0 in place of numbers nearer to it than `least`; NaN stays NaN.
WAGER_INLINE F without_below(F a, float least) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(a.v), _mm512_set1_ps(least), _CMP_NLT_UQ), a.v)};
}

// x * 2^n where `biased` is n + 1.5 * 2^23; n from -127 (zero) to 127.
WAGER_INLINE F times_power(F x, F biased) {
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(biased.v), _mm512_set1_epi32(0x4B400000 - 127));
    return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(_mm512_slli_epi32(n, 23)))};
}

WAGER_INLINE float sum(F a) {
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
WAGER_INLINE float max_lane(F a) {
    const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

WAGER_INLINE Pair load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
WAGER_INLINE Pair splat_pair(const uint16_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return {_mm512_set1_epi32(bits)};
}
// Of each pair the second product is added first (csrc/kernels_avx512.cpp verifies it).
WAGER_INLINE F dot(F acc, Pair a, Pair b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
WAGER_INLINE F widen(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
WAGER_INLINE void narrow(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(without_below(a, kLeastBf16).v));
}
WAGER_INLINE void narrow_two(uint16_t* p, F first, F second) {
    first = without_below(first, kLeastBf16), second = without_below(second, kLeastBf16);
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
}
WAGER_INLINE void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
WAGER_INLINE void fetch_once(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA); }

// Lanes that are not finite, as bits.
WAGER_INLINE uint32_t not_finite(F a) { return _mm512_fpclass_ps_mask(a.v, 0x01 | 0x08 | 0x10 | 0x80); }
WAGER_INLINE uint32_t at_most(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
WAGER_INLINE void split(const float* p, F& even, F& odd) {
    const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
    const __m512i index = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    even = {_mm512_permutex2var_ps(a, index, b)};
    odd = {_mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b)};
}

WAGER_INLINE U splat_u(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
WAGER_INLINE U count_from(uint32_t x) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(x)))};
}
WAGER_INLINE U load_u(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
WAGER_INLINE U exor(U a, U b) { return {_mm512_xor_si512(a.v, b.v)}; }
WAGER_INLINE void multiply(U a, uint32_t factor, U& high, U& low) {
    const __m512i m = _mm512_set1_epi64(factor);
    const __m512i even = _mm512_mul_epu32(a.v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), m);
    low = {_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))};
    high = {_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd)};
}
WAGER_INLINE F upper_bits(U a) { return {_mm512_cvtepi32_ps(_mm512_srli_epi32(a.v, 8))}; }  // a / 2^8, floored

// Sixteen lanes of four bytes each: unsigned weights of sixteen outputs, times four signed activations.
WAGER_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
WAGER_INLINE Bytes either(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int Left>
WAGER_INLINE Bytes shifted(Bytes a, int mask) {  // by Left bits (to the right if negative), those of `mask` alone
    const __m512i bits = Left >= 0 ? _mm512_slli_epi16(a.v, Left >= 0 ? Left : 0) : _mm512_srli_epi16(a.v, Left < 0 ? -Left : 0);
    return {_mm512_and_si512(bits, _mm512_set1_epi8(static_cast<char>(mask)))};
}
struct Lookup {  // sixteen bytes, looked up by codes of four bits
    __m512i v;
};
WAGER_INLINE Lookup load_lookup(const uint8_t* p) {
    return {_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)))};
}
WAGER_INLINE Bytes looked_up(Bytes codes, Lookup in) { return {_mm512_shuffle_epi8(in.v, codes.v)}; }
// e4m3 as the bytes of bf16 (lanes.h says how), 64 bytes by the lower six bits of codes whose nibbles are exchanged, and by s, E0 and m.
struct FloatBytes {
    uint8_t upper[64], small_upper[64], small_lower[64];
};
constexpr FloatBytes float_bytes() {
    constexpr uint8_t kSmall[] = {59, 59, 59, 60, 60, 60, 60}, kFractions[] = {0, 128, 192, 0, 32, 64, 96};  // of 1 to 7 times 2^-9
    FloatBytes all{};
    for (int i = 0; i < 64; ++i) {
        const int rest = i >> 1 & 15;
        all.upper[i] = static_cast<uint8_t>((i & 8) << 4 | (60 + (i & 7)));
        all.small_upper[i] = static_cast<uint8_t>((i & 1) << 7 | (rest == 0 ? 0 : rest < 8 ? kSmall[rest - 1] : 60));
        all.small_lower[i] = static_cast<uint8_t>(rest == 0 ? 0 : rest < 8 ? kFractions[rest - 1] : rest << 4);
    }
    return all;
}
alignas(64) constexpr FloatBytes kFloatBytes = float_bytes();
// Codes of sixteen outputs and four inputs, as weight_layout.h has them, as the first two of each output and the others.
WAGER_INLINE void widen_e4m3(Bytes codes, Pair& low, Pair& high) {
    const __mmask64 small = _mm512_testn_epi8_mask(codes.v, _mm512_set1_epi8(7));
    const __m512i rest = _mm512_srli_epi16(codes.v, 3);
    __m512i upper = _mm512_permutexvar_epi8(codes.v, _mm512_load_si512(kFloatBytes.upper));
    __m512i lower = _mm512_and_si512(codes.v, _mm512_set1_epi8(static_cast<char>(0xF0)));
    upper = _mm512_mask_permutexvar_epi8(upper, small, rest, _mm512_load_si512(kFloatBytes.small_upper));
    lower = _mm512_mask_permutexvar_epi8(lower, small, rest, _mm512_load_si512(kFloatBytes.small_lower));
    low = {_mm512_unpacklo_epi8(lower, upper)};
    high = {_mm512_unpackhi_epi8(lower, upper)};
}
WAGER_INLINE F add_exact(F acc, F a, F b) { return fma(a, b, acc); }  // a * b has no more than 24 bits
WAGER_INLINE void widen_pairs(Pair a, F& first, F& second) {
    first = {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))};
    second = {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}
struct Quad {  // four activations in every lane
    __m512i v;
};
template <int quad>
WAGER_INLINE Quad load_quad(const int8_t* values) {  // of a block's activations those of one quad
    int32_t four;
    std::memcpy(&four, values + 4 * quad, 4);
    return {_mm512_set1_epi32(four)};
}
WAGER_INLINE Sums splat_sum(const int32_t* p) { return {_mm512_set1_epi32(*p)}; }
WAGER_INLINE Sums no_sum() { return {_mm512_setzero_si512()}; }
WAGER_INLINE Sums dot_bytes(Sums acc, Bytes w, Quad x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)}; }
constexpr int kByteOffset = 128;  // of 8-bit weights stored plus 128, for `dot_any_bytes`
WAGER_INLINE Sums dot_any_bytes(Sums acc, Bytes w, Quad x) { return dot_bytes(acc, w, x); }
WAGER_INLINE F to_float(Sums a) { return {_mm512_cvtepi32_ps(a.v)}; }
WAGER_INLINE F load_halves(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
WAGER_INLINE F load_unsigned(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// 2^(p - 127) of the bytes at p, also of 0; infinity of 255.
WAGER_INLINE F load_powers(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(wide, 23), _mm512_set1_epi32(0x400000)))};
}
WAGER_INLINE F load_signed(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
WAGER_INLINE F load_low_nibbles(const uint8_t* p) {
    const __m128i bytes = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(15));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
WAGER_INLINE F load_high_nibbles(const uint8_t* p) {
    const __m128i words = _mm_srli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), 4);
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(words, _mm_set1_epi8(15))))};
}
WAGER_INLINE F magnitude(F a) { return {_mm512_abs_ps(a.v)}; }
// Rounds to the nearest integer, ties to even, and stores the lanes as int8; returns them.
WAGER_INLINE F store_rounded(int8_t* p, F a) {
    const __m512i whole = _mm512_cvtps_epi32(a.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
    return {_mm512_cvtepi32_ps(whole)};
}

// Lane i of the result combines all lanes of rows[i]: at each of four levels two registers become one with half of each.
template <class Of>
WAGER_INLINE F each_row(const F (&rows)[16], Of of) {
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512 x = rows[i].v, y = rows[i + 8].v;
        a[i] = of(F{_mm512_shuffle_f32x4(x, y, 0x44)}, F{_mm512_shuffle_f32x4(x, y, 0xEE)}).v;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        b[i] = of(F{_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88)}, F{_mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD)}).v;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        c[i] = of(F{_mm512_shuffle_ps(b[i], b[i + 2], 0x44)}, F{_mm512_shuffle_ps(b[i], b[i + 2], 0xEE)}).v;
    const F mixed = of(F{_mm512_shuffle_ps(c[0], c[1], 0x88)}, F{_mm512_shuffle_ps(c[0], c[1], 0xDD)});
    const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
    return {_mm512_permutexvar_ps(order, mixed.v)};
}
WAGER_INLINE F lane_maxima(const F (&rows)[16]) {
    return each_row(rows, [](F a, F b) { return max(a, b); });
}
WAGER_INLINE F lane_sums(const F (&rows)[16]) {
    return each_row(rows, [](F a, F b) { return add(a, b); });
}

WAGER_INLINE F whole(F a) { return {_mm512_castsi512_ps(_mm512_cvtps_epi32(a.v))}; }  // the bits of an int32
// Lane i of all four to p[stride * i], one after the other.
WAGER_INLINE void store_fours(float* p, int stride, F a, F b, F c, F d) {
    const __m512 ab[] = {_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v)};
    const __m512 cd[] = {_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d x = _mm512_castps_pd(ab[i / 2]), y = _mm512_castps_pd(cd[i / 2]);
        const __m512 four = _mm512_castpd_ps(i % 2 ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
        _mm_storeu_ps(p + stride * i, _mm512_castps512_ps128(four));
        _mm_storeu_ps(p + stride * (i + 4), _mm512_extractf32x4_ps(four, 1));
        _mm_storeu_ps(p + stride * (i + 8), _mm512_extractf32x4_ps(four, 2));
        _mm_storeu_ps(p + stride * (i + 12), _mm512_extractf32x4_ps(four, 3));
    }
}

// 32 whole numbers in bf16, which holds them exactly.
WAGER_INLINE void widen_bytes(uint16_t* p, const int8_t* from) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

}  // namespace wager::WAGER_NS
