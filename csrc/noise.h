// The noise field of kernels/noise.py in C++, one number at a time: Philox4x32-10 (Salmon et al., SC 2011) over counters
// (token id / 2, position, choice, domain 0), 52 random bits per id. WAGER_NS names who compiles it, see ops.h.
#pragma once

#include <cstdint>
#include <cstring>

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

// log(x) of a positive normal number, to less than a unit in the last place; src/wager/elementary.py has the same operations in numpy.
// x = 2^k (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); log(1 + f) = f - s (f - r) where s = f / (2 + f), by the series of
// artanh(s) in s^2.
inline double natural_log(double x) {
    constexpr int64_t kRootHalf = 0x3FE6A09E667F3BCD;
    constexpr double kUpper = 0x1.62e42feep-1, kLower = 0x1.a39ef35793c76p-33;  // of log(2), the first exact times k
    int64_t bits;
    std::memcpy(&bits, &x, 8);
    const int64_t k = (bits - kRootHalf) >> 52;
    bits -= k * (int64_t{1} << 52);
    double f;
    std::memcpy(&f, &bits, 8);
    f -= 1.0;
    const double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f, exponent = static_cast<double>(k);
    double r = 2.0 / 25;
    for (int odd = 23; odd >= 3; odd -= 2) r = r * z + 2.0 / odd;
    return exponent * kUpper - ((half - (s * (half + r * z) + exponent * kLower)) - f);
}

// Of the token field at a place: standard Gumbel.
inline double gumbel(uint64_t seed, uint32_t position, uint32_t choice, int id) {
    const Words words = philox(seed, static_cast<uint32_t>(id) / 2, position, choice, 0);
    const int at = id % 2 * 2;
    const uint64_t bits = (words.w[at] | static_cast<uint64_t>(words.w[at + 1]) << 32) >> 12;
    const double u = (static_cast<double>(bits) + 0.5) / 4503599627370496.0;
    return -natural_log(-natural_log(1.0 - u));
}

}  // namespace wager::WAGER_NS
