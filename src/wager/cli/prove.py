"""`wager prove`: counts token ids and finish reasons that differ from plain decoding, for every drafter under several
conditions that must not change a text: other requests in the batch, preemption, cached prefixes.

The plain answers come from an engine that serves one request at a time with nothing cached.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.cli.measuring import card_of, count_answers, duration, longest_seconds, settings_of, to_requests
from wager.config import EngineConfig
from wager.errors import MALFORMED, RequestError, UsageError, WagerError
from wager.inputs import read_text, shown
from wager.prompts import Prompt
from wager.terminal import console, flags
from wager.testing.drafters import PROOF_DRAFTERS, ReferenceOracle
from wager.types import RULES, Completion, OutputDelta, Request, SamplingParams, Stats, VerifyRule, as_token_ids

if TYPE_CHECKING:
    from wager.loading.load import LoadedEngine

TEMPERATURE = 0.8
"""The temperature of sampled texts without --temperature."""

_ROWS = 5
"""Rows of a step with guesses, for the time that a proof takes."""

DEFAULT_DRAFTERS = ("none", "ngram", "adversary", "random-tree")

OnDelta = Callable[[OutputDelta], None]


@dataclass(frozen=True, slots=True)
class Condition:
    """How requests are served. `concurrency`: how many run at once; `preempt_every`: tokens emitted between forced
    preemptions, of which the first comes with the first token (None: none are forced); `warm`: every prefix was cached
    before."""

    name: str
    concurrency: int
    preempt_every: int | None = None
    warm: bool = False


ALONE = Condition("alone", concurrency=1)
"""For an engine without a prefix cache."""


def conditions(concurrency: int) -> dict[str, Condition]:
    """All conditions by name. The ones after `alone` are for one engine with a prefix cache, in this order: from the
    second on, every prefix is cached."""
    return {
        "alone": ALONE,
        "preempted": Condition("together, preempted", concurrency, preempt_every=16),
        "warm-alone": Condition("alone, warm prefix", 1, warm=True),
        "warm-together": Condition("together, warm prefix", concurrency, warm=True),
    }


CONDITIONS = tuple(conditions(1))
"""Names of all conditions, as they are chosen."""


@click.command(
    "prove",
    cls=flags.Verb,
    main="limit model drafter policy verify temperature max_tokens concurrency names json_path",
)
@flags.prompts_flags(limit=8)
@flags.framing_flags
@flags.engine_flags(drafter=flags.drafter_flag(several=True, default=DEFAULT_DRAFTERS, further=PROOF_DRAFTERS))
@flags.sampling_flags(max_tokens=64, temperature=None, seed=0)
@click.option(
    "--concurrency",
    type=flags.Count(2, flags.MOST_CONCURRENT),
    default=8,
    help="Requests that run together in the trials where several do.",
)
@click.option(
    "--condition",
    "names",
    type=click.Choice(CONDITIONS),
    multiple=True,
    default=CONDITIONS,
    help="How requests are served. Repeat it to choose several.",
)
@click.option(
    "--against",
    type=flags.InputPath(),
    help="The --json of a proof of the same prompts on another machine: its plain answers must be those here.",
)
@flags.json_flag
def command(
    *,
    prompts: list[Prompt],
    framing: flags.Framing,
    config: EngineConfig,
    drafters: tuple[str, ...],
    params: SamplingParams,
    sampled: bool,
    concurrency: int,
    names: tuple[str, ...],
    against: Path | None,
    json_path: Path | None,
) -> None:
    """Run plain decoding against speculation on the prompts of FILE and count the token ids and finish reasons that
    differ.

    FILE is as for `wager bench`; without it a small set that comes with wager is used.

    Each drafter is tried with one request at a time, with several together, with forced preemption and with cached
    prefixes, greedy and sampled; with --temperature only at that temperature. Guesses are made at a fixed depth,
    whatever they cost, unless --policy is given or several drafters take part. Exits with 1 if anything differs or a
    drafter fails, naming the first. A trial in which nothing was preempted, cached or guessed says so.

    With --against the plain answers are also compared with those of another machine, or of other kernels.
    """
    from wager.cli.loading import open_engine

    chosen = [each for name, each in conditions(concurrency).items() if name in names]
    if not config.capacity.prefix_cache:
        if flags.wrote("names") and any(each.warm for each in chosen):
            raise UsageError("--no-prefix-cache leaves no --condition warm-alone or warm-together.", "Leave one out.")
        chosen = [each for each in chosen if not each.warm]
    other = OtherMachine.read(against) if against else None
    modes = _modes(params, sampled=sampled, verify=config.speculation.verify)
    prompts = [prompt.without("temperature") for prompt in prompts]  # which is the mode's
    drafters = tuple(dict.fromkeys(_leave_out_trees(drafters, config.speculation.verify)))
    configs = {drafter: _with_drafter(config, drafter) for drafter in drafters}
    settings = {**settings_of(config, params, framing, prompts), "concurrency": concurrency, "conditions": names}
    settings |= {"drafter": drafters, "temperature": [mode.temperature for mode in modes.values()]}
    # its cache leaves memory for each of the drafters, what their models and heads cache included
    plain = open_engine(
        config.with_options(drafter="none", prefix_cache=False),
        shared_by=[each.with_options(prefix_cache=False) for each in configs.values()],
    )
    proof = Proof(card_of(config, plain, settings), json_path)
    total = len(modes) * len(prompts) * (1 + len(configs) * len(chosen))
    requests = {
        mode: to_requests(prompts, plain.tokenizer, framing=framing, params=each) for mode, each in modes.items()
    }
    proof.model = _model_of(plain)
    if other is not None:
        other.check(proof.model, requests)
    seconds = sum(longest_seconds(plain, each, together=1, rows=_ROWS) for each in requests.values())
    at_most = duration(seconds * (1 + len(configs) * len(chosen)))
    console.say(f"{total} answers, plain and with {', '.join(configs)}: at most {at_most}.")
    with console.meter("answers") as update:
        trials = Trials(plain, chosen, count_answers(update, "Proving", total))
        questions = [Questions(mode, each, trials.plain_answers(each)) for mode, each in requests.items()]
        proof.note_plain(questions)
        if other is not None:
            proof.compare(other, questions)
        for drafter, each in configs.items():
            proof.add(trials.run(drafter, each, questions), failure=trials.failures.get(drafter, ""))
    proof.report()


def _with_drafter(config: EngineConfig, drafter: str) -> EngineConfig:
    """With a drafter at a fixed depth, or with several, among which the policy chooses."""
    if drafter in PROOF_DRAFTERS:  # it is no option of an engine: the trials make it
        return config.with_options(policy=config.speculation.policy or "fixed")
    if config.speculation.policy is not None:
        return config.with_options(drafter=drafter)
    several = len(config.with_options(drafter=drafter, policy="adaptive").speculation.drafters) > 1
    return config.with_options(drafter=drafter, policy="adaptive" if several else "fixed")


def _leave_out_trees(drafters: tuple[str, ...], verify: VerifyRule) -> tuple[str, ...]:
    """The default drafters without those that make trees, under a rule that verifies none; others stay."""
    if drafters != DEFAULT_DRAFTERS or RULES[verify].verifies_trees:
        return drafters
    kept = tuple(name for name in drafters if name != "random-tree")
    console.say(f"--verify {verify} verifies chains: {', '.join(sorted({*drafters} - {*kept}))} is left out.")
    return kept


def _modes(params: SamplingParams, *, sampled: bool, verify: VerifyRule) -> dict[str, SamplingParams]:
    """The sampling modes to compare: that of --temperature, or greedy and sampled."""
    greedy = {"greedy": replace(params, temperature=0.0)}
    if RULES[verify].needs_draft_probs:
        if sampled and not params.greedy:
            raise UsageError(
                f"--verify {verify} keeps the distribution of sampled text, not its bytes: there is nothing to count.",
                "Prove it with --verify match, or at --temperature 0.",
            )
        console.say(f"--verify {verify}: only greedy text is compared; sampled text keeps its distribution.")
        return greedy
    if sampled:
        return greedy if params.greedy else {"sampled": params}
    return greedy | {"sampled": replace(params, temperature=TEMPERATURE)}


# ---- trials ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Questions:
    """The requests of one sampling mode, and their plain answers by request id."""

    mode: str
    requests: Sequence[Request]
    plain: Mapping[str, Completion]

    def edited_predictions(self, vocab: int) -> list[Request]:
        """The requests, each with its plain answer as its predicted output, in which some tokens are changed."""
        texts = [edited(self.plain[request.id].token_ids, vocab=vocab) for request in self.requests]
        return [
            replace(request, params=replace(request.params, prediction=text))
            for request, text in zip(self.requests, texts, strict=True)
        ]


def edited(tokens: Sequence[int], *, vocab: int) -> tuple[int, ...]:
    """The tokens with one replaced a third of the way on, two inserted in the middle, and one left out near the end."""
    third, half, late = len(tokens) // 3, len(tokens) // 2, 5 * len(tokens) // 6
    strange = [(token + 1) % vocab for token in tokens]
    return (
        *tokens[:third],
        *strange[third : third + 1],
        *tokens[third + 1 : half],
        *strange[half : half + 2],
        *tokens[half:late],
        *tokens[late + 1 :],
    )


@contextmanager
def counted_failures() -> Iterator[list[str]]:
    """The warnings of drafters that fail meanwhile."""
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if message.startswith("Drafter %r") and "failed" in message:
            found.append(record.getMessage())
        return True

    log = logging.getLogger("wager")
    log.addFilter(note)
    try:
        yield found
    finally:
        log.removeFilter(note)


@dataclass(slots=True)
class Trials:
    """One loaded model and the conditions under which its drafters are tried. `failures` are drafters that failed, by
    name, with the reason."""

    plain: LoadedEngine
    conditions: Sequence[Condition]
    on_delta: OnDelta
    failures: dict[str, str] = field(default_factory=dict)

    def plain_answers(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """What every trial is compared with; RequestError if one fails."""
        expected = answers(self.plain, requests, ALONE, on_delta=self.on_delta)
        for name, answer in expected.items():
            if answer.finish_reason == "error":
                raise RequestError(f"Prompt {name} fails even without speculation: {answer.error}", "Leave it out.")
        return expected

    def run(self, drafter: str, config: EngineConfig, questions: Sequence[Questions]) -> list[TokenComparison]:
        """The answers with one drafter in every mode under every condition, compared with the plain ones."""
        alone = [each for each in self.conditions if each is ALONE]
        cached = [each for each in self.conditions if each is not ALONE]  # with one engine that has a prefix cache
        found = [trial for group in (alone, cached) if group for trial in self._run(drafter, config, questions, group)]
        order = [each.mode for each in questions]
        return sorted(found, key=lambda trial: order.index(trial.mode))

    def _run(
        self, drafter: str, config: EngineConfig, questions: Sequence[Questions], group: Sequence[Condition]
    ) -> Iterator[TokenComparison]:
        """The conditions of one engine, which serves all modes: what a drafter remembers of one it has in the next."""
        from wager.cli.loading import open_engine

        config = config.with_options(prefix_cache=config.capacity.prefix_cache and group[0] is not ALONE)
        oracle, vocab = ReferenceOracle({}), self.plain.target.decoder.vocab

        made = PROOF_DRAFTERS[drafter](vocab, oracle) if drafter in PROOF_DRAFTERS else None
        engine = open_engine(config, like=self.plain, drafter=made)
        specs = [spec for each in config.speculation.drafters for spec in each.all]
        predicts = any(spec.name == "prediction" for spec in specs)
        for each in questions:
            oracle.texts = {one.id: [*one.prompt, *each.plain[one.id].token_ids] for one in each.requests}
            requests = each.edited_predictions(self.plain.spec.vocab) if predicts else each.requests
            for condition in group:
                with counted_failures() as failures:
                    tried = answers(engine, requests, condition, on_delta=self.on_delta)
                if failures:
                    self.failures[drafter] = failures[-1]
                yield compare_answers(
                    each.plain, tried, mode=each.mode, drafter=drafter, condition=condition, failures=len(failures)
                )
        engine.check()


# ---- answers that are compared ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text differs from the plain one; a token is None where one text has already ended, and
    both are where only the finish reasons differ."""

    prompt: str
    position: int
    plain: int | None
    speculative: int | None
    error: str = ""
    plain_finish_reason: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """One sampling mode, drafter and condition: how many token ids and finish reasons (one per answer) were compared
    and how many differ.

    Preemptions, cached tokens, guesses and failures of drafters show that the condition really occurred; `notes` say
    what did not, and why.
    """

    mode: str
    drafter: str
    condition: str
    tokens: int
    differing: int
    first: Difference | None
    preemptions: int
    prefix_hit_tokens: int
    drafted: int
    accepted: int
    rounds: int
    answers: int
    finish_reasons_differing: int
    failures: int
    notes: tuple[str, ...]


def answers(
    engine: LoadedEngine, requests: Sequence[Request], condition: Condition, *, on_delta: OnDelta
) -> dict[str, Completion]:
    """Serve the requests under a condition; answers by request id. A failed request's answer carries its error."""
    due = 1  # tokens until the next forced preemption: also a text of few tokens is preempted

    def take(delta: OutputDelta) -> None:
        nonlocal due
        due -= len(delta.token_ids)
        if condition.preempt_every and due <= 0 and engine.scheduler.num_running:
            engine.preempt_all()
            due = condition.preempt_every
        on_delta(delta)

    found = engine.generate(requests, concurrency=condition.concurrency, on_output=take)
    return {answer.request_id: answer for answer in found}


def compare_answers(
    plain: Mapping[str, Completion],
    tried: Mapping[str, Completion],
    *,
    mode: str,
    drafter: str,
    condition: Condition,
    failures: int = 0,
) -> TokenComparison:
    """Compare answers by request id; `tried` has an answer to every plain one. `failures`: warnings meanwhile that a
    drafter failed."""
    differences = [_difference(prompt, answer, tried[prompt]) for prompt, answer in plain.items()]
    stats = [answer.stats for answer in tried.values()]
    return TokenComparison(
        mode=mode,
        drafter=drafter,
        condition=condition.name,
        tokens=sum(len(answer.token_ids) for answer in plain.values()),
        differing=sum(count for count, _ in differences),
        first=next((first for _, first in differences if first), None),
        preemptions=sum(s.preemptions for s in stats),
        prefix_hit_tokens=sum(s.cached_tokens for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        rounds=sum(s.rounds for s in stats),
        answers=len(plain),
        finish_reasons_differing=sum(plain[prompt].finish_reason != tried[prompt].finish_reason for prompt in plain),
        failures=failures,
        notes=tuple(_notes(drafter, condition, stats)),
    )


def _notes(drafter: str, condition: Condition, stats: Sequence[Stats]) -> Iterator[str]:
    """What the trial was to show and cannot, since it did not happen: a guess, a neighbour, a preemption."""
    if drafter != "none" and not any(s.drafted for s in stats):
        yield "no guess was made, so this trial shows nothing of its drafter"
    if condition.concurrency > 1 and len(stats) == 1:
        yield "one prompt, so nothing ran beside it"
    if condition.preempt_every and not any(s.preemptions for s in stats):
        if all(s.rounds <= 1 for s in stats):
            yield "no preemption: every text ended in the step of its first token"
        else:
            yield "no preemption: no request was running when one was due"
    if condition.warm and not any(s.cached_tokens for s in stats):
        yield "no prefix cached: prompts are shorter than a block, or the cache is too small to keep them"


def _difference(prompt: str, plain: Completion, tried: Completion) -> tuple[int, Difference | None]:
    """How many token ids differ, and the first difference, of ids or of finish reasons; a failed request differs even
    if its tokens agree so far."""
    length = max(len(plain.token_ids), len(tried.token_ids))
    a, b = (tuple(c.token_ids) + (None,) * (length - len(c.token_ids)) for c in (plain, tried))
    positions = [i for i in range(length) if a[i] != b[i]]
    failed = tried.finish_reason == "error"
    if not positions and plain.finish_reason == tried.finish_reason and not failed:
        return 0, None
    at, first = (positions[0], (a[positions[0]], b[positions[0]])) if positions else (length, (None, None))
    error = tried.error if failed else ""
    return len(positions) or int(failed), Difference(
        prompt, at, *first, error, plain.finish_reason, tried.finish_reason
    )


# ---- another machine ------------------------------------------------------------------------------------------------


def _model_of(engine: LoadedEngine) -> dict[str, Any]:
    """What must be the same on another machine: the model, and how it is set up. And the arithmetic of its kernels."""
    from wager.receipts import FORMAT

    target = engine.target
    return {
        "format": FORMAT,
        **target.digests.summary,
        "kv_dtype": target.config.model.kv_dtype,
        "max_context": target.opened.limits.context,
        _ARITHMETIC: engine.kernels.arithmetic,
    }


_ARITHMETIC = "arithmetic"
"""Machines may differ in it; then their answers may, too."""


@dataclass(frozen=True, slots=True)
class OtherMachine:
    """A proof that was made elsewhere: `name` says where, `model` is what its `_model_of` was, and `answers` its plain
    answers, each with the digest of its request, by mode and prompt."""

    name: str
    model: Mapping[str, Any]
    answers: Mapping[tuple[str, str], tuple[str, Completion]]

    @classmethod
    def read(cls, path: Path) -> OtherMachine:
        """From the file of --json. UsageError if it is none, or one of another version of wager."""
        from wager.receipts import FORMAT

        hint = "Give the --json of `wager prove` on the other machine."
        try:
            value = json.loads(read_text(path, "proof", hint))
            card, found = value["card"], {}
            machine = card["machine"]
            name = shown(f"{machine['cpu'] or machine['architecture']}, {card['kernels']['name']} kernels", length=100)
            model = dict(value.get("model", {}))
            if model.get("format") != FORMAT:
                raise UsageError(
                    f"The proof {path} is of another version of wager, whose digests are of other things.",
                    "Prove the same prompts there with this version.",
                )
            for each in value["answers"]:
                tokens, reason = as_token_ids(each["token_ids"]), each["finish_reason"]
                stats = Stats(prompt_tokens=0, completion_tokens=len(tokens), seed=0)
                answer = Completion(str(each["prompt"]), 0, tokens, "", reason, stats)
                found[str(each["mode"]), answer.request_id] = str(each["asked"]), answer
            return cls(name, model, found)
        except MALFORMED as error:
            cause = f"{error} is missing or wrong" if isinstance(error, LookupError) else str(error)
            raise UsageError(f"{path} is no proof with plain answers: {cause}.", hint) from None

    def check(self, model: Mapping[str, Any], requests: Mapping[str, Sequence[Request]]) -> None:
        """UsageError if it is of another model, other prompts or parameters than these, by their modes."""
        from wager.receipts import request_digest

        differing = [name for name in model if name != _ARITHMETIC and model[name] != self.model.get(name)]
        if differing:
            names = ", ".join(name.replace("_", " ") for name in differing)
            raise UsageError(
                f"The proof of {self.name} is of another model, or of one that is set up otherwise: {names}.",
                "Prove the same model with the same options there.",
            )
        if self.model.get(_ARITHMETIC) != model[_ARITHMETIC]:
            console.warn(f"The proof of {self.name} is of another arithmetic: answers may differ in near ties.")
        for mode, asked in requests.items():
            for request in asked:
                if self.answers.get((mode, request.id), ("",))[0] != request_digest(request):
                    raise UsageError(
                        f"The proof of {self.name} has no answer to prompt {request.id}, {mode}, as it is asked here.",
                        "Prove the same prompts with the same options there.",
                    )

    def compare(self, questions: Sequence[Questions]) -> list[TokenComparison]:
        """Its plain answers with those here, which were checked to be to the same questions."""
        condition = Condition(f"against {self.name}", concurrency=1)
        return [
            compare_answers(
                {request.id: self.answers[each.mode, request.id][1] for request in each.requests},
                each.plain,
                mode=each.mode,
                drafter="none",
                condition=condition,
            )
            for each in questions
        ]


# ---- the report -----------------------------------------------------------------------------------------------------

_WRONG = frozenset({"none", "adversary"})
"""Drafters of which no accepted guess is expected."""


def summed_up(trials: Sequence[TokenComparison], *, failure: str = "") -> dict[str, Any]:
    """The trials of one drafter, at least one, together. `failure`: why it failed, if it did; the `note` says what they
    do not show."""
    drafter = trials[0].drafter
    names = ("tokens", "differing", "finish_reasons_differing", "drafted", "accepted", "failures")
    sums = {name: sum(getattr(trial, name) for trial in trials) for name in names}
    note = ""
    if drafter != "none" and not sums["drafted"]:
        note = "it guessed nothing, so nothing is proven of it"
    elif drafter not in _WRONG and not sums["accepted"]:
        note = "no guess was accepted, so nothing is proven of accepted ones"
    answered = sum(trial.answers for trial in trials)
    about = {"drafter": drafter, "trials": len(trials), "failure": failure, "note": note}
    return {**about, **sums, "finish_reasons": answered}


@dataclass(slots=True)
class Proof:
    """The trials so far: `card` says under which conditions, `path` is that of --json."""

    card: dict[str, Any]
    path: Path | None
    trials: list[TokenComparison] = field(default_factory=list)
    drafters: list[dict[str, Any]] = field(default_factory=list)
    model: Mapping[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    against: list[TokenComparison] = field(default_factory=list)
    one_arithmetic: bool = True
    """Whether the other machine's kernels are to give the same bits."""

    def note_plain(self, questions: Sequence[Questions]) -> None:
        """The plain answers, which another machine's proof is compared with."""
        from wager.receipts import request_digest

        self.answers = [
            {
                "mode": each.mode,
                "prompt": request.id,
                "asked": request_digest(request),
                "token_ids": list(each.plain[request.id].token_ids),
                "finish_reason": each.plain[request.id].finish_reason,
            }
            for each in questions
            for request in each.requests
        ]

    def compare(self, other: OtherMachine, questions: Sequence[Questions]) -> None:
        """Compare the plain answers with those of another machine."""
        self.against = other.compare(questions)
        self.one_arithmetic = other.model.get(_ARITHMETIC) == self.model[_ARITHMETIC]
        tokens, differing = (sum(getattr(each, name) for each in self.against) for name in ("tokens", "differing"))
        console.say(f"Against {other.name}: {tokens} token ids, {differing} differ.")

    def add(self, trials: Sequence[TokenComparison], *, failure: str) -> None:
        """All the trials of one drafter. The file of --json is written, and a line says what was found."""
        self.trials += trials
        found = summed_up(trials, failure=failure)
        self.drafters.append(found)
        failed = f", {found['failures']} warnings that it failed" if found["failures"] else ""
        console.say(
            f"{found['drafter']}: {found['tokens']} token ids and {found['finish_reasons']} finish reasons, "
            f"{found['differing'] + found['finish_reasons_differing']} differ; {found['drafted']} guesses, "
            f"{found['accepted']} accepted{failed}{found['note'] and '; ' + found['note']}."
        )
        if self.path != console.STDOUT:
            console.write_json(self.as_dict(), self.path)

    @property
    def summary(self) -> dict[str, int]:
        names = ("tokens", "differing", "finish_reasons", "finish_reasons_differing")
        return {name: sum(each[name] for each in self.drafters) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """The JSON of --json; see docs/guarantees.md."""
        return {
            "card": self.card,
            "model": dict(self.model),
            "answers": self.answers,
            "against": [asdict(trial) for trial in self.against],
            "outcomes": [asdict(trial) for trial in self.trials],
            "drafters": self.drafters,
            "summary": self.summary,
        }

    def report(self) -> None:
        """The tables. WagerError if anything differs, or a drafter failed."""
        console.write_json(self.as_dict(), self.path)
        self._show(to_stdout=self.path != console.STDOUT)
        for trial in self.against:
            if trial.first is not None:
                raise _other_machine_error(trial, trial.first, one_arithmetic=self.one_arithmetic)
        summary = self.summary
        if summary["differing"] or summary["finish_reasons_differing"]:
            raise _difference_error(self.trials, summary)
        for each in self.drafters:
            if each["failure"]:
                message = f"Drafter {each['drafter']} failed during the proof: {each['failure']}."
                raise WagerError(message, "Without guesses nothing is proven.")
        count = f"{summary['tokens']} token ids and {summary['finish_reasons']} finish reasons"
        console.say(f"{count} compared, none differs.")

    def _show(self, *, to_stdout: bool) -> None:
        """A table of the trials, and one of the drafters."""
        columns = ["trial", "tokens", "differ", "ends differ", "τ", "guesses", "accepted", "preempted", "cached"]
        notes = list(dict.fromkeys(note for trial in self.trials for note in trial.notes))
        lines = [_line(trial, notes) for trial in self.trials]
        caption = "\n".join(f"Note {number}: {note}." for number, note in enumerate(notes, 1))
        title = f"{self.card['model']}, {self.card['kernels']['name']} kernels"
        console.table(title, columns + ["note"] * bool(notes), lines, to_stdout=to_stdout, caption=caption)
        columns = ["drafter", "tokens", "differ", "ends differ", "guesses", "accepted", "log warnings"]
        names = ("drafter", "tokens", "differing", "finish_reasons_differing", "drafted", "accepted", "failures")
        lines = [[str(each[name]) for name in names] for each in self.drafters]
        caption = "\n".join(f"{each['drafter']}: {each['note']}." for each in self.drafters if each["note"])
        console.table("By drafter", columns, lines, to_stdout=to_stdout, caption=caption)


def _other_machine_error(trial: TokenComparison, first: Difference, *, one_arithmetic: bool) -> WagerError:
    """The error for plain answers that are not those of another machine."""
    there, here = ("none" if token is None else token for token in (first.plain, first.speculative))
    place = f"token {first.position}: there {there}, here {here}"
    if first.plain is None and first.speculative is None:
        place = f"its end: there {first.plain_finish_reason}, here {first.finish_reason}"
    return WagerError(
        f"{trial.differing} of {trial.tokens} token ids differ {trial.condition}; first {trial.mode}, prompt "
        f"{first.prompt}, {place}.",
        "Kernels of one arithmetic give the same bits: please report this defect in wager with both files."
        if one_arithmetic
        else "Kernels of different arithmetic differ in their last bits (docs/receipts.md).",
    )


def _difference_error(comparisons: Sequence[TokenComparison], summary: Mapping[str, int]) -> WagerError:
    """The error that counts the differences and names the first."""
    trial, first = next((trial, trial.first) for trial in comparisons if trial.first)
    count = f"{summary['differing']} of {summary['tokens']} token ids"
    if reasons := summary["finish_reasons_differing"]:
        count += f" and {reasons} of {summary['finish_reasons']} finish reasons"
    place = f"token {first.position}: plain {first.plain}, speculative {first.speculative}"
    if first.plain is None and first.speculative is None:
        place = f"after token {first.position}: plain ends with {first.plain_finish_reason}, "
        place += f"speculative with {first.finish_reason}"
    cause = f" ({first.error})" if first.error else ""
    return WagerError(
        f"{count} differ; first with {trial.drafter}, {trial.mode}, {trial.condition}: prompt {first.prompt}, "
        f"{place}{cause}.",
        "This is a defect in wager: please report it with the output of --json.",
    )


def _line(trial: TokenComparison, notes: Sequence[str]) -> list[str]:
    """A line of the table; `notes` are those of all trials, referred to by number."""
    tau = trial.tokens / trial.rounds if trial.rounds else 0.0
    counts = (trial.drafted, trial.accepted, trial.preemptions, trial.prefix_hit_tokens)
    name = f"{trial.drafter}, {trial.mode}, {trial.condition}"
    line = [name, str(trial.tokens), str(trial.differing), str(trial.finish_reasons_differing), f"{tau:.2f}"]
    numbers = ", ".join(str(notes.index(note) + 1) for note in trial.notes)
    return [*line, *map(str, counts), *([numbers] if notes else [])]
