"""Why a step was what it was, in words. Knows what was decided, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from wager.economics.bidding import Decided, Outlook, View
from wager.economics.ratings import Ints
from wager.types import Draft


@dataclass(frozen=True, slots=True)
class Decision:
    """One step's decision. `rows` are the open sequences' rows in the outlooks; `probes` are sequences asked to find
    out, `control` says that the step was taken plain to find out."""

    view: View | None = None
    outlooks: tuple[Outlook, ...] = ()
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.intp))
    decided: Decided = field(default_factory=lambda: Decided(np.zeros(0, np.intp), np.zeros(0, np.intp)))
    probes: tuple[str, ...] = ()
    control: bool = False
    made: Mapping[str, Draft] = field(default_factory=dict)
    admitted: Mapping[str, Draft] = field(default_factory=dict)
    hurdle: float = 0.0

    def after(self, made: Mapping[str, Draft], admitted: Mapping[str, Draft], *, hurdle: float) -> Decision:
        """The same, with what became of the drafts and what a row had to bring."""
        return replace(self, made=made, admitted=admitted, hurdle=hurdle)


def explain(decision: Decision) -> str:
    """A few sentences, one a line: what a second is worth, who drafts and why others do not, what was admitted."""
    view = decision.view
    if view is None:
        return "No sequence decodes in this step, so there is nothing to bet on."
    factor = view.price * view.plain / view.total
    lines = [
        f"{_count(view.live, 'sequence')} would take {_ms(view.plain)} for a plain step; lately steps brought "
        f"{factor:.2f} times that rate, so a row must bring {decision.hurdle:.2f} tokens."
    ]
    if view.open < view.live:
        lines.append(f"{_count(view.live - view.open, 'sequence')} have no room for guesses.")
    if decision.control:
        lines.append("This step is taken plain, to know what plain steps take.")
    else:
        lines += [_drafter(decision, view, index) for index in range(len(decision.outlooks))]
    if decision.probes:
        lines.append(f"Asked only to find out: {', '.join(decision.probes)}.")
    if decision.made:
        made, kept = (sum(len(draft) for draft in drafts.values()) for drafts in (decision.made, decision.admitted))
        drafts = f"{len(decision.admitted)} of {_count(len(decision.made), 'draft')}"
        lines.append(f"{kept} of {_count(made, 'guess')} admitted, in {drafts}.")
    return "\n".join(lines)


def _drafter(decision: Decision, view: View, index: int) -> str:
    outlook = decision.outlooks[index]
    depths = decision.decided.depths
    mine = (decision.decided.choice == index) & (depths > 0)
    chance = outlook.survival[decision.rows, 0]
    seconds = float(outlook.drafting[:, 0].sum())
    if mine.any():
        low, high = int(depths[mine].min()), int(depths[mine].max())
        deep = f"{low}" if low == high else f"{low} to {high}"
        text = f"{outlook.drafter} drafts {deep} deep for {_count(int(mine.sum()), 'sequence')}"
        text += f" (first guess right {chance[mine].mean():.0%} of the time)"
    else:
        text = f"{outlook.drafter} sleeps: its first guess would be right {chance.mean():.0%} of the time"
        text += f", and guessing once for all costs {_ms(seconds)} besides the rows"
    left = (depths == 0) & ~mine
    if mine.any() and left.any():
        text += f"; {_count(int(left.sum()), 'sequence')} stay plain (there {chance[left].mean():.0%})"
    return text + "."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
