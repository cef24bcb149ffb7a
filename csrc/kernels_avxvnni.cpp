#include "ops.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__AVXVNNI__)
#define WAGER_NS avxvnni
#define WAGER_NAME "avxvnni"
#include "isa_avx2.h"
#include "table.h"

const wager::Table* wager::table_avxvnni() {
    static const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                               __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avxvnni");
    return usable ? &avxvnni::kTable : nullptr;
}
#else
const wager::Table* wager::table_avxvnni() { return nullptr; }
#endif
