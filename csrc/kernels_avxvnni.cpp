#include "cpu_features.h"
#include "ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)
#define WAGER_NS avxvnni
#define WAGER_NAME "avxvnni"
#include "isa_avx2.h"
#include "table.h"

const wager::Table* wager::table_avxvnni() {
    const CpuFeatures& cpu = kCpuFeatures;
    return cpu.avx2 && cpu.fma && cpu.f16c && cpu.avx_vnni ? &avxvnni::kTable : nullptr;
}
#else
const wager::Table* wager::table_avxvnni() { return nullptr; }
#endif
