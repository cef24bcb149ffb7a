// The noise field of draws: of one id, exact to the definition (noise.h); and of sixteen counters at a time.
#pragma once

#include "noise.h"

namespace wager::WAGER_NS {

inline double gumbel(const Draw& draw, int id) { return gumbel(draw.seed, draw.position, draw.choice, id); }

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
