#include "ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WAGER_NS avx2
#define WAGER_NAME "avx2"
#include "isa_avx2.h"
#include "table.h"

const wager::Table* wager::table_avx2() {
    static const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return usable ? &avx2::kTable : nullptr;
}
#else
const wager::Table* wager::table_avx2() { return nullptr; }
#endif
