"""Why a step was what it was, in words. Knows what was decided, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.economics.policy.bets import Seat, Step

_PLURAL = {"sequence": "sequences", "draft": "drafts", "guess": "guesses"}


def explain(step: Step, *, hurdle: float | None, drafters: Mapping[str, float]) -> str:
    """A few sentences, one a line: what a second is worth, who drafts and why others do not, what was admitted.
    `hurdle` is what a row must bring; `drafters` says what one guess for everyone costs, by name and in order."""
    if not step.live:
        return "No sequence decodes in this step, so there is nothing to bet on."
    factor = step.price * step.plain / step.worth
    lines = [
        f"{_count(step.live, 'sequence')} would take {_ms(step.plain)} for a plain step; lately steps brought "
        f"{factor:.2f} times that rate" + (f", so a row must bring {hurdle:.2f} tokens." if hurdle is not None else ".")
    ]
    if len(step.open) < step.live:
        lines.append(f"No room for guesses: {_count(step.live - len(step.open), 'sequence')}.")
    if step.control:
        lines.append("This step is taken plain, to know what plain steps take.")
    else:
        lines += [_drafter(step, index, *each) for index, each in enumerate(drafters.items())]
    probes = [name for name, bet in step.bets.items() if bet.probe]
    if probes:
        lines.append(f"Asked only to find out: {', '.join(probes)}.")
    drafts = [bet.draft for bet in step.bets.values() if bet.draft]
    if drafts:
        made, kept = sum(map(len, drafts)), sum(map(len, step.admitted.values()))
        lines.append(
            f"{kept} of {_count(made, 'guess')} admitted, in {len(step.admitted)} of {_count(len(drafts), 'draft')}."
        )
    return "\n".join(lines)


def _drafter(step: Step, index: int, name: str, seconds: float) -> str:
    asked = {id(bet.seat): bet.depth for bet in step.bets.values() if not bet.probe}
    seats = [seat for _, seat, _, _ in step.open if seat.choice.expected]
    mine = [seat for seat in seats if seat.choice.drafter == index and id(seat) in asked]
    left = [seat for seat in seats if id(seat) not in asked]
    if not mine:
        text = f"{name} sleeps: its first guess would be right {_chance(seats, index)} of the time"
        return f"{text}, and guessing once for all costs {_ms(seconds)} besides the rows."
    depths = [asked[id(seat)] for seat in mine]
    deep = f"{min(depths)}" if min(depths) == max(depths) else f"{min(depths)} to {max(depths)}"
    text = f"{name} drafts {deep} deep for {_count(len(mine), 'sequence')}"
    text += f" (first guess right {_chance(mine, index)} of the time)"
    if left:
        text += f"; {_count(len(left), 'sequence')} stay plain (there {_chance(left, index)})"
    return text + "."


def _chance(seats: Sequence[Seat], index: int) -> str:
    return f"{sum(seat.choice.expected[index][0] for seat in seats) / len(seats):.0%}" if seats else "an unknown share"


def _count(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else _PLURAL[what]}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
