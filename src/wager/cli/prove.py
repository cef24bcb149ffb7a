"""`wager prove`: counts token ids and finish reasons that differ from plain decoding, for every drafter under several
conditions."""

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
from wager.bench.variety import TextVariety, variety_of
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
    """Run plain decoding against speculation on the prompts of FILE and count the token ids and finish reasons that
    differ.

    FILE is as for `wager bench`; without it a small set that comes with wager is used.

    Each drafter is tried with one request at a time, with several together, with forced preemption and with cached
    prefixes, greedy and sampled; with --temperature only at that temperature. Guesses are made at a fixed depth,
    whatever they cost, unless --policy is given. Exits with 1 if anything differs, naming the first. A trial in which
    nothing was preempted, cached or guessed says so, and so do plain texts that are nearly constant.
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
    varieties: list[TextVariety] = []
    with console.meter("answers") as update:
        trials = Trials(plain, conditions, count_answers(update, "Proving", total))
        for mode, mode_params in modes.items():
            requests = to_requests(prompts, plain.tokenizer, framing=framing, params=mode_params)
            expected = trials.plain_answers(requests)
            varieties.append(variety_of(mode, expected.values()))
            comparisons += trials.run(mode, requests, configs, expected)
    settings = {**settings_of(config, params, framing), "concurrency": concurrency}
    settings |= {"drafter": drafters, "temperature": [mode.temperature for mode in modes.values()]}
    _report(comparisons, varieties, card_of(config, plain, settings), json_path)


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
        if any(spec.models for spec in config.speculation.drafters):
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

    def plain_answers(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """What every trial is compared with; RequestError if one fails."""
        expected = answers(self.plain, requests, ALONE, on_delta=self.on_delta)
        for name, answer in expected.items():
            if answer.finish_reason == "error":
                raise RequestError(f"Prompt {name} fails even without speculation: {answer.error}", "Leave it out.")
        return expected

    def run(
        self,
        mode: str,
        requests: Sequence[Request],
        configs: Mapping[str, EngineConfig],
        expected: Mapping[str, Completion],
    ) -> Iterator[TokenComparison]:
        """The answers of every configuration, by drafter, under every condition, compared with the plain ones."""
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


def _report(
    comparisons: Sequence[TokenComparison],
    varieties: Sequence[TextVariety],
    card: dict[str, Any],
    json_path: Path | None,
) -> None:
    summary = {
        "tokens": sum(trial.tokens for trial in comparisons),
        "differing": sum(trial.differing for trial in comparisons),
        "finish_reasons": sum(trial.answers for trial in comparisons),
        "finish_reasons_differing": sum(trial.finish_reasons_differing for trial in comparisons),
    }
    warnings = [variety.warning for variety in varieties if variety.warning]
    if json_path:
        value = {"card": card, "plain": [variety.as_dict() for variety in varieties]}
        value |= {"outcomes": [trial.as_dict() for trial in comparisons], "summary": summary, "warnings": warnings}
        console.write_json(value, json_path)
    columns = ["trial", "tokens", "differ", "ends differ", "τ", "guesses", "accepted", "preempted", "cached"]
    notes = list(dict.fromkeys(note for trial in comparisons for note in trial.notes))
    columns += ["note"] if notes else []
    lines = [_line(trial, notes) for trial in comparisons]
    caption = "\n".join(f"Note {number}: {note}." for number, note in enumerate(notes, 1))
    title = f"{card['model']}, {card['kernels']['name']} kernels"
    console.table(title, columns, lines, to_stdout=str(json_path) != "-", caption=caption)
    for warning in warnings:
        console.say(f"Warning: {warning} Give other prompts, or a model whose texts vary.")
    if summary["differing"] or summary["finish_reasons_differing"]:
        raise _difference_error(comparisons, summary)
    console.say(f"{summary['tokens']} token ids and {summary['finish_reasons']} finish reasons compared, none differs.")


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
