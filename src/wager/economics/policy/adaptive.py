"""The policy that knows prices: a guess is asked for, and verified, only if it is worth its seconds.

A second is worth what the machine lately made of one (weighted tokens per second), and that price decides everything:
which drafter, how deep, which guesses to verify, and whether to draft at all. What to ask for is decided every few
steps (`planning`), what to verify in every one (`admission`). Knows no tensors and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from wager.economics.latency_model import LatencyModel
from wager.economics.policy.acceptance import FADING, Acceptance
from wager.economics.policy.admission import keep, select
from wager.economics.policy.base import DrafterCapabilities, longest_that_fits
from wager.economics.policy.bets import Bet, Seat, Step
from wager.economics.policy.explain import explain
from wager.economics.policy.exploration import ALLOWANCE, Allowance
from wager.economics.policy.lessons import Lessons
from wager.economics.policy.objective import THROUGHPUT, Objective, Worth
from wager.economics.policy.planning import Planner
from wager.economics.policy.prices import NEAR, Prices, Rates
from wager.types import DRAFT_STAGE, POLICY_STAGE, Draft, DraftDecision, Plan, Span, StepRecord, Verdict, VerifyRule

_PROBE = 2
"""How deep a probe goes."""

_SELDOM = 8
"""Steps between what need not be done in each."""

_TOLD, _SAMPLE = 2, 4
"""What a step promises is told in every so many steps, and what drafting took (which needs that)."""

_NAP = 6
"""Steps after one in which nobody wanted to guess that go by without a look; who comes ends it."""

_YOUNG = 64
"""Steps before the first nap."""


class Adaptive:
    """Implements `policy.Policy`.

    `surface` prices steps and drafting, and is told what they took if it wants to know (`observe`, `observe_draft`).
    `drafters` are those at hand. `rule` is the acceptance rule: under another than `match`, draws of a drafter are
    never judged by anything that depends on them (they are verified as planned, from what older steps taught).
    `allowance` is the share of time that probes may cost.
    """

    def __init__(
        self,
        surface: LatencyModel,
        acceptance: Acceptance | None = None,
        *,
        drafters: Mapping[str, DrafterCapabilities],
        objective: Objective = THROUGHPUT,
        rule: VerifyRule = "match",
        allowance: float = ALLOWANCE,
    ) -> None:
        self.acceptance = acceptance or Acceptance()
        self.worth = Worth(objective)
        self._offers = [each for each in drafters.items() if each[1].max_depth]
        self._skills = [self.acceptance.skill(name) for name, _ in self._offers]
        self._exact = rule != "match"
        self._prices, self._rates = Prices(surface), Rates()
        self._corrected = surface.learns
        self._tell_drafting = surface.observe_draft if surface.learns else None
        self._allowance = Allowance(allowance)
        self._weights: dict[str, float] = {}  # of sequences that have not run yet, where it is not 1
        self._lessons = Lessons(self._skills, surface.observe if surface.learns else None)
        self._seats: dict[str, Seat] = {}
        self._step = self._last = Step()
        self._planner = Planner(self._offers, self._skills, prices=self._prices, rates=self._rates)
        self._steps = 0
        self._nap, self._crowd = 0, (0, "")

    def begin(self, sequence: str, *, weight: float) -> None:
        """A sequence was accepted; `weight` is what its tokens count."""
        if weight != 1.0:
            self._weights[sequence] = weight

    # ---- before drafting ------------------------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Drafter and depth of every live sequence with room."""
        self._prices.tick()
        self._steps += 1
        if self._steps % FADING == 0:
            for skill in self._skills:
                skill.age()
        if self._dozes(spans):
            self._step = Step()
            return {}
        step = self._step = self._look(spans)
        if not step.open or not self._offers:
            return {}
        self._last = step
        if self._planner.due(step, now=self._steps):
            self._lessons.learn()
            self._planner.decide(step, self.worth)
        step.control = self._corrected and self._stays_plain(step)
        if not step.control:
            for name, seat, room, known in step.open:
                choice = seat.choice
                if choice.depth:
                    self._ask(step, name, Bet(seat, choice.drafter, min(choice.depth, room), floor=choice.floor), known)
            self._nap = 0 if step.bets or self._steps < _YOUNG else _NAP
            if len(step.bets) < len(step.open) or len(self._offers) > 1:
                for _ in range(self._nap + 1):
                    if self._allowance.any(step.plain):
                        self._probe(step)
        if self._exact:  # draws are verified as planned, so they have to fit before they are drawn
            most = longest_that_fits([bet.depth for bet in step.bets.values()], budget)
            step.bets = {name: bet for name, bet in step.bets.items() if most}
            for bet in step.bets.values():
                bet.depth = min(bet.depth, most)
        return {
            name: DraftDecision(bet.depth, self._offers[bet.drafter][0], bet.floor) for name, bet in step.bets.items()
        }

    def _dozes(self, spans: Sequence[Span]) -> bool:
        """Whether nothing has happened since nobody wanted to guess. Who comes, comes last."""
        crowd = len(spans), spans[-1].seq_id if spans else ""
        self._nap = self._nap - 1 if crowd == self._crowd else 0
        self._crowd = crowd
        return self._nap > 0

    def _look(self, spans: Sequence[Span]) -> Step:
        step = Step(requests=len(spans))
        cached = 0
        for span in spans:
            step.rows += len(span.tokens)
            step.context += span.num_computed_tokens
            if span.needs_logits:
                seat = self._seats.get(span.seq_id) or self._seat(span.seq_id)
                step.live += 1
                step.worth += self.worth.of(seat.merit)
                cached += span.num_computed_tokens
                if span.max_draft_tokens > 0:
                    step.open.append((span.seq_id, seat, span.max_draft_tokens, span.num_computed_tokens + 1))
        if step.live:
            step.plain = self._prices.plain(step.live, cached)
            step.price = self._rates.factor(step.live) * step.worth / step.plain
        return step

    def _seat(self, sequence: str) -> Seat:
        ratings = [skill.open() for skill in self._skills]
        seat = self._seats[sequence] = Seat(
            self.worth.open(self._weights.pop(sequence, 1.0)), ratings, self._planner.usual
        )
        return seat

    def _ask(self, step: Step, name: str, bet: Bet, known: int) -> None:
        step.waking |= self._planner.catching_up(bet.drafter, bet.seat, known) > 0
        bet.seat.asked_at[bet.drafter], bet.seat.asked_in[bet.drafter] = known, self._steps
        step.bets[name] = bet

    def _stays_plain(self, step: Step) -> bool:
        """Whether this step is taken plain where all speculate; it loses what speculation gains."""
        lost = (step.price * step.plain / step.worth - 1) * step.plain
        return self._allowance.plain_step(step.live, speculates=self._planner.asks, lost=lost, plain=step.plain)

    def _probe(self, step: Step) -> None:
        """Ask each drafter about one sequence left plain, or left to another drafter, the one asked longest ago."""
        for index, (drafter, offer) in enumerate(self._offers):
            plain = [each for each in step.open if each[0] not in step.bets]
            others = [each for each in step.open if each[0] in step.bets and step.bets[each[0]].drafter != index]
            if not plain and not others:
                continue
            name, seat, room, known = min(plain or others, key=lambda each: each[1].asked_in[index])
            depth = min(room, offer.max_depth, _PROBE)
            depths = step.passes().get(index, [])
            cost = self._prices.ragged(drafter, [*depths, depth]) - self._prices.ragged(drafter, depths)
            if self._exact:  # draws are verified unseen
                cost += self._prices.extra(step.rows, step.requests, step.context, count=depth)[depth]
            cost += self._planner.catching_up(index, seat, known) + self._planner.own
            if not plain:  # what the other drafter's guesses would have brought
                cost += (step.price * step.plain / step.worth - 1) * step.plain / len(step.open)
            if self._allowance.spend(cost, plain=step.plain):
                self._ask(step, name, Bet(seat, index, depth, probe=True), known)

    # ---- after drafting -------------------------------------------------------------------------------------------

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """The guesses worth verifying, over the whole batch at once."""
        step = self._step
        if not step.live or (not step.bets and self._steps % _SELDOM):
            if step.live:  # nothing was asked: most of what follows can wait
                self._rates.learn(step.live, worth=step.worth, plain=step.worth)
            return {}
        admitted: dict[str, Draft] = {}
        gains: list[float] = []
        owners: list[Bet] = []
        promised, forced = 0.0, 0
        for name, draft in drafts.items():
            bet = step.bets.get(name)
            if bet is None:
                continue
            bet.draft = draft
            worth = self.worth.of(bet.seat.merit)
            drawn = bet.seat.drawn = self._exact and draft.draft_probs is not None
            if not drawn:
                bet.survival = self._skills[bet.drafter].judge(draft, bet.seat.ratings[bet.drafter])
            if drawn:
                admitted[name] = draft
                forced += len(draft)
                promised += worth * bet.promise(len(draft))
            elif bet.survival:
                bet.start = len(gains)
                gains += [worth * survival for survival in bet.survival]
                owners += [bet] * len(bet.survival)
        extra = self._prices.extra(step.rows, step.requests, step.context, count=forced + len(gains) + NEAR)
        chosen = select(gains, extra[forced:] if forced else extra, price=step.price, most=budget - forced)
        for index in chosen.taken:
            bet = owners[index]
            bet.taken.append(index - bet.start)
        for name, bet in step.bets.items():
            if bet.taken and bet.draft:
                bet.taken.sort()
                admitted[name] = keep(bet.draft, bet.taken)
        if self._steps % _TOLD == 0:
            self._account(step, extra, forced + len(chosen.taken), gain=promised + chosen.gain, cut=chosen.cut)
        step.admitted = admitted
        return admitted

    def _account(self, step: Step, extra: Sequence[float], rows: int, *, gain: float, cut: float | None) -> None:
        """What the step promises, and with it what a second and a row are worth."""
        step.drafting = sum([self._prices.ragged(self._offers[each][0], deep) for each, deep in step.passes().items()])
        seconds = step.plain + extra[rows] + step.drafting
        self._rates.learn(step.live, worth=step.worth + gain, plain=step.worth / step.plain * seconds)
        self._rates.learn_hurdle(step.live, extra=extra, rows=rows, cut=cut, price=step.price)

    # ---- after the pass ---------------------------------------------------------------------------------------------

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        """What became of each live sequence."""
        told: list[tuple[Seat, Verdict]] = []
        for verdict in verdicts:
            seat = self._seats.get(verdict.seq_id)
            if seat is not None:
                self.worth.learn(seat.merit, len(verdict.tokens))
                told.append((seat, verdict))
                bet = self._step.bets.get(verdict.seq_id)
                if bet and bet.probe and bet.draft and bet.draft.tokens[:1] == verdict.tokens[:1]:
                    self._planner.hurry()
        self._lessons.verdicts(told, self._step.bets, number=self._steps)

    def observe(self, record: StepRecord) -> None:
        """What the step took."""
        seconds = sum(record.seconds.values())
        self.worth.clock(seconds)
        self._allowance.earn(seconds)
        self._planner.note(record.seconds.get(POLICY_STAGE, 0.0), len(self._step.bets))
        self._lessons.record(record, rare=self._step.control)
        if self._tell_drafting and self._steps % _SAMPLE == 0 and not self._step.waking:
            for told in self._shares(record.seconds.get(DRAFT_STAGE, 0.0)):
                self._tell_drafting(*told[:3], seconds=told[3])

    def _shares(self, taken: float) -> Iterator[tuple[str, int, int, float]]:
        """Drafter, sequences, depth and seconds: what drafting took, shared out as expected. Depths differ from
        sequence to sequence, and a surface knows even ones: it is told what an even ask would have taken, were it as
        far off as this one."""
        passes, expected = self._step.passes(), self._step.drafting
        for index, depths in passes.items():
            name = self._offers[index][0]
            even = self._prices.draft(name, len(depths), max(depths))
            yield name, len(depths), max(depths), taken * even / expected if expected > 0 else taken / len(passes)

    def end(self, sequence: str) -> None:
        """The sequence is over."""
        self._weights.pop(sequence, None)
        seat = self._seats.pop(sequence, None)
        if seat is not None:
            self._lessons.end(seat)

    def explain(self) -> str:
        """Why the last step in which anyone could guess was what it was, in words."""
        step = self._last
        costs = {name: self._prices.draft(name, len(step.open), 1) for name, _ in self._offers}
        return explain(step, hurdle=self._rates.hurdle(step.live), drafters=costs)
