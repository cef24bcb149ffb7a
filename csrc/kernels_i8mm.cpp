#include "cpu_features.h"
#include "ops.h"

#if defined(__aarch64__) && defined(WAGER_I8MM)
#define WAGER_NS i8mm
#define WAGER_NAME "neon-i8mm"
#include "isa_neon.h"
#include "table.h"

const wager::Table* wager::table_i8mm() {
    const CpuFeatures& cpu = kCpuFeatures;
    return cpu.asimddp && cpu.i8mm && cpu.bf16 ? &i8mm::kTable : nullptr;
}
#else
const wager::Table* wager::table_i8mm() { return nullptr; }
#endif
