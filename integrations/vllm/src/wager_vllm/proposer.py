"""The proposer that vLLM calls (speculative method custom_class): drafters of wager that read text, at the depth that
its policy decides for each request and step.

vLLM hands a proposer its batch and nothing of who is in it; the hooks in `compat` add the requests' ids, what was
verified, and when a step began. A request keeps its id through chunks of its prompt, preemption and moves within the
batch; each of n choices has its own. What is known of it is read from vLLM's batch in every step, so that no event is
missed. Whatever fails here costs speed alone: vLLM goes on without draft tokens, and one line of log says so. What is
accepted is decided by vLLM's own rejection sampler, which is exact for guesses that are not drawn from a distribution.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import numpy as np

from wager.draft.base import Drafter, LogitsRows
from wager.draft.lookup import DEFAULT_LONGEST, LookupDrafter, LookupSources
from wager.draft.recycling import RecyclingDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.store_file import StoreFile, build_store
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.surface import LatencySurface, StepPoint
from wager.engine.proposer import Proposer as DrafterPool
from wager.errors import MALFORMED, UsageError, WagerError
from wager.inputs import read_text
from wager.kernels.base import TargetOutput
from wager.loading.drafters import shipped_store
from wager.models import hub
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.tenants import MOST_TENANTS
from wager.trace import Clock
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams, Span
from wager_vllm import compat
from wager_vllm.compat import Deployment, RequestFacts, RowFacts, RunnerStep, StepProposer, log
from wager_vllm.decisions import Decisions, TakenStep
from wager_vllm.metrics import FiguresFile
from wager_vllm.options import Options, read_options
from wager_vllm.prices import StepPrices

_BYTES_PER_TOKEN = 288  # of an ended request that a lookup drafter keeps (draft/lookup.py)
_LONGEST_PAUSE = 1.0  # seconds between two steps that are the engine's own; a longer one was something else's
_SLOW_CALLS = 3  # of drafting that take longer than a plain step, one after the other, until it is said
_TOP = 8  # logits of a row that token recycling keeps

T = TypeVar("T")


# ---- drafters -------------------------------------------------------------------------------------------------------


class RecycledChains(RecyclingDrafter):
    """Token recycling of which the likeliest path is drafted: vLLM verifies chains."""

    makes_trees = False
    nodes_per_token = 4  # of the tree that the path is chosen in

    def _draft(self, request: DraftRequest) -> Draft:
        table, last = self._tables.of(request.seq_id), self._last[request.seq_id]
        tokens, parents, scores = table.draft(last, self.nodes_per_token * request.depth)
        gains: list[float] = []  # of the path up to each node, in tokens
        for parent, score in zip(parents, scores, strict=True):
            gains.append(score + (gains[parent] if parent >= 0 else 0.0))
        node, path = (max(range(len(gains)), key=gains.__getitem__) if gains else -1), list[int]()
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        path = path[: request.depth]
        chosen = [scores[node] for node in path]
        return Draft.chain(request.seq_id, [tokens[node] for node in path], drafter=self.name, scores=chosen)


def make_drafters(options: Options, deployment: Deployment) -> list[Drafter]:
    """The drafters of the options. A store or corpus that is damaged, or of another tokenizer, is left out, and one
    line of log says so."""
    shared = min(1 << 20, (options.memory_mb << 20) // (MOST_TENANTS * _BYTES_PER_TOKEN))
    made: list[Drafter] = []
    for spec in options.specs:
        store = None
        if spec.name == "recycle":
            made.append(RecycledChains(deployment.vocab))
        elif spec.name in ("suffix", "store"):
            try:
                store = _open_store(options, deployment, spec.argument if spec.name == "store" else None)
            except (WagerError, OSError) as error:
                log.warning("wager guesses without its store: %s", str(error).replace("\n", " "))
            longest = int(spec.argument) if spec.name == "suffix" and spec.argument else DEFAULT_LONGEST
            name = "suffix" if store is None else "store"
            made.append(LookupDrafter(name, LookupSources(longest, shared, store)))
        else:
            made.append(build_drafter(spec, DrafterParts(deployment.vocab)))
    return made


def _open_store(options: Options, deployment: Deployment, named: str | None) -> StoreFile | None:
    """The store that a drafter names, that the options name, of the corpus, or that comes with wager for the model."""
    path = Path(named).expanduser() if named else options.store
    if path is None and options.corpus is None and options.drafters != "auto":
        return None
    tokenizer = _read_tokenizer(deployment)
    if tokenizer is None:
        if path or options.corpus:
            raise UsageError(f"{deployment.tokenizer} has no tokenizer.json.", "Stores and corpora need one.")
        return None
    if path is None and options.corpus is None:
        return shipped_store(tokenizer)
    digest = vocabulary_digest(tokenizer)
    if path is None and options.corpus is not None:
        path = _store_of(options.corpus, tokenizer, digest, most_bytes=options.memory_mb << 20)
    return (
        None if path is None else StoreFile(path, vocab=num_tokens(tokenizer), tokenizer=digest, vocabulary=tokenizer)
    )


def _read_tokenizer(deployment: Deployment) -> Tokenizer | None:
    """The tokenizer of the model's folder, or of vLLM's download of it."""
    folder = Path(deployment.tokenizer)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache  # needs half a second

        found = try_to_load_from_cache(deployment.tokenizer, "tokenizer.json")
        folder = Path(found).parent if isinstance(found, str) else folder
    return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None


def _store_of(corpus: Path, tokenizer: Tokenizer, digest: str, *, most_bytes: int) -> Path:
    """The store of a corpus, built unless an earlier run did. UsageError names a line that is not as it should be."""
    hint = 'Each line is an object: {"prompt": "...", "answer": "..."}; the prompt may be left out.'
    text = read_text(corpus, "corpus", hint)
    name = hashlib.sha256(f"{digest} {most_bytes} {text}".encode()).hexdigest()[:16]
    path = hub.cache_dir("stores") / f"{name}.store"
    if path.is_file():
        return path
    answers = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row.get("prompt", ""), row["answer"]
            answers.append((tokenizer.encode(prompt), tokenizer.encode(answer, special=False)))
        except (*MALFORMED, WagerError) as error:
            raise UsageError(f"The corpus {corpus} is damaged in line {number}: {error!r}.", hint) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    sample = vocabulary_sample(tokenizer)
    build_store(answers, path, vocab=num_tokens(tokenizer), tokenizer=digest, sample=sample, max_bytes=most_bytes)
    log.info("wager built a store of %d answers from %s.", len(answers), corpus)
    return path


# ---- the proposer ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class KnownRequest:
    """A request of vLLM, with its known `tokens`; as the engine's sequences, for the drafters (engine/proposer.py)."""

    id: str
    tenant: str
    facts: RequestFacts
    params: SamplingParams
    tokens: list[int]
    seed: int = 0
    choice: int = 0
    over: bool = field(default=False)
    """Whether it ended with its last token, as far as that can be told here."""

    @property
    def prompt_tokens(self) -> int:
        return self.facts.prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        stops = self.facts.stops
        self.over = self.num_tokens >= self.facts.limit or any(token in stops for token in tokens)


class Proposer(StepProposer):
    """Made by vLLM with its VllmConfig. `clock` is in seconds."""

    def __init__(self, vllm_config: Any, *, clock: Clock = time.perf_counter) -> None:
        self.wants_logits = False
        self._off = ""
        if not compat.usable():
            self._off = "vLLM's version is not known"
            return
        compat.install_hooks()
        options, deployment = read_options(), compat.deployment(vllm_config)
        self._start(options, deployment, clock, vllm_config)

    def _start(self, options: Options, deployment: Deployment, clock: Clock, vllm_config: Any = None) -> None:
        self._options, self._clock, self._vllm_config = options, clock, vllm_config
        self._depth = min(deployment.depth, options.max_depth)
        self._deployment = deployment
        drafters = make_drafters(options, deployment) if deployment.leads else []
        self._pool = DrafterPool(*drafters, vocab=deployment.vocab)
        self._capabilities = {
            drafter.name: DrafterCapabilities(min(self._depth, drafter.max_depth)) for drafter in drafters
        }
        self.wants_logits = self._pool.reads_passes
        self._logits: Any = None
        self._tenants: dict[str, str] = {}
        self._requests: dict[str, KnownRequest] = {}
        self._decisions: Decisions | None = None
        self._prices = StepPrices(deployment, options, changed=self._decide_by, clock=clock)
        self._began = self._ended = clock()
        self._before: Collection[str] = ()  # the requests of the last step
        self._planned = False  # whether the step that is taken was planned by the decisions
        self._slow = 0
        self._figures = FiguresFile(deployment, clock=clock) if deployment.leads else None
        log.info(
            "wager drafts by %s, at most %d tokens; prices from %s.",
            ", ".join(self._capabilities) or "nothing",
            self._depth,
            self._prices.source,
        )

    def _decide_by(self, surface: LatencySurface) -> None:
        """From now on decisions are made by these prices."""
        self._planned = False
        self._decisions = Decisions(
            surface,
            self._capabilities,
            max_rows=self._deployment.max_rows,
            objective=self._options.aim,
            clock=self._clock,
        )
        for request in self._requests.values():
            self._decisions.begin(request.id, tenant=request.tenant)

    # ---- what vLLM and the hooks call -------------------------------------------------------------------------------

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_given: Any, **_named: Any) -> list[list[int]]:
        """vLLM's own call, where there are no hooks: no draft tokens."""
        return [[] for _ in sampled_token_ids]

    def load_model(self, *_given: Any, **_named: Any) -> None:
        """There is no model to load."""

    def forget(self) -> None:
        """Have drafters forget the texts of requests that are over; none is running."""
        for request in list(self._requests):
            self._end(request)
        self._pool.forget()

    def model_ready(self, passes: compat.DummyPasses) -> None:
        """Time passes, if that is to be done."""
        self._unless_off(self._prices.model_ready, passes)

    def step_begins(self, tenants: Mapping[str, str], finished: Collection[str]) -> None:
        self._unless_off(self._begin_step, tenants, finished)

    def logits_computed(self, logits: Any) -> None:
        self._unless_off(self._keep_logits, logits)

    def step_sampled(self, step: RunnerStep) -> list[list[int]]:
        return self._unless_off(self._step, step) or [[] for _ in step.rows]

    def _unless_off(self, part: Callable[..., T], *given: Any) -> T | None:
        """What a part returns; None from when one failed."""
        if self._off:
            return None
        try:
            return part(*given)
        except Exception as error:
            frame = extract_tb(error.__traceback__)[-1]
            self._off = f"{type(error).__name__}: {error}"
            self.wants_logits = False
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            log.error("wager failed, and vLLM goes on without draft tokens: %s (%s)", self._off, where)
            if self._figures is not None:
                self._figures.stopped(self._off)
            return None

    def _begin_step(self, tenants: Mapping[str, str], finished: Collection[str]) -> None:
        self._began = self._clock()
        for request in finished:
            self._end(request)
        self._tenants.update(tenants)

    def _keep_logits(self, logits: Any) -> None:
        values, tokens = logits.topk(_TOP, dim=-1)
        self._logits = values.float().cpu().numpy(), tokens.cpu().numpy()

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _step(self, step: RunnerStep) -> list[list[int]]:
        if not self._deployment.leads:
            return []
        now = self._clock()
        known = {row.request: self._take(row, step) for row in step.rows}
        if self._logits is not None:
            self._show_logits(step)
        self._pool.observe(_NOTHING, known, ())
        if self._pool.changed:
            self._pool.set_inactive(frozenset(), self._requests, lambda _: None)
            if self._decisions is not None:
                self._decisions.leave_out(frozenset(self._pool.failed))
        self._learn(step, known, self._seconds(step, now))
        drafts = self._draft(step)
        self._before = known.keys()
        if self._figures is not None:
            self._figures.update(self._decisions, self._prices, failed=self._pool.failed)
        self._ended = self._clock()
        return drafts

    def _take(self, row: RowFacts, step: RunnerStep) -> list[int]:
        """The tokens of a request that became known; it begins if it was not known, or is another one by now."""
        request = self._requests.get(row.request)
        tenant = self._tenants.pop(row.request, NO_TENANT if request is None else request.tenant)
        count = len(row.tokens) - row.sampled
        if request is not None and not _continues(row.tokens, request.tokens):
            self._end(row.request)
            request = None
        if request is None:
            request = self._begin(row, step.facts(row.request), row.tokens[:count].tolist(), tenant)
        new: list[int] = row.tokens[request.num_tokens :].tolist()
        if new:
            request.extend(new)
        return new

    def _begin(self, row: RowFacts, facts: RequestFacts, tokens: list[int], tenant: str) -> KnownRequest:
        params = SamplingParams(prediction=self._prediction(facts.prediction))
        request = self._requests[row.request] = KnownRequest(row.request, tenant, facts, params, tokens)
        self._pool.begin(request.id, tokens, params, tenant=tenant)
        if self._decisions is not None:
            self._decisions.begin(request.id, tenant=tenant)
        return request

    def _prediction(self, given: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids; none where what the request carries is no prediction. No more is read than an answer can have."""
        most = self._deployment.max_context
        try:
            if isinstance(given, str) and given:
                given = compat.tokenizer_of(self._vllm_config).encode(given[: 16 * most], add_special_tokens=False)
            ids = tuple(int(each) for each in given[:most] if type(each) is int)
        except Exception as error:  # of one request, whatever it wrote
            log.debug("A prediction is not read: %r", error)
            return ()
        return ids if ids and min(ids) >= 0 and max(ids) < self._deployment.vocab else ()

    def _end(self, request: str) -> None:
        self._tenants.pop(request, None)
        if self._requests.pop(request, None) is not None:
            self._pool.end(request)
            if self._decisions is not None:
                self._decisions.end(request)

    def _seconds(self, step: RunnerStep, now: float) -> float:
        """What the step took, without drafting and policy. What the engine does between two steps is part of it, if it
        had requests to go on with."""
        goes_on = any(row.request in self._before for row in step.rows)
        pause = self._began - self._ended
        return now - (self._ended if goes_on and pause < _LONGEST_PAUSE else self._began)

    def _learn(self, step: RunnerStep, known: Mapping[str, Sequence[int]], seconds: float) -> None:
        verified = {name: len(tokens) for name, tokens in step.verified.items()}
        context = tuple([row.cached for row in step.rows])
        rows = sum([row.scheduled for row in step.rows])
        if all(row.sampled and row.scheduled == 1 + verified.get(row.request, 0) for row in step.rows):
            self._prices.observe(StepPoint(rows, len(step.rows), sum(context), seconds))
        if self._decisions is not None and self._planned:
            emitted = {row.request: known[row.request] for row in step.rows if row.sampled}
            self._decisions.learn(TakenStep(rows, context, seconds, verified, emitted))

    def _draft(self, step: RunnerStep) -> list[list[int]]:
        spans = [self._span(row) for row in step.rows if not self._requests[row.request].over]
        self._planned = self._prices.surface is not None
        if self._decisions is None or not self._planned:
            return self._filled(step, spans)
        plan = self._decisions.plan(spans)
        begun = self._clock()
        drafts = self._pool.propose(spans, plan, self._requests)
        seconds = self._clock() - begun
        if plan:
            self._watch(seconds, self._decisions.plain_step_s)
        admitted = self._decisions.admit(drafts, seconds=seconds)
        return [list(admitted[row.request].tokens) if row.request in admitted else [] for row in step.rows]

    def _span(self, row: RowFacts) -> Span:
        request = self._requests[row.request]
        if not row.sampled:  # its prompt is being computed
            left = max(1, min(len(row.tokens) - row.cached - row.scheduled, self._deployment.max_rows))
            return Span(row.request, row.cached + row.scheduled, (0,) * left, False)
        room = min(self._depth, request.facts.limit - request.num_tokens - 1)
        return Span(row.request, request.num_tokens - 1, (0,), True, max(0, room))

    def _filled(self, step: RunnerStep, spans: Sequence[Span]) -> list[list[int]]:
        """While prices are measured in steps: draft tokens that are there to be counted, the last one again."""
        deciding = [span for span in spans if span.needs_logits]
        depth = self._prices.depth_to_measure(len(deciding))
        depths = {span.seq_id: min(depth, span.max_draft_tokens) for span in deciding}
        return [[int(row.tokens[-1])] * depths.get(row.request, 0) for row in step.rows]

    def _watch(self, seconds: float, step: float) -> None:
        """Say once that drafting takes longer than a plain step: the policy does without it."""
        if self._slow < _SLOW_CALLS:
            self._slow = self._slow + 1 if seconds > step else 0
            if self._slow == _SLOW_CALLS:
                log.warning("Drafting takes %.0f ms, longer than a step: it is done where it pays.", 1e3 * seconds)

    def _show_logits(self, step: RunnerStep) -> None:
        """The greatest logits of every row to the drafters that read them."""
        (values, tokens), self._logits = self._logits, None
        logits = np.full((len(values), self._deployment.vocab), -np.inf, np.float32)
        np.put_along_axis(logits, tokens, values, axis=1)
        rows, first = [], 0
        for row in step.rows:
            draft = step.verified.get(row.request, ())
            last = int(row.tokens[row.cached + row.scheduled - len(draft) - 1])
            rows.append(LogitsRows(row.request, first, (last, *draft)))
            first += 1 + len(draft)
        self._pool.show_rows(TargetOutput(logits, _NO_TOKENS), rows)


_NO_TOKENS = np.zeros(0, np.int32)
_NOTHING = TargetOutput(np.zeros((0, 0), np.float32), _NO_TOKENS)


def _continues(tokens: Any, known: Sequence[int]) -> bool:
    """Whether these are tokens of the same request: they are no fewer, and go on after the last known one."""
    return len(tokens) >= len(known) and (not known or int(tokens[len(known) - 1]) == known[-1])
