// Sixteen float lanes in four 128-bit vectors of the compiler's own vector type: any machine that GCC or Clang supports.
// Little-endian: the first bf16 of a pair is its lower half.
#pragma once

#include <cstdint>
#include <cstring>

#define WAGER_INLINE inline __attribute__((always_inline))

namespace wager::WAGER_NS {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of bf16 are read as little-endian words");

constexpr int kTileRows = 2, kTileCols = 1, kFewRows = 0, kWideRows = 99;
constexpr int kBlockRows = 2, kHeldRows = 1, kManyRows = 2, kManyByteRows = 2, kBlockCols = 1;
constexpr int kPrefetchBytes = 4096;  // how far ahead of its reading a panel is prefetched that one tile reads
constexpr int kQkRows = 2, kQkCols = 1;
constexpr int kPvRows = 2, kPvCols = 1;
using Factor = uint16_t;  // what attention multiplies keys and values with
constexpr int kExpBlocks = 2;  // attention: sixteens of scores whose exponentials are taken together

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

struct F {
    F4 v[4];
};
struct Pair {
    U4 v[4];
};
struct U {
    U4 v[4];
};
struct Bytes {
    U4 v[4];
};
struct Sums {
    I4 v[4];
};

#define WAGER_EACH _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

WAGER_INLINE F splat(float x) {
    F r;
    WAGER_EACH r.v[i] = F4{x, x, x, x};
    return r;
}
WAGER_INLINE F splat_at(const float* p) { return splat(*p); }
WAGER_INLINE F zero() { return splat(0.0f); }
WAGER_INLINE F load(const float* p) {
    F r;
    WAGER_EACH std::memcpy(&r.v[i], p + 4 * i, 16);
    return r;
}
WAGER_INLINE void store(float* p, F a) { WAGER_EACH std::memcpy(p + 4 * i, &a.v[i], 16); }
WAGER_INLINE F add(F a, F b) {
    WAGER_EACH a.v[i] = a.v[i] + b.v[i];
    return a;
}
WAGER_INLINE F sub(F a, F b) {
    WAGER_EACH a.v[i] = a.v[i] - b.v[i];
    return a;
}
WAGER_INLINE F mul(F a, F b) {
    WAGER_EACH a.v[i] = a.v[i] * b.v[i];
    return a;
}
WAGER_INLINE F div(F a, F b) {
    WAGER_EACH a.v[i] = a.v[i] / b.v[i];
    return a;
}
#ifdef __FP_FAST_FMAF
WAGER_INLINE F fma(F a, F b, F c) {
    WAGER_EACH for (int j = 0; j < 4; ++j) c.v[i][j] = __builtin_fmaf(a.v[i][j], b.v[i][j], c.v[i][j]);
    return c;
}
#else
typedef double D4 __attribute__((vector_size(32)));
typedef int64_t L4 __attribute__((vector_size(32)));
// a * b + c rounded once, where the processor has no instruction for it. The product is exact in double. The sum is rounded to odd
// (Boldo and Melquiond 2008, "Emulation of a FMA"): what is rounded from that to float is as if rounded from the exact sum.
[[gnu::noinline]] inline void fma_by_odd(const F& a, const F& b, const F& c, F& out) {
    WAGER_EACH {
        const D4 product = __builtin_convertvector(a.v[i], D4) * __builtin_convertvector(b.v[i], D4);
        const D4 addend = __builtin_convertvector(c.v[i], D4), sum = product + addend, part = sum - product;
        const D4 error = (product - (sum - part)) + (addend - part);  // exact (Knuth's two-sum); NaN where the sum is not finite
        const L4 bits = (L4)sum, inexact = (error > 0.0) | (error < 0.0), even = (bits & 1) - 1;
        const L4 outwards = ~((error > 0.0) ^ (sum > 0.0));  // the exact sum is larger in magnitude
        out.v[i] = __builtin_convertvector((D4)(bits + (((outwards & 2) - 1) & inexact & even)), F4);
    }
}
// The same, mostly by the sum rounded to double: only where that lies halfway between two floats, or the float is subnormal or zero,
// may rounding twice be wrong.
WAGER_INLINE F fma(F a, F b, F c) {
    F r;
    U4 unsure = {};
    WAGER_EACH {
        const D4 sum = __builtin_convertvector(a.v[i], D4) * __builtin_convertvector(b.v[i], D4) + __builtin_convertvector(c.v[i], D4);
        r.v[i] = __builtin_convertvector(sum, F4);
        const U4 lower = __builtin_convertvector((L4)sum, U4);
        unsure |= (U4)((lower & 0x1FFFFFFFu) == 0x10000000u) | (U4)(((U4)r.v[i] & 0x7F800000u) == 0);
    }
    uint64_t halves[2];
    std::memcpy(halves, &unsure, 16);
    if (__builtin_expect((halves[0] | halves[1]) != 0, 0)) {
        const F x = a, y = b, z = c;
        F exact;
        fma_by_odd(x, y, z, exact);
        r = exact;
    }
    return r;
}
#endif
WAGER_INLINE F4 select_lanes(I4 mask, F4 a, F4 b) { return (F4)(((I4)a & mask) | ((I4)b & ~mask)); }
WAGER_INLINE F max(F a, F b) {  // b where either is NaN
    WAGER_EACH a.v[i] = select_lanes(a.v[i] > b.v[i], a.v[i], b.v[i]);
    return a;
}
WAGER_INLINE F min(F a, F b) {
    WAGER_EACH a.v[i] = select_lanes(a.v[i] < b.v[i], a.v[i], b.v[i]);
    return a;
}

WAGER_INLINE F keep(F a, F other, int lo, int hi) {
    WAGER_EACH {
        const I4 lanes = I4{0, 1, 2, 3} + 4 * i;
        a.v[i] = select_lanes((lanes >= lo) & (lanes < hi), a.v[i], other.v[i]);
    }
    return a;
}

WAGER_INLINE F without_below(F a, float least) {
    WAGER_EACH {
        const F4 size = (F4)((U4)a.v[i] & 0x7FFFFFFFu);
        a.v[i] = (F4)((I4)a.v[i] & ~(I4)(size < least));
    }
    return a;
}

WAGER_INLINE F times_power(F x, F biased) {
    WAGER_EACH x.v[i] = x.v[i] * (F4)(((U4)biased.v[i] - (0x4B400000u - 127u)) << 23);
    return x;
}

WAGER_INLINE float sum(F a) {
    const F4 b = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
    return (b[0] + b[2]) + (b[1] + b[3]);
}
WAGER_INLINE float max_lane(F a) {
    float best = a.v[0][0];
    WAGER_EACH for (int j = 0; j < 4; ++j) best = a.v[i][j] > best ? a.v[i][j] : best;
    return best;
}

WAGER_INLINE Pair load_pairs(const uint16_t* p) {
    Pair r;
    WAGER_EACH std::memcpy(&r.v[i], p + 8 * i, 16);
    return r;
}
WAGER_INLINE Pair splat_pair(const uint16_t* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    Pair r;
    WAGER_EACH r.v[i] = U4{bits, bits, bits, bits};
    return r;
}
WAGER_INLINE F4 first(U4 pair) { return (F4)(pair << 16); }
WAGER_INLINE F4 second(U4 pair) { return (F4)(pair & 0xFFFF0000u); }
WAGER_INLINE void widen_pairs(Pair a, F& low, F& high) {
    WAGER_EACH {
        low.v[i] = first(a.v[i]);
        high.v[i] = second(a.v[i]);
    }
}
WAGER_INLINE F add_exact(F acc, F a, F b) {
    WAGER_EACH acc.v[i] = acc.v[i] + a.v[i] * b.v[i];
    return acc;
}
WAGER_INLINE F dot(F acc, Pair a, Pair b) {  // products are exact: rounded once, as if fused
    WAGER_EACH acc.v[i] = (acc.v[i] + second(a.v[i]) * second(b.v[i])) + first(a.v[i]) * first(b.v[i]);
    return acc;
}
WAGER_INLINE F widen(const uint16_t* p) {
    F r;
    WAGER_EACH r.v[i] = first(U4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]});
    return r;
}
WAGER_INLINE void narrow(uint16_t* p, F a) {  // to nearest even; NaN stays NaN
    a = without_below(a, kLeastBf16);
    WAGER_EACH for (int j = 0; j < 4; ++j) {
        const uint32_t bits = ((U4)a.v[i])[j];
        const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        p[4 * i + j] = static_cast<uint16_t>((nan ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }
}
WAGER_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
WAGER_INLINE void fetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }

WAGER_INLINE uint32_t bits_of(const I4* masks) {
    uint32_t bits = 0;
    WAGER_EACH for (int j = 0; j < 4; ++j) bits |= static_cast<uint32_t>(masks[i][j] & 1) << (4 * i + j);
    return bits;
}
WAGER_INLINE uint32_t not_finite(F a) {
    I4 masks[4];
    WAGER_EACH masks[i] = ((U4)a.v[i] & 0x7F800000u) == 0x7F800000u;
    return bits_of(masks);
}
WAGER_INLINE uint32_t at_most(F a, F b) {
    I4 masks[4];
    WAGER_EACH masks[i] = a.v[i] <= b.v[i];
    return bits_of(masks);
}
WAGER_INLINE void split(const float* p, F& even, F& odd) {
    WAGER_EACH {
        const float* q = p + 8 * i;
        even.v[i] = F4{q[0], q[2], q[4], q[6]};
        odd.v[i] = F4{q[1], q[3], q[5], q[7]};
    }
}

WAGER_INLINE U splat_u(uint32_t x) {
    U r;
    WAGER_EACH r.v[i] = U4{x, x, x, x};
    return r;
}
WAGER_INLINE U count_from(uint32_t x) {
    U r;
    WAGER_EACH r.v[i] = U4{0, 1, 2, 3} + (x + 4u * static_cast<uint32_t>(i));
    return r;
}
WAGER_INLINE U load_u(const int32_t* p) {
    U r;
    std::memcpy(&r, p, sizeof(r));
    return r;
}
WAGER_INLINE U exor(U a, U b) {
    WAGER_EACH a.v[i] = a.v[i] ^ b.v[i];
    return a;
}
WAGER_INLINE void multiply(U a, uint32_t factor, U& high, U& low) {
    WAGER_EACH for (int j = 0; j < 4; ++j) {
        const uint64_t product = static_cast<uint64_t>(a.v[i][j]) * factor;
        high.v[i][j] = static_cast<uint32_t>(product >> 32);
        low.v[i][j] = static_cast<uint32_t>(product);
    }
}
WAGER_INLINE F upper_bits(U a) {
    F r;
    WAGER_EACH r.v[i] = __builtin_convertvector((I4)(a.v[i] >> 8), F4);
    return r;
}

WAGER_INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes r;
    WAGER_EACH std::memcpy(&r.v[i], p + 16 * i, 16);
    return r;
}
WAGER_INLINE Bytes either(Bytes a, Bytes b) {
    WAGER_EACH a.v[i] |= b.v[i];
    return a;
}
WAGER_INLINE Bytes chosen(Bytes mask, Bytes a, Bytes b) {
    WAGER_EACH a.v[i] = (a.v[i] & mask.v[i]) | (b.v[i] & ~mask.v[i]);
    return a;
}
WAGER_INLINE void interleave(Bytes lower, Bytes upper, Pair& low, Pair& high) {
    WAGER_EACH {
        uint8_t of_lower[16], of_upper[16];
        uint16_t words[16];
        std::memcpy(of_lower, &lower.v[i], 16);
        std::memcpy(of_upper, &upper.v[i], 16);
        for (int j = 0; j < 16; ++j) words[j] = static_cast<uint16_t>(of_lower[j] | of_upper[j] << 8);
        std::memcpy(&low.v[i], words, 16);
        std::memcpy(&high.v[i], words + 8, 16);
    }
}
template <int Left>
WAGER_INLINE Bytes shifted(Bytes a, int mask) {
    const uint32_t m = static_cast<uint32_t>(mask) * 0x01010101u;
    WAGER_EACH a.v[i] = (Left >= 0 ? a.v[i] << (Left >= 0 ? Left : 0) : a.v[i] >> (Left < 0 ? -Left : 0)) & m;
    return a;
}
struct Lookup {
    const uint8_t* of;
};
WAGER_INLINE Lookup load_lookup(const uint8_t* p) { return {p}; }
WAGER_INLINE Bytes looked_up(Bytes codes, Lookup in) {
    WAGER_EACH {
        uint8_t bytes[16];
        std::memcpy(bytes, &codes.v[i], 16);
        for (int j = 0; j < 16; ++j) bytes[j] = in.of[bytes[j]];
        std::memcpy(&codes.v[i], bytes, 16);
    }
    return codes;
}
WAGER_INLINE Sums splat_sum(const int32_t* p) {
    Sums r;
    WAGER_EACH r.v[i] = I4{*p, *p, *p, *p};
    return r;
}
WAGER_INLINE Sums no_sum() {
    const int32_t none = 0;
    return splat_sum(&none);
}
struct Quad {
    int32_t v[4];
};
template <int quad>
WAGER_INLINE Quad load_quad(const int8_t* values) {
    const int8_t* p = values + 4 * quad;
    return {{p[0], p[1], p[2], p[3]}};
}
WAGER_INLINE Sums dot_bytes(Sums acc, Bytes w, Quad x) {
    WAGER_EACH {
        const I4 bytes = (I4)w.v[i];
        acc.v[i] += (bytes & 0xFF) * x.v[0] + (bytes >> 8 & 0xFF) * x.v[1] + (bytes >> 16 & 0xFF) * x.v[2] + (bytes >> 24 & 0xFF) * x.v[3];
    }
    return acc;
}
constexpr int kByteOffset = 128;
WAGER_INLINE Sums dot_any_bytes(Sums acc, Bytes w, Quad x) { return dot_bytes(acc, w, x); }
WAGER_INLINE F to_float(Sums a) {
    F r;
    WAGER_EACH r.v[i] = __builtin_convertvector(a.v[i], F4);
    return r;
}
WAGER_INLINE float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    uint32_t bits = sign | (exponent + 112u) << 23 | fraction << 13;
    if (exponent == 31u) bits = sign | 0x7F800000u | fraction << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    if (exponent == 0u) value = (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return value;
}
WAGER_INLINE F load_halves(const uint8_t* p) {
    F r;
    WAGER_EACH for (int j = 0; j < 4; ++j) {
        uint16_t half;
        std::memcpy(&half, p + 2 * (4 * i + j), 2);
        r.v[i][j] = float_of_half(half);
    }
    return r;
}
WAGER_INLINE F load_unsigned(const uint8_t* p) {
    F r;
    WAGER_EACH for (int j = 0; j < 4; ++j) r.v[i][j] = static_cast<float>(p[4 * i + j]);
    return r;
}
WAGER_INLINE F load_powers(const uint8_t* p) {
    F r;
    WAGER_EACH for (int j = 0; j < 4; ++j) {
        const uint32_t bits = p[4 * i + j] ? static_cast<uint32_t>(p[4 * i + j]) << 23 : 0x400000u;
        float power;
        std::memcpy(&power, &bits, 4);
        r.v[i][j] = power;
    }
    return r;
}
WAGER_INLINE F load_signed(const uint8_t* p) {
    F r;
    WAGER_EACH for (int j = 0; j < 4; ++j) r.v[i][j] = static_cast<float>(static_cast<int8_t>(p[4 * i + j]));
    return r;
}
WAGER_INLINE F load_low_nibbles(const uint8_t* p) {
    F r;
    WAGER_EACH for (int j = 0; j < 4; ++j) r.v[i][j] = static_cast<float>(p[4 * i + j] & 15);
    return r;
}
WAGER_INLINE F load_high_nibbles(const uint8_t* p) {
    F r;
    WAGER_EACH for (int j = 0; j < 4; ++j) r.v[i][j] = static_cast<float>(p[4 * i + j] >> 4);
    return r;
}
WAGER_INLINE F magnitude(F a) {
    WAGER_EACH a.v[i] = (F4)((U4)a.v[i] & 0x7FFFFFFFu);
    return a;
}
WAGER_INLINE F store_rounded(int8_t* p, F a) {
    const F bias = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    const F whole = sub(add(a, bias), bias);
    WAGER_EACH for (int j = 0; j < 4; ++j) p[4 * i + j] = static_cast<int8_t>(whole.v[i][j]);
    return whole;
}
WAGER_INLINE F whole(F a) {  // the bits of an int32
    WAGER_EACH a.v[i] = (F4)__builtin_convertvector(a.v[i], I4);
    return a;
}

// 32 whole numbers in bf16, which holds them exactly.
WAGER_INLINE void widen_bytes(uint16_t* p, const int8_t* from) {
    for (int i = 0; i < 32; ++i) {
        const float value = from[i];
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        p[i] = static_cast<uint16_t>(bits >> 16);
    }
}

#undef WAGER_EACH

}  // namespace wager::WAGER_NS

#include "lanes.h"
