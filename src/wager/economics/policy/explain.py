"""What the last steps did and why, in words for users. What was observed and what is forecast are told apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from wager.economics.acceptance import LARGE_BATCH
from wager.economics.policy.objective import SloReport
from wager.economics.policy.prices import Prices
from wager.economics.policy.state import DrafterProfile, PlannedSequence, PolicyStep
from wager.types import StepRecord

_NEARLY_FREE = 0.005  # tokens: a cost of a row that would be printed as 0.00
_STEPS = 64  # that are remembered: a second or less on most machines


@dataclass(slots=True)
class DraftCounts:
    """Of one drafter: drafts that were asked for, and draft tokens that were drafted, verified and accepted."""

    requested: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, other: DraftCounts) -> None:
        self.requested += other.requested
        self.drafted += other.drafted
        self.verified += other.verified
        self.accepted += other.accepted


@dataclass(frozen=True, slots=True)
class ObservedSpeed:
    """`tokens` in `seconds` over `steps` steps, in which plain decoding would have taken `plain_seconds` for
    `plain_tokens`; `plain_steps` of the steps were plain, and took `measured_plain` seconds on average."""

    steps: int
    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float
    plain_steps: int
    measured_plain: float

    @property
    def ratio(self) -> float:
        """Tokens a second over those that plain decoding would have yielded."""
        return self.tokens / self.seconds * self.plain_seconds / self.plain_tokens


@dataclass(frozen=True, slots=True)
class CountedStep:
    """What is kept of a step of a large batch: whether drafts were asked for (`plan`), and what became of them."""

    plan: bool
    counts: dict[str, DraftCounts]
    record: StepRecord | None


class ObservedSteps:
    """Remembers the latest steps."""

    def __init__(self) -> None:
        self._observed: deque[PolicyStep | CountedStep] = deque(maxlen=_STEPS)
        self._steps = 0

    def add(self, taken: Sequence[PolicyStep]) -> None:
        """Steps were taken. What became of their drafts is counted when it is asked for; in a large batch, whose steps
        are not kept, in some steps, at once."""
        if max([len(step.all_spans) for step in taken], default=0) <= LARGE_BATCH:
            self._observed.extend(taken)
            return
        for step in taken:
            self._steps += 1
            interval = min(_STEPS // 2, max(1, len(step.plan) // LARGE_BATCH))
            counts = {} if not step.plan or self._steps % interval else _step_counts(step)
            self._observed.append(CountedStep(bool(step.plan), counts, step.record))

    def drafts(self, drafter: str) -> DraftCounts:
        """Of the latest steps together, as far as they were counted."""
        total = DraftCounts()
        for step in self._observed:
            counts = step.counts if isinstance(step, CountedStep) else _step_counts(step) if step.plan else {}
            if drafter in counts:
                total.add(counts[drafter])
        return total

    def speed(self, plain_seconds: Callable[[int, int], float]) -> ObservedSpeed | None:
        """Of the latest steps that computed no prompts; None if there was none. `plain_seconds` are those believed of
        a plain step, by sequences and cached positions."""
        decoded = [
            (record, sum(record.seconds.values()), not step.plan)
            for step in self._observed
            if (record := step.record) and record.rows == record.sequences + record.drafted
        ]
        records = [record for record, seconds, _ in decoded if seconds > 0]
        if not records:
            return None
        plain_steps = [seconds for _, seconds, plain in decoded if plain]
        return ObservedSpeed(
            steps=len(records),
            tokens=sum([record.emitted for record in records]),
            seconds=sum([seconds for _, seconds, _ in decoded]),
            plain_tokens=sum([record.sequences for record in records]),
            plain_seconds=sum([plain_seconds(record.sequences, sum(record.context_lens)) for record in records]),
            plain_steps=len(plain_steps),
            measured_plain=sum(plain_steps) / len(plain_steps) if plain_steps else 0.0,
        )


def _step_counts(step: PolicyStep) -> dict[str, DraftCounts]:
    if len(step.drafter_index) == 1:  # then sums suffice
        return {
            next(iter(step.drafter_index)): DraftCounts(
                requested=len(step.plan),
                drafted=sum([len(draft.tokens) for draft in step.drafted.values()]),
                verified=sum([len(draft.tokens) for draft in step.admitted.values()]),
                accepted=sum([len(verdict.accepted) for verdict in step.verdicts]),
            )
        }
    counts: dict[str, DraftCounts] = {}
    for seq_id, decision in step.plan.items():
        count = counts.setdefault(decision.drafter, DraftCounts())
        draft, kept = step.drafted.get(seq_id), step.admitted.get(seq_id)
        count.requested += 1
        count.drafted += len(draft.tokens) if draft else 0
        count.verified += len(kept.tokens) if kept else 0
    for verdict in step.verdicts:
        if verdict.accepted:
            counts[step.plan[verdict.seq_id].drafter].accepted += len(verdict.accepted)
    return counts


def explain(
    step: PolicyStep,
    drafters: Sequence[DrafterProfile],
    *,
    prices: Prices,
    observed: ObservedSteps,
    slo: SloReport | None,
    collapsed: Mapping[str, str],
    inactive: Collection[str],
) -> str:
    """Lines of one or two sentences; `slo` is how an SLO is met, `collapsed` are drafters that are good no more,
    `inactive` those that are shown no states."""
    states = step.decoding_states
    decoding = len(states)
    if not decoding:
        return "No sequence decodes in this step, so there is nothing to draft."
    lines = [
        f"{_count(decoding, 'sequence')} decode{'s' * (decoding == 1)}; a step without drafts takes "
        f"{1e3 * step.plain.seconds:.2f} ms, as estimated.",
        _observed(observed.speed(prices.latency.plain_seconds)),
        _forecast(prices.goodput.ratio(decoding), prices.goodput.row_cost(decoding)),
        *([_slo(slo, decoding)] if slo else []),
        *_kind(step, decoding),
    ]
    for index, profile in enumerate(drafters):
        draft_seconds = prices.latency.draft_seconds(profile.name, decoding, 1)
        forecast = _drafter(step, step.candidates or states, index, profile=profile, draft_seconds=draft_seconds)
        lines.append(f"{forecast}. {_counts(observed.drafts(profile.name))}")
    lines += collapsed.values()
    if inactive:
        lines.append(f"Inactive, and shown no states until tried again: {', '.join(sorted(inactive))}.")
    if step.explored:
        lines.append(f"Drafted for exploration only: {', '.join(sorted(step.explored))}.")
    drafts = list(step.drafted.values())
    if drafts:
        drafted, kept = sum(map(len, drafts)), sum(map(len, step.admitted.values()))
        tokens, number = _count(drafted, "draft token"), _count(len(drafts), "draft")
        lines.append(f"{kept} of {tokens} admitted, in {len(step.admitted)} of {number}.")
    return "\n".join(lines)


def _kind(step: PolicyStep, decoding: int) -> list[str]:
    """What is special about the step."""
    lines = []
    full = decoding - step.num_candidates if step.spans else 0
    if full:
        lines.append(f"No room for drafts: {_count(full, 'sequence')}.")
    if step.skipped:
        lines.append("This step was not planned: the last plan had no drafts, and the next is made within some steps.")
    elif step.measures_plain:
        lines.append("This step is taken without drafts, to measure what such steps take.")
    elif step.measures_rows:
        deepest = max([decision.depth for decision in step.plan.values()], default=0)
        lines.append(f"This step drafts and verifies {deepest} deep for every sequence, to measure what rows cost.")
    return lines


def _observed(speed: ObservedSpeed | None) -> str:
    if speed is None:
        return "No step was observed yet."
    text = (
        f"Observed in the last {_count(speed.steps, 'step')}: {_count(speed.tokens, 'token')} in {speed.seconds:.3g} s,"
        f" {speed.ratio:.2f} times the tokens a second that plain decoding would yield by that estimate"
    )
    if speed.plain_steps and speed.plain_steps < speed.steps:
        text += f"; {speed.plain_steps} of them had no drafts and took {1e3 * speed.measured_plain:.2f} ms"
        text += " on average" if speed.plain_steps > 1 else ""
    return text + "."


def _forecast(ratio: float, cost: float | None) -> str:
    """The forecast goodput, which is that of plain decoding at least, and the weighted tokens that a row must bring
    (None: no step of about this size was forecast)."""
    gain = f"{ratio:.2f} times the goodput of plain decoding" if ratio > 1 else "no more than plain decoding yields"
    if cost is None:
        return "Forecast: none yet."
    if cost < _NEARLY_FREE:
        return (
            f"Forecast: {gain}; one more row costs less than {_NEARLY_FREE:g} tokens, so nearly any draft token pays."
        )
    return f"Forecast: {gain}; one more row must bring {cost:.2f} tokens."


def _slo(slo: SloReport, decoding: int) -> str:
    target = f"The SLO of {1e3 * slo.seconds_per_token:g} ms a token"
    if slo.given_up:
        pace = f"the slowest takes {1e3 * slo.slowest:.3g} ms"
        return (
            f"{target} cannot be met for {slo.given_up} of {_count(decoding, 'sequence')}: {pace}; they count 1 again."
        )
    if slo.late:
        return f"{target} is not met by {slo.late} of {_count(decoding, 'sequence')}, whose tokens count more."
    return f"{target} is met."


def _drafter(
    step: PolicyStep,
    states: Sequence[PlannedSequence],
    index: int,
    *,
    profile: DrafterProfile,
    draft_seconds: float,
) -> str:
    """How the drafter is used; `draft_seconds` is what one draft token for every sequence takes it."""
    name, planned = profile.name, step.plan.keys() - step.explored
    users = [state for state in states if state.seq_id in planned and step.plan[state.seq_id].drafter == name]
    plain = [state for state in states if state.seq_id not in planned]
    known = profile.acceptance.depths.trials[0] > 0
    if users:
        deep = sorted({step.plan[state.seq_id].depth for state in users})
        text = f"{name}: depth {deep[0]}{f' to {deep[-1]}' * (len(deep) > 1)} for {_count(len(users), 'sequence')} "
        text += f"(forecast: first token accepted {_rate(users, index, known=known)})"
        if plain:
            text += f"; {_count(len(plain), 'sequence')} without drafts (there {_rate(plain, index, known=known)})"
        return text
    text = f"{name}: not used. Its first token would be accepted {_rate(plain, index, known=known)}, and drafting one "
    return text + f"for every sequence would take {1e3 * draft_seconds:.2f} ms besides the rows"


def _counts(counts: DraftCounts) -> str:
    if not counts.requested:
        return "Observed lately: it was not asked."
    share = f" ({counts.accepted / counts.verified:.0%} of these)" if counts.verified else ""
    return (
        f"Observed lately: asked for {_count(counts.requested, 'draft')}, {counts.drafted} tokens drafted, "
        f"{counts.verified} verified, {counts.accepted} accepted{share}."
    )


def _rate(states: Sequence[PlannedSequence], index: int, *, known: bool) -> str:
    rates = [float(plan.forecasts[index][plan.row, 0]) for plan in (state.plan for state in states) if plan.forecasts]
    if not rates:
        return "an unknown share of the time"
    share = f"{sum(rates) / len(rates):.0%} of the time"
    return share if known else f"{share} by assumption: no observation yet"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
