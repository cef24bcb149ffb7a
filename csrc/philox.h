// The noise field of kernels/noise.py in C++: Philox4x32-10 (Salmon et al., SC 2011) over counters (token id / 2,
// position, choice, domain 0), 52 random bits per id. Scalar, exact to the definition; and sixteen counters at a time.
#pragma once

#include <cmath>
#include <cstdint>

namespace wager::WAGER_NS {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

struct Words {
    uint32_t w[4];
};

inline Words philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
        const uint64_t a = static_cast<uint64_t>(kPhiloxM0) * c0, b = static_cast<uint64_t>(kPhiloxM1) * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(b);
        c3 = static_cast<uint32_t>(a);
    }
    return {{c0, c1, c2, c3}};
}

inline double gumbel(const Draw& draw, int id) {
    const Words words = philox(draw.seed, static_cast<uint32_t>(id) / 2, draw.position, draw.choice, 0);
    const int at = id % 2 * 2;
    const uint64_t bits = (words.w[at] | static_cast<uint64_t>(words.w[at + 1]) << 32) >> 12;
    const double u = (static_cast<double>(bits) + 0.5) / 4503599627370496.0;
    return -::log(-::log1p(-u));
}

// Upper words of the noise of ids 2 * counter and 2 * counter + 1, for sixteen counters c0.
WAGER_INLINE void philox_uppers(const Draw& draw, U c0, U& even, U& odd) {
    U c1 = splat_u(draw.position), c2 = splat_u(draw.choice), c3 = splat_u(0);
    uint32_t k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
        U a_high, a_low, b_high, b_low;
        multiply(c0, kPhiloxM0, a_high, a_low);
        multiply(c2, kPhiloxM1, b_high, b_low);
        c0 = exor(exor(b_high, c1), splat_u(k0));
        c2 = exor(exor(a_high, c3), splat_u(k1));
        c1 = b_low;
        c3 = a_low;
    }
    even = c1;
    odd = c3;
}

}  // namespace wager::WAGER_NS
