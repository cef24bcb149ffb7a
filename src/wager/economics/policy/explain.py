"""What the last steps did and why, in words for users. What was observed and what is forecast are told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wager.economics.acceptance import LARGE_BATCH, AcceptanceModel
from wager.economics.latency import LatencyCache
from wager.economics.policy.prices import MAX_LATE_STEPS, ObjectiveWeights, Prices
from wager.economics.policy.state import PlannedSequence, PolicyStep

LOOK_BACK = 64  # steps that are remembered: a second or less on most machines
_NEARLY_FREE = 0.005  # tokens: a cost of a row that would be printed as 0.00


def forget_drafts(step: PolicyStep) -> None:
    """The step is over: of a large batch its spans and drafts are not kept, so that they can be freed with it; the
    drafts of some steps are counted."""
    if len(step.ids) > LARGE_BATCH:
        interval = min(LOOK_BACK // 2, max(1, len(step.plan) // LARGE_BATCH))
        used = {decision.drafter for decision in step.plan.values()} if step.number % interval == 0 else ()
        step.counts = {drafter: _counts_of(step, drafter) for drafter in used}
        step.spans = step.verdicts = ()
        step.drafted = step.admitted = {}


def _counts_of(step: PolicyStep, drafter: str) -> tuple[int, ...]:
    """Drafts that were asked for, and draft tokens that were drafted, verified and accepted."""
    if step.counts is not None:
        return step.counts.get(drafter, (0,) * 4)
    asked = {seq_id for seq_id, decision in step.plan.items() if decision.drafter == drafter}
    return (
        len(asked),
        sum([len(draft.tokens) for seq_id, draft in step.drafted.items() if seq_id in asked]),
        sum([len(draft.tokens) for seq_id, draft in step.admitted.items() if seq_id in asked]),
        sum([len(verdict.accepted) for verdict in step.verdicts if verdict.seq_id in asked]),
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
    if not states:
        return "No sequence decodes in this step, so there is nothing to draft."
    full = {span.seq_id for span in step.spans if not span.max_draft_tokens}
    lines = [
        f"{_count(len(states), 'sequence')} decode{'s' * (len(states) == 1)}; a step without drafts takes "
        f"{1e3 * step.plain.seconds:.2f} ms, as estimated.",
        observed(latest, prices.latency)[1],
        _forecast(prices.goodput.ratio(len(states)), prices.goodput.row_cost(len(states))),
        *_slo(prices.weights, states),
    ]
    if full:
        lines.append(f"No room for drafts: {_count(len(full), 'sequence')}.")
    if step.skipped:
        lines.append("This step was not planned: the last plan had no drafts, and the next is made within some steps.")
    if step.measured_depth == 0:
        lines.append("This step is taken without drafts, to measure what such steps take.")
    elif step.measured_depth:
        deepest = max([decision.depth for decision in step.plan.values()], default=0)
        lines.append(f"This step drafts and verifies {deepest} deep for every sequence, to measure what rows cost.")
    candidates = [state for state in states if state.seq_id not in full] or states
    for drafter, model in models.items():
        seconds = prices.latency.draft_seconds(drafter, len(states), 1)
        use = _use(step, candidates, drafter, known=model.depths.trials[0] > 0, seconds=seconds)
        lines.append(f"{use}. {_counts(latest, drafter)}")
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


def observed(steps: Iterable[PolicyStep], latency: LatencyCache) -> tuple[float | None, str]:
    """Tokens a second over those that plain decoding would have yielded, in the steps that computed no prompts (None if
    there was none); and the same in words."""
    taken = [(step.record, not step.plan) for step in steps if step.record and step.record.decodes_only]
    timed = [(record, sum(record.seconds.values()), plain) for record, plain in taken if any(record.seconds.values())]
    if not timed:
        return None, "No step was observed yet."
    tokens, seconds = sum([record.emitted for record, _, _ in timed]), sum([seconds for _, seconds, _ in timed])
    expected = sum([latency.plain_seconds(each.sequences, sum(each.context_lens)) for each, _, _ in timed])
    speed = tokens / seconds * expected / sum([record.sequences for record, _, _ in timed])
    text = (
        f"Observed in the last {_count(len(timed), 'step')}: {_count(tokens, 'token')} in {seconds:.3g} s,"
        f" {speed:.2f} times the tokens a second that plain decoding would yield by that estimate"
    )
    without = [seconds for _, seconds, plain in timed if plain]
    if 0 < len(without) < len(timed):
        text += f"; {len(without)} of them had no drafts and took {1e3 * sum(without) / len(without):.2f} ms"
        text += " on average" if len(without) > 1 else ""
    return speed, text + "."


def _forecast(ratio: float, cost: float | None) -> str:
    """The forecast goodput, which is that of plain decoding at least, and the weighted tokens that a row must bring
    (None: no step of about this size was forecast)."""
    gain = f"{ratio:.2f} times the goodput of plain decoding" if ratio > 1 else "no more than plain decoding yields"
    if cost is None:
        return "Forecast: none yet."
    if cost < _NEARLY_FREE:
        free = f"one more row costs less than {_NEARLY_FREE:g} tokens, so nearly any draft token pays"
        return f"Forecast: {gain}; {free}."
    return f"Forecast: {gain}; one more row must bring {cost:.2f} tokens."


def _slo(weights: ObjectiveWeights, states: Sequence[PlannedSequence]) -> list[str]:
    """How an SLO is met lately; nothing under another objective, and before there is something to say."""
    if not weights.slo or not weights.step_seconds:
        return []
    target, of = f"The SLO of {1e3 * weights.slo:g} ms a token", f"of {_count(len(states), 'sequence')}"
    late = [state for state in states if weights.step_seconds / state.tokens > weights.slo]
    if given_up := sum([state.late_steps >= MAX_LATE_STEPS for state in late]):
        slowest = weights.step_seconds / min([state.tokens for state in states])
        pace = f"the slowest takes {1e3 * slowest:.3g} ms"
        return [f"{target} cannot be met for {given_up} {of}: {pace}; they count 1 again."]
    if late:
        return [f"{target} is not met by {len(late)} {of}, whose tokens count more."]
    return [f"{target} is met."]


def _use(step: PolicyStep, states: Sequence[PlannedSequence], drafter: str, *, known: bool, seconds: float) -> str:
    """How the drafter is used; `seconds` is what one draft token for every sequence takes it, `known` whether anything
    was observed of it."""

    def rate(those: Sequence[PlannedSequence]) -> str:
        rates = [float(state.forecasts[drafter][state.row, 0]) for state in those if state.forecasts]
        share = f"{sum(rates) / len(rates):.0%} of the time" if rates else "an unknown share of the time"
        return share if known or not rates else f"{share} by assumption: no observation yet"

    planned = step.plan.keys() - step.explored
    users = [state for state in states if state.seq_id in planned and step.plan[state.seq_id].drafter == drafter]
    plain = [state for state in states if state.seq_id not in planned]
    if not users:
        text = f"{drafter}: not used. Its first token would be accepted {rate(plain)}, and drafting one for every "
        return text + f"sequence would take {1e3 * seconds:.2f} ms besides the rows"
    deep = sorted({step.plan[state.seq_id].depth for state in users})
    text = f"{drafter}: depth {deep[0]}{f' to {deep[-1]}' * (len(deep) > 1)} for {_count(len(users), 'sequence')} "
    text += f"(forecast: first token accepted {rate(users)})"
    return text + (f"; {_count(len(plain), 'sequence')} without drafts (there {rate(plain)})" if plain else "")


def _counts(latest: Iterable[PolicyStep], drafter: str) -> str:
    """Of the latest steps together, as far as they were counted."""
    each = [_counts_of(step, drafter) for step in latest]
    requested, drafted, verified, accepted = map(sum, zip((0,) * 4, *each, strict=True))
    if not requested:
        return "Observed lately: it was not asked."
    share = f" ({accepted / verified:.0%} of these)" if verified else ""
    return (
        f"Observed lately: asked for {_count(requested, 'draft')}, {drafted} tokens drafted, "
        f"{verified} verified, {accepted} accepted{share}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
