"""`wager prove`: counts token ids that differ from plain decoding, for every drafter under several conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.bench.comparison import (
    ALONE,
    Condition,
    OnDelta,
    TokenComparison,
    answers,
    cached_conditions,
    compare_answers,
)
from wager.bench.workload import Prompt
from wager.cli import console, flags, parameters
from wager.cli.bench import card_of, count_answers, settings_of, to_requests
from wager.config import EngineConfig
from wager.draft.registry import KINDS
from wager.errors import RequestError, UsageError, WagerError
from wager.types import RULES, Completion, Request, SamplingParams, VerifyRule

if TYPE_CHECKING:
    from wager.build.load import LoadedEngine
    from wager.draft.base import Drafter

TEMPERATURE = 0.8
"""The temperature of sampled texts without --temperature."""

DRAFTERS = ("none", "ngram", "adversary", "random-tree")


@click.command("prove", cls=parameters.Verb)
@flags.prompts_flags(limit=8)
@flags.framing_flags
@flags.engine_flags(drafter=flags.drafter_flag(several=True, default=DRAFTERS))
@flags.sampling_flags(max_tokens=64, temperature=None, seed=0)
@click.option("--concurrency", type=click.IntRange(2, flags.MOST_CONCURRENT), default=8, show_default=True, metavar="N",
              help="Requests that run together in the trials where several do.")  # fmt: skip
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
    json_path: Path | None,
) -> None:
    """Run plain decoding against speculation on the prompts of FILE and count the token ids that differ.

    FILE is as for `wager bench`; without it a small set that comes with wager is used.

    Each drafter is tried with one request at a time, with several together, with forced preemption and with cached
    prefixes, greedy and sampled; with --temperature only at that temperature. Guesses are made at a fixed depth,
    whatever they cost, unless --policy is given. Exits with 1 if any token differs, naming the first.
    """
    if config.speculation.policy is None:
        config = config.with_options(policy="fixed")
    modes = _modes(params, sampled=sampled, verify=config.speculation.verify)
    drafters = _leave_out_trees(drafters, config.speculation.verify)
    configs = {drafter: config.with_options(drafter=drafter) for drafter in drafters}
    plain = _open_plain(configs)
    conditions = (ALONE, *cached_conditions(concurrency)[: None if config.capacity.prefix_cache else 1])
    total = len(modes) * len(prompts) * (1 + len(configs) * len(conditions))
    comparisons: list[TokenComparison] = []
    with console.meter("answers") as update:
        trials = Trials(plain, conditions, count_answers(update, "Proving", total))
        for mode, mode_params in modes.items():
            requests = to_requests(prompts, plain.tokenizer, framing=framing, params=mode_params)
            comparisons += trials.run(mode, requests, configs)
    settings = {**settings_of(config, params, framing), "concurrency": concurrency}
    settings |= {"drafter": drafters, "temperature": [mode.temperature for mode in modes.values()]}
    _report(comparisons, card_of(config, plain, settings), json_path)


def _leave_out_trees(drafters: tuple[str, ...], verify: VerifyRule) -> tuple[str, ...]:
    """The default drafters without those that make trees, under a rule that verifies none; others stay."""
    if drafters != DRAFTERS or RULES[verify].verifies_trees:
        return drafters
    kept = tuple(name for name in drafters if not (name in KINDS and KINDS[name].makes_trees))
    console.say(f"--verify {verify} verifies chains: {', '.join(sorted({*drafters} - {*kept}))} is left out.")
    return kept


def _open_plain(configs: Mapping[str, EngineConfig]) -> LoadedEngine:
    """The engine for the plain answers. Memory is planned as for a drafter that runs a model, if there is one."""
    from wager.cli.loading import open_engine

    [first, *_] = configs.values()
    plain = first.with_options(drafter="none", prefix_cache=False)
    for config in configs.values():
        if any(KINDS[spec.name].runs_a_model for spec in config.speculation.drafters):
            return open_engine(plain, like=open_engine(config.with_options(prefix_cache=False)))
    return open_engine(plain)


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


@dataclass(frozen=True, slots=True)
class Trials:
    """One loaded model and the conditions under which its drafters are tried."""

    plain: LoadedEngine
    conditions: Sequence[Condition]
    on_delta: OnDelta

    def run(
        self, mode: str, requests: Sequence[Request], configs: Mapping[str, EngineConfig]
    ) -> Iterator[TokenComparison]:
        """The plain answers once, then those of every configuration, by drafter, under every condition."""
        expected = answers(self.plain, requests, ALONE, on_delta=self.on_delta)
        for name, answer in expected.items():
            if answer.finish_reason == "error":
                raise RequestError(f"Prompt {name} fails even without speculation: {answer.error}", "Leave it out.")
        for drafter, config in configs.items():
            for condition, tried in self._answers(drafter, config, requests, expected):
                yield compare_answers(expected, tried, mode=mode, drafter=drafter, condition=condition)

    def _answers(
        self,
        drafter: str,
        config: EngineConfig,
        requests: Sequence[Request],
        expected: Mapping[str, Completion],
    ) -> Iterator[tuple[Condition, dict[str, Completion]]]:
        """Each condition and its answers: the first on an engine without a prefix cache, the others on one with it."""
        from wager.cli.loading import open_engine

        texts = {request.id: [*request.prompt, *expected[request.id].token_ids] for request in requests}
        for group in (self.conditions[:1], self.conditions[1:]):
            cached = config.capacity.prefix_cache and group[0] is not ALONE
            informed = _informed_drafter(drafter, self.plain.spec.vocab, texts)
            engine = open_engine(config.with_options(prefix_cache=cached), like=self.plain, drafter=informed)
            initial_name = engine.drafter_name
            for condition in group:
                yield condition, answers(engine, requests, condition, on_delta=self.on_delta)
            engine.check()
            if engine.drafter_name != initial_name:
                raise WagerError(f"Drafter {drafter} failed during the proof.", "Without guesses nothing is proven.")


def _informed_drafter(name: str, vocab: int, texts: Mapping[str, Sequence[int]]) -> Drafter | None:
    """The drafters made for proofs, given the plain texts: the adversary, so that it is wrong every time; the random
    trees, so that accepted guesses lie scattered among rejected ones. None for the others."""
    from wager.draft.adversary import AdversaryDrafter
    from wager.draft.history import ReferenceOracle
    from wager.draft.random_tree import RandomTreeDrafter

    kinds = {"adversary": AdversaryDrafter, "random-tree": RandomTreeDrafter}
    kind = kinds.get(name)
    return kind(vocab, oracle=ReferenceOracle(texts)) if kind else None


def _report(comparisons: Sequence[TokenComparison], card: dict[str, Any], json_path: Path | None) -> None:
    differing = sum(trial.differing for trial in comparisons)
    tokens = sum(trial.tokens for trial in comparisons)
    if json_path:
        summary = {"tokens": tokens, "differing": differing}
        value = {"card": card, "outcomes": [trial.as_dict() for trial in comparisons], "summary": summary}
        console.write_json(value, json_path)
    columns = ["trial", "tokens", "differ", "τ", "guesses", "accepted", "preempted", "cached"]
    lines = [_line(trial) for trial in comparisons]
    title = f"{card['model']}, {card['kernels']['name']} kernels"
    console.table(title, columns, lines, to_stdout=str(json_path) != "-")
    for trial in (trial for trial in comparisons if trial.drafter != "none" and not trial.drafted):
        console.say(f"{trial.drafter}, {trial.mode}, {trial.condition}: made no guess, so this trial shows nothing.")
    if not differing:
        console.say(f"{tokens} token ids compared, none differs.")
        return
    raise _difference_error(comparisons, f"{differing} of {tokens} token ids differ")


def _difference_error(comparisons: Sequence[TokenComparison], count: str) -> WagerError:
    """The error that names the first difference."""
    trial, first = next((trial, trial.first) for trial in comparisons if trial.first)
    cause = f" ({first.error})" if first.error else ""
    return WagerError(
        f"{count}; first with {trial.drafter}, {trial.mode}, {trial.condition}: prompt {first.prompt}, "
        f"token {first.position}: plain {first.plain}, speculative {first.speculative}{cause}.",
        "This is a defect in wager: please report it with the output of --json.",
    )


def _line(trial: TokenComparison) -> list[str]:
    tau = trial.tokens / trial.rounds if trial.rounds else 0.0
    counts = (trial.drafted, trial.accepted, trial.preemptions, trial.prefix_hit_tokens)
    name = f"{trial.drafter}, {trial.mode}, {trial.condition}"
    return [name, str(trial.tokens), str(trial.differing), f"{tau:.2f}", *map(str, counts)]
