// What several registers need together, one by one: for instruction sets without a quicker way.
#pragma once

namespace wager::WAGER_NS {

WAGER_INLINE void narrow_two(uint16_t* p, F first, F second) {
    narrow(p, first);
    narrow(p + 16, second);
}

// Lane i of the result combines all lanes of rows[i].
WAGER_INLINE F lane_maxima(const F (&rows)[16]) {
    alignas(64) float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = max_lane(rows[i]);
    return load(lanes);
}
WAGER_INLINE F lane_sums(const F (&rows)[16]) {
    alignas(64) float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = sum(rows[i]);
    return load(lanes);
}

// Lane i of all four to p[stride * i], one after the other.
WAGER_INLINE void store_fours(float* p, int stride, F a, F b, F c, F d) {
    alignas(64) float lanes[4][16];
    store(lanes[0], a), store(lanes[1], b), store(lanes[2], c), store(lanes[3], d);
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) std::memcpy(p + stride * i + j, &lanes[j][i], sizeof(float));
}

}  // namespace wager::WAGER_NS
