"""The interface of a policy: in every step it plans drafters and depths, and admits draft tokens worth verifying."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from wager.kernels import _native
from wager.types import Draft, Plan, Span, StepRecord, Verdict

UPDATE_INTERVAL = 4  # steps between updates of what changes slowly: goodput, cost of a row, latency, an empty plan
PAUSE = 8  # steps between decisions where nothing drafts, at least
SLOW_INTERVAL = 32  # steps between plans, and between ageings; a drafter that none wanted that long is inactive
LONGEST_INTERVAL = 128  # steps between decisions that nothing depends on: plans without drafts, looks at what rows cost
EARLY_STEPS = 64  # first steps, each of which is learned from
SMOOTHING = 0.05  # weight of a new step in a running mean: about the last 20 count
SLOW_SMOOTHING = 0.2 * SMOOTHING  # the same of a mean over many sequences, or one that spans several plans
NEGLIGIBLE = 0.002  # share of a step: what takes or gains less is not worth a decision


class Policy(Protocol):
    """Called by the engine in every step, in this order: plan, admit, learn, observe, which it looks up when the policy
    is set. Methods that return nothing do nothing unless a subclass overrides them."""

    def begin(self, sequence: str, *, weight: float) -> None:
        """A sequence was accepted; `weight` is what its tokens count beside those of others."""
        return

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """Drafter and depth per sequence, before drafting. The step has `budget` rows for draft tokens, all sequences
        together; a plan may draft more (not all that is drafted is verified), except for tokens sampled from
        draft_probs under a distribution-exact rule: those are verified as planned, so they must fit."""

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """The draft tokens to verify, at most `budget` of them together. Called in every step, also without drafts."""

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        """A verdict for each sequence that decoded, drafted for or not. `tokens` are all that verification emitted,
        before any stop was applied; `accepted` indexes the admitted draft."""
        return

    def observe(self, record: StepRecord) -> None:
        """What the step took, stage by stage."""
        return

    def end(self, sequence: str) -> None:
        """The sequence finished or was aborted (not: preempted). Unknown sequences are ignored."""
        return

    def leave_out(self, drafters: frozenset[str]) -> None:
        """These drafters, and no others, have failed and pause: from now on until the next call they give no draft."""
        return

    @property
    def collapsed(self) -> Mapping[str, str]:
        """The drafters that are not used since their acceptance collapsed, and a sentence about each."""
        return {}

    @property
    def inactive_drafters(self) -> frozenset[str]:
        """The drafters that the next steps do not ask for, so that they need not be shown the target's states: asked by
        the engine after every `plan`, before the pass."""
        return frozenset()

    def explain(self) -> str:
        """Why the last step was planned as it was, in words."""

    def figures(self) -> PolicyFigures | None:
        """The same in figures; None of a policy that estimates none, and before a step."""
        return None


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What the last step was planned by. `row_cost`: what one more row costs, in tokens that are given up for it, None
    before it is known; `predicted_speedup`: tokens a second over plain decoding's, as the plan expects them;
    `observed_speedup`: as they were in the latest steps, None before any; `plain_step_s`: seconds of a step without
    drafts, as estimated."""

    row_cost: float | None
    predicted_speedup: float
    observed_speedup: float | None
    plain_step_s: float


class WrappedPolicy(Policy):
    """Decides as `policy` does. Subclasses look on. What is called in every step and not overridden, by the class or on
    the instance, is `policy`'s own method, since after a pass of the target every call between takes microseconds; each
    of `rebound` is called when one of these methods is another one from now on."""

    def __init__(self, policy: Policy) -> None:
        self.rebound: list[Callable[[], object]] = []
        self._taken_over: dict[str, object] = {}
        self.policy = policy

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        if isinstance(policy, WrappedPolicy) and self.bind not in policy.rebound:
            policy.rebound.append(self.bind)
        self.bind()

    def bind(self) -> None:
        """Take over the methods of `deciding`."""
        for name in ("plan", "admit", "learn", "observe"):
            inherited = getattr(type(self), name) is getattr(WrappedPolicy, name)
            if inherited and vars(self).get(name) == self._taken_over.get(name):
                self._taken_over[name] = getattr(self.deciding, name)
                setattr(self, name, self._taken_over[name])
        for call in self.rebound:
            call()

    @property
    def deciding(self) -> Policy:
        """The policy whose methods are called in the next steps."""
        return self._policy

    def begin(self, sequence: str, *, weight: float) -> None:
        self.policy.begin(sequence, weight=weight)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        return self.policy.plan(spans, budget)

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        return self.policy.admit(drafts, budget)

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.policy.learn(verdicts)

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)

    def end(self, sequence: str) -> None:
        self.policy.end(sequence)

    def leave_out(self, drafters: frozenset[str]) -> None:
        self.policy.leave_out(drafters)

    def explain(self) -> str:
        return self.policy.explain()

    def figures(self) -> PolicyFigures | None:
        return self.policy.figures()

    @property
    def inactive_drafters(self) -> frozenset[str]:
        return self.policy.inactive_drafters

    @property
    def collapsed(self) -> Mapping[str, str]:
        return self.policy.collapsed


@dataclass(frozen=True, slots=True)
class DrafterCapabilities:
    """What a drafter can do: the greatest depth it may draft to; whether it heeds `DraftDecision.min_survival`; the
    seconds it needs per token that became known while it did not draft (0 if it keeps no cache); and, of one that reads
    the target's states, the steps for which it must be shown them before it drafts (0: it reads none, or always);
    whether it decides by `DraftDecision.prices` what to compute."""

    max_depth: int
    stops_early: bool = False
    catch_up_s: float = 0.0
    warm_up: int = 0
    weighs_prices: bool = False


def longest_that_fits(lengths: Collection[int], budget: int) -> int:
    """The greatest length to which all longer drafts can be truncated so that they take `budget` rows together."""
    longest = max(lengths, default=0)
    while sum([min(length, longest) for length in lengths]) > budget:
        longest -= 1
    return longest


def truncate_to(drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
    """The drafts within `budget` rows together: the longest are truncated."""
    if sum([len(draft.tokens) for draft in drafts.values()]) <= budget:
        return drafts
    longest = longest_that_fits([len(draft) for draft in drafts.values()], budget)
    return {seq_id: draft.truncate(longest) for seq_id, draft in drafts.items() if longest}


draft_selector = _native.DraftSelector(Draft)
"""Which tokens of drafts are worth their rows (csrc/judging.h), and a draft with some of its nodes alone."""
