"""What learning from traffic (--learn) brings, and what it costs where nothing repeats.

    python dev/bench_learning.py curve PROMPTS --answers FILE [--model M] [--requests 1000] [--measured 48]
        [--max-tokens 128] [--drafter suffix] [--json PATH]
    python dev/bench_learning.py curve --edits REPOSITORY [--model M] [--requests 1000] [--measured 48] [...]
    python dev/bench_learning.py curve --traces FOLDER [--model M] [--requests 1000] [--measured 48] [...]
    python dev/bench_learning.py drafts PROMPTS --answers FILE --unrelated FOLDER [...as for a curve]
    python dev/bench_learning.py cost PROMPTS [--model M] [--drafter suffix] [--requests 100] [--together 1]
        [--unrelated FOLDER]

curve: tau after 0, 10, 100, ... learned requests and after a restart, of the same --measured requests, from what was
learned alone. Every prompt is asked again and again with other numbers and names, in random order; FILE holds the
answers, which the model gives once (greedily) and which are then drafted along, since they do not depend on guesses.
With --edits the requests are the changes of files in a repository's history, as diffs, in their order, and with
--traces the turns of an agent, in SWE-agent's files (NAME.traj) in the order of their paths; no model runs.
Where arctic_inference can be imported, the suffix method of vLLM is measured on the same requests in the same order.

drafts: microseconds of a draft of at most 15 guesses along the same answers, without learning and with FOLDER, which
was learned in.

cost: every prompt once, so many --together, by an engine that learns and one that does not, in turns, with one copy of
the weights. Ratios of what decoding takes once all have their first token: seconds, and processor seconds of the
engine's thread, which other programs disturb less. --unrelated is a folder that was learned in, of other texts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import wager
from wager.draft.corpus.learning import LearnedTexts
from wager.draft.lookup import LookupDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.drafter_spec import DrafterSpec
from wager.loading.drafters import shipped_store
from wager.loading.load import LoadedEngine, load
from wager.models.opening import open_model, tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.profiling.acceptance import DraftedAnswer, PositionDraft, replay_drafts
from wager.prompts import Prompt, encode_answer, read_prompts, spread
from wager.terminal.flags import Framing
from wager.types import DraftRequest, Request, SamplingParams

DEPTH = 15
"""Guesses of a round, at most."""

_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}")
_NUMBER = re.compile(r"\d+")
_LONGEST_FILE, _LONGEST_DIFF = 24_000, 6_000  # characters


class Recorded(NamedTuple):
    """A request of a kind, and its answer, in token ids."""

    kind: str
    prompt: Sequence[int]
    answer: Sequence[int]


class Tau(NamedTuple):
    """Tokens and guesses of a round."""

    tau: float
    guesses: float


# ---- requests --------------------------------------------------------------------------------------------------------


def varied(text: str, pool: Sequence[str], seed: int) -> str:
    """The text with other numbers of as many digits, and other names, the same one for the same."""
    rng = random.Random(f"{seed} {text}")
    names = {name: rng.choice(pool) for name in sorted(set(_NAME.findall(text)))}
    text = _NAME.sub(lambda match: names[match[0]], text)
    return _NUMBER.sub(lambda match: "".join(rng.choice("123456789") for _ in match[0]), text)


def asked_again(prompts: Sequence[Prompt], *, requests: int, measured: int) -> Iterator[tuple[str, str]]:
    """Kinds and texts of `requests` in random order, every prompt about as often, then of `measured` others, spread
    over the prompts' categories."""
    pool = sorted({name for prompt in prompts for name in _NAME.findall(prompt.text)})
    chosen = [(prompts[number % len(prompts)], number // len(prompts)) for number in range(requests)]
    random.Random(0).shuffle(chosen)
    chosen += [(prompt, -1) for prompt in spread(prompts, measured)]
    for prompt, seed in chosen:
        yield prompt.category, prompt.text if seed == 0 else varied(prompt.text, pool, seed)


def answered(options: argparse.Namespace) -> list[Recorded]:
    """The requests of `asked_again` with the model's answers, from the file; those that it lacks are asked."""
    asked = list(asked_again(read_prompts(options.prompts), requests=options.requests, measured=options.measured))
    options.answers.touch()
    have = len(options.answers.read_text(encoding="utf-8").splitlines())
    if have < len(asked):
        engine = load(wager.EngineConfig.from_options(model=options.model, max_context=2048, max_sequences=16))
        params = SamplingParams(max_tokens=options.max_tokens, temperature=0)
        for first in range(have, len(asked), 32):
            some = asked[first : first + 32]
            prompts = [tuple(Framing().encode(engine.tokenizer, text)) for _, text in some]
            answers = engine.generate([Request(str(number), prompt, params) for number, prompt in enumerate(prompts)])
            with options.answers.open("a", encoding="utf-8") as file:
                for (kind, _), prompt, answer in zip(some, prompts, answers, strict=True):
                    file.write(json.dumps({"category": kind, "prompt": prompt, "answer": answer.token_ids}) + "\n")
    rows = map(json.loads, options.answers.read_text(encoding="utf-8").splitlines())
    return [Recorded(row["category"], row["prompt"], row["answer"]) for row in rows if row["answer"]]


def edits(repository: Path, tokenizer: Tokenizer, most: int) -> list[Recorded]:
    """The latest changes of files in the history, the oldest first: the file before and the commit's subject as the
    prompt, the diff as the answer."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(repository), *words], check=True, capture_output=True, text=True, errors="replace"
        ).stdout

    found: list[Recorded] = []
    for line in git("log", "--no-merges", "--format=%H %s").splitlines():
        commit, _, subject = line.partition(" ")
        names = git("diff-tree", "-r", "--root", "--no-commit-id", "--name-only", "--diff-filter=M", commit)
        for name in reversed(names.splitlines()):
            before = git("show", f"{commit}^:{name}")
            diff = git("diff", "--no-color", f"{commit}^", commit, "--", name).partition("\n@@")[2]
            if len(before) <= _LONGEST_FILE and 0 < len(diff) <= _LONGEST_DIFF:
                asked = f"{subject}\n\n{name}:\n{before}\n"
                found.append(Recorded(Path(name).suffix, tokenizer.encode_text(asked), tokenizer.encode_text(diff)))
            if len(found) == most:
                return found[::-1]
    return found[::-1]


def turns(folder: Path, tokenizer: Tokenizer, most: int) -> list[Recorded]:
    """The last turns of SWE-agent's trajectories, of each message that the agent wrote: all before it is the prompt."""
    found: list[Recorded] = []
    for path in sorted(folder.rglob("*.traj")):
        history = json.loads(path.read_text(encoding="utf-8"))["history"]
        said = [message for message in history if not message.get("is_demo")]
        while said and said[-1]["role"] != "assistant":
            said.pop()
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as log:
            log.write(json.dumps({"conversation": said}))
            log.flush()
            for each in read_prompts(Path(log.name)):
                asked, answer = Framing().encode(tokenizer, each.content), encode_answer(tokenizer, each.answer)
                found.append(Recorded(str(path.relative_to(folder)), asked, answer))
    return [each for each in found if each.answer][-most:]


def requests(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Recorded]:
    most = options.requests + options.measured
    if options.edits:
        return edits(options.edits, tokenizer, most)
    return turns(options.traces, tokenizer, most) if options.traces else answered(options)


# ---- drafting along --------------------------------------------------------------------------------------------------


def tau_of(answers: Iterable[DraftedAnswer]) -> Tau:
    rounds = [each for answer in answers for each in answer.rounds_at(DEPTH)]
    drafted, accepted = sum(each.drafted for each in rounds), sum(each.accepted for each in rounds)
    return Tau(1 + accepted / len(rounds), drafted / len(rounds))


def drafter_of(name: str, tokenizer: Tokenizer, learned: LearnedTexts | None) -> LookupDrafter:
    """suffix, or the store that comes with wager (auto)."""
    store = shipped_store(tokenizer) if name == "auto" else None
    spec = DrafterSpec("suffix") if store is None else DrafterSpec("store", str(store.path))
    drafter = build_drafter(spec, DrafterParts(num_tokens(tokenizer), store=store, learned=learned))
    assert isinstance(drafter, LookupDrafter)
    return drafter


def from_learned(drafter: LookupDrafter, measured: Sequence[Recorded]) -> Tau:
    """Of drafts along the answers, from what was learned alone: what the drafter remembers is forgotten before each."""
    found: list[DraftedAnswer] = []
    for each in measured:
        drafter.forget()
        found += replay_drafts(drafter, [(each.prompt, each.answer)], depth=DEPTH).answers
    return tau_of(found)


def learn_and_measure(
    name: str, tokenizer: Tokenizer, measured: Sequence[Recorded], texts: Sequence[Recorded], folder: Path
) -> Tau:
    learned = LearnedTexts(folder, tokenizer_fingerprint(tokenizer))
    try:
        learned.corpus("")
        learned.learn_all((each.prompt, each.answer) for each in texts)
        return from_learned(drafter_of(name, tokenizer, learned), measured)
    finally:
        learned.close()


def vllm_suffix(texts: Sequence[Recorded], measured: Sequence[Recorded]) -> Tau:
    """With vLLM's defaults: trees of depth 24, guesses of probability 0.1, as many as the match is long. Nothing
    leaves."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

    cache = SuffixDecodingCache(max_tree_depth=24)
    for number, each in enumerate(texts):
        cache.start_request(number, list(each.prompt))
        cache.add_active_response(number, list(each.answer))
        cache.stop_request(number)
    found: list[DraftedAnswer] = []
    for each in measured:
        cache.start_request("measured", list(each.prompt))
        text, drafts = list(each.prompt), list[PositionDraft]()
        for token in each.answer:
            draft = cache.speculate("measured", text[-24:], max_spec_tokens=DEPTH)
            drafts.append(PositionDraft(DEPTH, tuple(draft.token_ids)))
            cache.add_active_response("measured", [token])
            text.append(token)
        cache.stop_request("measured")
        cache.evict_cached_response("measured")
        found.append(DraftedAnswer.of(each.answer, drafts, prompt_tokens=len(each.prompt)))
    return tau_of(found)


def curve(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = open_model(options.model)[2]
    every = requests(options, tokenizer)
    before, measured = every[: -options.measured], every[-options.measured :]
    counts = [0, *(10**power for power in range(1, 9) if 10**power < len(before)), len(before)]
    methods: dict[str, Callable[[Sequence[Recorded], Path], Tau]] = {}
    for name in options.drafter:
        methods[name] = partial(learn_and_measure, name, tokenizer, measured)
    try:
        import arctic_inference.suffix_decoding  # type: ignore[import-not-found]  # noqa: F401

        methods["vLLM's suffix"] = lambda texts, _: vllm_suffix(texts, measured)
    except ImportError:
        print("arctic_inference is not here: vLLM's suffix method is left out")
    found: dict[str, Any] = {
        "requests": len(every),
        "answer_tokens": sum(len(each.answer) for each in every),
        "measured_tokens": sum(len(each.answer) for each in measured),
    }
    for name, method in methods.items():
        rows = found[name] = {}
        for count in counts:  # those just before the measured ones
            with tempfile.TemporaryDirectory() as folder:
                rows[count] = method(before[len(before) - count :], Path(folder))
                if count == counts[-1]:
                    rows["after a restart"] = method([], Path(folder))
            print(name, count, rows[count], flush=True)
    return found


# ---- what it costs ---------------------------------------------------------------------------------------------------


def drafts(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer, params, found = open_model(options.model)[2], SamplingParams(), dict[str, Any]()
    every = requests(options, tokenizer)
    learned = LearnedTexts(options.unrelated, tokenizer_fingerprint(tokenizer))
    try:
        learned.corpus("")
        learned.settle()
        for name, corpora in (("not learning", None), ("learning", learned)):
            drafter, seconds, guesses = drafter_of(options.drafter[0], tokenizer, corpora), list[float](), 0
            for number, each in enumerate(every):
                seq_id, at = str(number), 0
                drafter.begin(seq_id, each.prompt, params)
                while at < len(each.answer):
                    request = DraftRequest(seq_id, len(each.prompt) + at, DEPTH, params, 0)
                    started = time.perf_counter()
                    [draft] = drafter.propose([request])
                    if at:  # the first one indexes the prompt
                        seconds.append(time.perf_counter() - started)
                        guesses += len(draft)
                    ahead = each.answer[at:]
                    right = takewhile(lambda pair: pair[0] == pair[1], zip(draft.tokens, ahead, strict=False))
                    made = 1 + sum(1 for _ in right)
                    drafter.accept(seq_id, ahead[:made])
                    at += made
                drafter.end(seq_id)
            microseconds = [round(1e6 * each, 1) for each in quantiles(seconds)]
            found[name] = {"drafts": len(seconds), "guesses": guesses / len(seconds), "quartiles_us": microseconds}
    finally:
        learned.close()
    return found


def cost(options: argparse.Namespace) -> dict[str, Any]:
    together = options.together
    config = wager.EngineConfig.from_options(
        model=options.model,
        drafter=options.drafter[0],
        max_context=2048,
        max_sequences=together,
        cache_tokens=8192 + 1024 * together,
        prefix_cache=False,
    )
    prompts = spread(read_prompts(options.prompts), options.requests)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0)

    def ask(engine: LoadedEngine, some: Sequence[Prompt]) -> tuple[dict[str, list[int]], list[float]]:
        """The answers, and what decoding them took, as in `ratios`."""
        answers: dict[str, list[int]] = {}
        for number, prompt in enumerate(some):
            engine.add(Request(str(number), Framing().encode(engine.tokenizer, prompt.text), params))
        seconds = processor_seconds = 0.0
        while engine.busy:
            if len(answers) == len(some) and not seconds:
                seconds, processor_seconds = time.perf_counter(), time.thread_time()
            for delta in engine.step():
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        return answers, [time.perf_counter() - seconds, time.thread_time() - processor_seconds]

    plain = load(config)
    with tempfile.TemporaryDirectory() as empty:
        engine = load(config.with_options(learn=str(options.unrelated or empty)), target=plain.target)
        assert engine.learned is not None
        engine.learned.settle()
        ratios: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}
        for number in range(0, len(prompts), together):
            some = prompts[number : number + together]
            pair = [plain, engine] if number // together % 2 else [engine, plain]
            found = {each is engine: ask(each, some) for each in pair}
            if found[True][0] != found[False][0]:
                raise SystemExit(f"{some[0].id}: another text")
            for ratio, learns, plainly in zip(ratios.values(), found[True][1], found[False][1], strict=True):
                ratio.append(learns / plainly)
        engine.close()
    names = "lower_quartile", "median", "upper_quartile"
    return {name: dict(zip(names, quantiles(each), strict=True)) for name, each in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curve", "drafts", "cost"])
    parser.add_argument("prompts", type=Path, nargs="?")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--edits", type=Path)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--measured", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--unrelated", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.drafter = options.drafter or ["suffix"]
    options.requests = options.requests or (100 if options.what == "cost" else 1000)
    if not (options.edits or options.traces or (options.prompts and (options.answers or options.what == "cost"))):
        parser.error("give PROMPTS, for a curve with --answers, or --edits, or --traces")
    if options.what == "drafts" and not options.unrelated:
        parser.error("give --unrelated")
    found = {"curve": curve, "drafts": drafts, "cost": cost}[options.what](options)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
