// Gathers the kernels of the instruction set named WAGER_NS into its table. Included last by each kernels_*.cpp, which is
// compiled with flags of its own; everything with code in it lives in namespace WAGER_NS (ops.h says why).
#pragma once

#include "ops.h"
// (the isa_*.h header comes before)
#include "sizes.h"
#include "exp.h"
#include "linear.h"
#include "rows.h"
#include "experts.h"
#include "attention.h"
#include "recurrence.h"
#include "sample.h"

namespace wager::WAGER_NS {

inline constexpr Table kTable = {{{embed}, {rms_norm}, {float_norm}, {narrow_rows}, {soft_cap}, {quantise_rows}, {linear}, {per_head},
                                  {router}, {top_experts}, {gather}, {experts_in}, {experts_out}, {add_gated}, {latent}, {rotary},
                                  {attention}, {replay}, {convolve}, {recur}, {gated_norm}, {multiply}, {add_silu}, {sigmoid_gate},
                                  {select}, {copy}, {argmax}, {guess}},
                                 WAGER_NAME, max_logit, draw, draw_among, at_least, masses, sweep, kHeldRows > 1 ? kRowBlock : 0};

}  // namespace wager::WAGER_NS
