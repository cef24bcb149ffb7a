"""What the last step did and why, in words for users. What was observed and what is forecast are told apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from wager.economics.latency import LatencyCache
from wager.economics.policy.goodput import GoodputEstimator
from wager.economics.policy.objective import SloReport
from wager.economics.policy.observed import DraftCounts, ObservedSpeed, ObservedSteps
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePolicyState

_NEARLY_FREE = 0.005  # tokens: a cost of a row that would be printed as 0.00


def explain(
    step: PolicyStep,
    drafters: Sequence[DrafterProfile],
    *,
    latency: LatencyCache,
    goodput: GoodputEstimator,
    observed: ObservedSteps,
    slo: SloReport | None,
    collapsed: Mapping[str, str],
    resting: Collection[str],
) -> str:
    """Lines of one or two sentences; `slo` is how an SLO is met, `collapsed` are drafters that are good no more,
    `resting` those that are shown no states."""
    states = step.decoding_states
    decoding = len(states)
    if not decoding:
        return "No sequence decodes in this step, so there is nothing to draft."
    lines = [
        f"{_count(decoding, 'sequence')} decode{'s' * (decoding == 1)}; a step without drafts takes "
        f"{1e3 * step.load.plain_seconds:.2f} ms, as estimated.",
        _observed(observed.speed(latency.plain_seconds)),
        _forecast(goodput.ratio(decoding), goodput.row_cost(decoding)),
        *([_slo(slo, decoding)] if slo else []),
        *_kind(step, decoding),
    ]
    for index, profile in enumerate(drafters):
        draft_seconds = latency.draft_seconds(profile.name, decoding, 1)
        forecast = _drafter(step, step.candidates or states, index, profile=profile, draft_seconds=draft_seconds)
        lines.append(f"{forecast}. {_counts(observed.drafts(profile.name))}")
    lines += collapsed.values()
    if resting:
        lines.append(f"Resting, and shown no states until tried again: {', '.join(sorted(resting))}.")
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
    states: Sequence[SequencePolicyState],
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


def _rate(states: Sequence[SequencePolicyState], index: int, *, known: bool) -> str:
    rates = [float(plan.forecasts[index][plan.row, 0]) for plan in (state.plan for state in states) if plan.forecasts]
    if not rates:
        return "an unknown share of the time"
    share = f"{sum(rates) / len(rates):.0%} of the time"
    return share if known else f"{share} by assumption: no observation yet"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
