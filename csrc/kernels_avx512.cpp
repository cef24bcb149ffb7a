#include "cpu_features.h"
#include "ops.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define WAGER_NS avx512
#define WAGER_NAME "avx512-bf16"
#include "isa_avx512.h"
#include "table.h"

namespace wager::avx512 {

// Whether vdpbf16ps adds the second product of a pair, rounds, adds the first and rounds: Intel documents it, and sums whose bits
// depend on it are what all instruction sets compute (docs/arithmetic.md).
bool pairs_are_added_in_order() {
    constexpr float kSmall = 0x1p-24f, kTiny = 0x1p-30f;
    // {sum, first product, second product, expected}
    constexpr float kCases[][4] = {
        {1.0f, kSmall, kSmall, 1.0f}, {1.0f, kTiny, -1.0f, kTiny}, {-1.0f, kTiny, 1.0f, kTiny}, {1.0f, -1.0f, kTiny, 0.0f}};
    bool same = true;
    for (const auto& [sum_before, first, second, expected] : kCases) {
        alignas(64) float floats[32], sums[16];
        alignas(64) uint16_t pairs[32], ones[32];
        for (int i = 0; i < 32; ++i) floats[i] = i % 2 ? second : first;
        narrow_two(pairs, load(floats), load(floats + 16));
        for (uint16_t& one : ones) one = 0x3F80;
        store(sums, dot(splat(sum_before), load_pairs(pairs), load_pairs(ones)));
        for (float found : sums) same = same && found == expected;
    }
    return same;
}

}  // namespace wager::avx512

const wager::Table* wager::table_avx512() {
    const CpuFeatures& cpu = kCpuFeatures;
    const bool usable = cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq && cpu.avx512_bf16 && cpu.avx512_vnni &&
                        cpu.avx512vbmi;
    if (!usable) return nullptr;
    static const bool same = avx512::pairs_are_added_in_order();
    return same ? &avx512::kTable : nullptr;
}
#else
const wager::Table* wager::table_avx512() { return nullptr; }
#endif
