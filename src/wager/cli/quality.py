"""How far a loaded model's logits are from those of weights and cache in bfloat16, for `wager bench --quality`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from wager.bench.quality import WINDOW, Quality, compare_logits, fixed_text, windows
from wager.errors import UsageError
from wager.kernels.base import BLOCK_SIZE
from wager.loading import memory_plan as memory
from wager.loading.free_memory import free_memory
from wager.loading.load import LoadedEngine
from wager.loading.opened import PassLimits
from wager.models.hub import is_random
from wager.profiling.logits import logits_of

_ROWS = 128


def measure_quality(engine: LoadedEngine) -> Quality:
    """Loads the model once more, weights and cache in bfloat16. Overwrites the engine's cache. UsageError if neither is
    quantised or the model's weights are drawn quantised, MemoryPlanError if there is no room for both."""
    target, kernels = engine.target, engine.kernels
    if target.opened.formats(kernels) == str(kernels.act):
        raise UsageError(
            f"--quality compares with bfloat16, and the weights of {target.opened.path.name} are {kernels.act}.",
            "Leave it out, or quantise them with --dtype q8 or q4, or the cache with --kv-dtype q8.",
        )
    if target.decoder.weight_form != str(kernels.act) and is_random(str(target.opened.path)):
        raise UsageError(
            "--quality has nothing to compare with: a random model has other weights under every --dtype.",
            "Give a trained model.",
        )
    context = min(WINDOW, target.opened.limits.context)
    limits = PassLimits(_ROWS, 1, context, logits_rows=_ROWS)
    reference = replace(target.opened, dtype="bf16", limits=limits)
    plan = memory.plan(
        budget=memory.Budget.of(free_memory(), limit=None).size,
        weights=reference.weight_bytes(kernels),
        workspace=reference.workspace_bytes(kernels),
        drafter=0,
        token_bytes=reference.token_bytes(kernels),
        max_context=context,
        cache_tokens=-(-context // BLOCK_SIZE) * BLOCK_SIZE,
    )
    decoder = reference.load(kernels, plan.num_blocks)
    target.claim_cache(None)
    text = list(windows(engine.tokenizer.encode(fixed_text()), size=context))
    return compare_logits(partial(logits_of, decoder), partial(logits_of, target.decoder), text)


def in_words(found: Quality) -> str:
    return (
        f"Against bfloat16, over {found.tokens} tokens: KL {found.kl:.4f} (99th percentile {found.kl_99:.3f}), the "
        f"same most likely token at {found.top1:.1%}, perplexity {found.perplexity:.2f} (bfloat16 "
        f"{found.reference_perplexity:.2f})."
    )
