#include "cpu_features.h"
#include "ops.h"

#if defined(__aarch64__) && defined(WAGER_DOTPROD)
#define WAGER_NS neon
#define WAGER_NAME "neon"
#include "isa_neon.h"
#include "table.h"

const wager::Table* wager::table_neon() { return kCpuFeatures.asimddp ? &neon::kTable : nullptr; }
#else
const wager::Table* wager::table_neon() { return nullptr; }
#endif
