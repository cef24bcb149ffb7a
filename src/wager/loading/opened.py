"""Models whose files were opened and checked, but not loaded: their shape, tokenizer, limits and memory.

Whether a drafter's tokenizer and chat template are the target's is checked here. Another vocabulary is refused, unless
the drafter translates; another chat template is warned of: the drafter reads prompts as the target's template writes
them, guesses worse, and changes no text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from wager.arch.config_keys import ConfigKeys, read_json
from wager.arch.layers import Mla
from wager.arch.spec import ModelSpec
from wager.config import CapacityConfig, EngineConfig
from wager.draft.vocabulary import check_same_vocabulary, vocabulary_difference
from wager.drafter_spec import parse_layers
from wager.errors import SetupError, TokenizerError, UsageError, WagerError
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.blocks import BLOCK_FORMATS
from wager.kernels.cpu import Kernels
from wager.loading.memory import budget
from wager.models.opening import fingerprints, open_model, trained_for_another
from wager.models.packed_cache import open_store
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import (
    Decoder,
    block_bytes,
    refuse_int8_latents,
    states_bytes,
    weight_bytes,
    workspace_bytes,
)
from wager.models.weights import Matrices, Weights
from wager.types import KVDtype

log = logging.getLogger("wager")

_CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye."},
]
"""What templates are compared on; without its first message for those that take no system message."""

_EXCERPT = 60
"""Characters of a line that are shown."""


def check_head_tokenizer(path: Path, target: Tokenizer) -> None:
    """TokenizerError if some id of the tokenizer beside a head is another token than in the target; a warning if its
    chat template writes conversations otherwise. Both name the first difference."""
    try:
        own = Tokenizer.load(path)
    except TokenizerError as error:
        log.warning("The tokenizer beside the head in %s is not compared with the target's: %s", path, error.message)
        return
    if found := vocabulary_difference(target, own):
        raise TokenizerError(
            f"The head in {path} has another tokenizer than the target: {found}.",
            "Give a head of this target, or train one: wager train.",
        )
    if path.is_dir() or own.chat_template is not None:
        _warn_of_template(f"head in {path}", own, target)


def tokenizer_difference(path: Path, target: Tokenizer) -> str:
    """The first difference between the tokenizer in a directory and the target's, or else of their chat templates; ""
    if neither differs, or it cannot be read."""
    try:
        own = Tokenizer.load(path)
    except TokenizerError:
        return ""
    return vocabulary_difference(target, own) or template_difference(target, own)


def _warn_of_template(what: str, own: Tokenizer, target: Tokenizer) -> None:
    if found := template_difference(target, own):
        log.warning(
            "The %s differs in its chat template: %s. It reads the target's prompts, so its guesses may be wrong more "
            "often; answers stay the same.",
            what,
            found,
        )


def template_difference(target: Tokenizer, other: Tokenizer) -> str:
    """The first line in which two chat templates write a conversation differently, from both; "" if they write it
    alike, or the target has none."""
    mine, its = target.chat_template, other.chat_template
    if mine is None or mine == its:
        return ""
    if its is None:
        return "it has none"
    for conversation in (_CONVERSATION, _CONVERSATION[1:]):
        try:
            written, wanted = other.chat(conversation), target.chat(conversation)
        except WagerError:
            continue
        return _first_line(written, wanted, "of a conversation")
    return _first_line(its, mine, "of the template")


def _first_line(written: str, wanted: str, what: str) -> str:
    lines = zip_longest(written.split("\n"), wanted.split("\n"))
    for number, (one, other) in enumerate(lines, 1):
        if one != other:
            return f"line {number} {what} is {_excerpt(one, other)}, but {_excerpt(other, one)} in the target's"
    return ""


def _excerpt(line: str | None, other: str | None) -> str:
    """A line around the first character in which it differs from another one."""
    if line is None:
        return "absent"
    same = next((i for i, (a, b) in enumerate(zip(line, other or "", strict=False)) if a != b), 0)
    first = max(0, same - _EXCERPT // 2) if len(line) > _EXCERPT else 0
    return ("..." if first else "") + repr(line[first : first + _EXCERPT])


_DRAFT_LOGITS_ROWS = 16
"""Rows with logits in a pass of a draft model at least; otherwise as many as sequences, since the next guess of each is
drawn from one row. Trees and guesses of a drafter of its own take more, in further passes if need be."""


@dataclass(frozen=True)
class PassLimits:
    """What a decoder is built with: rows of a pass, sequences in it, positions of a sequence, rows with logits, and the
    type of the cache."""

    rows: int
    sequences: int
    context: int
    logits_rows: int
    kv_dtype: KVDtype = "bf16"

    @property
    def sizes(self) -> Mapping[str, Any]:
        """By the names that the decoder gives them."""
        sizes = {"max_rows": self.rows, "max_sequences": self.sequences, "max_logits_rows": self.logits_rows}
        return {**sizes, "max_blocks": -(-self.context // BLOCK_SIZE)}


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files were opened and checked, but not loaded."""

    path: Path
    weights: Weights
    tokenizer: Tokenizer
    limits: PassLimits
    dtype: str = "auto"
    layers: tuple[int, ...] | None = None  # of the model that are run; None: all
    note: str = ""  # what a user should know of it when it is loaded
    drafts: bool = False  # for another model
    role = "draft model"
    """What it is called where it is loaded beside a target."""

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    @property
    def quantised(self) -> bool:
        """Whether some matrix is multiplied in fewer than 16 bits."""
        return any(Matrices(self.weights, self.dtype).formats.values())

    @property
    def draft_dtype(self) -> str:
        """The form of the matrices of a head on its states, since a guess costs what its bytes cost: in four bits where
        most of its own have fewer than six, in eight where others are quantised."""
        counts = Counter(Matrices(self.weights, self.dtype).formats.values())
        if set(counts) == {None}:
            return "bf16"
        usual = counts.most_common(1)[0][0]
        return "q4" if usual is not None and BLOCK_FORMATS[usual].packed_bits < 6 else "q8"

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What figures that are measured with it note of it."""
        return fingerprints(self.weights, self.tokenizer)

    def weight_bytes(self, kernels: Kernels) -> int:
        return weight_bytes(self.matrices(kernels), kernels)

    def matrices(self, kernels: Kernels) -> Matrices:
        """The form of each matrix on these kernels."""
        return Matrices(self.weights, self.dtype, kernels.act)

    def workspace_bytes(self, kernels: Kernels) -> int:
        return workspace_bytes(self.spec, kernels, **self.limits.sizes)

    @property
    def states_bytes(self) -> int:
        """Bytes of recurrent states."""
        rows, sequences, spare = self.limits.rows, self.limits.sequences, self._spare_states
        return states_bytes(self.spec, max_rows=rows, max_sequences=sequences, spare=spare, layers=self.layers)

    @property
    def _spare_states(self) -> int | None:
        """A drafter keeps states behind guesses beside those behind known tokens, and no snapshots."""
        return self.limits.sequences if self.drafts else None

    def formats(self, kernels: Kernels) -> str:
        """The forms of the weights, and the cache's if it is not the default: what a step's seconds depend on."""
        cache = "" if self.limits.kv_dtype == "bf16" else f" + {self.limits.kv_dtype} cache"
        return self.matrices(kernels).description + cache

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        every = block_bytes(self.spec, kernels, self.limits.kv_dtype) // BLOCK_SIZE
        return every if self.layers is None else -(-every * len(self.layers) // self.spec.num_layers)

    def load(self, kernels: Kernels, num_blocks: int) -> Decoder:
        store = open_store(self.path, kernels, dtype=self.dtype)
        decoder = Decoder(
            self.weights,
            kernels,
            num_blocks=num_blocks,
            **self.limits.sizes,
            dtype=self.dtype,
            store=store,
            kv_dtype=self.limits.kv_dtype,
            layers=self.layers,
            spare_states=self._spare_states,
            suppressed=[each for each in self.tokenizer.suppressed_ids if each < self.spec.vocab],
        )
        if self.layers is None:  # a file holds all of a model's weights
            store.save()
        return decoder


_SEQUENCES, _STATES_SHARE = (64, 32, 16, 8), 8
"""Sequences that run at once by default: the most whose recurrent states take at most an eighth of the memory."""


def running_sequences(capacity: CapacityConfig, spec: ModelSpec) -> int:
    """How many sequences run at once. MemoryPlanError as memory.budget, where that is asked."""
    if capacity.max_sequences is not None or spec.recurrent is None:
        return min(capacity.max_sequences or _SEQUENCES[0], capacity.max_rows)
    room = budget(limit=capacity.memory)[0] // _STATES_SHARE
    counts = [min(count, capacity.max_rows) for count in _SEQUENCES]
    taken = (states_bytes(spec, max_rows=capacity.max_rows, max_sequences=count) for count in counts)
    return next((count for count, size in zip(counts, taken, strict=True) if size <= room), counts[-1])


def open_target(config: EngineConfig) -> OpenedModel:
    """The model of a configuration. WagerError if it is unknown, missing, damaged or too short for max_context."""
    capacity = config.capacity
    path, weights, tokenizer = open_model(config.model.model, chat_template=config.model.chat_template)
    context = weights.spec.context if capacity.max_context is None else capacity.max_context
    if context > weights.spec.context:
        raise SetupError(
            f"max_context = {context} is more than the model's {weights.spec.context} positions.",
            "Leave it out to use all of them.",
        )
    if weights.spec.left_out:
        log.warning("The model %s: %s.", path.name, weights.spec.left_out)
    sequences = running_sequences(capacity, weights.spec)
    kv_dtype = config.model.kv_dtype
    if isinstance(weights.spec.attention, Mla):
        refuse_int8_latents(kv_dtype)
    limits = PassLimits(capacity.max_rows, sequences, context, logits_rows=capacity.max_rows, kv_dtype=kv_dtype)
    return OpenedModel(path, weights, tokenizer, limits, config.model.dtype)


def open_draft(config: EngineConfig, target: OpenedModel, model: str, *, other_vocabulary: bool = False) -> OpenedModel:
    """A smaller model that drafts for `target`; refused if its vocabulary differs, unless it may. Its cache has the
    target's type, unless it holds latents; beside a quantised target it is rounded to q8_0, as heads are, since a guess
    costs what its bytes cost."""
    path, weights, tokenizer = open_model(model)
    note = ""
    if not other_vocabulary:
        check_same_vocabulary(target.tokenizer, tokenizer, where=f" ({path})")
        _warn_of_template(f"draft model {path}", tokenizer, target.tokenizer)
    elif found := vocabulary_difference(target.tokenizer, tokenizer):
        note = f"the draft model {path} has another vocabulary, so its guesses are translated: {found}."
    else:
        log.warning(
            "The draft model %s has the target's vocabulary: --drafter model:PATH drafts without translating.", path
        )
    if path.is_dir():  # what was trained for one target may guess well for one that was tuned from it
        noted = ConfigKeys(read_json(path / "config.json")).section("wager")
        if other := trained_for_another(noted, target.weights, target.tokenizer, target.path.name):
            log.warning("The draft model in %s was trained %s: its guesses may be wrong more often.", path, other)
    context = weights.spec.context if other_vocabulary else min(target.limits.context, weights.spec.context)
    limits = _draft_limits(config, target, context)
    if isinstance(weights.spec.attention, Mla):
        limits = replace(limits, kv_dtype="bf16")
    dtype = config.model.dtype
    if dtype == "auto" and target.quantised:
        dtype = "q8"
    return OpenedModel(path, weights, tokenizer, limits, dtype, note=note, drafts=True)


def _draft_limits(config: EngineConfig, target: OpenedModel, context: int) -> PassLimits:
    rows, sequences = config.capacity.max_rows, target.limits.sequences
    logits_rows = min(rows, max(sequences, _DRAFT_LOGITS_ROWS))
    return PassLimits(rows, sequences, context, logits_rows=logits_rows, kv_dtype=config.model.kv_dtype)


def open_layers(config: EngineConfig, target: OpenedModel, text: str) -> OpenedModel:
    """Some layers of the target as a draft model, with a cache of their own. Their packed weights are those of the
    target's file, mapped once more, where there is one."""
    layers = parse_layers(text, target.spec.num_layers)
    kinds, own = target.spec.ordered_layers, set[int | None]()
    for layer in layers:
        window = getattr(kinds[layer].attending, "window", None)
        if kinds[layer].caching:
            own.add(window)
        elif kinds[layer].attending and window not in own:
            raise UsageError(
                f"Layer {layer} of {target.path.name} reads keys and values of a layer before it, and none of "
                f"layers:{text} has some.",
                "Choose more of the first layers.",
            )
    return replace(target, layers=layers, limits=_draft_limits(config, target, target.limits.context), drafts=True)
