"""Why a step was planned as it was, in words for users."""

from __future__ import annotations

from collections.abc import Sequence

from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePolicyState


def explain(
    step: PolicyStep, drafters: Sequence[DrafterProfile], *, draft_seconds: Sequence[float], row_cost: float | None
) -> str:
    """Lines of one or two sentences. `draft_seconds` is what one draft token for every candidate takes each drafter,
    and `row_cost` the weighted tokens that a row must bring."""
    if not step.decoding:
        return "No sequence decodes in this step, so there is nothing to draft."
    ratio = step.goodput * step.plain_seconds / step.weight
    cost = "" if row_cost is None else f", so one more row must bring {row_cost:.2f} tokens"
    lines = [
        f"{_count(step.decoding, 'sequence')} decode{'s' * (step.decoding == 1)}; a step without drafts takes "
        f"{1e3 * step.plain_seconds:.2f} ms. Goodput lately: {ratio:.2f} times that of plain decoding{cost}."
    ]
    if len(step.candidates) < step.decoding:
        lines.append(f"No room for drafts: {_count(step.decoding - len(step.candidates), 'sequence')}.")
    if step.measures_plain:
        lines.append("This step is taken without drafts, to measure what such steps take.")
    else:
        lines += [_drafter(step, index, profile.name, draft_seconds[index]) for index, profile in enumerate(drafters)]
    explored = [seq_id for seq_id, step_draft in step.drafts.items() if step_draft.exploration]
    if explored:
        lines.append(f"Drafted for exploration only: {', '.join(explored)}.")
    drafts = [step_draft.draft for step_draft in step.drafts.values() if step_draft.draft]
    if drafts:
        drafted, kept = sum(map(len, drafts)), sum(map(len, step.admitted.values()))
        tokens, number = _count(drafted, "draft token"), _count(len(drafts), "draft")
        lines.append(f"{kept} of {tokens} admitted, in {len(step.admitted)} of {number}.")
    return "\n".join(lines)


def _drafter(step: PolicyStep, index: int, name: str, seconds: float) -> str:
    depths = {
        id(step_draft.state): step_draft.depth for step_draft in step.drafts.values() if not step_draft.exploration
    }
    planned = [state for state in step.candidates if state.plan.forecast]
    users = [state for state in planned if state.plan.drafter == index and id(state) in depths]
    plain = [state for state in planned if id(state) not in depths]
    if not users:
        text = f"{name}: not used. Its first token would be accepted {_rate(plain, index)} of the time, and drafting "
        return text + f"one for every sequence takes {1e3 * seconds:.2f} ms besides the rows."
    deep = sorted({depths[id(state)] for state in users})
    text = f"{name}: depth {deep[0]}{f' to {deep[-1]}' * (len(deep) > 1)} for {_count(len(users), 'sequence')}"
    text += f" (forecast: first token accepted {_rate(users, index)} of the time)"
    if plain:
        text += f"; {_count(len(plain), 'sequence')} without drafts (there {_rate(plain, index)})"
    return text + "."


def _rate(states: Sequence[SequencePolicyState], index: int) -> str:
    rates = [state.plan.forecast[index][0] for state in states]
    return f"{sum(rates) / len(rates):.0%}" if rates else "an unknown share"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
