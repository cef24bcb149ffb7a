"""Service-level objectives of a load test: the times that a request has to keep to count as served well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wager.bench.load_answer import TimedAnswer
from wager.economics.durations import parse_seconds
from wager.errors import UsageError
from wager.inputs import did_you_mean, shown

OBJECTIVES: Mapping[str, str] = {
    "ttft": "time to the first token",
    "itl": "longest wait between two chunks",
    "tpot": "mean time of a token after the first",
    "e2e": "time to the end",
}


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The longest time allowed for each objective, in seconds."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """Of ttft:500ms,itl:50ms. UsageError for a name, a time or a repetition that is not possible."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, colon, time = part.strip().partition(":")
            if name not in OBJECTIVES or not colon:
                raise UsageError(
                    f"--slo {shown(text)}: {shown(part)} is no objective.",
                    did_you_mean(name, OBJECTIVES, otherwise="Write NAME:TIME, such as ttft:500ms, of: {}."),
                )
            if name in limits:
                raise UsageError(f"--slo {shown(text)} has {name} twice.", "Give each objective once.")
            limits[name] = parse_seconds(f"--slo {name}", time)
        return cls(tuple(limits.items()))

    def missed(self, answer: TimedAnswer) -> list[str]:
        """The objectives that an answer misses; `failed` if it failed. A time that an answer does not have, as there is
        no ITL in an answer of one chunk, is kept."""
        if not answer.ok:
            return ["failed"]
        times = {"ttft": answer.ttft, "itl": max(answer.gaps, default=None), "tpot": answer.tpot, "e2e": answer.e2e}
        return [name for name, limit in self.limits if (times[name] or 0.0) > limit]

    def as_dict(self) -> dict[str, float]:
        return dict(self.limits)
