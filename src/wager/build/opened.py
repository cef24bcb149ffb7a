"""Models whose files were opened and checked, but not loaded: what they are and what they would take.

Everything that may be refused is refused here, before the first big allocation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wager.arch.spec import ModelSpec
from wager.config import EngineConfig
from wager.draft.model import check_same_vocabulary
from wager.errors import UsageError
from wager.kernels.base import BLOCK_SIZE, Kernels
from wager.models import footprint
from wager.models.opening import open_model
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import Decoder
from wager.models.weights import Weights


@dataclass(frozen=True)
class PassLimits:
    """Sizes a decoder is built with; `heads` bounds the rows of a pass that want logits."""

    rows: int
    sequences: int
    context: int
    logits_rows: int

    @property
    def max_blocks(self) -> int:
        """Pages of one sequence of full length."""
        return -(-self.context // BLOCK_SIZE)


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files were opened and checked, but not loaded."""

    path: Path
    weights: Weights
    tokenizer: Tokenizer
    limits: PassLimits

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    def weight_bytes(self, kernels: Kernels) -> int:
        return footprint.weight_bytes(self.spec, kernels)

    def workspace_bytes(self, kernels: Kernels) -> int:
        shape = self.limits
        return footprint.workspace_bytes(
            self.spec,
            kernels,
            max_rows=shape.rows,
            max_sequences=shape.sequences,
            max_blocks=shape.max_blocks,
            max_logits_rows=shape.logits_rows,
        )

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        return footprint.block_bytes(self.spec, kernels) // BLOCK_SIZE

    def load(self, kernels: Kernels, num_blocks: int) -> Decoder:
        shape = self.limits
        return Decoder(
            self.weights,
            kernels,
            num_blocks=num_blocks,
            max_rows=shape.rows,
            max_sequences=shape.sequences,
            max_blocks=shape.max_blocks,
            max_logits_rows=shape.logits_rows,
        )


def open_target(config: EngineConfig) -> OpenedModel:
    """The model of a configuration."""
    path, weights, tokenizer = open_model(config.model)
    context = min(config.max_context or weights.spec.context, weights.spec.context)
    if config.max_context is not None and config.max_context > weights.spec.context:
        raise UsageError(
            f"max_context = {config.max_context} is more than the model's {weights.spec.context} positions.",
            "Leave it out to use all of them.",
        )
    sequences = min(config.max_sequences, config.max_rows)
    return OpenedModel(
        path, weights, tokenizer, PassLimits(config.max_rows, sequences, context, logits_rows=config.max_rows)
    )


def open_draft(config: EngineConfig, target: OpenedModel, model: str) -> OpenedModel:
    """A smaller model that drafts for `target`; refused if its vocabulary is another one."""
    path, weights, tokenizer = open_model(model)
    check_same_vocabulary(target.tokenizer, tokenizer)
    context = min(target.limits.context, weights.spec.context)
    sequences = target.limits.sequences  # one row of each wants logits: the next guess comes out of it
    return OpenedModel(path, weights, tokenizer, PassLimits(config.max_rows, sequences, context, logits_rows=sequences))
