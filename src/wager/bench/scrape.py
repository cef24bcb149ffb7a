"""What a server has counted of its speculation, from the text of its /metrics: counters under vLLM's names, which
llama.cpp and wager share, and SGLang's gauges, which tell a mean alone.

vLLM's are in vllm/v1/spec_decode/metrics.py, llama.cpp's in tools/server/server-task.cpp, SGLang's in
srt/observability/metrics_collector.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from wager.errors import MALFORMED, UsageError

_DRAFTS, _DRAFTED = "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"
_ACCEPTED, _BY_POSITION = "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"
_TO_POSITION = "spec_decode_num_draft_tokens_per_pos_total"
_PROMPTS, _GENERATED, _FIRST = "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"
_COUNTERS = (_DRAFTS, _DRAFTED, _ACCEPTED, _BY_POSITION, _TO_POSITION, _PROMPTS, _GENERATED, _FIRST)
_STARTED, _LENGTH, _STEPS = "spec_decode_num_drafts_created", "spec_accept_length", "spec_num_steps"
_SAME = {"tokens_predicted_total": _GENERATED}
"""llama.cpp's own name."""


class CountedBy(NamedTuple):
    """Whose counts they are: the engine by its names' prefix, and the labels model_name and drafter ("": none)."""

    engine: str
    model: str
    drafter: str


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What one drafter did: the `drafts` that were verified, their tokens, and by position in the draft the `accepted`
    ones and, of wager alone, the drafts `reaching` it. `generated`, `first_tokens` and `prompt_tokens` are the
    server's, 0 where it does not say, and `generated` also where other drafters drafted too. SGLang tells the mean
    `length` of rounds since its last line of log, bonus token included, and the `steps` of a draft, 0 where it does
    not say."""

    by: CountedBy
    drafts: int
    drafted: int
    accepted: tuple[int, ...]
    reaching: tuple[int, ...]
    generated: int
    first_tokens: int
    prompt_tokens: int
    length: float
    steps: int

    @property
    def rounds(self) -> int | None:
        """Passes of the target that emitted a token of a sequence, with a draft or without; None where unknown. The
        first token of an answer comes from the pass over its prompt."""
        passes = self.generated - self.first_tokens - sum(self.accepted)
        return max(passes, self.drafts) if self.generated else None


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics, and `where` it was read. Counters that differ in other labels (data parallel ranks) are
    added up; of gauges the last one counts. `families`: how many there are by the prefixes of their names."""

    where: str
    counts: Mapping[CountedBy, Counter[str]] = field(default_factory=dict)
    gauges: Mapping[CountedBy, Mapping[str, float]] = field(default_factory=dict)
    families: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, where: str) -> Scrape:
        """UsageError for what is not in the format of Prometheus."""
        counts: dict[CountedBy, Counter[str]] = {}
        gauges: dict[CountedBy, dict[str, float]] = {}
        families: Counter[str] = Counter()
        try:
            for family in text_string_to_metric_families(text):
                prefix, colon, _ = family.name.partition(":")
                families[prefix if colon else "others"] += 1
                for sample in family.samples:
                    name = sample.name.removeprefix(prefix + colon)
                    name = _SAME.get(name, name)
                    key = CountedBy(prefix, sample.labels.get("model_name", ""), sample.labels.get("drafter", ""))
                    if name in _COUNTERS:
                        if sample.value < 0:
                            raise ValueError(f"{sample.name} is {sample.value:g}")
                        by_position = name in (_BY_POSITION, _TO_POSITION)
                        place = f"[{int(sample.labels['position'])}]" if by_position else ""
                        counts.setdefault(key, Counter())[name + place] += round(sample.value)
                    elif name in (_STARTED, _LENGTH, _STEPS) and math.isfinite(sample.value):
                        gauges.setdefault(key, {})[name] = sample.value
        except MALFORMED as error:
            raise UsageError(f"{where} is not in Prometheus' format: {error}.", "Give the text of /metrics.") from error
        return cls(where, counts, gauges, families)

    def since(self, before: Scrape) -> Scrape:
        """By how much the counters rose since an earlier reading. UsageError that names one which went back, as it does
        when the server is started again."""
        rose = {key: Counter(counted) for key, counted in self.counts.items()}
        for key, earlier in before.counts.items():
            later = rose.setdefault(key, Counter())
            later.subtract(earlier)
            starts = {scrape.gauges.get(key, {}).get(_STARTED) for scrape in (before, self)}
            for name, value in later.items():
                if value < 0 or (None not in starts and len(starts) > 1):
                    raise UsageError(
                        f"{key.engine}:{name} began again between {before.where} and {self.where}: it was "
                        f"{earlier[name]} and is {earlier[name] + value}.",
                        "The server was started again meanwhile, or the later reading is given first.",
                    )
        return Scrape(self.where, rose, self.gauges, self.families)

    def totals(self) -> Counter[str]:
        """Drafts (as `rounds`), drafted and accepted tokens of all drafters; without those that are 0."""
        names = {"rounds": _DRAFTS, "drafted": _DRAFTED, "accepted": _ACCEPTED}
        return +Counter({name: sum(each[of] for each in self.counts.values()) for name, of in names.items()})

    def speculation(self, *, model: str | None = None, drafter: str | None = None) -> SpeculationCounts:
        """The counts of the one model and drafter that drafted, or of those named where the server names any.
        UsageError if there is none, or more than one."""
        keys = [key for key, counted in self.counts.items() if counted[_DRAFTS]]
        keys += [key for key, each in self.gauges.items() if each.get(_LENGTH)]
        if not keys:
            raise self._nothing()
        for kind, wanted in (("model", model), ("drafter", drafter)):
            names = sorted({getattr(key, kind) for key in keys} - {""})
            if names and wanted not in names and (wanted or len(names) > 1):
                counted = f"no {kind} {wanted!r}" if wanted else f"{len(names)} {kind}s"
                raise UsageError(f"{self.where} counts {counted}.", f"Name one with --{kind}: {', '.join(names)}.")
            keys = [key for key in keys if wanted is None or not names or getattr(key, kind) == wanted]
        return self._of(keys[0])

    def _nothing(self) -> UsageError:
        """The error for counters that are missing, or that did not rise."""
        if self.gauges or any(_DRAFTS in counted for counted in self.counts.values()):
            return UsageError(
                f"{self.where} counts no draft: {_DRAFTS} did not rise.",
                "Send the server requests meanwhile, whose answers are long enough to be drafted for.",
            )
        found = ", ".join(f"{count} of {prefix}" for prefix, count in self.families.items())
        return UsageError(
            f"{self.where} has no counters of speculation; its families are {found or 'none'}.",
            "Start the server with speculation and metrics (llama.cpp: --metrics, SGLang: --enable-metrics).",
        )

    def _of(self, key: CountedBy) -> SpeculationCounts:
        nothing: Counter[str] = Counter()
        own, server = self.counts.get(key, nothing), self.counts.get(key._replace(drafter=""), nothing)
        drafting = [each for each, counted in self.counts.items() if each.model == key.model and counted[_DRAFTS]]
        accepted, reaching = (self._by_position(own, family) for family in (_BY_POSITION, _TO_POSITION))
        return SpeculationCounts(
            key,
            drafts=own[_DRAFTS],
            drafted=own[_DRAFTED],
            accepted=tuple(accumulate(accepted, min, initial=own[_DRAFTS]))[1:],  # llama.cpp rounds to six digits
            reaching=tuple(reaching),
            generated=server[_GENERATED] if len(drafting) < 2 else 0,
            first_tokens=server[_FIRST],
            prompt_tokens=server[_PROMPTS],
            length=self.gauges.get(key, {}).get(_LENGTH, 0.0),
            steps=round(self.gauges.get(key, {}).get(_STEPS, 0.0)),
        )

    def _by_position(self, counted: Counter[str], family: str) -> list[int]:
        """The counters of a family from position 0 on. UsageError where one is missing between others."""
        places = [f"{family}[{at}]" for at in range(sum(name.startswith(family) for name in counted))]
        missing = next((place for place in places if place not in counted), None)
        if missing is not None:
            raise UsageError(f"{self.where} has no {missing}, and has other positions.", "Give the whole text.")
        return [counted[place] for place in places]
