"""A server without a model: requests arrive, are batched, drafted for and verified on a price surface.

Discrete events, one per step: the same policies that run in the engine see spans and drafts, and the clock moves by
what the surface says a step of that shape takes. Knows no tensors.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.economics.latency_model import LatencyModel
from wager.economics.policy.base import Policy
from wager.economics.simulation.workload import Text, World
from wager.errors import UsageError
from wager.types import Draft, Plan, Span, StepRecord, Verdict

_WRONG = -1


@dataclass(frozen=True, slots=True)
class Workload:
    """How requests come. Closed loop: `concurrency` users, each asking again as soon as it is answered. Open: `rate`
    requests a second.

    It ends after `requests` answers, all of them whole; or, with None, after `rounds` target passes summed over
    requests, and then the first users are met in the middle of their answers, as on a server that runs for long.
    `batch` bounds what runs together, `chunk` the prompt rows of a step.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    rounds: int = 20_000
    batch: int = 4096
    chunk: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UsageError("A load is either closed or open.", "Give a concurrency or a rate, not both.")
        for name in ("concurrency", "rate", "requests", "rounds", "batch", "chunk"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} = {value} is out of range.", f"{name} must be above 0.")


@dataclass(slots=True)
class Served:
    """One request: when it came, got its first token and its last, how many tokens and passes, its number."""

    number: int
    arrived: float
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    rounds: int = 0


@dataclass(slots=True)
class Result:
    """What a simulation brought. Seconds are of the simulated clock."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    steps: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    served: list[Served] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens a second, all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        """Tokens per pass and request, the bonus token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def paces(self) -> list[float]:
        """Seconds per token after the first, of every request that got at least sixteen."""
        return [(s.last - s.first) / (s.tokens - 1) for s in self.served if s.tokens >= 16]


class _Running:
    """A request in the batch: `done` of its answer's tokens are known, and the keys of `cached` tokens stored."""

    __slots__ = ("cached", "done", "id", "record", "text")

    def __init__(self, text: Text, record: Served, *, done: int = 0) -> None:
        self.id = f"r{record.number}"
        self.text, self.record, self.done = text, record, done
        self.cached = text.prompt + done - 1 if done else 0


class SimulatedServer:
    """A world served by a policy. `surface` is the truth; the policy may believe in another. `room` is the deepest
    draft; `jitter` the standard deviation of log step seconds."""

    def __init__(
        self, world: World, surface: LatencyModel, policy: Policy, load: Workload, *, jitter: float = 0.0
    ) -> None:
        self._world, self._surface, self._policy, self._load = world, surface, policy, load
        self._drafters = dict(world.deepest())
        self._room = max(self._drafters.values(), default=0)
        self._draw = np.random.default_rng((load.seed, 17))
        self._jitter = jitter
        self._running: list[_Running] = []
        self._waiting: deque[_Running] = deque()
        self._started = 0
        self._arrival = 0.0
        self.result = Result()

    def run(self) -> Result:
        """Serve until the load's requests or rounds are done."""
        while not self._done():
            self._arrive()
            if not self._running:
                self.result.seconds = self._arrival  # idle until someone comes
                continue
            self._step()
        return self.result

    def _done(self) -> bool:
        if self._load.requests is None:
            return self.result.rounds >= self._load.rounds
        return len(self.result.served) >= self._load.requests

    # ---- arrivals ----------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        load, now = self._load, self.result.seconds
        most = load.requests or sys.maxsize
        if load.concurrency is not None:
            while len(self._running) + len(self._waiting) < load.concurrency and self._started < most:
                self._admit(now, amid=load.requests is None and self._started < load.concurrency)
        else:
            while self._arrival <= now and self._started < most:
                self._admit(self._arrival)
                self._arrival += float(self._draw.exponential(1 / (load.rate or 1.0)))
        while self._waiting and len(self._running) < load.batch:
            self._running.append(self._waiting.popleft())

    def _admit(self, now: float, *, amid: bool = False) -> None:
        text = self._world.text(self._started)
        done = int(self._draw.integers(text.output)) if amid else 0
        self._waiting.append(_Running(text, Served(self._started, now), done=done))
        self._started += 1

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        spans, owners = self._spans()
        budget = self._budget(spans)
        plan = self._policy.plan(spans, budget)
        drafts, drafting = self._drafts(plan, owners)
        admitted = self._policy.admit(drafts, budget)
        guesses = sum(len(draft) for draft in admitted.values())
        rows, context = sum(len(span.tokens) for span in spans), sum(span.num_computed_tokens for span in spans)
        seconds = {
            "draft": drafting,
            "forward": self._surface.seconds(rows + guesses, len(spans), context) * self._noise(),
        }
        self.result.seconds += sum(seconds.values())
        verdicts = [
            self._verdict(owners[span.seq_id], admitted.get(span.seq_id)) for span in spans if span.needs_logits
        ]
        self._policy.learn(verdicts)
        accepted = sum(len(verdict.accepted) for verdict in verdicts)
        self._count(drafting, drafts, guesses, verdicts)
        self._commit(spans, owners, verdicts)
        self._policy.observe(
            StepRecord(rows + guesses, len(spans), guesses, accepted, sum(len(v.tokens) for v in verdicts), seconds,
                       tuple(span.num_computed_tokens for span in spans))
        )  # fmt: skip

    def _spans(self) -> tuple[list[Span], dict[str, _Running]]:
        spans, owners, left = [], {}, self._load.chunk
        for one in self._running:
            known = one.text.prompt + one.done
            pending = known - one.cached
            rows = 1 if pending == 1 else min(pending, left)
            if not rows:
                continue
            left -= rows if pending > 1 else 0
            live = rows == pending
            room = min(self._room, one.text.output - one.done - 1) if live else 0
            spans.append(Span(one.id, one.cached, (0,) * rows, live, room))
            owners[one.id] = one
        return spans, owners

    def _drafts(self, plan: Plan, owners: Mapping[str, _Running]) -> tuple[dict[str, Draft], float]:
        """What the drafters guess, and the seconds it takes them."""
        drafts: dict[str, Draft] = {}
        passes: dict[str, list[int]] = {}
        for sequence, decision in plan.items():
            name, depth = decision.drafter or next(iter(self._drafters)), decision.depth
            one = owners[sequence]
            guesses, at = one.text.guesses[name], one.done
            made = min(depth, int(guesses.made[at]))
            floor = decision.min_survival
            if floor and guesses.scores is not None:
                doubt = np.flatnonzero(guesses.scores[at, :made] < floor)
                made = int(doubt[0]) + 1 if len(doubt) else made
            passes.setdefault(name, []).append(max(1, made) if floor else depth)
            if made > 0:
                right = min(made, int(guesses.right[at]))
                tokens = (*range(at, at + right), *((_WRONG,) * (made - right)))
                scores = () if guesses.scores is None else tuple(guesses.scores[at, :made].tolist())
                drafts[sequence] = Draft.chain(sequence, tokens, drafter=name, scores=scores)
        return drafts, sum(self._drafting(name, depths) for name, depths in passes.items())

    def _drafting(self, drafter: str, depths: Sequence[int]) -> float:
        """Seconds of drafting: a pass for each depth, for those who draft that deep."""
        ask, total = self._surface.draft_seconds, 0.0
        for depth in range(1, max(depths) + 1):
            here = sum([each >= depth for each in depths])
            total += ask(drafter, here, depth) - (ask(drafter, here, depth - 1) if depth > 1 else 0.0)
        return total

    def _budget(self, spans: Sequence[Span]) -> int:
        """No server of the published measurements bounds the rows of a step: as many as there can be guesses."""
        return self._room * len(spans)

    def _verdict(self, one: _Running, draft: Draft | None) -> Verdict:
        """Tokens are named by their position in the answer, so a guess is right if it says where it stands."""
        at, run = one.done, 0
        if draft is not None:
            while run < len(draft.tokens) and draft.tokens[run] == at + run:
                run += 1
        return Verdict(one.id, tuple(range(run)), tuple(range(at, at + run + 1)))

    def _noise(self) -> float:
        return float(np.exp(self._jitter * self._draw.standard_normal())) if self._jitter else 1.0

    def _count(self, drafting: float, drafts: Mapping[str, Draft], guesses: int, verdicts: Sequence[Verdict]) -> None:
        result = self.result
        result.steps += 1
        result.rounds += len(verdicts)
        result.draft_seconds += drafting
        result.drafted += sum(len(draft) for draft in drafts.values())
        result.admitted += guesses
        result.accepted += sum(len(verdict.accepted) for verdict in verdicts)
        result.tokens += sum(len(verdict.tokens) for verdict in verdicts)

    def _commit(self, spans: Sequence[Span], owners: Mapping[str, _Running], verdicts: Sequence[Verdict]) -> None:
        for span in spans:
            owners[span.seq_id].cached += len(span.tokens)
        now, ended = self.result.seconds, set()
        for verdict in verdicts:
            one = owners[verdict.seq_id]
            record = one.record
            record.first = now if record.first < 0 else record.first
            record.last = now
            record.tokens += len(verdict.tokens)
            record.rounds += 1
            one.done += len(verdict.tokens)
            one.cached = one.text.prompt + one.done - 1
            if one.done >= one.text.output:
                ended.add(one.id)
                self.result.served.append(record)
                self._policy.end(one.id)
        if ended:
            self._running = [one for one in self._running if one.id not in ended]
