"""Every drafter on the same prompts in one table: tau, survival, cost, speed-up over plain decoding, and its bound.

    python dev/bench_drafters.py PROMPTS --drafter auto --drafter head=eagle3:PATH [--some layers:0-24]
        [--temperature 0] [--max-tokens 128] [--limit N] --results FILE.jsonl --write FILE.md
    python dev/bench_drafters.py --results FILE.jsonl --write FILE.md     (without measuring)

A drafter is named as for `wager run`, or LABEL=NAME. Every prompt is answered plainly and with every drafter in turns,
all on one copy of the weights, in an order that rotates; results are appended to --results after every turn, and the
same command goes on where it was ended. `--some` drafters answer --some-limit of the prompts. Before that each drafter
drafts at every position of the answers to --curve-limit prompts, which gives its survival by depth, and its drafting is
timed. Run `wager calibrate` before, and no other program meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from drafter_table import (
    PLAIN,
    DecodeSeconds,
    DrafterCurve,
    DrafterRuns,
    FixedRounds,
    RunFile,
    Turn,
    TurnAnswer,
    tables,
)

import wager
from wager.bench.machine import card
from wager.bench.measure import short_request
from wager.cli.measuring import to_requests
from wager.engine.proposer import Proposer
from wager.errors import UsageError, WagerError
from wager.loading.load import LoadedEngine, load
from wager.profiling.acceptance import AcceptanceCounts, record_drafts
from wager.profiling.calibrate import StepTimer, time_drafting
from wager.prompts import Prompt, read_prompts, spread
from wager.terminal.flags import Framing
from wager.types import Request, SamplingParams

DEEPEST = 7
CACHE_TOKENS = 16_384


@dataclass(frozen=True)
class Named:
    """A drafter and what it is called in the table; `some`: it answers fewer prompts."""

    label: str
    spec: str
    some: bool

    @classmethod
    def of(cls, text: str, *, some: bool) -> Named:
        label, equals, spec = text.partition("=")
        unnamed = not equals or ":" in label  # a path may hold an equals sign
        return cls(text, text, some) if unnamed else cls(label, spec, some)


class Measurement:
    """One target, the prompts, and the file of results."""

    def __init__(self, options: argparse.Namespace, drafters: Sequence[Named]) -> None:
        self.options, self.drafters = options, drafters
        config = wager.EngineConfig.from_options(
            model=options.model,
            dtype=options.dtype,
            drafter="none",
            prefix_cache=False,
            max_context=4096,
            cache_tokens=CACHE_TOKENS,
        )
        self.plain = load(config, report=say)
        self.prompts = spread(read_prompts(options.prompts), options.limit)
        self.some = {prompt.id for prompt in spread(self.prompts, options.some_limit)}
        self.file = RunFile(options.results)
        digest = hashlib.sha256("\n".join(prompt.text for prompt in read_prompts(options.prompts)).encode()).hexdigest()
        settings = {
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "max_tokens": options.max_tokens,
            "prompts": digest[:16],
        }
        kernels = {"name": self.plain.kernels.name, "reason": self.plain.kernels.reason}
        conditions = card(model=Path(options.model).name, kernels=kernels, settings=settings)
        conditions["apart_from"] = [self._check_apart(path) for path in options.apart_from]
        self.runs = self.file.begin(conditions, [drafter.label for drafter in drafters])

    def engine(self, spec: str, **options: object) -> LoadedEngine:
        return load(self.plain.target.config.with_options(drafter=spec, **options), target=self.plain.target)

    def requests(self, prompts: Sequence[Prompt], temperature: float) -> list[Request]:
        params = SamplingParams(max_tokens=self.options.max_tokens, temperature=temperature, seed=1)
        return to_requests(prompts, self.plain.tokenizer, framing=Framing(), params=params)

    def _check_apart(self, path: Path) -> str:
        """Refuse prompts that drafters were trained on: a file of prompts, or of answers with the ids of their prompts.
        Returns what was compared, in words."""
        measured = {_plain_text(prompt.text): prompt.id for prompt in self.prompts}
        asked = {request.prompt: request.id for request in self.requests(self.prompts, 0.0)}
        count = 0
        with path.open(encoding="utf-8") as file:
            for count, line in enumerate(file, 1):
                row = json.loads(line)
                text = row.get("prompt") or row.get("turns", [""])[0]
                same = asked.get(tuple(row["prompt_ids"])) if "prompt_ids" in row else measured.get(_plain_text(text))
                if same is not None:
                    raise UsageError(f"Prompt {same} is in {path}, line {count}.", "Measure on other prompts.")
        return f"{count:,} of {path.name}"

    # ---- curves ----------------------------------------------------------------------------------------------------

    def measure_curves(self, temperature: float) -> None:
        """The curve of every drafter that has none yet; a choice of several drafters has none."""
        for drafter in self.drafters:
            if "," in drafter.spec or self.runs.curve(temperature, drafter.label):
                continue
            begun = time.monotonic()
            curve = self._curve(drafter, temperature)
            self.runs.curves.append(curve)
            self.file.add_curve(curve)
            say(f"T {temperature:g}  {drafter.label}: curve in {time.monotonic() - begun:.0f} s")

    def _curve(self, drafter: Named, temperature: float) -> DrafterCurve:
        engine = self.engine(drafter.spec, policy="fixed", depth=1)
        [loaded] = engine.proposer.drafters.values()
        depth = min(DEEPEST, loaded.max_depth)
        draft_s, step_s = self._timed_drafting(engine, depth)
        engine = self.engine(drafter.spec, policy="fixed", depth=1)  # a new cache: timing wrote into the target's
        limit = self.options.some_limit // 4 if drafter.some else self.options.curve_limit
        prompts = spread(self.prompts, limit)
        recording = record_drafts(engine, self.requests(prompts, temperature), depth=depth, concurrency=8)
        found = AcceptanceCounts(recording.answers, depth).estimate()
        return DrafterCurve(
            drafter=drafter.label,
            temperature=temperature,
            prompts=len(prompts),
            trees=recording.trees,
            survival=tuple(each.value or 0.0 for each in found.survival),
            rounds=tuple(FixedRounds(each.tau.value or 1.0, each.lengths) for each in found.depths),
            draft_s=draft_s,
            step_s=step_s,
        )

    def _timed_drafting(self, engine: LoadedEngine, depth: int) -> tuple[tuple[float, ...], float]:
        """Seconds of drafting 1 to `depth` guesses for one request, and of the plain steps that ran between."""
        engine.target.claim_cache(None)
        [drafter] = engine.proposer.drafters.values()
        vocab = engine.target.decoder.vocab
        timer = StepTimer(engine.runner, max_context=engine.scheduler.max_context, longest=512, tokens=2048)
        timer.start_sequences((timer.limits.text_lengths()[-1],))
        steps: list[float] = []

        def plain_step() -> None:
            record = timer.step((0,))
            if record is not None:
                steps.append(sum(record.seconds.values()))

        curve = time_drafting(
            Proposer(drafter, vocab=vocab),
            vocab=vocab,
            hidden=engine.spec.hidden,
            seconds=2.0,
            clock=time.perf_counter,
            between=plain_step,
            batches=(1,),
        )
        timer.end_sequences()
        return tuple(curve.seconds_by_depth(1, range(1, depth + 1))), median(steps)

    # ---- turns -----------------------------------------------------------------------------------------------------

    def measure_turns(self, temperature: float) -> None:
        """Answer every prompt in turns, leaving out what is there already."""
        engines = {PLAIN: self.plain, **{each.label: self.engine(each.spec) for each in self.drafters}}
        used = {name: engine.drafter_name for name, engine in engines.items()}
        todo = [(place, prompt, self._missing(prompt, temperature)) for place, prompt in enumerate(self.prompts)]
        todo = [each for each in todo if each[2]]
        for engine in engines.values():  # the first answer maps memory
            engine.generate([short_request(self.requests(self.prompts[:1], temperature)[0])])
            engine.forget_requests()
        begun = time.monotonic()
        for done, (place, prompt, names) in enumerate(todo, 1):
            [request] = self.requests([prompt], temperature)
            first = place % (1 + len(names))
            order = [PLAIN, *names][first:] + [PLAIN, *names][:first]
            turn = _turn({name: engines[name] for name in order}, request, prompt, temperature)
            for name in order:
                if engines[name].drafter_name != used[name]:
                    raise WagerError(f"Drafter {name} failed at prompt {prompt.id}.", "Measure it alone to see why.")
            self.runs.turns.append(turn)
            self.file.add_turn(turn)
            if done % 10 == 0 or done == len(todo):
                each = (time.monotonic() - begun) / done
                say(f"T {temperature:g}  {done} of {len(todo)} prompts, {each * (len(todo) - done):.0f} s left")

    def _missing(self, prompt: Prompt, temperature: float) -> list[str]:
        measured = self.runs.measured(temperature, str(prompt.id))
        wanted = [each.label for each in self.drafters if not each.some or prompt.id in self.some]
        return [label for label in wanted if label not in measured]


def _turn(engines: Mapping[str, LoadedEngine], request: Request, prompt: Prompt, temperature: float) -> Turn:
    """One prompt's answers by all engines, in their order."""
    steps, completions = {}, {}
    for name, engine in engines.items():
        steps[name] = DecodeSeconds()
        engine.on_step = steps[name].add
        [completions[name]] = engine.generate([request])
        if completions[name].finish_reason == "error":
            raise WagerError(f"Prompt {prompt.id} failed with {name}: {completions[name].error}", "Leave it out.")
    plain = completions[PLAIN].token_ids
    answers = {
        name: TurnAnswer.of(completion.stats, steps[name], same=completion.token_ids == plain)
        for name, completion in completions.items()
    }
    return Turn(temperature, str(prompt.id), prompt.category, answers)


def _plain_text(text: str) -> str:
    """Letter case and blanks aside."""
    return " ".join(text.lower().split())


def page(runs: DrafterRuns) -> str:
    """The tables with their conditions."""
    settings, machine, kernels = runs.card["settings"], runs.card["machine"], runs.card["kernels"]["name"]
    processor = machine["cpu"] or machine["architecture"]
    head = (
        f"Model {runs.card['model']}, weights `{settings['dtype']}`, {kernels} kernels; answers of at most "
        f"{settings['max_tokens']} tokens; {machine['cores']} cores of {processor}; {runs.card['date'][:10]}."
    )
    if runs.card["apart_from"]:
        head += f" None of the prompts is among those trained on ({', '.join(runs.card['apart_from'])})."
    return f"{head}\n\n{tables(runs)}"


def write(runs: DrafterRuns, path: Path | None) -> None:
    """Put the tables behind the line of their marker in the file, or at its end; to stdout without a file."""
    text = page(runs)
    if path is None:
        sys.stdout.write(text)
        return
    marker = f"<!-- measured: {runs.card['settings']['dtype']} -->\n"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    head, found, rest = before.partition(marker)
    after = rest[rest.index("<!-- ") :] if found and "<!-- " in rest else ""
    path.write_text(f"{head}{marker}\n{text}{chr(10) + after if after else ''}", encoding="utf-8")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", help="without it nothing is measured")
    parser.add_argument("--drafter", action="append", default=[], help="[LABEL=]NAME[:ARG]; repeat it")
    parser.add_argument("--some", action="append", default=[], help="a drafter that answers fewer prompts")
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--model", default=wager.EngineConfig().model.model)
    parser.add_argument("--dtype", default="auto", help="as of wager run  [default: auto]")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="prompts, spread over the families  [default: all]")
    parser.add_argument("--some-limit", type=int, default=48)
    parser.add_argument("--curve-limit", type=int, default=48, help="prompts of the curves")
    parser.add_argument(
        "--apart-from",
        type=Path,
        action="append",
        default=[],
        help="prompts, or answers, that drafters were trained on: none may be measured",
    )
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--write", type=Path, help="Markdown file  [default: standard output]")
    options = parser.parse_args()
    drafters = [Named.of(text, some=False) for text in options.drafter]
    drafters += [Named.of(text, some=True) for text in options.some]
    if options.prompts is not None:
        measurement = Measurement(options, drafters)
        for temperature in options.temperature or [0.0]:
            measurement.measure_curves(temperature)
            measurement.measure_turns(temperature)
    runs = RunFile(options.results).read()
    if runs is None or not runs.turns:
        raise UsageError(f"{options.results} has no results.", "Name PROMPTS and drafters to measure.")
    write(runs, options.write)


if __name__ == "__main__":
    try:
        main()
    except WagerError as error:
        sys.exit(str(error))
