"""What the last steps did and why, in words for users. What was observed and what is forecast are told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wager.economics.acceptance import LARGE_BATCH, AcceptanceModel
from wager.economics.latency import LatencyCache
from wager.economics.policy.prices import ObjectiveWeights, Prices
from wager.economics.policy.state import DraftCounts, PlannedSequence, PolicyStep

LOOK_BACK = 64  # steps that are remembered: a second or less on most machines
_NEARLY_FREE = 0.005  # tokens: a cost of a row that would be printed as 0.00


def _counts_of(step: PolicyStep, drafter: str) -> DraftCounts:
    """What became of the drafts of one step."""
    asked = {seq_id for seq_id, decision in step.plan.items() if decision.drafter == drafter}
    return DraftCounts(
        len(asked),
        sum([len(draft.tokens) for seq_id, draft in step.drafted.items() if seq_id in asked]),
        sum([len(draft.tokens) for seq_id, draft in step.admitted.items() if seq_id in asked]),
        sum([len(verdict.accepted) for verdict in step.verdicts if verdict.seq_id in asked]),
    )


def forget_drafts(step: PolicyStep) -> None:
    """The step is over: of a large batch its spans and drafts are not kept, so that they can be freed with it; the
    drafts of some steps are counted."""
    if step.decoding > LARGE_BATCH:
        interval = min(LOOK_BACK // 2, max(1, len(step.plan) // LARGE_BATCH))
        used = {decision.drafter for decision in step.plan.values()} if step.number % interval == 0 else ()
        step.counts = {drafter: _counts_of(step, drafter) for drafter in used}
        step.spans = step.verdicts = ()
        step.drafted = step.admitted = {}


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


def observed_speed(steps: Iterable[PolicyStep], latency: LatencyCache) -> ObservedSpeed | None:
    """Of the steps that computed no prompts; None if there was none."""
    decoded = [
        (record, sum(record.seconds.values()), not step.plan)
        for step in steps
        if (record := step.record) and record.decodes_only
    ]
    records = [record for record, seconds, _ in decoded if seconds > 0]
    if not records:
        return None
    plain = [seconds for _, seconds, plain in decoded if plain]
    return ObservedSpeed(
        steps=len(records),
        tokens=sum([record.emitted for record in records]),
        seconds=sum([seconds for _, seconds, _ in decoded]),
        plain_tokens=sum([record.sequences for record in records]),
        plain_seconds=sum([latency.plain_seconds(each.sequences, sum(each.context_lens)) for each in records]),
        plain_steps=len(plain),
        measured_plain=sum(plain) / len(plain) if plain else 0.0,
    )


def explain(
    step: PolicyStep,
    states: Sequence[PlannedSequence],
    latest: Sequence[PolicyStep],
    *,
    prices: Prices,
    models: Mapping[str, AcceptanceModel],
    collapsed: Iterable[str],
    inactive: Iterable[str],
) -> str:
    """Lines of one or two sentences. `states` are the sequences that decode, `latest` the steps that were taken,
    `collapsed` says of drafters that they are good no more, `inactive` are those that are shown no states."""
    decoding = len(states)
    if not decoding:
        return "No sequence decodes in this step, so there is nothing to draft."
    full = {span.seq_id for span in step.spans if not span.max_draft_tokens}
    lines = [
        f"{_count(decoding, 'sequence')} decode{'s' * (decoding == 1)}; a step without drafts takes "
        f"{1e3 * step.plain.seconds:.2f} ms, as estimated.",
        _observed(observed_speed(latest, prices.latency)),
        _forecast(prices.goodput.ratio(decoding), prices.goodput.row_cost(decoding)),
        *_slo(prices.weights, states),
        *([f"No room for drafts: {_count(len(full), 'sequence')}."] if full else []),
        *_kind(step),
    ]
    candidates = [state for state in states if state.seq_id not in full] or states
    for drafter, model in models.items():
        seconds = prices.latency.draft_seconds(drafter, decoding, 1)
        known = model.depths.trials[0] > 0
        lines.append(f"{_drafter(step, candidates, drafter, known=known, seconds=seconds)}. {_counts(latest, drafter)}")
    lines += collapsed
    if inactive:
        lines.append(f"Inactive, and shown no states until tried again: {', '.join(sorted(inactive))}.")
    if step.explored:
        lines.append(f"Drafted for exploration only: {', '.join(sorted(step.explored))}.")
    if step.drafted:
        drafted, kept = (sum(map(len, drafts.values())) for drafts in (step.drafted, step.admitted))
        tokens, number = _count(drafted, "draft token"), _count(len(step.drafted), "draft")
        lines.append(f"{kept} of {tokens} admitted, in {len(step.admitted)} of {number}.")
    return "\n".join(lines)


def _kind(step: PolicyStep) -> list[str]:
    """What is special about the step."""
    if step.skipped:
        return ["This step was not planned: the last plan had no drafts, and the next is made within some steps."]
    if step.measures_plain:
        return ["This step is taken without drafts, to measure what such steps take."]
    if step.measures_rows:
        deepest = max([decision.depth for decision in step.plan.values()], default=0)
        return [f"This step drafts and verifies {deepest} deep for every sequence, to measure what rows cost."]
    return []


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


def _slo(weights: ObjectiveWeights, states: Sequence[PlannedSequence]) -> list[str]:
    """How an SLO is met lately; nothing under another objective, and before there is something to say."""
    if not weights.slo or not weights.step_seconds:
        return []
    target, of = f"The SLO of {1e3 * weights.slo:g} ms a token", f"of {_count(len(states), 'sequence')}"
    late = [state for state in states if weights.step_seconds / state.tokens > weights.slo]
    if given_up := sum([weights.gave_up(state) for state in late]):
        slowest = weights.step_seconds / min([state.tokens for state in states])
        pace = f"the slowest takes {1e3 * slowest:.3g} ms"
        return [f"{target} cannot be met for {given_up} {of}: {pace}; they count 1 again."]
    if late:
        return [f"{target} is not met by {len(late)} {of}, whose tokens count more."]
    return [f"{target} is met."]


def _drafter(step: PolicyStep, states: Sequence[PlannedSequence], drafter: str, *, known: bool, seconds: float) -> str:
    """How the drafter is used; `seconds` is what one draft token for every sequence takes it, `known` whether anything
    was observed of it."""
    planned = step.plan.keys() - step.explored
    users = [state for state in states if state.seq_id in planned and step.plan[state.seq_id].drafter == drafter]
    plain = [state for state in states if state.seq_id not in planned]
    if users:
        deep = sorted({step.plan[state.seq_id].depth for state in users})
        text = f"{drafter}: depth {deep[0]}{f' to {deep[-1]}' * (len(deep) > 1)} for {_count(len(users), 'sequence')} "
        text += f"(forecast: first token accepted {_rate(users, drafter, known=known)})"
        if plain:
            text += f"; {_count(len(plain), 'sequence')} without drafts (there {_rate(plain, drafter, known=known)})"
        return text
    text = f"{drafter}: not used. Its first token would be accepted {_rate(plain, drafter, known=known)}, and drafting "
    return text + f"one for every sequence would take {1e3 * seconds:.2f} ms besides the rows"


def _counts(latest: Iterable[PolicyStep], drafter: str) -> str:
    """Of the latest steps together, as far as they were counted."""
    each = [_counts_of(step, drafter) if step.counts is None else step.counts.get(drafter) for step in latest]
    requested, drafted, verified, accepted = map(sum, zip((0,) * 4, *filter(None, each), strict=True))
    if not requested:
        return "Observed lately: it was not asked."
    share = f" ({accepted / verified:.0%} of these)" if verified else ""
    return (
        f"Observed lately: asked for {_count(requested, 'draft')}, {drafted} tokens drafted, "
        f"{verified} verified, {accepted} accepted{share}."
    )


def _rate(states: Sequence[PlannedSequence], drafter: str, *, known: bool) -> str:
    rates = [float(state.forecasts[drafter][state.row, 0]) for state in states if state.forecasts]
    if not rates:
        return "an unknown share of the time"
    share = f"{sum(rates) / len(rates):.0%} of the time"
    return share if known else f"{share} by assumption: no observation yet"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
