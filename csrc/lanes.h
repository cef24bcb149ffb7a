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

// e4m3 as the bytes of bf16, by nibbles, which codes have exchanged: the lower byte is E0 m m m 0 0 0 0, the upper one follows from s and
// E3 to E1; but where these are zero (subnormal numbers and the least others) both follow from E0 and m.
alignas(16) constexpr uint8_t kUpperBytes[] = {0, 61, 62, 63, 64, 65, 66, 67, 128, 189, 190, 191, 192, 193, 194, 195};
alignas(16) constexpr uint8_t kSmall[] = {255, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0};
alignas(16) constexpr uint8_t kSmallUpper[] = {0, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 60};
alignas(16) constexpr uint8_t kSmallLower[] = {0, 0, 128, 192, 0, 32, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240};
// Codes of sixteen outputs and four inputs, as weight_layout.h has them, as the first two of each output and the others.
WAGER_INLINE void widen_e4m3(Bytes codes, Pair& low, Pair& high) {
    const Bytes sign = shifted<0>(codes, 15), rest = shifted<-4>(codes, 15), small = looked_up(sign, load_lookup(kSmall));
    const Bytes lower = chosen(small, looked_up(rest, load_lookup(kSmallLower)), shifted<0>(codes, 0xF0));
    const Bytes upper = chosen(small, looked_up(rest, load_lookup(kSmallUpper)), small);
    interleave(lower, either(upper, looked_up(sign, load_lookup(kUpperBytes))), low, high);
}

}  // namespace wager::WAGER_NS
