#include "cpu_features.h"
#include "ops.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define WAGER_NS avx512
#define WAGER_NAME "avx512-bf16"
#include "isa_avx512.h"
#include "table.h"

const wager::Table* wager::table_avx512() {
    const CpuFeatures& cpu = kCpuFeatures;
    const bool usable = cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq && cpu.avx512_bf16 && cpu.avx512_vnni;
    return usable ? &avx512::kTable : nullptr;
}
#else
const wager::Table* wager::table_avx512() { return nullptr; }
#endif
