"""Learning in an engine: texts are the same with it, while a corpus grows and after restarts, and guesses come from it;
what is refused; `wager corpus` on what was learned."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from wager import LLM, SamplingParams, UsageError
from wager.cli import main
from wager.draft.corpus import learning
from wager.draft.corpus.files import Segment
from wager.models.opening import open_model, tokenizer_fingerprint
from wager.types import Completion

MODEL = "random:llama:tiny"
OPTIONS: dict[str, Any] = dict(model=MODEL, threads=1, max_context=256, max_sequences=4)
PROMPTS = [[1 + number % 3, 5, 6, 7, 8 + number % 5] for number in range(15)]
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
SAMPLED = [
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=3, n=2),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=4, repetition_penalty=1.2),
]


def opened(folder: Path | None, drafter: str = "suffix", **options: Any) -> LLM:
    return LLM(**{**OPTIONS, "drafter": drafter, "depth": 6, "learn": folder, **options})


def answers(llm: LLM, params: SamplingParams) -> list[Completion]:
    return [each for prompt in PROMPTS for each in llm.generate([prompt], params)]


def ids(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


def tau(completions: Sequence[Completion]) -> float:
    return sum(len(each.token_ids) for each in completions) / sum(each.stats.rounds for each in completions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", ["suffix", *(pytest.param(each, marks=pytest.mark.slow) for each in ("suffix:tree", "layers:0+suffix"))]
)
def test_texts_are_the_same_while_a_corpus_grows_and_after_restarts(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "SEAL_TOKENS", 100)  # it is built and swapped all the time
    with opened(None, "none", depth=None) as llm:
        plain = [ids(answers(llm, params)) for params in (GREEDY, *SAMPLED)]
    lengths: list[float] = []
    for _ in range(3):
        with opened(tmp_path, drafter) as llm:
            found = [answers(llm, params) for params in (GREEDY, *SAMPLED)]
            assert [ids(each) for each in found] == plain
            lengths.append(tau(found[0]))
            assert llm.engine.learned is not None
            llm.engine.learned.settle()
    if drafter.startswith("suffix"):
        assert max(lengths[1:]) > 1.2 * lengths[0], lengths  # on a busy machine the second may not have read it yet
    [tenant] = (path for path in tmp_path.glob("*/*") if path.is_dir())
    assert list(tenant.glob("*.segment"))


def test_a_swap_between_two_tokens_changes_guesses_alone(tmp_path: Path) -> None:
    with opened(None, "none", depth=None) as llm:
        [plain] = llm.generate([PROMPTS[0]], GREEDY)
    with opened(tmp_path) as llm:
        llm.generate([PROMPTS[0]], GREEDY)
        learned, found = llm.engine.learned, []
        assert learned is not None
        llm.engine.forget_requests()
        stream = llm.stream(PROMPTS[0], GREEDY)
        for number, delta in enumerate(stream):
            found += delta.token_ids
            if number == 5:
                learned.seal()
            if number == 9:
                learned.corpus("").set([])
        [again] = stream.completions()
    assert tuple(found) == plain.token_ids == again.token_ids
    assert again.stats.accepted > 0


def test_scored_prompts_and_prompts_themselves_are_not_learned(tmp_path: Path) -> None:
    from wager.types import Grammar

    secret = list(range(40, 80))
    with opened(tmp_path) as llm:
        llm.generate([[*secret, 5, 6, 7, 8, 9]], SamplingParams(max_tokens=8, ignore_eos=True))
        llm.generate([[1]], SamplingParams(max_tokens=40, ignore_eos=True, grammar=Grammar.tokens(secret)))
        learned = llm.engine.learned
        assert learned is not None
        learned.seal()
        assert learned.corpus("").find(secret[:20], 2) == (0, [])
        assert learned.corpus("").find([5, 6, 7], 2)[0] == 3
    with opened(tmp_path / "p", learn_prompts=True) as llm:
        llm.generate([secret], SamplingParams(max_tokens=8, ignore_eos=True))
        learned = llm.engine.learned
        assert learned is not None
        learned.seal()
        assert learned.corpus("").find(secret[:20], 2) == (20, [(secret[20], 1)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "ngram"}, "Nothing reads what is learned"),
        ({"drafter": "none", "depth": None}, "Nothing reads what is learned"),
        ({"depth": 0}, "Nothing reads what is learned"),
        ({"learn_days": 0}, "learn_days"),
        ({"learn_bytes": 5}, "learn_bytes"),
        ({"learn_prompts": 1}, "learn_prompts"),
        ({"learn": ""}, "learn"),
        ({"learn": "/dev/null"}, "Nothing can be learned in /dev/null"),
    ],
)
def test_what_cannot_be_learned_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        opened(tmp_path, **options)
    opened(tmp_path).close()  # what was refused holds no lock


def test_acceptance_recycled_tokens_and_rates_are_kept_for_later_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"depth": None, "learn": tmp_path}
    with opened(None, "none", depth=None) as llm:
        plain = ids(answers(llm, GREEDY))

    def estimates(llm: LLM) -> Any:
        policies: Any = llm.engine.policy
        return [model.estimates() for model in policies.policy.policy.acceptance.values()]

    with opened(None, "suffix,recycle", **{**options, "learn": None}) as llm:
        blank = estimates(llm)
    with opened(None, "suffix,recycle", **options) as llm:
        assert ids(answers(llm, GREEDY)) == plain
        learned = estimates(llm)
        assert learned != blank
    states = sorted(tmp_path.glob("*/*/*.state"))
    assert [path.name for path in states] == ["acceptance.state", "recycle.state", "suffix.state"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in states)

    def rates(llm: LLM) -> Any:
        return llm.engine.proposer.drafters["suffix"]._tables.get("").found()

    with opened(None, "suffix,recycle", **options) as llm:
        assert estimates(llm) == learned, "they go on"
        assert llm.engine.learned is not None
        llm.engine.learned.settle()
        prior = rates(llm)
        assert ids(answers(llm, GREEDY)) == plain
        found = rates(llm)
        assert found != prior
    with opened(None, "suffix,recycle", **options) as llm:
        assert rates(llm) == found
        [first] = llm.generate([PROMPTS[0]], GREEDY)
        assert first.token_ids == plain[0]
    for path in tmp_path.glob("*/*/*.state"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with opened(None, "suffix,recycle", **options) as llm:
        assert estimates(llm) == blank and rates(llm) == prior
        assert ids(answers(llm, GREEDY)) == plain
    assert caplog.text.count("is damaged: it begins anew") == 3


# ---- wager corpus ----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_was_learned_is_listed_shown_exported_imported_and_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "learned", tmp_path / "texts.jsonl"
    with opened(folder) as llm:
        expected = sorted([*prompt, *ids(llm.generate([prompt], GREEDY))[0]] for prompt in PROMPTS)
    code, out, _ = run(capsys, "corpus", "list", folder, "--json", "-")
    [listed] = json.loads(out)["tenants"]
    assert code == 0 and listed["texts"] == 15 and listed["tokens"] == 15 * 65
    code, out, _ = run(capsys, "corpus", "show", folder, "--limit", 3, "--model", MODEL, "--json", "-")
    shown = json.loads(out)["texts"]
    assert code == 0 and len(shown) == 3 and shown[0]["text"] and shown[0]["token_ids"] in expected
    assert run(capsys, "corpus", "export", folder, "--output", file)[0] == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted([*row["prompt"], *row["answer"]] for row in rows) == expected
    assert file.stat().st_mode & 0o777 == 0o600

    file.write_text(file.read_text() + '{"prompt": [1], "answer": [4294967296]}\n')
    code, _, err = run(capsys, "corpus", "import", tmp_path / "other", "--file", file, "--model", MODEL)
    assert code == 2 and "has token ids that" in err
    file.write_text(file.read_text().rsplit("{", 1)[0])

    copy = tmp_path / "copy"
    for said in ("15 answers were learned.", "0 answers were learned; 15 were known."):
        code, _, err = run(capsys, "corpus", "import", copy, "--file", file, "--model", MODEL)
        assert code == 0 and said in err
    with opened(copy) as llm:
        assert llm.engine.learned is not None
        llm.engine.learned.settle()
        [again] = llm.generate([PROMPTS[0]], GREEDY)
        assert len(again.token_ids) / again.stats.rounds > 3

    with opened(folder) as llm:  # a server is running
        code, _, err = run(capsys, "corpus", "forget", folder, "--all")
        assert code == 2 and "learns in" in err
    code, _, err = run(capsys, "corpus", "forget", folder)
    assert code == 2 and "--all" in err
    assert run(capsys, "corpus", "forget", copy, "--tenant", listed["tenant"][:4])[0] == 2
    (copy / "of others" / "kept").mkdir(parents=True)
    (copy / "of others" / "kept" / "file").write_text("x")
    assert run(capsys, "corpus", "forget", copy, "--all")[0] == 0
    assert (copy / "of others" / "kept" / "file").exists()
    assert not [path for path in copy.glob("*/*") if path.is_dir() and path.name != "kept"]


def test_what_is_exported_to_a_pipe_or_an_open_file_leaves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a device, which root may replace by a file."""
    folder, file, pipe = tmp_path / "learned", tmp_path / "log.jsonl", tmp_path / "pipe"
    file.write_text('{"prompt": "a b", "answer": "c d"}\n')
    assert run(capsys, "corpus", "import", folder, "--file", file, "--model", MODEL)[0] == 0
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    mode = pipe.stat().st_mode
    code, _, err = run(capsys, "corpus", "export", folder, "--output", pipe)
    assert code == 0, err
    assert pipe.stat().st_mode == mode
    [row] = os.read(reader, 1 << 16).splitlines()
    assert json.loads(row)["prompt"]
    os.close(reader)
    with file.open("ab") as opened:  # as `>> log.jsonl` opens it
        assert run(capsys, "corpus", "export", folder, "--output", f"/dev/fd/{opened.fileno()}")[0] == 0
    assert file.read_bytes().splitlines()[1:] == [row]


def test_texts_that_a_server_overwrites_while_they_are_read_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = learning.LearnedTexts(tmp_path / "learned", "ab" * 32)
    learned.learn("", [], list(range(50)))
    learned.seal()
    learned.close()
    run(capsys, "corpus", "export", tmp_path / "learned", "--output", tmp_path / "texts")
    verified: list[Segment] = []

    def verify(segment: Segment, inner: Any = Segment.verify) -> None:
        verified.append(segment)
        if len(verified) == 2:
            with segment.file.path.open("r+b") as file:
                file.seek(200)
                file.write(bytes(100))
        inner(segment)

    monkeypatch.setattr(Segment, "verify", verify)
    code, _, err = run(capsys, "corpus", "export", tmp_path / "learned", "--output", tmp_path / "again")
    assert code == 0 and "is damaged" in err and len(verified) == 2
    assert (tmp_path / "texts").read_text() and not (tmp_path / "again").read_text()


def test_tenants_may_be_more_than_the_files_that_a_process_may_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learning.LearnedTexts(tmp_path / "learned", "ab" * 32).close()
    for number in range(200):
        (tmp_path / "learned" / ("ab" * 8) / f"{number:032x}").mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 100, before[1]))
    try:
        found = run(capsys, "corpus", "list", tmp_path / "learned", "--json", "-")
        forgotten, _, _ = run(capsys, "corpus", "forget", tmp_path / "learned", "--all")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found[0] == forgotten == 0 and len(json.loads(found[1])["tenants"]) == 200


def test_one_of_several_tenants_is_forgotten_by_its_key_or_its_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from wager.tenants import tenant_of_key, tenant_of_user

    keys = tmp_path / "keys"
    keys.write_text("anna-0123456789abcdef\n")
    anna = tenant_of_key("anna-0123456789abcdef")
    learned = learning.LearnedTexts(tmp_path / "learned", "ab" * 32)
    for tenant in (anna, tenant_of_user(anna, "bob"), "", tenant_of_user("", "eve")):
        learned.learn(tenant, [], list(range(50)))
    learned.close()

    def left(*words: object) -> int:
        assert run(capsys, "corpus", "forget", tmp_path / "learned", *words)[0] == 0
        return len([path for path in (tmp_path / "learned").glob("*/*") if path.is_dir()])

    assert left("--api-key-file", keys, "--user", "bob") == 3
    assert left("--user", "eve") == 2
    assert left("--api-key-file", keys) == 1
    code, _, err = run(capsys, "corpus", "forget", tmp_path / "learned", "--api-key-file", keys)
    assert code == 2 and "nothing of that tenant" in err


@pytest.mark.slow
def test_a_store_is_made_of_exported_texts_and_nothing_is_forgotten_while_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, folder, exported = random.Random(0), tmp_path / "learned", tmp_path / "texts.jsonl"
    learned = learning.LearnedTexts(folder, tokenizer_fingerprint(open_model(MODEL)[2]))
    likeliest = [rng.randrange(250) for _ in range(250)]
    for number in range(60):
        text = [number]
        while len(text) < 60:
            text.append(likeliest[text[-1]])
        learned.learn("", text[:5], text[5:])
        learned.settle()
    learned.close()
    forgotten: list[int] = []

    def time_of(_seconds: int) -> str:
        forgotten.append(main(["corpus", "forget", str(folder), "--all"]))
        return "then"

    monkeypatch.setattr("wager.cli.corpus._time", time_of)
    code, _, err = run(capsys, "corpus", "export", folder, "--output", exported)
    assert code == 0 and set(forgotten) == {2} and "Another process reads the texts in" in err
    assert len(exported.read_text().splitlines()) == 60 and exported.stat().st_mode & 0o777 == 0o600
    words = ("train", "--kind", "store", "--model", MODEL, "--answers", exported, "--output", tmp_path / "made")
    code, out, err = run(capsys, *words, "--json", "-")
    assert code == 0 and json.loads(out)["held_out"]["tau"] > 1, err
    assert (tmp_path / "made" / "answers.store").stat().st_mode & 0o777 == 0o600, "who may read the texts"
    with opened(None, f"store:{tmp_path / 'made' / 'answers.store'}") as llm, opened(None) as plain:
        assert ids(llm.generate(PROMPTS[:2], GREEDY)) == ids(plain.generate(PROMPTS[:2], GREEDY))


def test_what_was_learned_with_another_chat_template_is_found_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template, folder = tmp_path / "template.jinja", tmp_path / "learned"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    with opened(folder, chat_template=str(template)) as llm:
        llm.generate([PROMPTS[0]], GREEDY)
    words = ("corpus", "show", folder, "--model", MODEL)
    code, out, err = run(capsys, *words)
    assert code == 0 and out == "" and "is not the tokenizer" in err
    code, out, _ = run(capsys, *words, "--chat-template", template)
    assert code == 0 and len(out.splitlines()) >= 1
    code, _, err = run(capsys, *words[:3], "--chat-template", template)
    assert code == 2 and "no effect without --model" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list {}/none", "no folder of --learn"),
        ("export {}", "--output is missing"),
        ("import {} --model random:llama:tiny", "--file is missing"),
        ("list {} --limit 3", "--limit has no effect"),
        ("forget {} --all --tenant a", "--all names all"),
        ("show {} --tenant zz", "nothing of that tenant"),
    ],
)
def test_wrong_calls_are_refused(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learning.LearnedTexts(tmp_path, "ab" * 32).close()
    code, _, err = run(capsys, "corpus", *words.format(tmp_path).split())
    assert code == 2 and said in err
