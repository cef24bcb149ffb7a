"""A whole run: the target in torch, the vocabulary, the module, the loop with checkpoints, the held-out acceptance, the
export.

What is written to the output folder: checkpoint.pt while it runs, config.json and model.safetensors at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wager.arch.layers import Gqa
from wager.errors import UsageError
from wager.models.weights import Weights
from wager.train import export
from wager.train.block import BlockModule
from wager.train.data import DraftVocabulary, TextWeights, TrainingData, TrainingTarget, TrainingText
from wager.train.draft_module import DraftModule, DraftSizes, MedusaModule
from wager.train.eagle import EagleModule
from wager.train.export import check_prunable, write_pruned
from wager.train.pruned import PrunedModule, chosen_layers
from wager.train.target import StateSource, TorchTarget, check_trainable, default_taps
from wager.train.trainer import NAME, Provenance, StepReport, Trainer, TrainingCheckpoint, TrainSettings, autocast


@dataclass(frozen=True)
class HeldOutAcceptance:
    """`survival[j]` is the share of rounds whose first j + 1 guesses are accepted; `tau` counts the bonus token."""

    survival: tuple[float, ...]
    rounds: int
    texts: int

    @property
    def tau(self) -> float:
        return 1 + sum(self.survival)

    def as_dict(self) -> dict[str, float | int | list[float]]:
        return {"survival": list(self.survival), "tau": self.tau, "rounds": self.rounds, "texts": self.texts}


@torch.no_grad()
def held_out_acceptance(
    module: DraftModule,
    target: TorchTarget,
    texts: Sequence[TrainingText],
    data: TrainingData,
    vocabulary: NDArray[np.int64],
    *,
    depth: int,
    precision: str,
    most: int = 64,
) -> HeldOutAcceptance:
    """Rounds of `depth` guesses over the answers of the first `most` texts (over all of a text without an answer)."""
    accepted: list[int] = []
    plain = TextWeights(np.ones(target.spec.vocab, bool), 1.0, 0)
    ids = torch.from_numpy(vocabulary).to(target.device)
    chosen = [text for text in texts if len(text.ids) > depth + 2][:most]
    for text in chosen:
        batch = data.padded([text], plain)
        states = target.states(
            torch.from_numpy(batch.tokens).to(target.device), torch.from_numpy(batch.weights).to(target.device)
        )
        best = target.logits(states.final)[0].argmax(-1)
        right = np.zeros((depth, batch.tokens.shape[1]), bool)
        with autocast(precision, target.device):
            for step, rows in enumerate(module.steps(states, depth, None)):
                guesses = module.choices(rows.take(0), ids)
                found = (guesses == best[rows.positions[0]]) & rows.valid[0]
                right[step, : len(found)] = found.cpu().numpy()
        first = text.prompt_length if text.answered else 1
        accepted.extend(_walk(np.cumprod(right, 0).sum(0), first - 1, depth))
    counts = np.asarray(accepted)
    survival = tuple(float((counts > step).mean()) if len(counts) else 0.0 for step in range(depth))
    return HeldOutAcceptance(survival, len(accepted), len(chosen))


def _walk(lengths: NDArray[np.int64], first: int, depth: int) -> list[int]:
    """Guesses accepted in each round: `lengths[t]` if it begins at row t; the next begins after its bonus token. Rounds
    whose last guess would lie beyond the text are left out, since it cannot be judged."""
    found, row = [], first
    while row < len(lengths) - depth:
        found.append(int(lengths[row]))
        row += found[-1] + 1
    return found


MODULES: Mapping[str, type[DraftModule]] = {
    "eagle3": EagleModule,
    "dspark": BlockModule,
    "medusa": MedusaModule,
    "pruned": PrunedModule,
}
"""What is trained, by its kind."""

_CONFIGS = {"eagle3": export.eagle_config, "dspark": export.block_config, "medusa": export.medusa_config}

_EVALUATED = 64
"""Held-out texts of the last estimate."""
_MARKOV_RANK = 64
_LAYERS: Mapping[str, int] = {"dspark": 2, "pruned": 6}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are not of its numbers, or decide them through sizes and data.

    `passes` over the data (None: `settings.steps` counts), `taps` of the target (None: the usual), `longest` text,
    `vocabulary` size (None: the target's), `prompt_weight` of prompt tokens in the loss, `layers` of a block drafter or
    pruned model (a number, or of the latter which; None: the usual number), `save_every` steps, `keep` the states on
    disk, `begin_with` the weights and vocabulary of an earlier run's folder.
    """

    passes: float | None = None
    taps: tuple[int, ...] | None = None
    longest: int = 512
    vocabulary: int | None = 8192
    prompt_weight: float = 0.3
    layers: int | tuple[int, ...] | None = None
    save_every: int = 50
    keep: bool = False
    begin_with: Path | None = None
    device: str = "cpu"
    command: str = ""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    acceptance: HeldOutAcceptance
    figures: dict[str, Any]
    history: tuple[dict[str, Any], ...]


def head_sizes(weights: Weights, options: RunOptions, settings: TrainSettings, mask_token: int) -> DraftSizes:
    """Sizes of a drafter for this target: its own widths. An EAGLE-3 head has keys and values for every query head,
    since its residual has no other path for the embedding."""
    spec = weights.spec
    check_trainable(spec)
    attention, dense = spec.attention, spec.dense
    if not isinstance(attention, Gqa) or dense is None:
        raise UsageError(f"{spec.name} cannot be trained for.", "Give a dense model with grouped-query attention.")
    taps = options.taps or default_taps(spec.num_layers)
    bad = [tap for tap in taps if not 0 <= tap < spec.num_layers]
    if bad:
        raise UsageError(
            f"Layer {bad[0]} cannot be tapped: {spec.name} has layers 0 to {spec.num_layers - 1}.",
            "0 taps the embeddings, N what comes after N layers.",
        )
    shared = spec.hidden, dense.width, attention.heads
    layers = options.layers or _LAYERS.get(settings.kind, 1)
    eps = spec.details.norm_eps
    if settings.kind == "medusa":  # reads no taps; one is computed in any case
        return DraftSizes(*shared, attention.heads, attention.head_dim, eps, (0,), layers=settings.depth)
    if settings.kind == "pruned":
        check_prunable(spec)
        kept = chosen_layers(layers, spec.num_layers)
        return DraftSizes(*shared, attention.kv_heads, attention.head_dim, eps, (0,), kept_layers=kept)
    if not isinstance(layers, int):
        raise UsageError("--layers lists layers of a pruned draft model.", "Give a number for this kind.")
    if settings.kind == "dspark":
        return DraftSizes(
            *shared,
            attention.kv_heads,
            attention.head_dim,
            eps,
            taps,
            layers=layers,
            mask_token=mask_token,
            markov_rank=_MARKOV_RANK,
        )
    return DraftSizes(*shared, attention.heads, attention.head_dim, eps, taps, depth_share=0.6)


class TrainingSession:
    """A run that is set up: `run` takes its steps, from its checkpoint if there is one, and exports the result.

    UsageError where the folder has a checkpoint of other options, data or target.
    """

    def __init__(
        self,
        target: TrainingTarget,
        texts: Sequence[TrainingText],
        settings: TrainSettings,
        options: RunOptions,
        folder: Path,
    ) -> None:
        self.target, self.options, self.folder = target, options, folder
        spec = target.weights.spec
        self.scaling = export.rope_scaling(spec, target.path)
        self.data = TrainingData(tuple(texts), min(options.longest, spec.context))
        earlier = None if options.begin_with is None else TrainingCheckpoint.load(options.begin_with)
        self.vocabulary = self._vocabulary(earlier)
        sizes = head_sizes(target.weights, options, settings, self._mask_token())
        self.torch_target = TorchTarget(
            target.weights,
            sizes.taps,
            dtype=getattr(torch, settings.precision),
            device=options.device,
            positions=self.data.longest + settings.depth,
        )
        self.module = _module(settings.kind, sizes, settings.seed, self.torch_target, self.vocabulary)
        self.settings = replace(settings, steps=self._steps(settings))
        if earlier is not None and options.begin_with is not None:
            earlier.check_can_begin(settings.kind, self.module.sizes, target.fingerprint, options.begin_with)
            earlier.restore_module(self.module)
            self.settings = replace(self.settings, begun_with=earlier.digest)
        identity = f"{target.fingerprint} {settings.precision}"
        states = StateSource(
            self.torch_target, self.data, identity=identity, folder=folder / "states" if options.keep else None
        )
        weights = TextWeights(self.vocabulary.known(), options.prompt_weight, self.data.shared_beginning)
        self.trainer = Trainer(self.module, states, self.data, weights, self.settings)
        self.provenance = Provenance(
            target.name,
            target.fingerprint,
            target.tokenizer_fingerprint,
            self.data.digest,
            len(self.data.texts),
            options.command,
        )
        self.history: list[dict[str, Any]] = []
        self._resume()

    def _vocabulary(self, earlier: TrainingCheckpoint | None) -> DraftVocabulary:
        """That of the run it begins with, or the most frequent tokens of the texts."""
        size, most = self.target.weights.spec.vocab, self.options.vocabulary
        if earlier is not None:
            return DraftVocabulary(earlier.vocabulary, size)
        ids = (text.ids for text in self.data.train)
        return DraftVocabulary.of(ids, size=size, most=most, always=self.target.eos_ids)

    def _mask_token(self) -> int:
        """The id that the texts have least often, the first of equals: it stands in the empty slots of a block."""
        counts = np.zeros(self.target.weights.spec.vocab, np.int64)
        for text in self.data.train:
            np.add.at(counts, np.asarray(text.ids), 1)
        return int(counts.argmin())

    def _steps(self, settings: TrainSettings) -> int:
        """`settings.steps`, or as many as `passes` over the data take."""
        if self.options.passes is None:
            return settings.steps
        whole = int(self.options.passes)
        counts = [
            len(self.data.batches(tokens=settings.batch, seed=settings.seed, number=number))
            for number in range(whole + 1)
        ]
        return max(1, round(sum(counts[:whole]) + counts[whole] * (self.options.passes - whole)))

    def _resume(self) -> None:
        if not (self.folder / NAME).exists():
            return
        found = TrainingCheckpoint.load(self.folder)
        found.check_same(self.settings, self.module.sizes, self.provenance)
        found.restore(self.trainer)
        self.history = list(found.history)

    def run(self, report: Callable[[StepReport], None]) -> TrainResult:
        started, first = time.monotonic(), self.trainer.step
        tokens = 0

        def after(step: StepReport) -> None:
            nonlocal tokens
            tokens += step.tokens
            self.history.append(step.as_dict())
            report(step)
            if self.trainer.step % self.options.save_every == 0:
                self.save()

        self.trainer.run(after)
        seconds = time.monotonic() - started
        acceptance = self.evaluate(_EVALUATED)
        figures = {
            "steps": self.settings.steps,
            "steps_of_this_process": self.trainer.step - first,
            "tokens_of_this_process": tokens,
            "seconds_of_this_process": seconds,
            "loss": self.history[-1]["loss"] if self.history else None,
            "held_out": acceptance.as_dict(),
        }
        self.provenance = replace(self.provenance, figures=figures)
        self.save()
        self.export(self.folder)
        return TrainResult(acceptance, figures, tuple(self.history))

    def save(self) -> None:
        """Write the checkpoint."""
        TrainingCheckpoint.of(self.trainer, self.vocabulary.ids, self.provenance, self.history).save(self.folder)

    def evaluate(self, most: int) -> HeldOutAcceptance:
        """The held-out acceptance of the module as it is."""
        texts = [text for text in self.data.held_out if text.answered] or list(self.data.held_out)
        return held_out_acceptance(
            self.module,
            self.torch_target,
            texts,
            self.data,
            self.vocabulary.ids,
            depth=self.settings.depth,
            precision=self.settings.precision,
            most=most,
        )

    def export(self, folder: Path) -> None:
        """Write config.json, model.safetensors and the files of the tokenizer."""
        if isinstance(self.module, PrunedModule):
            write_pruned(folder, self.module, self.target, self.provenance, self.scaling)
            return
        config = _CONFIGS[self.settings.kind](
            self.module.sizes,
            self.vocabulary,
            self.target.weights.spec,
            self.provenance,
            depth=self.settings.depth,
            scaling=self.scaling,
        )
        export.write_export(folder, config, self.module, self.vocabulary, tokenizer=self.target.tokenizer.files())


def _module(kind: str, sizes: DraftSizes, seed: int, target: TorchTarget, vocabulary: DraftVocabulary) -> DraftModule:
    """A fresh module on the target's device, drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = MODULES[kind](sizes).to(target.device)
        module.attach(target, vocabulary)
    return module
