#include "cpu_features.h"
#include "ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WAGER_NS avx2
#define WAGER_NAME "avx2"
#include "isa_avx2.h"
#include "table.h"

const wager::Table* wager::table_avx2() {
    const CpuFeatures& cpu = kCpuFeatures;
    return cpu.avx2 && cpu.fma && cpu.f16c ? &avx2::kTable : nullptr;
}
#else
const wager::Table* wager::table_avx2() { return nullptr; }
#endif
