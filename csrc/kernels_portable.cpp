#define WAGER_NS portable
#define WAGER_NAME "portable"
#include "ops.h"
#include "isa_portable.h"
#include "table.h"

const wager::Table* wager::table_portable() { return &portable::kTable; }
