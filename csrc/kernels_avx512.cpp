#include "ops.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define WAGER_NS avx512
#define WAGER_NAME "avx512-bf16"
#include "isa_avx512.h"
#include "table.h"

const wager::Table* wager::table_avx512() {
    static const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                               __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    return usable ? &avx512::kTable : nullptr;
}
#else
const wager::Table* wager::table_avx512() { return nullptr; }
#endif
