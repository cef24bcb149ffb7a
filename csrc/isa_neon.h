// Sixteen float lanes in four NEON registers. Sums of bytes by SDOT; where the file that includes this is compiled for I8MM
// (WAGER_I8MM, which means BF16 too) by USDOT, of two rows at a time by USMMLA, and products of bf16 pairs by BFMLALT and BFMLALB.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define WAGER_INLINE inline __attribute__((always_inline))

namespace wager::WAGER_NS {

#ifdef WAGER_I8MM
constexpr int kTileRows = 5, kTileCols = 1, kFewRows = 0, kWideRows = 99;
#else
constexpr int kTileRows = 4, kTileCols = 1, kFewRows = 0, kWideRows = 99;
#endif
constexpr int kBlockRows = 4, kHeldRows = 1, kManyRows = 4, kManyByteRows = 4, kBlockCols = 1;
constexpr int kPrefetchBytes = 4096;  // how far ahead of its reading a panel is prefetched that one tile reads
constexpr int kQkRows = 4, kQkCols = 1;
constexpr int kPvRows = 4, kPvCols = 1;
using Factor = uint16_t;  // what attention multiplies keys and values with
constexpr int kExpBlocks = 2;  // attention: sixteens of scores whose exponentials are taken together

struct F {
    float32x4_t v[4];
};
struct Pair {
    uint16x8_t v[4];
};
struct OnePair {  // in every lane
    uint16x8_t v;
};
struct U {
    uint32x4_t v[4];
};
struct Bytes {
    uint8x16_t v[4];
};
struct Sums {
    int32x4_t v[4];
};

#define WAGER_EACH _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

WAGER_INLINE F splat(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {{v, v, v, v}};
}
WAGER_INLINE F splat_at(const float* p) { return splat(*p); }
WAGER_INLINE F zero() { return splat(0.0f); }
WAGER_INLINE F load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
WAGER_INLINE void store(float* p, F a) { WAGER_EACH vst1q_f32(p + 4 * i, a.v[i]); }
WAGER_INLINE F add(F a, F b) {
    WAGER_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE F sub(F a, F b) {
    WAGER_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE F mul(F a, F b) {
    WAGER_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE F div(F a, F b) {
    WAGER_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE F fma(F a, F b, F c) {
    WAGER_EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
    return c;
}
// FMAX and FMIN give NaN where either is; others give b (docs/arithmetic.md).
WAGER_INLINE F max(F a, F b) {
    WAGER_EACH a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE F min(F a, F b) {
    WAGER_EACH a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
    return a;
}

WAGER_INLINE int32x4_t lanes_from(int first) {
    const int32_t numbers[4] = {0, 1, 2, 3};
    return vaddq_s32(vld1q_s32(numbers), vdupq_n_s32(first));
}
WAGER_INLINE F keep(F a, F other, int lo, int hi) {
    const int32x4_t least = vdupq_n_s32(lo), end = vdupq_n_s32(hi);
    WAGER_EACH {
        const int32x4_t lanes = lanes_from(4 * i);
        a.v[i] = vbslq_f32(vandq_u32(vcgeq_s32(lanes, least), vcltq_s32(lanes, end)), a.v[i], other.v[i]);
    }
    return a;
}
WAGER_INLINE F without_below(F a, float least) {
    const float32x4_t limit = vdupq_n_f32(least);
    WAGER_EACH a.v[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.v[i]), vcagtq_f32(limit, a.v[i])));
    return a;
}

WAGER_INLINE F times_power(F x, F biased) {
    const uint32x4_t bias = vdupq_n_u32(0x4B400000u - 127u);
    WAGER_EACH {
        const uint32x4_t n = vsubq_u32(vreinterpretq_u32_f32(biased.v[i]), bias);
        x.v[i] = vmulq_f32(x.v[i], vreinterpretq_f32_u32(vshlq_n_u32(n, 23)));
    }
    return x;
}

WAGER_INLINE float sum(F a) {
    const float32x4_t b = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(b), vget_high_f32(b)));
}
WAGER_INLINE float max_lane(F a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[2]), vmaxq_f32(a.v[1], a.v[3])));
}

WAGER_INLINE Pair load_pairs(const uint16_t* p) { return {{vld1q_u16(p), vld1q_u16(p + 8), vld1q_u16(p + 16), vld1q_u16(p + 24)}}; }
WAGER_INLINE OnePair splat_pair(const uint16_t* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    return {vreinterpretq_u16_u32(vdupq_n_u32(bits))};
}
WAGER_INLINE float32x4_t first(uint16x8_t pair) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(pair), 16)); }
WAGER_INLINE float32x4_t second(uint16x8_t pair) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(pair), vdupq_n_u32(0xFFFF0000u)));
}
WAGER_INLINE F add_exact(F acc, F a, F b) { return fma(a, b, acc); }  // a * b has no more than 24 bits
WAGER_INLINE void widen_pairs(Pair a, F& low, F& high) {
    WAGER_EACH {
        low.v[i] = first(a.v[i]);
        high.v[i] = second(a.v[i]);
    }
}
#ifdef WAGER_I8MM
WAGER_INLINE F dot(F acc, OnePair a, Pair b) {
    const bfloat16x8_t by = vreinterpretq_bf16_u16(a.v);
    WAGER_EACH {
        const bfloat16x8_t w = vreinterpretq_bf16_u16(b.v[i]);
        acc.v[i] = vbfmlalbq_f32(vbfmlaltq_f32(acc.v[i], w, by), w, by);
    }
    return acc;
}
#else
WAGER_INLINE F dot(F acc, OnePair a, Pair b) {
    const float32x4_t low = first(a.v), high = second(a.v);
    WAGER_EACH acc.v[i] = vfmaq_f32(vfmaq_f32(acc.v[i], high, second(b.v[i])), low, first(b.v[i]));
    return acc;
}
#endif
WAGER_INLINE F widen(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8), none = vdupq_n_u16(0);  // interleaved below the bits
    return {{vreinterpretq_f32_u16(vzip1q_u16(none, low)), vreinterpretq_f32_u16(vzip2q_u16(none, low)),
             vreinterpretq_f32_u16(vzip1q_u16(none, high)), vreinterpretq_f32_u16(vzip2q_u16(none, high))}};
}
#ifdef WAGER_I8MM
WAGER_INLINE uint16x8_t round_bf16(float32x4_t low, float32x4_t high) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
#else
WAGER_INLINE uint16x4_t round_bf16(float32x4_t x) {  // to nearest even; NaN stays NaN
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFFu)));
    const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000u));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, nan), 16);
}
WAGER_INLINE uint16x8_t round_bf16(float32x4_t low, float32x4_t high) { return vcombine_u16(round_bf16(low), round_bf16(high)); }
#endif
WAGER_INLINE void narrow(uint16_t* p, F a) {
    a = without_below(a, kLeastBf16);
    vst1q_u16(p, round_bf16(a.v[0], a.v[1]));
    vst1q_u16(p + 8, round_bf16(a.v[2], a.v[3]));
}
WAGER_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }
WAGER_INLINE void fetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }

WAGER_INLINE uint32_t bits_of(const uint32x4_t* masks) {
    const uint8_t places[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t low = vcombine_u16(vmovn_u32(masks[0]), vmovn_u32(masks[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(masks[2]), vmovn_u32(masks[3]));
    const uint8x16_t bits = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), vld1q_u8(places));
    return static_cast<uint32_t>(vaddv_u8(vget_low_u8(bits))) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}
WAGER_INLINE uint32_t not_finite(F a) {
    const uint32x4_t exponent = vdupq_n_u32(0x7F800000u);
    uint32x4_t masks[4];
    WAGER_EACH masks[i] = vceqq_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), exponent), exponent);
    return bits_of(masks);
}
WAGER_INLINE uint32_t at_most(F a, F b) {
    uint32x4_t masks[4];
    WAGER_EACH masks[i] = vcleq_f32(a.v[i], b.v[i]);
    return bits_of(masks);
}
WAGER_INLINE void split(const float* p, F& even, F& odd) {
    WAGER_EACH {
        const float32x4x2_t both = vld2q_f32(p + 8 * i);
        even.v[i] = both.val[0];
        odd.v[i] = both.val[1];
    }
}

WAGER_INLINE U splat_u(uint32_t x) {
    const uint32x4_t v = vdupq_n_u32(x);
    return {{v, v, v, v}};
}
WAGER_INLINE U count_from(uint32_t x) {
    U r;
    WAGER_EACH r.v[i] = vaddq_u32(vreinterpretq_u32_s32(lanes_from(4 * i)), vdupq_n_u32(x));
    return r;
}
WAGER_INLINE U load_u(const int32_t* p) {
    U r;
    WAGER_EACH r.v[i] = vreinterpretq_u32_s32(vld1q_s32(p + 4 * i));
    return r;
}
WAGER_INLINE U exor(U a, U b) {
    WAGER_EACH a.v[i] = veorq_u32(a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE void multiply(U a, uint32_t factor, U& high, U& low) {
    const uint32x4_t by = vdupq_n_u32(factor);
    WAGER_EACH {
        const uint32x4_t x = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a.v[i]), vget_low_u32(by)));
        const uint32x4_t y = vreinterpretq_u32_u64(vmull_high_u32(a.v[i], by));
        low.v[i] = vuzp1q_u32(x, y);
        high.v[i] = vuzp2q_u32(x, y);
    }
}
WAGER_INLINE F upper_bits(U a) {
    F r;
    WAGER_EACH r.v[i] = vcvtq_f32_u32(vshrq_n_u32(a.v[i], 8));
    return r;
}

WAGER_INLINE Bytes load_bytes(const uint8_t* p) { return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}}; }
WAGER_INLINE Bytes either(Bytes a, Bytes b) {
    WAGER_EACH a.v[i] = vorrq_u8(a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE Bytes chosen(Bytes mask, Bytes a, Bytes b) {
    WAGER_EACH a.v[i] = vbslq_u8(mask.v[i], a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE void interleave(Bytes lower, Bytes upper, Pair& low, Pair& high) {
    WAGER_EACH {
        low.v[i] = vreinterpretq_u16_u8(vzip1q_u8(lower.v[i], upper.v[i]));
        high.v[i] = vreinterpretq_u16_u8(vzip2q_u8(lower.v[i], upper.v[i]));
    }
}
template <int Left>
WAGER_INLINE Bytes shifted(Bytes a, int mask) {
    const uint8x16_t m = vdupq_n_u8(static_cast<uint8_t>(mask));
    const bool whole = mask == (Left < 0 ? 255 >> (Left < 0 ? -Left : 0) : 255 << (Left > 0 ? Left : 0) & 255);
    WAGER_EACH {
        if constexpr (Left > 0) a.v[i] = vshlq_n_u8(a.v[i], Left);
        if constexpr (Left < 0) a.v[i] = vshrq_n_u8(a.v[i], -Left);
        if (!whole) a.v[i] = vandq_u8(a.v[i], m);
    }
    return a;
}
struct Lookup {
    uint8x16_t v;
};
WAGER_INLINE Lookup load_lookup(const uint8_t* p) { return {vld1q_u8(p)}; }
WAGER_INLINE Bytes looked_up(Bytes codes, Lookup in) {
    WAGER_EACH codes.v[i] = vqtbl1q_u8(in.v, codes.v[i]);
    return codes;
}
WAGER_INLINE Sums splat_sum(const int32_t* p) {
    const int32x4_t v = vdupq_n_s32(*p);
    return {{v, v, v, v}};
}
WAGER_INLINE Sums no_sum() {
    const int32x4_t v = vdupq_n_s32(0);
    return {{v, v, v, v}};
}
// Quad `quad` of a block's activations: a lane of the register with those beside it, which its neighbours share.
template <int quad>
struct Quad {
    int8x16_t v;
};
template <int quad>
WAGER_INLINE Quad<quad> load_quad(const int8_t* values) {
    return {vld1q_s8(values + quad / 4 * 16)};
}
#ifdef WAGER_I8MM
template <int quad>
WAGER_INLINE Sums dot_bytes(Sums acc, Bytes w, Quad<quad> x) {
    WAGER_EACH acc.v[i] = vusdotq_laneq_s32(acc.v[i], w.v[i], x.v, quad % 4);
    return acc;
}
constexpr int kByteOffset = 128;
template <int quad>
WAGER_INLINE Sums dot_any_bytes(Sums acc, Bytes w, Quad<quad> x) { return dot_bytes(acc, w, x); }
#else
template <int quad>
WAGER_INLINE Sums dot_bytes(Sums acc, Bytes w, Quad<quad> x) {
    WAGER_EACH acc.v[i] = vdotq_laneq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), x.v, quad % 4);
    return acc;
}
constexpr int kByteOffset = 0;  // of weights above 7 bits the upper bit is inverted: they are signed then
template <int quad>
WAGER_INLINE Sums dot_any_bytes(Sums acc, Bytes w, Quad<quad> x) {
    WAGER_EACH w.v[i] = veorq_u8(w.v[i], vdupq_n_u8(0x80));
    return dot_bytes(acc, w, x);
}
#endif
WAGER_INLINE F to_float(Sums a) {
    F r;
    WAGER_EACH r.v[i] = vcvtq_f32_s32(a.v[i]);
    return r;
}

#ifdef WAGER_I8MM
// Sums of two rows: in v[i] that of output 2 i with the first row and with the second, then those of output 2 i + 1.
struct TwoSums {
    int32x4_t v[8];
};
struct TwoEights {  // eight activations of each row
    int8x16_t v;
};
WAGER_INLINE TwoEights load_eights(const int8_t* first, const int8_t* second) { return {vcombine_s8(vld1_s8(first), vld1_s8(second))}; }
WAGER_INLINE TwoSums begin_two(const int32_t* first, const int32_t* second) {
    const int32x2_t both = vzip1_s32(vld1_dup_s32(first), vld1_dup_s32(second));
    const int32x4_t v = vcombine_s32(both, both);
    return {{v, v, v, v, v, v, v, v}};
}
WAGER_INLINE TwoSums no_sums() {
    const int32x4_t v = vdupq_n_s32(0);
    return {{v, v, v, v, v, v, v, v}};
}
// The weights of two quads, output by output, as USMMLA takes them.
struct Eights {
    uint8x16_t v[8];
};
WAGER_INLINE Eights eights(Bytes first, Bytes second) {
    Eights r;
    WAGER_EACH {
        const uint32x4_t a = vreinterpretq_u32_u8(first.v[i]), b = vreinterpretq_u32_u8(second.v[i]);
        r.v[2 * i] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
        r.v[2 * i + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
    }
    return r;
}
WAGER_INLINE TwoSums dot_eights(TwoSums acc, const Eights& w, TwoEights x) {
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) acc.v[i] = vusmmlaq_s32(acc.v[i], w.v[i], x.v);
    return acc;
}
WAGER_INLINE Sums sums_of(const TwoSums& both, bool second) {
    Sums r;
    WAGER_EACH r.v[i] = second ? vuzp2q_s32(both.v[2 * i], both.v[2 * i + 1]) : vuzp1q_s32(both.v[2 * i], both.v[2 * i + 1]);
    return r;
}
#endif

WAGER_INLINE F load_halves(const uint8_t* p) {
    F r;
    WAGER_EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
    return r;
}
WAGER_INLINE U wide_bytes(uint8x16_t bytes) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)}};
}
WAGER_INLINE F to_float(U a) {
    F r;
    WAGER_EACH r.v[i] = vcvtq_f32_u32(a.v[i]);
    return r;
}
WAGER_INLINE F load_unsigned(const uint8_t* p) { return to_float(wide_bytes(vld1q_u8(p))); }
WAGER_INLINE F load_powers(const uint8_t* p) {
    const U wide = wide_bytes(vld1q_u8(p));
    F r;
    WAGER_EACH r.v[i] = vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(wide.v[i], 23), vdupq_n_u32(0x400000u)));
    return r;
}
WAGER_INLINE F load_signed(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return to_float(Sums{{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
}
WAGER_INLINE F load_low_nibbles(const uint8_t* p) { return to_float(wide_bytes(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)))); }
WAGER_INLINE F load_high_nibbles(const uint8_t* p) { return to_float(wide_bytes(vshrq_n_u8(vld1q_u8(p), 4))); }
WAGER_INLINE F magnitude(F a) {
    WAGER_EACH a.v[i] = vabsq_f32(a.v[i]);
    return a;
}
WAGER_INLINE F store_rounded(int8_t* p, F a) {
    int32x4_t whole[4];
    WAGER_EACH whole[i] = vcvtnq_s32_f32(a.v[i]);
    const int16x8_t low = vcombine_s16(vmovn_s32(whole[0]), vmovn_s32(whole[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(whole[2]), vmovn_s32(whole[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    WAGER_EACH a.v[i] = vcvtq_f32_s32(whole[i]);
    return a;
}
WAGER_INLINE F whole(F a) {  // the bits of an int32
    WAGER_EACH a.v[i] = vreinterpretq_f32_s32(vcvtnq_s32_f32(a.v[i]));
    return a;
}

// 32 whole numbers in bf16, which holds them exactly.
WAGER_INLINE uint16x8_t bytes_to_bf16(int8x8_t bytes) {
    const int16x8_t wide = vmovl_s8(bytes);
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), high = vcvtq_f32_s32(vmovl_high_s16(wide));
    return vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high));
}
WAGER_INLINE void widen_bytes(uint16_t* p, const int8_t* from) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 32; i += 8) vst1q_u16(p + i, bytes_to_bf16(vld1_s8(from + i)));
}

#undef WAGER_EACH

}  // namespace wager::WAGER_NS

#include "lanes.h"
