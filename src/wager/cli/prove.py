"""`wager prove`: counts token ids and finish reasons that differ from plain decoding, for every drafter under several
conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wager.bench.comparison import CONDITIONS, answers, conditions
from wager.bench.variety import variety_of
from wager.bench.workload import Prompt
from wager.cli.bench import card_of, count_answers, settings_of, to_requests
from wager.cli.prove_report import Proof, earlier_trials
from wager.cli.prove_trials import Questions, Trials
from wager.config import EngineConfig
from wager.errors import UsageError
from wager.terminal import console, flags
from wager.testing.drafters import PROOF_DRAFTERS
from wager.types import RULES, SamplingParams, VerifyRule

if TYPE_CHECKING:
    from wager.loading.load import LoadedEngine

TEMPERATURE = 0.8
"""The temperature of sampled texts without --temperature."""

DRAFTERS = ("none", "ngram", "adversary", "random-tree")


@click.command("prove", cls=flags.Verb)
@flags.prompts_flags(limit=8)
@flags.framing_flags
@flags.engine_flags(drafter=flags.drafter_flag(several=True, default=DRAFTERS, further=PROOF_DRAFTERS))
@flags.sampling_flags(max_tokens=64, temperature=None, seed=0)
@click.option(
    "--concurrency",
    type=click.IntRange(2, flags.MOST_CONCURRENT),
    default=8,
    show_default=True,
    metavar="N",
    help="Requests that run together in the trials where several do.",
)
@click.option(
    "--condition",
    "names",
    type=click.Choice(CONDITIONS),
    multiple=True,
    default=CONDITIONS,
    show_default=True,
    help="How requests are served. Repeat it to choose several.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the file of --json, which is written after every drafter: those that it has are not tried again.",
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
    resume: bool,
    json_path: Path | None,
) -> None:
    """Run plain decoding against speculation on the prompts of FILE and count the token ids and finish reasons that
    differ.

    FILE is as for `wager bench`; without it a small set that comes with wager is used.

    Each drafter is tried with one request at a time, with several together, with forced preemption and with cached
    prefixes, greedy and sampled; with --temperature only at that temperature. Guesses are made at a fixed depth,
    whatever they cost, unless --policy is given or several drafters take part. Exits with 1 if anything differs or a
    drafter fails that is not made to, naming the first. A trial in which nothing was preempted, cached or guessed says
    so, and so do plain texts that are nearly constant.
    """
    modes = _modes(params, sampled=sampled, verify=config.speculation.verify)
    drafters = tuple(dict.fromkeys(_leave_out_trees(drafters, config.speculation.verify)))
    configs = {drafter: _with_drafter(config, drafter) for drafter in drafters}
    settings = {**settings_of(config, params, framing), "concurrency": concurrency, "conditions": names}
    settings |= {"drafter": drafters, "temperature": [mode.temperature for mode in modes.values()]}
    done = earlier_trials(json_path, settings) if resume else {}
    configs = {drafter: each for drafter, each in configs.items() if drafter not in done}
    plain = _open_plain(config, configs)
    chosen = [each for name, each in conditions(concurrency).items() if name in names]
    chosen = [each for each in chosen if config.capacity.prefix_cache or not each.warm]
    proof = Proof(card_of(config, plain, settings), json_path, [trial for each in done.values() for trial in each])
    total = len(modes) * len(prompts) * (1 + len(configs) * len(chosen))
    with console.meter("answers") as update:
        trials = Trials(plain, chosen, count_answers(update, "Proving", total), answers)
        questions = _questions(prompts, framing, modes, trials)
        proof.varieties = [variety_of(each.mode, each.plain.values()) for each in questions]
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


def _questions(
    prompts: Sequence[Prompt], framing: flags.Framing, modes: Mapping[str, SamplingParams], trials: Trials
) -> list[Questions]:
    """The requests of each mode, answered plainly."""
    found = []
    for mode, params in modes.items():
        requests = to_requests(prompts, trials.plain.tokenizer, framing=framing, params=params)
        found.append(Questions(mode, requests, trials.plain_answers(requests)))
    return found


def _leave_out_trees(drafters: tuple[str, ...], verify: VerifyRule) -> tuple[str, ...]:
    """The default drafters without those that make trees, under a rule that verifies none; others stay."""
    if drafters != DRAFTERS or RULES[verify].verifies_trees:
        return drafters
    kept = tuple(name for name in drafters if name != "random-tree")
    console.say(f"--verify {verify} verifies chains: {', '.join(sorted({*drafters} - {*kept}))} is left out.")
    return kept


def _open_plain(config: EngineConfig, configs: Mapping[str, EngineConfig]) -> LoadedEngine:
    """The engine for the plain answers. Its cache leaves memory for each of the drafters, what their models and heads
    cache included."""
    from wager.cli.loading import open_engine

    plain = config.with_options(drafter="none", prefix_cache=False)
    return open_engine(plain, besides=[each.with_options(prefix_cache=False) for each in configs.values()])


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
