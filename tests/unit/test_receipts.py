"""Receipts: an answer is verified on the model that gave it, and whatever was changed in it is found and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_format import FORMATS, made_of
from safetensors.numpy import load_file, save_file
from tokenizer_models import save_model

from in_process import Call, refused
from wager import EngineConfig, Grammar, Receipt, RequestError, SamplingParams, UsageError, Verification, receipts
from wager.kernels import _native
from wager.kernels.cpu import ISAS
from wager.loading.load import load
from wager.models import hub, packed_cache, random_models
from wager.receipts import Signature, SigningKey, Verifier, read_public_key, read_receipts
from wager.types import Request

MODEL = "random:llama:tiny"
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, seed=7)
PROMPT = list(range(40, 70))
ANSWERING = {"drafter": "ngram", "threads": 1, "cache_tokens": 2048}
"""How the engines here answer; they verify with guesses of their own, of the receipt alone."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    return Path(save_model(tmp_path_factory.mktemp("models") / "small", **sizes))


def answer(
    model: str, params: Sequence[SamplingParams], *, prompt: Sequence[int] = PROMPT, **options: Any
) -> list[Receipt]:
    """Receipts of one engine, whose requests run together."""
    engine = load(EngineConfig.from_options(model=model, **{**ANSWERING, **options}))
    requests = [Request(str(at), tuple(prompt), each) for at, each in enumerate(params)]
    asked = [request for request in requests for _ in request.choices]
    completions = engine.generate(requests)
    return [Receipt.of(engine, request, each) for request, each in zip(asked, completions, strict=True)]


def verify(receipt: Receipt, model: str = MODEL, **options: Any) -> Verification:
    return receipt.verify(model, threads=1, **options)


def changed(receipt: Receipt, **values: Any) -> Receipt:
    """With other values, and sealed as if they had been its own."""
    return replace(receipt, **values).sealed()


# ---- what is verified ------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
def test_an_answer_of_the_real_model(smollm2: Path, tmp_path: Path, wager: Call) -> None:
    paths = []
    for name, more in (("greedy", ""), ("sampled", "--temperature 0.8 --top-p 0.9 --repetition-penalty 1.1 --seed 3")):
        paths.append(str(tmp_path / f"{name}.json"))
        call = wager(
            "run", "Name three colours of the sky.", "--model", str(smollm2), "--receipt", paths[-1], more=more
        )
        assert call.code == 0, call.err
        assert read_receipts(Path(paths[-1]))[0].text == call.out.rstrip("\n")
    call = wager("verify", *paths, "--model", str(smollm2))
    assert call.code == 0, call.err
    assert call.out.count("verified, not signed;") == 2
    [receipt, other] = (Receipt.read(path) for path in paths)
    assert receipt.digests == other.digests and len(receipt.digests.weights) > 100


def test_a_receipt_names_the_model_as_the_option_takes_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is what finds the model on any machine; of a path the last part, since the rest is this machine's."""
    monkeypatch.setattr(hub, "resolve", lambda _name: directory)
    for given, name in (("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"), (str(directory), directory.name)):
        [receipt] = answer(given, [GREEDY])
        assert receipt.model == name
    monkeypatch.undo()
    monkeypatch.chdir(directory)
    assert [receipt.model for receipt in answer(".", [GREEDY])] == [directory.name]


@pytest.fixture
def of_format(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The name of a random model whose matrices are of a format."""

    def use(name: str) -> str:
        made = made_of(name)
        monkeypatch.setattr(random_models, "make", lambda _model: made)
        return f"random:{name}"

    return use


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_k", *(each for each in FORMATS if each != "q4_k")])
def test_answers_of_every_type_of_weights(name: str, of_format: Callable[[str], str]) -> None:
    model = of_format(name)
    params = [*(replace(SAMPLED, max_tokens=300, seed=seed) for seed in range(3)), replace(GREEDY, max_tokens=300)]
    receipts = answer(model, [replace(each, ignore_eos=True) for each in params])
    assert len({receipt.output for receipt in receipts}) == 4
    verifier = Verifier(receipts[0], EngineConfig.from_options(model=model, threads=1))
    for receipt in receipts:
        found = verifier.verify(receipt)
        assert found.verified and found.first_difference is None, found.problems
        assert found.computed == len(PROMPT) + 300


@pytest.mark.parametrize("family", ["qwen3.5", *(name for name in random_models.MODELS if name != "qwen3.5")])
def test_answers_of_every_family(family: str) -> None:
    model = f"random:{family}:tiny"
    for receipt in answer(model, [GREEDY, SAMPLED], dtype="q8"):
        assert verify(receipt, model).problems == ()


def test_parameters_that_depend_on_the_tokens_before() -> None:
    params = [
        replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.02, logit_bias={5: 3.0, 60: -100.0}),
        replace(SAMPLED, grammar=Grammar.regex("[a-f]{20,40}")),
        replace(SAMPLED, min_tokens=30, stop_token_ids=tuple(range(200))),
        replace(SAMPLED, temperature=1.5, stop=("a", "e")),
        replace(SAMPLED, n=3, logprobs=2, prediction=PROMPT),
        replace(GREEDY, grammar=Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})),
    ]
    receipts = answer(MODEL, params)
    assert [receipt.choice for receipt in receipts] == [0, 0, 0, 0, 0, 0, 1, 2, 0]
    assert {receipt.finish_reason for receipt in receipts} == {"stop", "length"}
    verifier = Verifier(receipts[0], EngineConfig.from_options(model=MODEL, threads=1))
    for receipt in receipts:
        written = Receipt.from_dict(json.loads(json.dumps(receipt.as_dict())))
        assert written == receipt
        found = verifier.verify(written)
        assert found.problems == ()
        limits = [note for note in found.notes if "was limited by" in note]
        assert bool(limits) == bool(written.params.grammar or written.params.logit_bias)


@pytest.mark.slow
def test_long_answers_take_as_many_passes_as_their_tokens_fill() -> None:
    [receipt] = answer(MODEL, [replace(SAMPLED, max_tokens=900, ignore_eos=True)])
    verifier = Verifier(receipt, EngineConfig.from_options(model=MODEL, threads=1, max_rows=128))
    passes: list[int] = []
    verifier.engine.on_step = lambda record: passes.append(record.rows)
    assert verifier.verify(receipt).verified
    assert sum(passes) <= len(PROMPT) + 900 + len(passes) and len(passes) <= 9


# ---- what is found ---------------------------------------------------------------------------------------------------


def tampered(receipt: Receipt) -> Iterator[tuple[Receipt, str, int | None]]:
    """Receipts with something changed and sealed again, words of what is said of it, and where it is found first."""
    output = receipt.output
    for at in (0, 17, len(output) - 1):
        other = (output[at] + 1) % 512
        yield changed(receipt, output=(*output[:at], other, *output[at + 1 :])), f"Token {at} of the answer", at
    yield changed(receipt, output=output[:-5]), "absent from the receipt", len(output) - 5
    params = replace(receipt.params, max_tokens=len(output) + 1)
    yield changed(receipt, output=(*output, 9), params=params), f"Token {len(output)} of", len(output)
    yield changed(receipt, params=replace(receipt.params, max_tokens=20)), "The model's answer ends with 20 tokens", 20
    yield changed(receipt, text=receipt.text + "!"), "The text of the receipt is not that of its tokens", None
    yield changed(receipt, finish_reason="stop"), "ends with 'length', that of the receipt with 'stop'", None
    yield changed(receipt, output=(*output[:3], 1 << 30, *output[4:])), "Token 3 of the answer", 3
    yield changed(receipt, prompt=(*receipt.prompt, 1 << 30)), "cannot be asked this", None


@pytest.mark.parametrize("params", [SAMPLED, GREEDY])
def test_what_was_changed_is_found(params: SamplingParams) -> None:
    [receipt] = answer(MODEL, [replace(params, ignore_eos=True)])
    verifier = Verifier(receipt, EngineConfig.from_options(model=MODEL, threads=1))
    for wrong, words, at in tampered(receipt):
        found = verifier.verify(wrong)
        assert [problem for problem in found.problems if words in problem], (words, found.problems)
        assert found.first_difference == at, words
    for other in (replace(receipt.params, seed=8), replace(receipt.params, temperature=1.2)):
        if not params.greedy:
            assert verifier.verify(changed(receipt, params=other)).first_difference is not None
    for at in range(len(PROMPT)):
        prompt = (*PROMPT[:at], 3, *PROMPT[at + 1 :])
        assert verifier.verify(changed(receipt, prompt=prompt)).first_difference is not None, at
    assert verifier.verify(receipt).verified


def test_a_part_that_was_changed_is_named_whether_or_not_it_changes_the_answer() -> None:
    [receipt] = answer(MODEL, [SAMPLED])
    verifier = Verifier(receipt, EngineConfig.from_options(model=MODEL, threads=1))
    for values, name in (
        ({"params": replace(receipt.params, seed=8)}, "seed"),
        ({"params": replace(receipt.params, max_tokens=41)}, "sampling"),
        ({"prompt": (*receipt.prompt, 5)}, "prompt_ids"),
        ({"output": receipt.output[:-1]}, "output_ids"),
        ({"made_by": {"kernels": "none"}}, "made_by"),
        ({"model": "another"}, "model"),
    ):
        assert (
            f"Its part '{name}' was changed after it was made." in verifier.verify(replace(receipt, **values)).problems
        )


def other_params(receipt: Receipt) -> Iterator[SamplingParams]:
    """One parameter after the other is another one: some change this answer, others would change another."""
    params, output, text = receipt.params, receipt.output, receipt.text
    vocab = range(512)
    absent = next(token for token in vocab if token not in output)
    numbers: dict[str, Sequence[Any]] = {
        "max_tokens": (1, len(output) - 1, len(output), len(output) + 1, 1 << 40),
        "min_tokens": (0, 1, len(output) - 1, len(output), len(output) + 1),
        "temperature": (0.0, 1e-5, 0.3, params.temperature * 1.0001, 2.0),
        "top_k": (0, 1, 2, 100),
        "top_p": (1.0, 0.99, 0.5),
        "min_p": (0.0, 0.01, 0.5),
        "repetition_penalty": (1.0, 1.0001, 1.5),
        "presence_penalty": (0.0, -1.0, 1.0),
        "frequency_penalty": (0.0, 1e-4, 2.0),
        "seed": (0, 8, (1 << 64) - 1),
        "ignore_eos": (True, False),
        "stop": ((), (text[3:5],), (text[-2:],), ("\x00\x00",)),
        "stop_token_ids": ((), (output[len(output) // 2],), (output[-1],), (absent,)),
        "logit_bias": ({}, {output[-1]: -100}, {output[-1]: 0.001}, {absent: 100}, {absent: -100}),
        "grammar": (None, Grammar.regex("[a-f]{3,9}"), Grammar.regex("[a-z]*"), Grammar.regex("(.|\\n)*")),
    }
    for name, values in numbers.items():
        for value in values:
            with suppress(UsageError):  # two that exclude each other
                changed = replace(params, **{name: value})
                yield replace(changed, seed=None if changed.greedy else changed.seed or 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        replace(SAMPLED, max_tokens=12),
        replace(GREEDY, max_tokens=12),
        replace(SAMPLED, max_tokens=60, stop_token_ids=tuple(range(90, 120)), min_tokens=5),
        replace(SAMPLED, max_tokens=60, stop=("a", "e", "1")),
        replace(SAMPLED, max_tokens=20, grammar=Grammar.regex("[a-f]{3,9}")),
    ],
)
def test_a_receipt_with_other_parameters_is_verified_where_they_give_the_same_answer(given: SamplingParams) -> None:
    """Of every parameter: what is claimed is true of a plain answer, or it is not verified."""
    plain = load(EngineConfig.from_options(model=MODEL, threads=1, drafter="none", cache_tokens=512, max_context=256))
    outcomes: set[bool] = set()
    [receipt] = answer(MODEL, [given], max_context=256)
    verifier = Verifier(receipt, EngineConfig.from_options(model=MODEL, threads=1, cache_tokens=512))
    for params in other_params(receipt):
        for choice in (0, 1) if params == receipt.params else (0,):
            claim = changed(receipt, params=params, choice=choice)
            [found] = plain.generate([Request("plain", receipt.prompt, params, first_choice=choice)])
            same = (found.token_ids, found.text, found.finish_reason) == (
                *(receipt.output, receipt.text, receipt.finish_reason),
            )
            checked = verifier.verify(Receipt.from_dict(json.loads(json.dumps(claim.as_dict()))))
            assert checked.verified == same, (params, choice, checked.problems)
            outcomes.add(same)
    assert outcomes == {True, False}


def edited_tensor(folder: Path, name: str) -> None:
    path, tensors = next((path, found) for path in folder.glob("*.safetensors") if name in (found := load_file(path)))
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[3] += np.asarray(0.25, tensors[name].dtype)
    save_file(tensors, path)


def edited_json(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_another_model_is_found_and_what_differs_is_named(directory: Path, tmp_path: Path) -> None:
    [receipt] = answer(str(directory), [GREEDY])
    assert verify(receipt, str(directory)).verified

    def against(name: str, change: Callable[[Path], object]) -> str:
        folder = tmp_path / name
        shutil.copytree(directory, folder)
        change(folder)
        return " ".join(verify(receipt, str(folder)).problems)

    assert against("same", lambda _: None) == ""
    down = "model.layers.1.mlp.down_proj.weight"
    found = against("matrix", lambda folder: edited_tensor(folder, down))
    assert "The model's weights are not those of the receipt" in found and "'layers.1.down' differs" in found
    found = against("norm", lambda folder: edited_tensor(folder, "model.norm.weight"))
    assert "'norm.weight' differs" in found
    theta = "rope_parameters" if "rope_parameters" in json.loads((directory / "config.json").read_text()) else None

    def turn(config: dict[str, Any]) -> None:
        (config[theta] if theta else config)["rope_theta"] = 777.0

    assert "The model's configuration is not" in against("config", lambda f: edited_json(f / "config.json", turn))

    def swap(value: dict[str, Any]) -> None:
        vocab = value["model"]["vocab"]
        first, second = list(vocab)[300:302]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    found = against("tokenizer", lambda folder: edited_json(folder / "tokenizer.json", swap))
    assert "The model's tokenizer is not that of the receipt." in found
    merges = lambda value: value["model"]["merges"].pop()  # noqa: E731
    found = against("merges", lambda folder: edited_json(folder / "tokenizer.json", merges))
    assert found == "The model's tokenizer is not that of the receipt."
    found = against("template", lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"))
    assert found == "The model's chat template is not that of the receipt."


def test_digests_of_weights_are_those_of_memory_and_of_the_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests() -> dict[str, str]:
        engine = load(EngineConfig.from_options(model=str(directory), drafter="none", threads=1))
        return dict(engine.target.digests.weights)

    packed = digests()
    hashed: list[str] = []
    real = packed_cache.weight_digest
    monkeypatch.setattr(packed_cache, "weight_digest", lambda weight: hashed.append("") or real(weight))
    assert digests() == packed and hashed == []  # those of the file, which was checked in this run of the system
    monkeypatch.setenv("WAGER_CACHE", "/proc/none")
    assert digests() == packed and len(hashed) > 5


# ---- instruction sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", [name for name in ISAS if _native.Isa.has(name)])
def test_instruction_sets_of_one_arithmetic_verify_each_other(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "random:qwen3:tiny"
    monkeypatch.setenv("WAGER_ISA", maker)
    receipts = answer(model, [GREEDY, SAMPLED], dtype="q4")
    for isa in filter(_native.Isa.has, ISAS):
        monkeypatch.setenv("WAGER_ISA", isa)
        verifier = Verifier(receipts[0], EngineConfig.from_options(model=model, threads=1))
        same = verifier.engine.kernels.arithmetic == receipts[0].arithmetic
        for receipt in receipts:
            found = verifier.verify(receipt)
            assert found.verified or not same, (isa, found.problems)
            assert [note for note in found.notes if "may differ in their last bits" in note] or same


# ---- signatures ------------------------------------------------------------------------------------------------------


def new_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A private and a public key as openssl writes them."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    for command in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)],
        ["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return private, public


def test_signatures(tmp_path: Path, wager: Call) -> None:
    pytest.importorskip("cryptography")
    private, public = new_key(tmp_path, "mine")
    _, others = new_key(tmp_path, "other")
    path = tmp_path / "receipt.json"
    options = ("--model", MODEL, "--threads", "1")
    call = wager("run", "hello", *options, "-n", "8", "--receipt", str(path), "--receipt-key", str(private))
    assert call.code == 0, call.err
    key = read_public_key(public)
    assert SigningKey.read(private).public_key == key
    call = wager("verify", str(path), *options, "--signed-by", str(public))
    assert call.code == 0 and f"verified, signed with {key}" in call.out
    call = wager("verify", str(path), *options, "--signed-by", str(others))
    assert call.code == 1 and "It is signed with another key" in call.out
    receipt = Receipt.read(path)
    made_by = {**receipt.made_by, "kernels": "native none"}
    problems = " ".join(verify(replace(receipt, made_by=made_by).sealed()).problems)
    assert problems == ""  # unsigned, whoever changes it may seal it again
    forged = replace(receipt, made_by=made_by, parts=replace(receipt, made_by=made_by).sealed().parts)
    assert "Its signature is not of these parts" in " ".join(verify(forged).problems)
    assert verify(receipt.sealed(), signed_by=key).problems == ("It is not signed.",)
    call = wager("verify", str(path), *options, "--signed-by", str(private))
    refused(call, "holds no public key", "openssl pkey")
    call = wager("run", "hello", *options, "--receipt", str(path), "--receipt-key", str(public))
    refused(call, "holds no private key", "openssl genpkey")


def test_without_the_package_of_signatures_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    [receipt] = answer(MODEL, [replace(SAMPLED, max_tokens=4)])
    assert verify(receipt).verified
    path = tmp_path / "key.pem"
    path.write_text("")
    signed = replace(receipt, signature=Signature("00" * 32, "00" * 64))
    for call in (lambda: verify(signed), lambda: SigningKey.read(path), lambda: read_public_key(path)):
        with pytest.raises(UsageError, match="need the package cryptography"):
            call()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_answers_that_nobody_could_compute_again_have_no_receipt(tmp_path: Path, wager: Call) -> None:
    path = str(tmp_path / "r.json")
    call = wager("run", "hello", "--model", MODEL, "--receipt", path, "--verify", "rejection")
    refused(call, "Under --verify rejection an answer depends on its guesses", "--verify match")
    call = wager("serve", "--model", MODEL, "--receipt-key", __file__, "--verify", "rejection")
    refused(call, "Under --verify rejection an answer depends on its guesses", "--verify match")
    call = wager("run", "hello", "--model", MODEL, "--receipt-key", __file__)
    refused(call, "--receipt-key has no effect without --receipt")
    for other, words in (("-", "'-' is standard output"), (f"{path} --json {path}", "is that of '--receipt', too")):
        refused(wager("run", "hello", "--model", MODEL, "--receipt", more=other), words)
    assert not os.path.exists(path)
    with pytest.raises(RequestError, match="whose tokens were given has no receipt"):
        answer(MODEL, [replace(GREEDY, grammar=Grammar.tokens([5, 6]))])


def test_what_is_no_receipt_is_refused_in_a_sentence(tmp_path: Path, wager: Call) -> None:
    [receipt] = answer(MODEL, [replace(SAMPLED, max_tokens=4)])
    good = receipt.as_dict()
    grammar = {"kind": "regex", "text": "[5]"}
    twice = json.dumps(good).replace('"seed": "7"', '"seed": "8", "seed": "7"')
    path = tmp_path / "r.json"
    for value, words in (
        ("{", "is not JSON"),
        (twice, "an object has 'seed' twice"),
        (json.dumps(good).replace("0.8", "NaN"), "NaN is no number"),
        ([], "holds no receipt"),
        ({"a": 1}, "holds no receipt"),
        ({**good, "wager_receipt": 1}, "is of format 1, and this wager reads 2"),
        ({**good, "wager_receipt": "x" * 90}, "is of format xxx"),
        ({**good, "wager_receipt": True}, "is of format True"),
        ({**good, "more": 2}, "its part 'more' is not as this wager writes it"),
        ({**good, "more": []}, "its part 'more' is not as this wager writes it"),
        ({**good, "model": {**good["model"], "licence": "mine"}}, "its part 'model' is not as"),
        (
            {**good, "sampling": {**good["sampling"], "grammar": {**grammar, "kind": "tokens"}}},
            "holds the whole answer",
        ),
        (
            {**good, "sampling": {**good["sampling"], "grammar": {**grammar, "any_whitespace": 0}}},
            "its part 'sampling'",
        ),
        ({**good, "signature": {"algorithm": "ed25519", "public_key": "00\n", "value": "00"}}, "is not in hex"),
        ({**good, "signature": {"algorithm": "none", "public_key": "00", "value": "00"}}, "its part 'signature'"),
        ({**good, "seed": None}, "a sampled answer has a seed"),
        ({**good, "seed": "-1"}, "a sampled answer has a seed"),
        ({**good, "seed": 7}, "'7' is no text"),
        ({**good, "seed": "07"}, "its part 'seed'"),
        ({**good, "seed": str(1 << 64)}, "seed = 18446744073709551616"),
        ({**good, "output_ids": []}, "token ids are missing"),
        ({**good, "output_ids": [1.5]}, "1.5"),
        ({**good, "sampling": {}}, "'max_tokens' is missing"),
        ({**good, "sampling": {**good["sampling"], "more": 1}}, "sampling has 'more', which this wager does not know"),
        ({**good, "sampling": {**good["sampling"], "top_k": 0}}, "its part 'sampling'"),
        ({**good, "sampling": {**good["sampling"], "top_p": "x"}}, "top_p"),
        ({**good, "weights": None}, "is no receipt"),
        ({**good, "finish_reason": "abort"}, "ends with 'abort'"),
        ({**good, "choice": "0"}, "choice and max_context are whole numbers"),
        ({**good, "model": {**good["model"], "kv_dtype": "q1"}}, "This is no receipt: kv_dtype = 'q1'"),
        ({**good, "model": {**good["model"], "kv_dtype": []}}, "This is no receipt: kv_dtype = []"),
        ({**good, "model": {**good["model"], "dtype": "q1"}}, "This is no receipt: dtype = 'q1'"),
        ({**good, "model": {**good["model"], "max_context": 1 << 40}}, "This is no receipt: max_context"),
        ({name: value for name, value in good.items() if name != "text"}, "'text' is missing"),
    ):
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        refused(wager("verify", str(path), "--model", MODEL), words)
    held = json.dumps({"receipts": [good]})
    for stream in (
        f"data: {held}",
        f": a proxy waits\n\ndata:{held}\n\ndata: [DONE]\n",
        f"\nevent: end\ndata: {held}\n",
    ):
        path.write_text(stream, encoding="utf-8")
        assert len(read_receipts(path)) == 1
    both = [good, good]
    path.write_text(json.dumps({"receipts": both}), encoding="utf-8")
    call = wager("verify", str(path), "--model", MODEL, "--threads", "1", "--json", "-")
    assert call.code == 0 and [each["verified"] for each in json.loads(call.out)["receipts"]] == [True, True]
    with pytest.raises(UsageError, match="has 2 receipts"):
        Receipt.read(path)
    both[1] = {**good, "output_ids": [*good["output_ids"][:-1], 3]}
    path.write_text(json.dumps(both), encoding="utf-8")
    call = wager("verify", str(path), "--model", MODEL, "--threads", "1")
    assert call.code == 1 and "1 of 2 receipts are not verified" in call.err
    assert "Its part 'output_ids' was changed" in call.out and "Token 3 of the answer, from 0, is 3 (" in call.out


@pytest.mark.slow
def test_a_receipt_that_the_model_cannot_be_set_up_for_is_one_of_several(tmp_path: Path, wager: Call) -> None:
    receipts = answer(MODEL, [GREEDY, SAMPLED])
    [latents] = answer("random:deepseek:tiny", [GREEDY])
    every = [
        receipts[0],
        changed(receipts[0], max_context=1 << 20),
        changed(latents, kv_dtype="q8"),
        changed(receipts[1], max_context=256),
    ]
    paths = [tmp_path / f"{at}.json" for at in range(len(every))]
    for path, receipt in zip(paths, every, strict=True):
        path.write_text(json.dumps(receipt.as_dict()), encoding="utf-8")

    def lines(model: str) -> list[str]:
        call = wager("verify", *map(str, paths), "--model", model, "--threads", "1")
        assert call.code == 1
        return list(call.out.splitlines())

    found = lines(MODEL)
    assert ["verified, not signed" in line for line in found] == [True, False, False, True]
    assert "The model cannot be set up as the receipt says: max_context = 1048576 is more than" in found[1]
    assert "The model's weights are not those of the receipt" in found[2]
    found = lines("random:deepseek:tiny")
    assert len(found) == 4 and "is not possible with latent attention" in found[2]
    assert "The model's configuration is not that of the receipt." in found[3]
    problems = every[1].verify(MODEL, threads=1).problems
    assert len(problems) == 1 and "cannot be set up" in problems[0]


def test_a_parameter_that_is_neutral_is_no_part_of_a_receipt() -> None:
    known = {each.name for each in fields(SamplingParams)}
    apart = {"max_tokens", "temperature", "seed", "logprobs", "n", "prediction"}
    assert known == receipts._NEUTRAL.keys() | apart
    [receipt] = answer(MODEL, [replace(SAMPLED, max_tokens=4)])
    assert receipt.as_dict()["sampling"] == {"max_tokens": 4, "temperature": 0.8}


def test_a_receipt_that_was_written_anew_by_another_program_is_the_same() -> None:
    """JavaScript has one kind of number, and keeps no order."""
    params = replace(SAMPLED, temperature=1.0, top_p=0.9, logit_bias={5: 2.0}, max_tokens=6, seed=(1 << 64) - 1)
    [receipt] = answer(MODEL, [params])
    text = json.dumps(receipt.as_dict(), sort_keys=True, indent=1)
    assert '"temperature": 1.0' in text and '"5": 2.0' in text
    text = text.replace('"temperature": 1.0', '"temperature": 1').replace('"5": 2.0', '"5": 2')
    again = Receipt.from_dict(json.loads(text, parse_int=lambda digits: int(float(digits))))
    assert verify(again).problems == ()


# ---- two machines ----------------------------------------------------------------------------------------------------


def test_prove_compares_plain_answers_with_those_of_another_machine(tmp_path: Path, wager: Call) -> None:
    there, here = tmp_path / "there.json", tmp_path / "here.json"

    def prove(*more: str, path: Path = here) -> Any:
        options = ("--model", MODEL, "--threads", "1", "--limit", "2", "--drafter", "none", "--condition", "alone")
        return wager("prove", *options, "--json", str(path), *more)

    assert prove("-n", "8", path=there).code == 0
    call = prove("-n", "8", "--against", str(there))
    assert call.code == 0 and "32 token ids, 0 differ" in call.err, call.err
    assert [each["differing"] for each in json.loads(here.read_text())["against"]] == [0, 0]
    edited_json(there, lambda value: value["answers"][1]["token_ids"].__setitem__(5, 3))
    call = prove("-n", "8", "--against", str(there))
    assert call.code == 1 and "1 of 16 token ids differ against" in call.err and "token 5: there 3, here" in call.err
    assert "please report this defect" in call.err
    refused(prove("-n", "9", "--against", str(there)), "has no answer to prompt", "the same options")
    refused(prove("-n", "8", "--max-context", "512", "--against", str(there)), "set up otherwise: max context.")
    edited_json(there, lambda value: value["model"].__setitem__("arithmetic", "0"))
    call = prove("-n", "8", "--against", str(there))
    assert call.code == 1 and "is of another arithmetic" in call.err and "please report" not in call.err
    edited_json(there, lambda value: value["model"].__setitem__("weights", "0"))
    refused(
        prove("-n", "8", "--against", str(there)), "is of another model, or of one that is set up otherwise: weights."
    )
    edited_json(there, lambda value: value["model"].pop("format"))
    refused(prove("-n", "8", "--against", str(there)), "is of another version of wager", "with this version")
    for text, words in (
        ("{}", "'card' is missing"),
        ("[]", "is no proof"),
        ("{", "is no proof"),
        ('"card"', "is no proof"),
    ):
        there.write_text(text)
        refused(prove("--against", str(there)), words, "Give the --json of `wager prove`")
