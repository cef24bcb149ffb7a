"""A whole run: the target in torch, the vocabulary, the module, the loop, checkpoints, the held-out acceptance, the
export.

Everything random is drawn from (seed, step), so a run that goes on from its checkpoint ends in the same weights as one
that was never interrupted. What decides the numbers (settings, sizes, data, target) must be equal, or it is refused by
name. What is written to the output folder: checkpoint.pt while it runs, config.json and model.safetensors at the end.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wager.arch.spec import ModelSpec
from wager.errors import MALFORMED, ModelError, UsageError
from wager.inputs import replacing
from wager.models.head_files import HeadFiles, read_vocabulary
from wager.train.block import BlockModule
from wager.train.data import (
    DraftVocabulary,
    HeldOutAcceptance,
    Provenance,
    TextWeights,
    TrainingData,
    TrainingTarget,
    TrainingText,
)
from wager.train.draft_module import DraftModule, DraftSizes, MedusaModule
from wager.train.eagle import EagleModule
from wager.train.export import export, rope_scaling
from wager.train.losses import unrolled_loss
from wager.train.pruned import PrunedModule, check_prunable, chosen_layers
from wager.train.rounding import as_rounded
from wager.train.target import TargetStates, TorchTarget, check_trainable, default_taps, uncompiled

MODULES: Mapping[str, type[DraftModule]] = {
    "eagle3": EagleModule,
    "dspark": BlockModule,
    "medusa": MedusaModule,
    "pruned": PrunedModule,
}
"""What is trained, by its kind."""

_EVALUATED = 64
"""Held-out texts of the last estimate."""
_MARKOV_RANK = 64
_LAYERS: Mapping[str, int] = {"dspark": 2, "pruned": 6}


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Options of a run that decide its numbers; a checkpoint can only be resumed with equal ones.

    `depth` is the number of guesses that are trained, each counting `decay` times the one before; `batch` is in tokens;
    the learning rate rises over `warmup` steps and falls linearly to 0 over the last `cooldown` share of all `steps`.
    `rounded` matrices have their values in 4 bits in every step. `begun_with` is the digest of the weights that the run
    begins with; empty for fresh ones.
    """

    kind: str = "eagle3"
    steps: int = 1000
    batch: int = 2048
    depth: int = 3
    decay: float = 0.8
    loss: str = "kl"
    rate: float = 1e-3
    warmup: int = 20
    cooldown: float = 0.5
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    precision: str = "bfloat16"
    rounded: bool = False
    begun_with: str = ""

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; the first step is 0."""
        left = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return self.rate * min(1.0, (step + 1) / max(1, self.warmup), left)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are not of its numbers, or decide them through sizes and data.

    `passes` over the data (None: `settings.steps` counts), `taps` of the target (None: the usual), `longest` text,
    `vocabulary` size (None: the target's), `prompt_weight` of prompt tokens in the loss, `layers` of a block drafter or
    pruned model (a number, or of the latter which; None: the usual number), `inner` width of a head's feed-forward
    (None: the target's), `state_norms` of an EAGLE-3 head, `save_every` steps, `begin_with` the weights and
    vocabulary of an earlier run's folder, or of a head that was exported.
    """

    passes: float | None = None
    taps: tuple[int, ...] | None = None
    longest: int = 512
    vocabulary: int | None = 8192
    prompt_weight: float = 0.3
    layers: int | tuple[int, ...] | None = None
    inner: int | None = None
    state_norms: bool = True
    save_every: int = 50
    begin_with: Path | None = None
    device: str = "cpu"
    command: str = ""


@dataclass(frozen=True)
class StepReport:
    """What a step was: loss, share of rows whose first choice is the target's by depth, and tokens."""

    step: int
    loss: float
    agreement: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class _Launched:
    """A step that a GPU may still compute: `found` float32 [1 + depth] are its loss and agreement."""

    step: int
    found: torch.Tensor
    tokens: int


_FORMAT = 1
NAME = "checkpoint.pt"


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A run at a step. `module` and `optimiser` are state dictionaries."""

    settings: TrainSettings
    sizes: DraftSizes
    vocabulary: NDArray[np.int64]
    provenance: Provenance
    step: int
    module: Mapping[str, Any]
    optimiser: Mapping[str, Any]
    history: Sequence[dict[str, Any]]

    def save(self, folder: Path) -> None:
        """Write it to `folder`; at every moment there is the old one or the new one, whole."""
        sizes = asdict(self.sizes).items()
        values = {
            "format": _FORMAT,
            "settings": asdict(self.settings),
            "sizes": {name: list(value) if isinstance(value, tuple) else value for name, value in sizes},
            "vocabulary": torch.from_numpy(self.vocabulary),
            "provenance": asdict(self.provenance),
            "step": self.step,
            "module": dict(self.module),
            "optimiser": dict(self.optimiser),
            "history": list(self.history),
        }
        with replacing(folder / NAME, durable=True) as file:
            try:
                torch.save(values, file)
            except RuntimeError as error:  # torch puts its own in place of that of a full disk
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    @classmethod
    def load(cls, folder: Path) -> TrainingCheckpoint:
        """The checkpoint of `folder`. ModelError if it is damaged."""
        path = folder / NAME
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            if values["format"] != _FORMAT:
                raise ModelError(f"{path} is a checkpoint of format {values['format']}.", "Train again.")
            known = {field.name for field in fields(DraftSizes)}
            sizes: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values["sizes"].items()
                if name in known
            }
            return cls(
                TrainSettings(**values["settings"]),
                DraftSizes(**sizes),
                values["vocabulary"].numpy(),
                Provenance(**values["provenance"]),
                values["step"],
                values["module"],
                values["optimiser"],
                values["history"],
            )
        except ModelError:
            raise
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ModelError(f"{path} cannot be read: {error}.", "The file is damaged; train again.") from error

    @classmethod
    def of_head(cls, folder: Path) -> TrainingCheckpoint:
        """An EAGLE-3 head that was exported, also one that is stored in fewer bits, as the beginning of a run.
        UsageError if it was not trained by wager."""
        try:
            files = HeadFiles(folder)
            layer, written = files.config["transformer_layer_config"], dict(files.config["wager"])
            taps = tuple(written.pop("taps"))
            sizes = DraftSizes(
                hidden=layer["hidden_size"],
                inner=layer["intermediate_size"],
                heads=layer["num_attention_heads"],
                kv_heads=layer["num_key_value_heads"],
                head_dim=layer["head_dim"],
                norm_eps=layer["rms_norm_eps"],
                taps=taps,
                state_norms=files.config["fc_norm"],
            )
            provenance, draft = Provenance(**written), files.config["draft_vocab_size"]
            kind = files.config["speculators_model_type"]
        except (*MALFORMED, ModelError) as error:
            cause = error.message if isinstance(error, ModelError) else f"{error!r}."
            raise UsageError(
                f"{folder} has no checkpoint, and no EAGLE-3 head that wager trained: {cause}",
                "Begin with the folder of an earlier run.",
            ) from error
        ids = read_vocabulary(files, draft=draft, size=layer["vocab_size"]).ids
        module = {name: torch.from_numpy(files.read(name)) for name in files.shapes if name not in ("d2t", "t2d")}
        return cls(TrainSettings(kind), sizes, ids, provenance, 0, module, {}, [])

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the numbers of the run, by name."""
        data = {"target": self.provenance.target_fingerprint, "data": self.provenance.data_digest}
        return {**asdict(self.settings), **asdict(self.sizes), **data, "vocabulary": len(self.vocabulary)}

    @property
    def digest(self) -> str:
        """SHA-256 of the module's weights, in hex."""
        found = hashlib.sha256()
        for name, value in sorted(self.module.items()):
            found.update(name.encode() + value.float().cpu().numpy().tobytes())
        return found.hexdigest()

    def restore_module(self, module: DraftModule) -> None:
        try:
            module.load_state_dict(dict(self.module))
        except RuntimeError as error:
            raise ModelError(f"The checkpoint does not fit this drafter: {error}.", "Train again.") from error


class TrainingSession:
    """A run that is set up: `run` takes its steps, from its checkpoint if there is one, and exports the result. `step`
    is the number of steps that are done.

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
        self.scaling = rope_scaling(spec, target.path)
        self.data = TrainingData(tuple(texts), min(options.longest, spec.context))
        earlier = None
        if (begin_with := options.begin_with) is not None:
            whole = (begin_with / NAME).exists()
            earlier = TrainingCheckpoint.load(begin_with) if whole else TrainingCheckpoint.of_head(begin_with)
        if earlier is not None:
            self.vocabulary = DraftVocabulary(earlier.vocabulary, spec.vocab)
        else:
            ids = (text.ids for text in self.data.train)
            self.vocabulary = DraftVocabulary.of(
                ids, size=spec.vocab, most=options.vocabulary, always=target.tokenizer.eos_ids
            )
        mask_token = self._mask_token() if settings.kind == "dspark" else 0
        sizes = head_sizes(spec, options, settings, mask_token)
        self.torch_target = TorchTarget(
            target.weights,
            sizes.taps,
            dtype=getattr(torch, settings.precision),
            device=options.device,
            positions=self.data.longest + settings.depth,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.module = MODULES[settings.kind](sizes).to(options.device)
            self.module.attach(self.torch_target, self.vocabulary)
        self.settings = replace(settings, steps=self._steps(settings))
        self.provenance = Provenance(
            target.name,
            target.fingerprint,
            target.tokenizer_fingerprint,
            self.data.digest,
            len(self.data.texts),
            options.command,
            rounded=settings.rounded,
        )
        matrices = [parameter for parameter in self.module.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.module.parameters() if parameter.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = options.device == "cuda"
        self.optimiser = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)
        self.step = 0
        self.history: list[dict[str, Any]] = []
        if earlier is not None:
            self._begin_with(earlier)
        self.weights = TextWeights(self.vocabulary.known(), options.prompt_weight, self.data.shared_beginning)
        if (folder / NAME).exists():
            self._resume(TrainingCheckpoint.load(folder))

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

    def _begin_with(self, earlier: TrainingCheckpoint) -> None:
        """Take the weights of another run, if it was of this kind, of these sizes and for this target."""
        names = [*asdict(self.module.sizes), "kind", "target"]
        names.remove("mask_token")
        hint = "Begin with a run of the same kind, sizes and target."
        self._check_same(earlier, names, f"The weights in {self.options.begin_with} are of", hint)
        earlier.restore_module(self.module)
        self.settings = replace(self.settings, begun_with=earlier.digest)

    def _resume(self, found: TrainingCheckpoint) -> None:
        """Go on from a checkpoint of this very run."""
        hint = "Resume with the options, --prompts and --answers it was begun with, or write to another --output."
        self._check_same(found, found.identity, "The checkpoint was made with", hint)
        found.restore_module(self.module)
        self.optimiser.load_state_dict(dict(found.optimiser))
        self.step, self.history = found.step, list(found.history)

    def _check_same(self, other: TrainingCheckpoint, names: Iterable[str], what: str, hint: str) -> None:
        """UsageError for the first of `names` that differs from the other run."""
        old, new = other.identity, self.checkpoint().identity
        for name in names:
            if old[name] != new[name]:
                raise UsageError(f"{what} {name} = {old[name]!r}, and this run has {new[name]!r}.", hint)

    def run(self, report: Callable[[StepReport], None]) -> dict[str, Any]:
        """Take the steps that are left, calling `report` after each, and export the result. Its figures."""
        started, first = time.monotonic(), self.step
        tokens = 0
        waiting: _Launched | None = None
        for texts in self._remaining():
            launched = self._take(texts)
            if waiting is not None:  # a GPU computes while the step before is reported
                self._note(waiting, report)
            waiting = launched
            self.step += 1
            tokens += launched.tokens
            if self.step % self.options.save_every == 0:
                self._note(waiting, report)
                waiting = None
                self.checkpoint().save(self.folder)
        if waiting is not None:
            self._note(waiting, report)
        seconds = time.monotonic() - started
        figures = {
            "steps": self.settings.steps,
            "steps_of_this_process": self.step - first,
            "tokens_of_this_process": tokens,
            "seconds_of_this_process": seconds,
            "loss": self.history[-1]["loss"] if self.history else None,
            "held_out": self.evaluate().as_dict(),
        }
        self.provenance = replace(self.provenance, figures=figures)
        self.checkpoint().save(self.folder)
        self.export(self.folder)
        return figures

    def _remaining(self) -> Iterator[list[TrainingText]]:
        """The batches from `step` on, pass after pass."""
        done, number = 0, 0
        while done < self.settings.steps:
            for batch in self.data.batches(tokens=self.settings.batch, seed=self.settings.seed, number=number):
                if self.step <= done < self.settings.steps:
                    yield batch
                done += 1
            number += 1

    def _note(self, launched: _Launched, report: Callable[[StepReport], None]) -> None:
        """Wait for a step and report it. UsageError where its loss is no number."""
        loss, *agreement = launched.found.tolist()
        if not math.isfinite(loss):
            raise UsageError(f"The loss of step {launched.step + 1} is not a number.", "Take a smaller --rate.")
        taken = StepReport(launched.step, loss, tuple(agreement), launched.tokens)
        self.history.append(asdict(taken))
        report(taken)

    def _take(self, texts: list[TrainingText]) -> _Launched:
        settings = self.settings
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate(self.step)
        states = self.states(texts, self.weights)
        drawn = np.random.default_rng([settings.seed, self.step, 1]).integers(1 << 62)
        generator = torch.Generator(self.options.device).manual_seed(int(drawn))
        with self._rounded():
            with self._autocast():
                total, agreement = unrolled_loss(
                    self.module,
                    states,
                    depth=settings.depth,
                    decay=settings.decay,
                    loss=settings.loss,
                    generator=generator,
                )
            self.optimiser.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), settings.clip)
        self.optimiser.step()
        return _Launched(self.step, torch.cat([total.detach()[None], agreement]), states.tokens.numel())

    def checkpoint(self) -> TrainingCheckpoint:
        """The run as it is."""
        return TrainingCheckpoint(
            self.settings,
            self.module.sizes,
            self.vocabulary.ids,
            self.provenance,
            self.step,
            self.module.state_dict(),
            self.optimiser.state_dict(),
            self.history,
        )

    def states(self, texts: list[TrainingText], weights: TextWeights) -> TargetStates:
        """The target's states of a batch."""
        padded, device = self.data.padded(texts, weights), self.torch_target.device
        found = [torch.from_numpy(array) for array in padded]
        if device == "cuda":  # so that nothing waits for the steps before
            found = [part.pin_memory().to(device, non_blocking=True) for part in found]
        return self.torch_target.states(*found)

    @torch.no_grad()
    def evaluate(self, texts: Sequence[TrainingText] | None = None) -> HeldOutAcceptance:
        """The acceptance of the module as it is: rounds of guesses over the answers of some texts (over all of a text
        without an answer), by default of held-out ones."""
        held_out = self.data.held_out
        texts = texts or [text for text in held_out if text.answered] or held_out
        depth, target = self.settings.depth, self.torch_target
        chosen = [text for text in texts if len(text.ids) > depth + 2][:_EVALUATED]
        plain = TextWeights(np.ones(target.spec.vocab, bool), 1.0, 0)
        ids = torch.from_numpy(self.vocabulary.ids).to(target.device)
        accepted: list[int] = []
        with uncompiled(target.device):
            for text in chosen:
                accepted += self._accepted(text, plain, ids)
        return HeldOutAcceptance.of(accepted, depth=depth, texts=len(chosen))

    def _accepted(self, text: TrainingText, plain: TextWeights, ids: torch.Tensor) -> list[int]:
        """Guesses accepted in each round over the answer of a text."""
        depth, target, accepted = self.settings.depth, self.torch_target, list[int]()
        states = self.states([text], plain)
        best = target.logits(states.final)[0].argmax(-1)
        right = np.zeros((depth, states.tokens.shape[1]), bool)
        with self._rounded(), self._autocast():
            for step, rows in enumerate(self.module.steps(states, depth, None)):
                guesses = self.module.choices(rows.take(0), ids)
                found = (guesses == best[rows.positions[0]]) & rows.valid[0]
                right[step, : len(found)] = found.cpu().numpy()
        lengths = np.cumprod(right, 0).sum(0).tolist()  # guesses accepted in a round that begins at each row
        row = (text.prompt_length if text.answered else 1) - 1
        while row < len(lengths) - depth:  # the last guesses of later rounds would lie beyond the text
            accepted.append(lengths[row])
            row += lengths[row] + 1
        return accepted

    def _rounded(self) -> AbstractContextManager[None]:
        """Matrices as they will be stored, where that is asked for."""
        return as_rounded(self.module.parameters()) if self.settings.rounded else nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        """Products in bfloat16 where that is asked for."""
        wanted = self.settings.precision == "bfloat16"
        return torch.autocast(self.options.device, torch.bfloat16) if wanted else nullcontext()

    def export(self, folder: Path) -> None:
        """Write config.json, model.safetensors and the files of the tokenizer."""
        export(
            folder,
            self.module,
            self.target,
            self.vocabulary,
            self.provenance,
            kind=self.settings.kind,
            depth=self.settings.depth,
            scaling=self.scaling,
        )


def head_sizes(spec: ModelSpec, options: RunOptions, settings: TrainSettings, mask_token: int) -> DraftSizes:
    """Sizes of a drafter for this target: its own widths. An EAGLE-3 head has keys and values for every query head,
    since its residual has no other path for the embedding."""
    attention, dense = check_trainable(spec)
    taps = options.taps or default_taps(spec.num_layers)
    bad = [tap for tap in taps if not 0 <= tap < spec.num_layers]
    if bad:
        raise UsageError(
            f"Layer {bad[0]} cannot be tapped: {spec.name} has layers 0 to {spec.num_layers - 1}.",
            "0 taps the embeddings, N what comes after N layers.",
        )
    inner = options.inner or dense.width
    sizes = DraftSizes(
        spec.hidden, inner, attention.heads, attention.heads, attention.head_dim, spec.details.norm_eps, taps
    )
    layers = options.layers or _LAYERS.get(settings.kind, 1)
    if settings.kind == "medusa":  # reads no taps; one is computed in any case
        return replace(sizes, taps=(0,), layers=settings.depth)
    if settings.kind == "pruned":
        check_prunable(spec)
        kept = chosen_layers(layers, spec.num_layers)
        return replace(sizes, kv_heads=attention.kv_heads, taps=(0,), kept_layers=kept)
    if not isinstance(layers, int):
        raise UsageError("--layers lists layers of a pruned draft model.", "Give a number for this kind.")
    if settings.kind == "dspark":
        sizes = replace(sizes, kv_heads=attention.kv_heads, layers=layers)
        return replace(sizes, mask_token=mask_token, markov_rank=_MARKOV_RANK)
    return replace(sizes, state_norms=options.state_norms)
