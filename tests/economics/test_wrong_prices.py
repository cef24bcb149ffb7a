"""Wrong prices: what a policy loses on a machine whose steps take other seconds than it believes, once it has had 200
steps to notice. Drafts differ in nothing a policy could use, so the best fixed depth is the best there is.

The luck of drafts and the scatter of steps would move a rate by more than is lost, so a step counts with the tokens
that its depths yield in the mean and the seconds that it takes in the mean, both known here; the policy sees the drawn
ones. Its decisions still depend on them: a loss is the mean over SEEDS runs.

`python dev/bench_wrong_prices.py` prints the whole table (minutes)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean
from types import SimpleNamespace

import pytest

from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy, WrappedPolicy
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.surface import DraftCurve, LatencySurface
from wager.loading.load import _latency
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import DRAFT_STAGE, Draft, StepRecord

DEPTH, OUTPUT = 7, 512
SETTLED = 200
"""Steps after which a policy must have corrected what it believes."""
SEEDS = 3

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512)
CURVES = {
    # a processor: rows are cheap up to eight, and dear soon after
    "processor": (5.25e-3, 5.79e-3, 6.26e-3, 6.87e-3, 9.9e-3, 11.3e-3, 15e-3, 19e-3, 36e-3, 70e-3, 140e-3, 280e-3),
    # an accelerator: rows are cheap up to a hundred or so
    "accelerator": (
        10e-3,
        10.05e-3,
        10.1e-3,
        10.2e-3,
        10.4e-3,
        10.6e-3,
        11e-3,
        11.5e-3,
        13e-3,
        17e-3,
        32e-3,
        62e-3,
    ),
    # a mixture of experts (Qwen3.6-35B-A3B on a B200, by `wager plan`): each row reads its own experts, until all are
    "mixture": (
        0.71e-3,
        0.96e-3,
        1.42e-3,
        2.27e-3,
        3.01e-3,
        3.67e-3,
        4.75e-3,
        5.60e-3,
        7.46e-3,
        8.38e-3,
        8.52e-3,
        8.88e-3,
    ),
}
PER_REQUEST, PER_CONTEXT = 2e-5, 1e-8
EVEN = {"request_sd": 0.0, "round_sd": 0.0, "token_sd": 0.0, "score_sd": None}
"""Drafts that differ in nothing a policy could use, so that the best fixed depth is the best there is."""

DRAFTERS = {
    "lookup": SyntheticDrafter((0.45, 0.30, 0.22, 0.17, 0.14, 0.12, 0.10), **EVEN),
    "mtp": SyntheticDrafter((0.78, 0.58, 0.44, 0.35, 0.28, 0.23, 0.19), **EVEN),
    "sure": SyntheticDrafter(tuple([0.85**depth for depth in range(1, DEPTH + 1)]), **EVEN),
}
DRAFT_SECONDS = {"lookup": (1e-5, 2e-6), "mtp": (1e-4, 6e-4), "sure": (1e-5, 2e-6)}
"""Seconds of a call and of a draft token, for one request; each request more adds a fiftieth."""


def surface(
    machine: str,
    drafter: str,
    *,
    fixed: float = 1,
    rows: float = 1,
    drafting: float = 1,
    tilt: float = 0,
    uncertainty: float = 1.0,
) -> LatencySurface:
    """The machine's prices, of which the fixed part, that of rows and that of drafting are multiplied by factors;
    `tilt`: rows are multiplied by a factor that grows to 1 + tilt at 64 rows."""
    curve = CURVES[machine]
    seconds = [
        fixed * curve[0] + rows * (1 + tilt * min(1, count / 64)) * (value - curve[0])
        for count, value in zip(ROWS, curve, strict=True)
    ]
    requests = [1, 2, 4, 8, 16, 32, 64]
    call, token = (
        [drafting * value * (1 + (count - 1) / 50) for count in requests] for value in DRAFT_SECONDS[drafter]
    )
    return LatencySurface(
        ROWS,
        seconds,
        per_request=rows * PER_REQUEST,
        per_context=fixed * PER_CONTEXT,
        drafters={drafter: DraftCurve(requests, call, token)},
        uncertainty=uncertainty,
    )


class TrueMachine(LatencyModel):
    """Charges `before` up to the step `change` and `after` from then on; `noise` is the relative standard deviation of
    a step's seconds."""

    def __init__(
        self,
        before: LatencySurface,
        after: LatencySurface | None = None,
        *,
        change: int = 0,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._before, self._after, self._change = before, after or before, change
        self._noise, self._random = noise, random.Random(seed)
        self.steps = 0

    @property
    def now(self) -> LatencySurface:
        return self._before if self.steps < self._change else self._after

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        self.steps += 1  # the server asks once a step
        factor = self._random.lognormvariate(-(self._noise**2) / 2, self._noise) if self._noise else 1.0
        return factor * self.now.seconds(rows, requests, context_sum)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return self.now.draft_seconds(drafter, requests, depth)


class SharedHost(TrueMachine):
    """A machine whose neighbours slow it: some 25 steps in a row by 1.2 to 2.2, after 40 in the mean, and one step in
    33 by 1.5 to 3.5, whatever is computed (on a virtual machine one fixed loop took 8 to 58 ms)."""

    _slowed, _steps_left = 1.0, 0.0

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        draw = self._random
        if self._steps_left <= 0:
            slow = draw.random() < 1 / 40
            self._slowed, self._steps_left = (draw.uniform(1.2, 2.2), draw.expovariate(1 / 25)) if slow else (1.0, 0.0)
        self._steps_left -= 1
        paused = draw.uniform(1.5, 3.5) if draw.random() < 0.03 else 1.0
        return self._slowed * paused * super().seconds(rows, requests, context_sum)


class Metered(WrappedPolicy):
    """A policy whose steps are counted after `skipped`: mean tokens of drafts that survive by `survival`, and mean
    seconds on `machine`. Depths are chosen before it is known what survives, so the mean given the depths is right."""

    def __init__(self, policy: Policy, machine: TrueMachine, *, survival: Sequence[float], skipped: int) -> None:
        super().__init__(policy)
        self._machine, self._skipped = machine, skipped
        self._yields = [1 + sum(survival[:depth]) for depth in range(len(survival) + 1)]
        self._depths: list[int] = []
        self.steps, self.tokens, self.seconds = 0, 0.0, 0.0

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        admitted = self.policy.admit(drafts, budget)
        self._depths = [len(draft.tokens) for draft in admitted.values()]
        return admitted

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)
        self.steps += 1
        if self.steps > self._skipped:
            plain, context = record.sequences - len(self._depths), sum(record.context_lens)
            self.tokens += plain + sum([self._yields[depth] for depth in self._depths])
            self.seconds += self._machine.now.seconds(record.rows, record.sequences, context)
            self.seconds += record.seconds[DRAFT_STAGE]


@dataclass(frozen=True)
class Cell:
    """One machine, drafter and load."""

    machine: str
    drafter: str
    users: int

    def rate(self, policy: Policy, machine: TrueMachine, *, skipped: int, seed: int = 0) -> float:
        """Tokens a second of the steps_for(users) steps after `skipped`."""
        drafter, rounds = DRAFTERS[self.drafter], self.users * (skipped + steps_for(self.users))
        traces = SyntheticTraces({self.drafter: drafter}, output_tokens=OUTPUT, seed=seed)
        meter = Metered(policy, machine, survival=drafter.survival, skipped=skipped)
        workload = Workload(concurrency=self.users, rounds=rounds, seed=seed)
        SimulatedServer(traces, machine, policy=meter, workload=workload).run()
        return meter.tokens / meter.seconds


@lru_cache
def best_fixed(cell: Cell, change: str = "") -> float:
    """Tokens a second of the best of plain decoding and fixed depths on a machine, after a change of its prices: of the
    two best by expected tokens over seconds, halfway through an answer."""
    truth = surface(cell.machine, cell.drafter, **CHANGES.get(change, {}))
    users, survival = cell.users, DRAFTERS[cell.drafter].survival

    def expected(depth: int) -> float:
        step = truth.seconds(users * (depth + 1), users, users * OUTPUT / 2)
        return users * (1 + sum(survival[:depth])) / (step + truth.draft_seconds(cell.drafter, users, depth))

    best = sorted(range(DEPTH + 1), key=expected)[-2:]
    return max(cell.rate(FixedDepth(depth), TrueMachine(truth), skipped=SETTLED) for depth in best)


def steps_for(users: int) -> int:
    """So many steps that a run with few users takes as long as one with many."""
    return {1: 4000, 4: 1200, 16: 400, 64: 200, 256: 150, 512: 120, 1024: 100}[users]


WRONG: dict[str, dict[str, float]] = {"right": {}}
for factor in (0.3, 0.5, 2.0, 3.0):
    WRONG[f"all x{factor:g}"] = {"fixed": factor, "rows": factor, "drafting": factor}
    WRONG[f"rows x{factor:g}"] = {"rows": factor}
    WRONG[f"drafting x{factor:g}"] = {"drafting": factor}
    WRONG[f"fixed x{factor:g}"] = {"fixed": factor}
WRONG["tilted up"] = {"tilt": 2.0}
WRONG["tilted down"] = {"tilt": -0.7}

CHANGES = {
    "rows twice as slow": {"rows": 2.0},
    "rows twice as fast": {"rows": 0.5},
    "busy": {"fixed": 1.6, "rows": 1.6, "drafting": 1.6},
}


def losses(
    cell: Cell,
    belief: str,
    *,
    uncertainty: float = 1.0,
    noise: float = 0.05,
    seeds: int = SEEDS,
    machine_type: type[TrueMachine] = TrueMachine,
) -> list[float]:
    """Share that the adaptive policy loses against the best fixed depth after SETTLED steps, if it believes that, in
    each of `seeds` runs. After a belief of CHANGES: if it was right until the machine changed in mid-run."""
    truth, early = surface(cell.machine, cell.drafter), cell.drafter == "mtp"
    rates = []
    for seed in range(seeds):
        if belief in CHANGES:
            after = surface(cell.machine, cell.drafter, **CHANGES[belief])
            machine = TrueMachine(truth, after, change=SETTLED, noise=noise, seed=seed)
        else:
            machine = machine_type(truth, noise=noise, seed=seed)
        believed = surface(cell.machine, cell.drafter, uncertainty=uncertainty, **WRONG.get(belief, {}))
        skipped = SETTLED * (2 if belief in CHANGES else 1)
        policy = Adaptive(believed, drafters={cell.drafter: DrafterCapabilities(DEPTH, stops_early=early)})
        rates.append(cell.rate(policy, machine, skipped=skipped, seed=seed))
    return [1 - rate / best_fixed(cell, belief) for rate in rates]


def loss(cell: Cell, belief: str, *, uncertainty: float = 1.0, noise: float = 0.05) -> float:
    """The mean of `losses`."""
    return mean(losses(cell, belief, uncertainty=uncertainty, noise=noise))


NOTICED = [  # beside the cells of policy_goldens.py
    # experts: the first rows are dear and later ones cheap, so a step without drafts says nothing of what a row costs
    ("mixture", "sure", 16, "tilted down"),
    # and one guess for each does not pay, but seven do
    ("mixture", "lookup", 16, "right"),
    # rows believed too cheap: drafting too deep
    ("processor", "mtp", 4, "rows x0.3"),
    # the fixed part believed too dear, which makes rows look cheap once steps correct it
    ("processor", "mtp", 4, "fixed x3"),
    ("accelerator", "mtp", 16, "fixed x3"),
    # rows believed too dear: nothing is drafted, so nothing shows that they are not
    ("accelerator", "lookup", 64, "rows x3"),
    ("accelerator", "lookup", 64, "tilted up"),
    ("accelerator", "mtp", 16, "rows x3"),
    # drafting believed too cheap, then all of it too dear or too cheap
    ("accelerator", "mtp", 4, "drafting x0.3"),
    ("processor", "lookup", 64, "all x2"),
    ("accelerator", "lookup", 4, "all x3"),
    # a processor at sixteen users, where depth 1 gains 2 % over plain decoding and nothing else does
    ("processor", "mtp", 16, "all x0.3"),
    # the machine changes in mid-run
    ("processor", "mtp", 1, "rows twice as slow"),
]


SELDOM_STUCK = [  # where one run in five lost 7 to 26 %, which three seeds need not show
    # deep drafts alone pay, and are believed to cost three times as much: what is cheap to measure must not be measured
    # again and again in their place
    ("mixture", "lookup", 16, "tilted up"),
    ("mixture", "mtp", 16, "tilted up"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "drafter", "users", "belief", "seeds"),
    [*[(*cell, SEEDS) for cell in NOTICED], *[(*cell, 8) for cell in SELDOM_STUCK]],
)
def test_wrong_prices_and_changes_are_noticed(machine: str, drafter: str, users: int, belief: str, seeds: int) -> None:
    assert mean(losses(Cell(machine, drafter, users), belief, seeds=seeds)) < 0.02


@pytest.mark.slow
def test_a_machine_that_changes_takes_other_seconds_for_drafting_too() -> None:
    cell = Cell("processor", "mtp", 4)
    truth, after = (surface(cell.machine, cell.drafter, **each) for each in ({}, CHANGES["busy"]))
    rates = [
        cell.rate(FixedDepth(2), machine, skipped=2 * SETTLED)
        for machine in (TrueMachine(truth, after, change=SETTLED), TrueMachine(after))
    ]
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("belief", ["right", "rows x0.3", "rows x3"])
def test_scatter_and_a_hasty_calibration_cost_little(belief: str) -> None:
    assert loss(Cell("accelerator", "mtp", 64), belief, noise=0.15) < 0.02
    assert loss(Cell("accelerator", "mtp", 4), belief, uncertainty=3.0) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "users"), [("lookup", 1), ("lookup", 4), ("mtp", 4)])
def test_neighbours_on_the_host_do_not_change_prices(drafter: str, users: int) -> None:
    """Where what slows all steps of a while passed for the price of their rows, four users lost 1.7 % in these runs, up
    to 18 % in one. A lucky few say little."""
    seeds = 5 if users == 1 else 24
    assert mean(losses(Cell("processor", drafter, users), "right", seeds=seeds, machine_type=SharedHost)) < 0.0125


def test_what_slows_all_steps_of_a_while_is_not_taken_for_the_price_of_their_rows() -> None:
    """Steps of 12 rows come when a neighbour slows the machine, of 8 rows at other times too."""
    truth, believed = surface("processor", "lookup"), surface("processor", "lookup")

    def observe(rows: int, slowed: float) -> None:
        seconds = slowed * truth.seconds(rows, 4, 400)
        believed.observe(StepRecord(rows, 4, rows - 4, 0, 4, {"forward": seconds}, (100,) * 4))

    for _ in range(5):
        for rows, slowed in [*[(8, 1.0)] * 10, *[(8, 1.8)] * 5, (12, 1.8), *[(8, 1.8)] * 2]:
            observe(rows, slowed)
    ratio, true_ratio = (each.seconds(12, 4, 400) / each.seconds(8, 4, 400) for each in (believed, truth))
    assert ratio == pytest.approx(true_ratio, rel=0.2)  # else 0.38


def test_steps_that_become_faster_are_believed() -> None:
    """A request cannot cost less than nothing. A filter that does not know this explains faster steps by requests,
    which cannot change, and moves the rest the other way: the seconds that it believed rose from 1.15 to 1.31 times
    those observed."""
    machines = [surface("accelerator", "mtp", rows=rows) for rows in (1.0, 0.5)]
    believed, context = surface("accelerator", "mtp"), 64 * 100

    def observe(rows: int, machine: LatencySurface) -> float:
        """How far off the belief is after a step."""
        seconds = machine.seconds(rows, 64, context)
        believed.observe(StepRecord(rows, 64, rows - 64, 0, 64, {"forward": seconds}, (100,) * 64))
        return believed.seconds(rows, 64, context) / seconds

    for rows in (64, 128, 192) * 10:
        assert observe(rows, machines[0]) == pytest.approx(1)
    off = [observe(128, machines[1]) for _ in range(40)]
    assert off == sorted(off, reverse=True)
    assert off[-1] == pytest.approx(1, abs=0.01)
    assert believed.per_request == 0


def test_what_more_requests_take_for_drafting_than_were_measured_is_no_error_of_the_price() -> None:
    """Drafting was measured to 64 requests. 256 were compared with 64, so that right prices rose to 2.8 times theirs:
    31 % lost where every step should draft (mixture, mtp, 256 users)."""
    truth, believed = surface("mixture", "mtp"), surface("mixture", "mtp")
    for _ in range(30):
        believed.observe_draft("mtp", 256, 2, seconds=truth.draft_seconds("mtp", 256, 2))
    for requests in (16, 256):
        assert believed.draft_seconds("mtp", requests, 2) == pytest.approx(truth.draft_seconds("mtp", requests, 2))


def test_more_requests_never_take_less_for_drafting_beyond_those_that_were_measured() -> None:
    """64 were measured a little faster than 32. Along that line 600 would take no time, and the first call of so many
    would pass for the first of a drafter that was never measured: all prices were thrown away."""
    curve = DraftCurve([1, 32, 64], [1e-3, 5e-3, 4.5e-3], [1e-4, 5e-4, 4.5e-4])
    alone, most = curve.seconds(1, 2), curve.seconds(64, 2)
    assert curve.seconds(600, 2) == most
    curve.observe(600, 2, seconds=most)
    assert (curve.seconds(1, 2), curve.seconds(64, 2)) == pytest.approx((alone, most))


def test_more_rows_than_were_measured_are_corrected_by_as_much_as_they_are_off() -> None:
    """512 rows were measured. An error at 1,024 passed for one of the last count alone, which moves the line beyond it
    three times as far: step by step rows beyond were believed cheaper than they are, and where every guess was verified
    21 % was lost (accelerator, lookup, 1,024 users, rows believed three times as dear)."""
    truth, believed, context = surface("accelerator", "lookup"), surface("accelerator", "lookup", rows=3), 1024 * 200
    for _ in range(30):
        seconds = truth.seconds(1024, 1024, context)
        believed.observe(StepRecord(1024, 1024, 0, 0, 1024, {"forward": seconds}, (200,) * 1024))
    assert believed.seconds(1024, 1024, context) == pytest.approx(seconds, rel=0.01)
    rises = [each.seconds(2048, 1024, context) - each.seconds(1024, 1024, context) for each in (truth, believed)]
    assert rises[1] == pytest.approx(rises[0], rel=0.1)


def test_what_is_not_known_is_uncertain_and_stays_so_in_a_file_and_in_an_engine() -> None:
    careful, hasty = (surface("accelerator", "mtp", uncertainty=uncertainty) for uncertainty in (1.0, 3.0))

    def deviation(prices: LatencySurface, rows: int = 64) -> float:
        return prices.difference_deviations(4, [rows], requests=4, context_sum=400)[0]

    before = deviation(careful)
    engines = _latency(SimpleNamespace(latency=hasty), None, print)  # type: ignore[arg-type]
    for copy in (hasty, LatencySurface.from_dict(json.loads(json.dumps(hasty.as_dict()))), engines):
        assert copy.uncertainty == 3.0
        assert deviation(copy) == pytest.approx(3 * before)
    assert deviation(careful, rows=4) == 0
    for _ in range(5):
        for rows in (4, 64):
            seconds = surface("accelerator", "mtp").seconds(rows, 4, 400)
            careful.observe(StepRecord(rows, 4, rows - 4, 0, 4, {"forward": seconds}, (100,) * 4))
    assert deviation(careful) < 0.6 * before
