"""The policy that knows prices: a guess is asked for, and verified, only if it is worth its seconds.

A second is worth what the machine lately made of one (weighted tokens per second), and that price decides everything:
which drafter, how deep, which guesses to verify, and whether to draft at all. Maximising tokens - price x seconds in
every step maximises tokens over seconds in the long run (Dinkelbach's method), also where steps differ. Knows no
tensors and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from wager.economics.acceptance import Acceptance
from wager.economics.admission import Going, Prices, kept, select
from wager.economics.bidding import Decided, Outlook, Standing, View, decide, outlook
from wager.economics.explaining import Decision, explain
from wager.economics.policy import Offer
from wager.economics.probing import ALLOWANCE, Probing
from wager.economics.ratings import Floats, Ints
from wager.economics.settling import Asked, Bets, Made, Settling
from wager.economics.surface import StepSurface
from wager.economics.waking import Waking
from wager.economics.worth import Objective, Worth
from wager.types import Draft, Plan, Span, StepRecord, Verdict, VerifyRule

_PATIENCE = 12
"""Steps that a decision stands while the sequences stay the same."""

_HURDLE_RATE = 0.1


class Adaptive:
    """Implements `policy.Policy`.

    `surface` prices steps and drafting, and is told what they took if it wants to know (`observe`, `observe_draft`).
    `drafters` are those at hand. `rule` is the acceptance rule: under another
    than `match`, draws of a drafter are never judged by anything that depends on them (they are verified as planned,
    from what older steps taught). `allowance` is the share of time that probes may cost.
    """

    def __init__(
        self,
        surface: StepSurface,
        acceptance: Acceptance | None = None,
        *,
        drafters: Mapping[str, Offer],
        objective: Objective = "throughput",
        weights: Mapping[str, float] | None = None,
        rule: VerifyRule = "match",
        allowance: float = ALLOWANCE,
    ) -> None:
        self.surface = surface
        self.acceptance = acceptance or Acceptance()
        self.worth = Worth(objective, weights)
        self._offers = dict(drafters)
        self._exact = rule != "match"
        self._prices, self._going = Prices(surface), Going()
        self._waking = Waking(self._offers, surface)
        self._probing = Probing(self._offers, self._prices, self._waking, share=allowance, forced=self._exact)
        self.acceptance.follow(self.worth)
        self.acceptance.follow(self._waking)
        self._settling = Settling(self.acceptance, exact=self._exact)
        self._hurdles: dict[int, float] = {}  # what a row costs at the margin, in tokens' worth, by size of batch
        self._bets = Bets()
        self._view: View | None = None
        self._standing: Standing | None = None
        self._age = 0
        self.decision = Decision()

    # ---- before drafting ------------------------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span]) -> Plan:
        """Drafter and depth of every live sequence with room."""
        self._prices.tick()
        self._bets = Bets()
        view = self._view = self._look(spans)
        self.decision = Decision(view=view)
        if view is None or not view.open or not self._offers:
            return Plan({})
        standing = self._decide(view)
        rows, decided = standing.over(view)
        control = self._probing.control(view, decided, factor=self._going.factor(view.live))
        if control:
            decided.depths[:] = 0
        probes = () if control else self._probing.probe(view, decided)
        self.decision = Decision(view, standing.outlooks, rows, decided, probes, control)
        names, deep = list(self._offers), decided.depths.tolist()
        for index, each in enumerate(standing.outlooks):
            self._ask(each, view, rows, decided, np.flatnonzero((decided.choice == index) & (decided.depths > 0)))
        asked = [row for row, depth in enumerate(deep) if depth]
        sequences, choice = view.sequences, decided.choice.tolist()
        return Plan(
            {sequences[row]: deep[row] for row in asked},
            {sequences[row]: names[choice[row]] for row in asked},
            {sequences[row]: float(standing.floors[rows[row]]) for row in asked} if standing.floors.any() else {},
        )

    def _decide(self, view: View) -> Standing:
        """Anew every few steps and whenever a sequence joins; what stands is a few array operations."""
        self._age += 1
        if self._standing is None or self._age >= _PATIENCE or not self._standing.covers(view):
            outlooks = [
                outlook(
                    self.acceptance.skill(name), name, view, prices=self._prices, depth=offer.depth,
                    waking=self._waking.seconds(name, view.slots, view.known), stops=offer.stops,
                )
                for name, offer in self._offers.items()
            ]  # fmt: skip
            self._standing = decide(outlooks, view, prices=self._prices, hurdles=self._hurdles_at(view))
            self._age = 0
        return self._standing

    def _look(self, spans: Sequence[Span]) -> View | None:
        live = [span for span in spans if span.live]
        if not live:
            return None
        slots = np.array([self.acceptance.slot(span.sequence) for span in live], dtype=np.intp)
        worth = self.worth.of(slots)
        total = float(worth.sum())
        rooms = np.array([span.room for span in live], dtype=np.intp)
        known = np.array([span.start for span in live], dtype=np.intp)
        plain = self._prices.plain(len(live), int(known.sum()))
        room = np.flatnonzero(rooms)
        return View(
            rows=sum([len(span.tokens) for span in spans]),
            requests=len(spans),
            context=sum([span.start for span in spans]),
            live=len(live),
            plain=plain,
            price=self._going.factor(len(live)) * total / plain,
            total=total,
            sequences=tuple([live[row].sequence for row in room.tolist()]),
            slots=slots[room],
            rooms=rooms[room],
            known=known[room] + 1,
            worth=worth[room],
        )

    def _hurdles_at(self, view: View) -> list[float]:
        """What a row may cost: what it lately did, and what it would if everyone drafted one guess."""
        extra = self._prices.extra(view.rows, view.requests, view.context, count=view.open + 8)
        crowd = view.price * float(extra[view.open + 8] - extra[view.open]) / 8
        lately = self._hurdles.get(view.live.bit_length(), crowd)
        return [lately, crowd]

    def _ask(self, outlook: Outlook, view: View, rows: Ints, decided: Decided, mine: Ints) -> None:
        """Note what is asked of a drafter, for those sequences of the step that are `mine`."""
        if len(mine):
            slots, depths = view.slots[mine], decided.depths[mine]
            self._waking.asked(outlook.drafter, slots, view.known[mine])
            sequences = tuple([view.sequences[row] for row in mine.tolist()])
            chance, survival = outlook.chance[rows[mine]], outlook.survival[rows[mine]]
            self._bets.asked.append(Asked(outlook.drafter, sequences, slots, depths, chance, survival, depths))

    # ---- after drafting -------------------------------------------------------------------------------------------

    def admit(self, drafts: Mapping[str, Draft]) -> Mapping[str, Draft]:
        """The guesses worth verifying, over the whole batch at once."""
        view = self._view
        if view is None:
            return drafts
        for asked in self._bets.asked:
            if self._offers[asked.drafter].stops:
                asked.passes = np.array([max(1, len(drafts.get(name, ()))) for name in asked.sequences], dtype=np.intp)
        groups: dict[str, list[Draft]] = {}
        for draft in drafts.values():
            groups.setdefault(draft.drafter, []).append(draft)
        made = self._bets.made = [self._judge(name, group) for name, group in groups.items()]
        admitted = {draft.sequence: draft for each in made if each.judged is None for draft in each.drafts}
        forced = sum([len(draft.tokens) for draft in admitted.values()])
        weighed = [(each, each.judged) for each in made if each.judged is not None]

        def seconds(count: int) -> Floats:
            extra = self._prices.extra(view.rows, view.requests, view.context, count=forced + count)
            return extra[forced:]

        if weighed:
            gains = [judged.survival * self.worth.of(each.slots)[:, None] for each, judged in weighed]
            chosen = select(gains, seconds, price=view.price)
            for (each, _), taken in zip(weighed, chosen.taken, strict=True):
                admitted |= kept(each.drafts, taken)
            self._account(view, chosen.gain, forced + chosen.count)
        else:
            self._account(view, 0.0, forced)
        self._bets.admitted = admitted
        self.decision = self.decision.after(drafts, admitted, hurdle=self._hurdles[view.live.bit_length()])
        return admitted

    def _judge(self, name: str, drafts: Sequence[Draft]) -> Made:
        slots = np.array([self.acceptance.slot(draft.sequence) for draft in drafts], dtype=np.intp)
        if self._exact and any(draft.law is not None for draft in drafts):
            return Made(name, drafts, slots, None)
        return Made(name, drafts, slots, self.acceptance.skill(name).judge(slots, drafts))

    def _account(self, view: View, gain: float, rows: int) -> None:
        """What the step promises, and what a row costs at the margin."""
        extra = self._prices.extra(view.rows, view.requests, view.context, count=rows + 3)
        for asked in self._bets.asked:
            asked.seconds = self._drafting(asked)
        seconds = view.plain + float(extra[rows]) + sum([asked.seconds for asked in self._bets.asked])
        self._going.learn(view.live, worth=view.total + gain, plain=view.total / view.plain * seconds)
        low = max(0, rows - 3)
        hurdle = view.price * float(extra[rows + 3] - extra[low]) / (rows + 3 - low)
        size = view.live.bit_length()
        before = self._hurdles.get(size, hurdle)
        self._hurdles[size] = before + _HURDLE_RATE * (hurdle - before)

    def _drafting(self, asked: Asked) -> float:
        marginal = self._prices.drafting(asked.drafter, len(asked.slots), int(asked.passes.max()))
        deep = np.sort(asked.passes)[::-1]
        return float(marginal[np.arange(marginal.shape[1]) < deep[:, None]].sum())

    # ---- after the pass ---------------------------------------------------------------------------------------------

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        """What became of each live sequence."""
        known = {verdict.sequence: verdict for verdict in verdicts}
        self._settling.settle(self._bets, known)
        self.worth.learn({self.acceptance.slot(name): len(verdict.tokens) for name, verdict in known.items()})

    def observe(self, record: StepRecord) -> None:
        """What the step took."""
        seconds = sum(record.seconds.values())
        self.worth.clock(seconds)
        self._probing.earn(seconds)
        self._waking.observe(record, self._bets.asked)

    def end(self, sequence: str) -> None:
        """The sequence is over."""
        self._settling.end(sequence)
        self.acceptance.end(sequence)

    def explain(self) -> str:
        """Why the last step was what it was, in words."""
        return explain(self.decision)
