"""Acceptance in `wager plan` and `wager replay`: rates by depth, or rounds of each depth as `wager acceptance` measured
them, and how both are given on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wager.arch.config_keys import ConfigKeys
from wager.economics.acceptance import CURVES, conditional, survival
from wager.errors import UsageError
from wager.inputs import did_you_mean, expand_path, shown
from wager.planner.inputs import is_number, read_json, split

_POINTS = 16
"""Equally likely sums that stand for the distribution of the rows of a step."""


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """The rounds of one depth: mean `tokens` per round, bonus token included; `lengths` are the shares of rounds with
    0, 1, ... depth draft tokens, which add up to 1."""

    tokens: float
    lengths: tuple[float, ...]

    @property
    def drafted(self) -> float:
        """Draft tokens per round."""
        return sum(length * share for length, share in enumerate(self.lengths))

    def rows(self, batch: float) -> tuple[float, ...]:
        """Rows per request in a step of `batch` requests with independent lengths: equally likely values, that is, the
        distribution of the sum at evenly spaced quantiles, shifted so that their mean is exact."""
        count = max(1, round(batch))
        if max(self.lengths) == 1.0:
            return (1.0 + self.drafted,)
        size = count * (len(self.lengths) - 1) + 1
        total = np.fft.irfft(np.fft.rfft(self.lengths, size) ** count, size)
        below = np.cumsum(np.clip(total, 0.0, None))
        sums = np.searchsorted(below / below[-1], (np.arange(_POINTS) + 0.5) / _POINTS)
        means = sums / count
        return tuple((1.0 + np.maximum(0.0, means + self.drafted - means.mean())).tolist())


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """How often draft tokens are accepted: one rate, or one per depth given that the token before was accepted.

    `rounds` are the rounds of depths 1, 2, ... where they were measured (`wager acceptance`). They count for more than
    the rates: drafts may be shorter than requested, and survival at one depth is not that at another. `noted` is what
    their file says of the model and the drafter.
    """

    label: str
    rates: float | tuple[float, ...]
    rounds: tuple[MeasuredRound, ...] = ()
    noted: ConfigKeys | None = field(default=None, compare=False)

    @classmethod
    def measured(
        cls, label: str, survival: Sequence[float], rounds: tuple[MeasuredRound, ...], noted: ConfigKeys | None = None
    ) -> AcceptanceRates:
        """From S_1, S_2, ... and the rounds of each depth."""
        given = (below / above if above else 0.0 for above, below in pairwise((1.0, *survival)))
        return cls(label, tuple(given), rounds, noted)

    def survival(self, depth: int) -> tuple[float, ...]:
        """S_1..S_depth."""
        return survival(self.rates, depth)

    def added_tokens(self, depth: int) -> tuple[float, ...]:
        """Tokens that a round of depth 1, 2, ... `depth` has more than one of a depth less: S_k, or as measured."""
        if not self.rounds:
            return self.survival(depth)
        tokens = [1.0, *(each.tokens for each in self.rounds[:depth])]
        return tuple(later - earlier for earlier, later in pairwise(tokens))

    def rows(self, depth: int, *, batch: float) -> tuple[float, ...]:
        """Rows per request in a step of that depth, the known token included: equally likely values."""
        return self.rounds[depth - 1].rows(batch) if self.rounds and depth else (depth + 1.0,)

    @property
    def max_depth(self) -> int | None:
        """The deepest draft token with a known rate; None if every depth has one."""
        return len(self.rates) if isinstance(self.rates, tuple) else None


# ---- how it is given -------------------------------------------------------------------------------------------------


def parse_acceptances(text: str) -> list[AcceptanceRates]:
    """Rates between 0 and 1, names of published survival curves (CURVES), or JSON files with rates or survival by
    depth; each once. Files of one name are told apart by their path."""
    rates: dict[str, AcceptanceRates] = {}
    for word in split("acceptance", text):
        if word in CURVES:
            rates[word] = AcceptanceRates(word, conditional(CURVES[word]))
            continue
        try:
            rate = float("file" if "_" in word else word)
        except ValueError:
            found = _acceptance_file(expand_path(word))
            again = found.label in rates and rates[found.label] != found
            found = replace(found, label=word) if again else found
        else:
            if not 0 <= rate <= 1:
                raise UsageError(
                    f"acceptance = {shown(word)[1:-1]} is out of range.", "Acceptance lies between 0 and 1."
                )
            found = AcceptanceRates(word, rate)
        rates[found.label] = found
    return list(rates.values())


_RATES = ("acceptance", "survival")
_OF_ROUNDS = ("alpha", "tau", "survival")
FILE_KEYS = {
    *(*_RATES, "depths", "drafter", "depth", "survival_given_draft", "categories"),
    *("model", "engine", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "trees", "date"),
    *("target_sizes", "target_fingerprint", "tokenizer_fingerprint", "drafter_fingerprint"),
    *("prompts", "tokens", "rounds", "drafts", "drafted", "coverage", "context"),
    *(f"{name}{end}" for name in _OF_ROUNDS for end in ("", "_low", "_high")),
}
"""What an acceptance file may hold (docs/acceptance.md)."""


def _acceptance_file(path: Path) -> AcceptanceRates:
    """From {"acceptance": [...]} or {"survival": [...]}, with the "drafter", which is the label, and the rounds of each
    depth that `wager acceptance` writes beside survival. Nothing else that it writes is read. UsageError for what it
    does not write, and for values that contradict each other."""
    values = read_json(
        path, hint=f"Give a rate from 0 to 1, a published curve ({', '.join(CURVES)}), or a file's path."
    )
    keys = [name for name in _RATES if name in values]
    unknown = sorted(set(values) - FILE_KEYS)
    if unknown:
        known = did_you_mean(unknown[0], FILE_KEYS, otherwise="")
        raise UsageError(
            f"{path} has {shown(unknown[0])}, which no acceptance file has.",
            f'{known} It holds {{"acceptance": [...]}} or {{"survival": [...]}} by depth, and what `wager acceptance` '
            "writes beside it.".strip(),
        )
    if len(keys) != 1:
        raise UsageError(
            f"{path} gives {'both acceptance and survival' if keys else 'no acceptance'}.",
            'It holds either {"acceptance": [...]} or {"survival": [...]} by depth.',
        )
    rates = values[keys[0]]
    if not isinstance(rates, list) or not rates:
        raise UsageError(f"{keys[0]} in {path} is no list of rates.", "Give one probability for each depth.")
    if values.get("depth", len(rates)) != len(rates):
        raise UsageError(
            f"{path} contradicts itself: depth is {values['depth']!r}, and {keys[0]} has {len(rates)} values.",
            "Give one value for each depth.",
        )
    tau = values.get("tau")
    if tau is not None and not (is_number(tau) and 1 <= tau <= len(rates) + 1):
        raise UsageError(
            f"{path} contradicts itself: tau is {tau!r}, with drafts of {len(rates)} tokens.",
            f"A round has 1 to {len(rates) + 1} tokens, the bonus token included.",
        )
    if not all(is_number(rate) and 0 <= rate <= 1 for rate in rates):
        raise UsageError(f"{keys[0]} in {path} has a value outside 0 to 1.", "Give one probability for each depth.")
    drafter = values.get("drafter")
    label = drafter.strip()[:40] if isinstance(drafter, str) and drafter.strip() else path.stem
    noted = ConfigKeys(values, where=str(path))
    if keys[0] == "acceptance":
        return AcceptanceRates(label, tuple(float(rate) for rate in rates), noted=noted)
    if any(later > earlier for earlier, later in pairwise(rates)):
        raise UsageError(f"survival in {path} rises with depth.", "Survival cannot be higher at a deeper token.")
    return AcceptanceRates.measured(
        label, rates, _measured_rounds(values.get("depths"), path, deepest=len(rates)), noted
    )


def _measured_rounds(depths: Any, path: Path, *, deepest: int) -> tuple[MeasuredRound, ...]:
    """The rounds of depths 1, 2, ... `deepest`; none without "depths"."""
    if depths is None:
        return ()
    rounds = []
    try:
        for depth, value in enumerate(depths, 1):
            shares = tuple(float(share) for share in value["lengths"])
            rounds.append(MeasuredRound(float(value["tau"]), shares))
            if value.get("depth", depth) != depth:
                raise ValueError(f"depth {value['depth']!r} in the place of {depth}")
            if len(shares) != depth + 1 or not min(shares) >= 0 or not abs(sum(shares) - 1) < 1e-6:
                raise ValueError(f"lengths at depth {depth}")
            if not 1 <= rounds[-1].tokens <= 1 + rounds[-1].drafted + 1e-6:
                raise ValueError(f"tau at depth {depth}")
        if len(rounds) != deepest:
            raise ValueError(f"{len(rounds)} depths, and survival of {deepest}")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"depths in {path} does not hold the rounds of every depth: {error}.",
            "Write the file with `wager acceptance -o FILE`.",
        ) from error
    return tuple(rounds)
