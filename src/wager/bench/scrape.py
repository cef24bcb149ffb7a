"""What a server has counted of its speculation, from the text of its /metrics: counters under vLLM's names, which
llama.cpp and wager share, and SGLang's, which tell a mean alone.

vLLM's are in vllm/v1/spec_decode/metrics.py (as Ray Serve renames them in v1/metrics/ray_wrappers.py), llama.cpp's in
tools/server/server-task.cpp, SGLang's in srt/observability/metrics_collector.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from wager.errors import MALFORMED, UsageError
from wager.types import GRAMMAR_DRAFTER

_DRAFTS, _DRAFTED = "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"
_ACCEPTED, _BY_POSITION = "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"
_TO_POSITION = "spec_decode_num_draft_tokens_per_pos_total"
_PROMPTS, _GENERATED, _FIRST = "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"
_ROUNDS = "rounds_total"
_COUNTERS = (_DRAFTS, _DRAFTED, _ACCEPTED, _BY_POSITION, _TO_POSITION, _PROMPTS, _GENERATED, _FIRST, _ROUNDS)
_STARTED = "spec_decode_num_drafts_created"
_LENGTH, _STEPS, _ROWS = "spec_accept_length", "spec_num_steps", "spec_num_draft_tokens"
_SAME = {
    "llamacpp:tokens_predicted_total": _GENERATED,
    "sglang:spec_verify_calls_total": _DRAFTS,
    "sglang:num_requests_total": _FIRST,
    f"sglang:{_FIRST}": "",
}
"""Names of other engines. What SGLang counts of tokens and drafts it counts at a request's end."""
_PREFIX = re.compile(r"(?:ray_)?(vllm)_|(\w+):")


class CountedBy(NamedTuple):
    """Whose counts they are: the engine by its names' prefix, and the labels model_name and drafter ("": none)."""

    engine: str
    model: str
    drafter: str


Series = tuple[CountedBy, str, frozenset[tuple[str, str]]]
"""Whose counter it is, its name with the position, and all its labels."""


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What one drafter did, or several together: the `drafts` that were verified, their tokens, and by position in the
    draft the `accepted` ones and, of wager alone, the drafts `reaching` it. `generated`, `passes` (of wager alone),
    `first_tokens` and `prompt_tokens` are the server's, 0 where it does not say, and `generated` also where other
    drafters drafted too. SGLang tells the mean `length` of rounds, bonus token included, and the `steps` of a draft, 0
    where it does not say: where it counts no drafts, of the rounds since its last line of log."""

    by: CountedBy
    drafts: int
    drafted: int
    accepted: tuple[int, ...]
    reaching: tuple[int, ...]
    generated: int
    passes: int
    first_tokens: int
    prompt_tokens: int
    length: float
    steps: int

    @property
    def rounds(self) -> int | None:
        """Passes of the target that emitted a token of a sequence, with a draft or without; None where unknown. But for
        wager, which drafts then too and counts them, those over prompts are left out."""
        passes = self.passes or self.generated - self.first_tokens - sum(self.accepted)
        return max(passes, self.drafts) if self.generated else None


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics, and `where` it was read. Counters that differ in other labels (data parallel ranks,
    replicas) are added up in `counts`; of gauges the last one that is not 0 counts. `families`: how many there are by
    the prefixes of their names."""

    where: str
    series: Mapping[Series, float] = field(default_factory=dict)
    gauges: Mapping[CountedBy, Mapping[str, float]] = field(default_factory=dict)
    families: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, where: str) -> Scrape:
        """UsageError for what is not in the format of Prometheus."""
        series: dict[Series, float] = {}
        gauges: dict[CountedBy, dict[str, float]] = {}
        families: Counter[str] = Counter()
        try:
            for family in text_string_to_metric_families(text):
                match = _PREFIX.match(family.name)
                prefix = (match[1] or match[2]) if match else "others"
                families[prefix] += 1
                for sample in family.samples:
                    name = sample.name[match.end() :] if match else sample.name
                    name = _SAME.get(f"{prefix}:{name}", name)
                    labels = {"model_name": sample.labels.get("model", ""), **sample.labels}  # proxies of llama.cpp's
                    key = CountedBy(prefix, labels["model_name"], labels.get("drafter", ""))
                    if name in _COUNTERS or name == _STARTED:
                        if sample.value < 0:
                            raise ValueError(f"{sample.name} is {sample.value:g}")
                        by_position = name in (_BY_POSITION, _TO_POSITION)
                        place = f"[{int(sample.labels['position'])}]" if by_position else ""
                        own = (key, name + place, frozenset(sample.labels.items()))
                        if own in series:
                            raise ValueError(f"{sample.name} is there twice with the same labels")
                        series[own] = sample.value if name == _STARTED else round(sample.value)
                    elif name in (_LENGTH, _STEPS, _ROWS) and 0 < sample.value < math.inf:
                        gauges.setdefault(key, {})[name] = sample.value
        except MALFORMED as error:
            raise UsageError(f"{where} is not in Prometheus' format: {error}.", "Give the text of /metrics.") from error
        return cls(where, series, gauges, families)

    @property
    def counts(self) -> dict[CountedBy, Counter[str]]:
        """The counters by whose they are; those of all ranks together."""
        found: dict[CountedBy, Counter[str]] = {}
        for (key, name, _), value in self.series.items():
            found.setdefault(key, Counter())[name] += int(value)
        return found

    def since(self, before: Scrape) -> Scrape:
        """By how much the counters rose since an earlier reading. UsageError that names one which went back or is gone,
        as it is when its server, or one of its ranks, is started again."""
        for own, earlier in before.series.items():
            key, name, _ = own
            later = self.series.get(own)
            if later is None or later < earlier or (name == _STARTED and later != earlier):
                shown = {f"{each.partition(':')[0]}:{same}": each for each, same in _SAME.items()}
                counter = shown.get(f"{key.engine}:{name}", f"{key.engine}:{name}")
                raise UsageError(
                    f"{counter}{f' of {key.model}' * bool(key.model)} began again between {before.where} and "
                    f"{self.where}: it was {earlier:.12g} and is {'gone' if later is None else f'{later:.12g}'}.",
                    "The server was started again meanwhile, the later reading is given first, or they are of two "
                    "servers.",
                )
        rose = {own: value - before.series.get(own, 0) for own, value in self.series.items()}
        return Scrape(self.where, rose, self.gauges, self.families)

    def totals(self) -> Counter[str]:
        """Drafts (as `rounds`), drafted and accepted tokens of all drafters; without those that are 0."""
        names = {"rounds": _DRAFTS, "drafted": _DRAFTED, "accepted": _ACCEPTED}
        counts = self.counts
        found = Counter({name: sum(each[of] for each in counts.values()) for name, of in names.items()})
        for key, counted in counts.items():
            if key.engine == "sglang":
                rows = round(self.gauges.get(key, {}).get(_ROWS, 1.0))  # with the last known token
                found["drafted"] += counted[_DRAFTS] * (rows - 1)
                found["accepted"] += max(0, counted[_GENERATED] - counted[_FIRST] - counted[_DRAFTS])
        return +found

    def speculation(self, *, model: str | None = None, drafter: str | None = None) -> SpeculationCounts:
        """The counts of the one model that drafted, and of all its drafters together, or of those named where the
        server names any, without what grammars force. UsageError if there is none, or more than one model."""
        counts = self.counts
        keys = [key for key, counted in counts.items() if counted[_DRAFTS] and key.drafter != GRAMMAR_DRAFTER]
        keys += [key for key, each in self.gauges.items() if _LENGTH in each and _DRAFTS not in counts.get(key, ())]
        if not keys:
            raise self._nothing()
        for kind, wanted in (("model", model), ("drafter", drafter)):
            names = sorted({getattr(key, kind) for key in keys} - {""})
            if names and wanted not in names and (wanted or (kind == "model" and len(names) > 1)):
                counted = f"no {kind} {wanted!r}" if wanted else f"{len(names)} {kind}s"
                raise UsageError(f"{self.where} counts {counted}.", f"Name one with --{kind}: {', '.join(names)}.")
            keys = [key for key in keys if wanted is None or not names or getattr(key, kind) == wanted]
        return self._of([key for key in keys if key[:2] == keys[0][:2]])

    def _nothing(self) -> UsageError:
        """The error for counters that are missing, or that did not rise."""
        if self.gauges or any(_DRAFTS in counted for counted in self.counts.values()):
            return UsageError(
                f"{self.where} counts no draft: the drafters' counters did not rise.",
                "Send the server requests meanwhile, whose answers are long enough to be drafted for.",
            )
        found = ", ".join(f"{count} of {prefix}" for prefix, count in self.families.items())
        return UsageError(
            f"{self.where} has no counters of speculation; its families are {found or 'none'}.",
            "Start the server with speculation and metrics (llama.cpp: --metrics, SGLang: --enable-metrics).",
        )

    def _of(self, keys: Sequence[CountedBy]) -> SpeculationCounts:
        key, counts, own = keys[0]._replace(drafter=""), self.counts, Counter[str]()
        for each in keys:
            own.update(counts.get(each, {}))
        server, gauges = counts.get(key, Counter[str]()), self.gauges.get(key, {})
        others = {each.drafter for each, counted in counts.items() if each.model == key.model and counted[_DRAFTS]}
        others -= {each.drafter for each in keys} | ({GRAMMAR_DRAFTER} if server[_ROUNDS] else set())
        length = gauges.get(_LENGTH, 0.0)
        if key.engine == "sglang" and own[_DRAFTS]:
            length = (own[_GENERATED] - own[_FIRST]) / own[_DRAFTS]
        accepted, reaching = (self._by_position(own, family) for family in (_BY_POSITION, _TO_POSITION))
        return SpeculationCounts(
            key._replace(drafter=",".join(sorted(each.drafter for each in keys))),
            drafts=own[_DRAFTS],
            drafted=own[_DRAFTED],
            accepted=tuple(accumulate(accepted, min, initial=own[_DRAFTS]))[1:],  # llama.cpp rounds to six digits
            reaching=tuple(reaching),
            generated=0 if others else server[_GENERATED],
            passes=server[_ROUNDS],
            first_tokens=server[_FIRST],
            prompt_tokens=server[_PROMPTS],
            length=length,
            steps=round(gauges.get(_STEPS, 0.0)),
        )

    def _by_position(self, counted: Counter[str], family: str) -> list[int]:
        """The counters of a family from position 0 on. UsageError where one is missing between others."""
        places = [f"{family}[{at}]" for at in range(sum(name.startswith(family) for name in counted))]
        missing = next((place for place in places if place not in counted), None)
        if missing is not None:
            raise UsageError(f"{self.where} has no {missing}, and has other positions.", "Give the whole text.")
        return [counted[place] for place in places]
