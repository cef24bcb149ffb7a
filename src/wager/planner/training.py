"""What training a head would take and bring, before it is begun: time, disk and survival, for a target and a machine.

Measured runs (training.toml) are scaled. Seconds are the cost model's at the share of them that was measured: of a step
of decoding for answers, and for training of the FLOPs, 2 for each weight of the target and 6 for each of the head in
each of its unrolled passes, of which one has 0.6 of the rows of the one before. A small target leaves more of a machine
unused than a large one, so times of large targets are bounds. Survival is that of the measured target after as many
tokens; a curve is not continued beyond its end.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from wager.arch import ModelSpec
from wager.errors import UsageError
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import Device, find_device
from wager.planner.inputs import find_plan_model

_KEPT_ROWS = 0.6
_CONTEXT = 300
"""Cached positions of an answer that is being written, in the mean."""

_CHECKPOINT_BYTES, _EXPORT_BYTES = 16, 2
"""Of a weight: itself, its gradient's two means and a copy while it is written; in the drafter's folder."""


@cache
def measured() -> Mapping[str, Any]:
    """training.toml."""
    return tomllib.loads((Path(__file__).parent / "training.toml").read_text(encoding="utf-8"))


def curve(kind: str) -> Mapping[str, Any]:
    """The measured curve of a kind of head; UsageError if there is none."""
    curves = {each["kind"]: each for each in measured()["curve"]}
    if kind not in curves:
        raise UsageError(f"No curve of {kind!r} was measured.", f"--plan knows {' and '.join(curves)}.")
    found: Mapping[str, Any] = curves[kind]
    return found


def survival_after(kind: str, tokens: float) -> tuple[float, ...]:
    """S_1, S_2, ... after so many tokens of training: linear in their logarithm between two measured points, in
    proportion to them before the first, the last beyond it."""
    known, at = curve(kind), tokens / 1e6
    millions, share = known["millions"], min(1.0, at / known["millions"][0])
    place, places = np.log(max(at, millions[0])), np.log(millions)
    return tuple(share * float(np.interp(place, places, column)) for column in zip(*known["survival"], strict=True))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What is trained: `depth` guesses, a vocabulary, and the width of the feed-forward (None: the target's)."""

    kind: str
    depth: int
    vocabulary: int
    inner: int | None = None

    def weights(self, target: ModelSpec) -> int:
        """Weights of the head, about: of an EAGLE-3 head fusion, attention with keys and values for every query head,
        feed-forward and output matrix; of a block drafter the same in two layers."""
        hidden, inner = target.hidden, self.inner or self._inner_of(target)
        layers, reads = (1, 2) if self.kind == "eagle3" else (2, 1)
        layer = (3 * reads + 1) * hidden**2 + 3 * hidden * inner
        return 3 * hidden**2 + layers * layer + self.vocabulary * hidden

    def passes(self) -> float:
        """Rows of all passes of the head for one token of a text."""
        if self.kind != "eagle3":  # a quarter of the positions are anchors of blocks
            return self.depth / 4
        return sum(_KEPT_ROWS**step for step in range(self.depth))

    @staticmethod
    def _inner_of(target: ModelSpec) -> int:
        sizes = target.elements()
        layers = sum(layer.count for layer in target.layers)
        return max(1, round((sizes.get("ffn", 0) + sizes.get("experts", 0)) / (3 * target.hidden * layers)))

    def flops(self, target: ModelSpec) -> float:
        """Of one token of a text: the target reads it, the head learns from it."""
        return 2.0 * target.active + 6.0 * self.weights(target) * self.passes()


@dataclass(frozen=True, slots=True)
class TrainingNeeds:
    """What a run computes. `answers` are written, of `answer_tokens` together; `text_tokens` are those of all texts
    with prompts; `trained_tokens` those of all passes over them."""

    answers: int
    answer_tokens: float
    text_tokens: float
    trained_tokens: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: round(getattr(self, name)) for name in self.__slots__}


def needs(
    *,
    answers: int,
    longest: int,
    known_tokens: int,
    passes: float,
    trained: int | None,
) -> TrainingNeeds:
    """Of `answers` of at most `longest` tokens that are to be written beside texts of `known_tokens`. `trained` tokens,
    or (None) so many `passes`."""
    written = answers * longest * measured()["answer_share"]
    texts = written + answers * measured()["prompt_tokens"] + known_tokens
    return TrainingNeeds(answers, written, texts, float(trained or passes * texts))


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Seconds from the fastest to the slowest, bytes on disk, S_1, S_2, ..., and τ of all guesses together."""

    answering_s: tuple[float, float]
    training_s: tuple[float, float]
    disk_bytes: float
    head_weights: int
    survival: tuple[float, ...]
    beyond_curve: bool

    @property
    def tau(self) -> float:
        return 1 + sum(self.survival)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "answering_s": list(self.answering_s),
            "training_s": list(self.training_s),
            "disk_bytes": round(self.disk_bytes),
            "head_weights": self.head_weights,
            "survival": [round(value, 4) for value in self.survival],
            "tau": round(self.tau, 4),
            "beyond_curve": self.beyond_curve,
        }


def plan_training(target: ModelSpec, device: Device, head: HeadShape, needs: TrainingNeeds) -> TrainingPlan:
    """UsageError for a kind without a curve, and for a target that does not fit the device."""
    known, run = measured(), _run_of(device)
    reference, machine = find_plan_model(known["target"]), find_device(run["device"])
    answers = _answer_rate(target, device, run["batch"]) / _answer_rate(reference, machine, run["batch"])
    of_reference = HeadShape("eagle3", 5, 8192, 3072).flops(reference)
    trained = of_reference / head.flops(target) * device.peak("bf16") / machine.peak("bf16")
    weights = head.weights(target)
    disk = known["bytes_per_token"] * needs.text_tokens
    return TrainingPlan(
        answering_s=_seconds(needs.answer_tokens, run["answered"], answers),
        training_s=_seconds(needs.trained_tokens, run["trained"], trained),
        disk_bytes=disk + (_CHECKPOINT_BYTES + _EXPORT_BYTES) * weights,
        head_weights=weights,
        survival=survival_after(head.kind, needs.trained_tokens)[: head.depth],
        beyond_curve=needs.trained_tokens > 1e6 * curve(head.kind)["millions"][-1],
    )


def _run_of(device: Device) -> Mapping[str, Any]:
    """The measured machine that is most like a device."""
    gpu = device.memory is not None
    found: Mapping[str, Any] = next(
        each for each in measured()["machine"] if (find_device(each["device"]).memory is not None) == gpu
    )
    return found


def _answer_rate(target: ModelSpec, device: Device, most: int) -> float:
    """Tokens a second of decoding `most` answers at a time, or as many as fit."""
    cost = CostModel(target, Cluster(device))
    batch = float(most)
    if device.memory is not None:
        room = 0.9 * device.memory - cost.weight_bytes()
        batch = min(batch, room // max(1.0, cost.cache_bytes(2 * _CONTEXT)))
        if batch < 1:
            raise UsageError(
                f"{target.name} takes {cost.weight_bytes() / 1e9:.0f} GB, more than {device.name} has room for.",
                "Name another --hardware, or a quantised model.",
            )
    return batch / cost.seconds(_CONTEXT, 1, batch=batch)


def _seconds(tokens: float, rates: Sequence[float], scale: float) -> tuple[float, float]:
    slow, fast = min(rates) * scale, max(rates) * scale
    return tokens / fast, tokens / slow


# ---- in words -------------------------------------------------------------------------------------------------------


def lines(plan: TrainingPlan, needs: TrainingNeeds) -> list[tuple[str, str]]:
    """What is needed and what it brings, each with its figures."""
    survival = " ".join(f"{value:.2f}" for value in plan.survival)
    return [
        ("answers", f"{needs.answers:,}, {needs.answer_tokens / 1e6:.1f} million tokens: {_span(plan.answering_s)}"),
        ("training", f"{needs.trained_tokens / 1e6:.1f} million tokens: {_span(plan.training_s)}"),
        ("disk", f"{plan.disk_bytes / 1e9:.1f} GB"),
        ("head", f"{plan.head_weights / 1e6:.0f} million weights"),
        ("survival by depth", f"{survival}, τ {plan.tau:.2f}"),
    ]


def caveat(kind: str, target: ModelSpec, plan: TrainingPlan) -> str:
    """Where the figures come from, and where they end."""
    known = measured()
    text = f"Survival as measured for {known['target']} on answers to prompts of the kinds trained on"
    if elsewhere := curve(kind).get("elsewhere"):
        text += f"; on prompts of Spec-Bench S_1 is {elsewhere:.2f} where the curve ends"
    if plan.beyond_curve:
        text += "; this is more training than was measured, and the last point stands for it"
    if target.name != find_plan_model(known["target"]).name:
        text += ". Times are scaled from that model; a larger one uses a machine better, so they are bounds"
    return f"{text}."


def _span(seconds: tuple[float, float]) -> str:
    """From the fastest to the slowest, in one unit."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds[1] >= 1.5 * size:
            return f"{seconds[0] / size:.1f} to {seconds[1] / size:.1f} {name}"
    return f"{seconds[0]:.0f} to {seconds[1]:.0f} s"
