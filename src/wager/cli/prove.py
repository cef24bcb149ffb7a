"""`wager prove`: is the text the same? Plain decoding against every drafter, under everything that must not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.bench.sameness import COLD, Comparison, Condition, Watch, answers, hardships, judge
from wager.bench.workload import Prompt
from wager.cli import console, flags
from wager.cli.bench import count_answers, to_requests
from wager.config import EngineConfig
from wager.draft import roster
from wager.errors import RequestError, UsageError, WagerError
from wager.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from wager.build.load import LoadedEngine
    from wager.draft.base import Drafter

TEMPERATURE = 0.8
"""Of the sampled half of the proof, when no --temperature is given."""

DRAFTERS = ("none", "ngram", "adversary", "random-tree")


@click.command("prove")
@flags.prompts_flags(limit=8)
@flags.framing_flags
@flags.engine_flags(drafter=flags.drafter_flag(several=True, default=DRAFTERS))
@flags.sampling_flags(max_tokens=64, temperature=None, seed=0)
@click.option("--concurrency", type=click.IntRange(min=2), default=8, show_default=True, metavar="N",
              help="Requests that run together in the trials with company.")  # fmt: skip
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

    Each drafter is tried alone, in company, with forced preemption and with warm prefixes, greedy and sampled; with
    --temperature only at that temperature. Guesses are made at a fixed depth, whether they pay or not, unless --policy
    says otherwise. Exits with 1 if any token differs, naming the first that does.
    """
    from wager.bench import report

    if config.policy is None:
        config = replace(config, policy="fixed")
    modes = _modes(params, sampled=sampled, verify=config.verify)
    console.check_writable(json_path)
    plain = _open_plain(config, drafters)
    conditions = (COLD, *hardships(concurrency)) if config.prefix_cache else (COLD, *hardships(concurrency)[:1])
    total = len(modes) * len(prompts) * (1 + len(drafters) * len(conditions))
    outcomes: list[Comparison] = []
    with console.meter("answers") as update:
        proof = Proof(plain, config, conditions, count_answers(update, "Proving", total))
        for mode, mode_params in modes.items():
            requests = to_requests(prompts, plain.tokenizer, framing=framing, params=mode_params)
            outcomes += proof.run(mode, requests, drafters)
    settings = {**asdict(config), **asdict(params), **asdict(framing), "concurrency": concurrency}
    settings |= {"drafter": drafters, "temperature": [mode.temperature for mode in modes.values()]}
    kernels = {"name": plain.kernels.name, "reason": plain.kernels.reason}
    _report(outcomes, report.card(model=config.model, kernels=kernels, settings=settings), json_path)


def _open_plain(config: EngineConfig, drafters: Sequence[str]) -> LoadedEngine:
    """The engine of the plain answers. The memory is divided as for a drafter that needs some, if there is one."""
    from wager.cli.loading import open_engine

    cold = replace(config, drafter="none", prefix_cache=False)
    hungry = [names for names in drafters if any(name == "model" for name, _ in roster(names))]
    return open_engine(cold, like=open_engine(replace(cold, drafter=hungry[0])) if hungry else None)


def _modes(params: SamplingParams, *, sampled: bool, verify: str) -> dict[str, SamplingParams]:
    """The sampling modes to prove: the one asked for, or greedy and sampled."""
    greedy = {"greedy": replace(params, temperature=0.0)}
    if verify != "match":
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
class Proof:
    """One loaded model and what it is to be put through."""

    plain: LoadedEngine
    config: EngineConfig
    conditions: Sequence[Condition]
    watch: Watch

    def run(self, mode: str, requests: Sequence[Request], drafters: Sequence[str]) -> Iterator[Comparison]:
        """The plain answers once, then every drafter under every condition."""
        expected = answers(self.plain, requests, COLD, watch=self.watch)
        for name, answer in expected.items():
            if answer.finish_reason == "error":
                raise RequestError(f"Prompt {name} fails even without speculation: {answer.error}", "Leave it out.")
        for drafter in drafters:
            for condition, found in self._trials(drafter, requests, expected):
                yield judge(expected, found, mode=mode, drafter=drafter, condition=condition)

    def _trials(
        self, drafter: str, requests: Sequence[Request], expected: Mapping[str, Completion]
    ) -> Iterator[tuple[Condition, dict[str, Completion]]]:
        """Each condition and its answers: the first on an engine that keeps nothing, the others on one that does."""
        from wager.cli.loading import open_engine

        for group in (self.conditions[:1], self.conditions[1:]):
            cached = self.config.prefix_cache and group[0] is not COLD
            seeing = _seeing(drafter, self.plain, {r.id: [*r.prompt, *expected[r.id].token_ids] for r in requests})
            config = replace(self.config, drafter=drafter, prefix_cache=cached)
            engine = open_engine(config, like=self.plain, drafter=seeing)
            begun = engine.drafter_name
            for condition in group:
                yield condition, answers(engine, requests, condition, watch=self.watch)
            engine.check()
            if engine.drafter_name != begun:
                raise WagerError(f"Drafter {drafter} failed during the proof.", "A silent drafter proves nothing.")


def _seeing(name: str, plain: LoadedEngine, texts: Mapping[str, Sequence[int]]) -> Drafter | None:
    """The drafters made for proofs, shown the plain text: the adversary, so that it is wrong every time; the random
    trees, so that accepted guesses lie scattered among rejected ones. None for the others."""
    from wager.testing import AdversaryDrafter, RandomTreeDrafter, ReferenceOracle

    kinds = {"adversary": AdversaryDrafter, "random-tree": RandomTreeDrafter}
    kind = kinds.get(name)
    return kind(plain.spec.vocab, oracle=ReferenceOracle(texts)) if kind else None


def _report(outcomes: Sequence[Comparison], card: dict[str, Any], json_path: Path | None) -> None:
    differing = sum(outcome.differing for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    if json_path:
        summary = {"tokens": tokens, "differing": differing}
        value = {"card": card, "outcomes": [outcome.as_dict() for outcome in outcomes], "summary": summary}
        console.write_json(value, json_path)
    columns = ["trial", "tokens", "differ", "τ", "guesses", "accepted", "preempted", "cached"]
    lines = [_line(outcome) for outcome in outcomes]
    title = f"{card['model']}, {card['kernels']['name']} kernels"
    console.table(title, columns, lines, to_stdout=str(json_path) != "-")
    for silent in (o for o in outcomes if o.drafter != "none" and not o.drafted):
        console.say(
            f"{silent.drafter}, {silent.mode}, {silent.condition}: made no guess, so this trial proves nothing."
        )
    if not differing:
        console.say(f"{tokens} token ids compared, none differs.")
        return
    raise _broken(outcomes, f"{differing} of {tokens} token ids differ")


def _broken(outcomes: Sequence[Comparison], count: str) -> WagerError:
    """The error that names the first difference."""
    where, first = next((outcome, outcome.first) for outcome in outcomes if outcome.first)
    cause = f" ({first.error})" if first.error else ""
    return WagerError(
        f"{count}; first with {where.drafter}, {where.mode}, {where.condition}: prompt {first.prompt}, "
        f"token {first.position}: plain {first.plain}, speculative {first.speculative}{cause}.",
        "This breaks wager's first promise; please report it with what --json says.",
    )


def _line(outcome: Comparison) -> list[str]:
    tau = outcome.tokens / outcome.rounds if outcome.rounds else 0.0
    counts = (outcome.drafted, outcome.accepted, outcome.preemptions, outcome.prefix_hit_tokens)
    trial = f"{outcome.drafter}, {outcome.mode}, {outcome.condition}"
    return [trial, str(outcome.tokens), str(outcome.differing), f"{tau:.2f}", *map(str, counts)]
