"""Draft models whose tokenizer is the target's and whose matrices have more or fewer rows: padding is no difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from blank_heads import HEADS
from tiny_models import as_gguf, gguf_metadata, oracle, save, write_gguf
from tokenizer_models import gguf_metadata as tokenizer_metadata
from tokenizer_models import train

import wager
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.store_file import build_store
from wager.draft.vocabulary import vocabulary_difference, vocabulary_digest, vocabulary_sample
from wager.drafter_spec import DrafterSpec
from wager.errors import ModelError, TokenizerError
from wager.loading.load import LoadedEngine, load
from wager.loading.opened import check_head_tokenizer
from wager.models.opening import open_model, target_fingerprint, tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.testing import ToyDistribution, ToyTarget
from wager.types import Completion, DraftRequest, Request, SamplingParams

TOKENS = train("gpt-2").get_vocab_size()
FEW, MANY = TOKENS + 8, TOKENS + 60
ROWS = {"few": FEW, "many": MANY}


SHAPE = {"head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models that differ in nothing but the padding, as directories and as GGUF files, which name it."""
    backend, paths = train("gpt-2"), {}
    whole = oracle("LlamaForCausalLM", **SHAPE, vocab_size=MANY)
    with torch.no_grad():  # ids of the padding are sampled, but not at once
        whole.lm_head.weight[TOKENS:] *= 0.6
    for name, rows in ROWS.items():
        path = tmp_path_factory.mktemp(name)
        model = oracle("LlamaForCausalLM", **SHAPE, vocab_size=rows)
        state = {key: value[: len(model.state_dict()[key])] for key, value in whole.state_dict().items()}
        model.load_state_dict(state)
        save(model, path)
        backend.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        paths[name] = str(path)
        spec = open_model(str(path))[1].spec
        metadata = {**gguf_metadata(spec, "llama"), **padded(tokenizer_metadata(backend, "gpt-2"), rows)}
        del metadata["tokenizer.chat_template"]
        tensors = as_gguf(model, spec, {}, permuted=True)
        paths[f"{name}.gguf"] = str(write_gguf(path / "model.gguf", "llama", metadata, tensors))
    return paths


def padded(metadata: dict[str, Any], rows: int, *, more: Sequence[str] = ()) -> dict[str, Any]:
    """As llama.cpp's converter writes the vocabulary of a model with so many rows."""
    tokens = [*metadata["tokenizer.ggml.tokens"], *more]
    types = metadata["tokenizer.ggml.token_type"] + [1] * len(more)
    return {
        **metadata,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(len(tokens), rows)],
        "tokenizer.ggml.token_type": types + [5] * (rows - len(tokens)),
    }


def options(model: str, **further: Any) -> wager.EngineConfig:
    given = {"model": model, "max_rows": 32, "max_sequences": 4, "cache_tokens": 512, "threads": 1, **further}
    return wager.EngineConfig.from_options(**given)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_further_token_is_a_difference_in_spite_of_padding(models: dict[str, str], tmp_path: Path, rows: int) -> None:
    """In the place of padding, in either model; and one that is swapped is named with both tokens."""
    plain = tokenizer_metadata(train("gpt-2"), "gpt-2")
    spec = open_model(models["few.gguf"])[1].spec
    named = {**gguf_metadata(replace(spec, vocab=rows), "llama"), **padded(plain, rows, more=["<|more|>"])}
    model = oracle("LlamaForCausalLM", **SHAPE, vocab_size=rows)
    other = str(write_gguf(tmp_path / "more.gguf", "llama", named, as_gguf(model, spec, {}, permuted=True)))
    for form in ("few.gguf", "few", "many.gguf", "many"):
        with pytest.raises(TokenizerError, match=rf"id {TOKENS} is '<\|more\|>', and the target has none"):
            load(options(models[form], drafter=f"model:{other}"))
        with pytest.raises(TokenizerError, match=rf"there is no id {TOKENS}, which is '<\|more\|>' in the target"):
            load(options(other, drafter=f"model:{models[form]}"))
    few, more = Tokenizer.load(Path(models["few.gguf"])), Tokenizer.load(Path(other))
    assert (num_tokens(few), num_tokens(more)) == (TOKENS, TOKENS + 1) and vocabulary_difference(few, few) == ""
    assert few.vocab_size == FEW and few.token(FEW - 1) == f"[PAD{FEW - 1}]"


def test_a_token_that_is_written_like_padding_elsewhere_is_one() -> None:
    class Words:
        def __init__(self, *words: str) -> None:
            self._words, self.vocab_size = words, len(words)

        def token(self, token_id: int) -> str:
            return self._words[token_id]

    assert "there is no id 1, which is '[PAD7]' in the" in vocabulary_difference(Words("a", "[PAD7]"), Words("a"))
    assert vocabulary_difference(Words("a", "", "b", "[PAD3]"), Words("a", "[PAD1]", "b")) == ""
    assert vocabulary_difference(Words("a", "", "b"), Words("a", "c", "b")) == "id 1 is 'c', and the target has none"


@pytest.mark.slow
def test_the_tokenizer_beside_a_head_and_the_digest_of_a_store_leave_padding_out(
    models: dict[str, str], tmp_path: Path
) -> None:
    check_head_tokenizer(Path(models["few"]), Tokenizer.load(Path(models["many.gguf"])))
    check_head_tokenizer(Path(models["few.gguf"]), Tokenizer.load(Path(models["many"])))
    own = Tokenizer.load(Path(models["few.gguf"]))
    assert {vocabulary_digest(Tokenizer.load(Path(path))) for path in models.values()} == {vocabulary_digest(own)}
    store = tmp_path / "answers.store"
    known = {"tokenizer": vocabulary_digest(own), "sample": vocabulary_sample(own)}
    build_store([([1], [5, 6, 7])], store, vocab=num_tokens(own), **known)
    for path in models.values():
        assert load(options(path, drafter=f"store:{store}")).drafter_name == "store"


@pytest.mark.parametrize("with_padding", [False, True])
def test_a_head_trained_on_one_form_of_a_model_fits_the_other(
    models: dict[str, str], tmp_path: Path, with_padding: bool
) -> None:
    """Also one that notes the fingerprint as it was before, which has the names of the padding."""
    _, weights, tokenizer = open_model(models["many.gguf"])
    noted = {
        "target": "it",
        "target_fingerprint": target_fingerprint(weights),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer, with_padding=with_padding),
    }
    head = HEADS["medusa"](tmp_path / "head", weights.spec, wager=noted)
    assert load(options(models["many.gguf"], drafter=f"medusa:{head}", depth=2)).drafter_name == "medusa"
    directory = options(models["many"], drafter=f"medusa:{head}", depth=2)
    if with_padding:
        with pytest.raises(ModelError, match="with another tokenizer"):
            load(directory)
    else:
        assert load(directory).drafter_name == "medusa"


PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True, logit_bias={MANY - 1: 3.0, FEW - 1: 2.0}),
]


def asked(rows: int, rule: str) -> list[Request]:
    """Requests with and without ids of the padding in their prompts, the highest that there are among them."""
    prompts = [[5, 6, 7, 5, 6], [rows - 1, 40, 41], [40, 41, TOKENS, 7], [300, 301, 302, rows - 1], [9, 8, 7, 9, 8]]
    prompts += [[rows - 1], [TOKENS, rows - 1], [5, min(FEW, rows - 1), 6]]
    found = []
    for number, (prompt, params) in enumerate((prompt, params) for prompt in prompts for params in PARAMS):
        params = replace(params, seed=number)
        if rule != "match":  # greedy texts alone stay the same
            params = replace(params, temperature=0.0)
        bias = {token: value for token, value in params.logit_bias.items() if token < rows}
        found.append(Request(f"r{number}", tuple(prompt), replace(params, logit_bias=bias)))
    return found


def count_guesses(engine: LoadedEngine) -> list[int]:
    """All ids that the engine's drafters guess from now on, as they were before they were checked."""
    guesses: list[int] = []
    for drafter in engine.proposer.drafters.values():
        propose: Any = drafter.propose

        def watched(requests: Sequence[DraftRequest], propose: Any = propose) -> Any:
            drafts = propose(requests)
            guesses.extend(token for draft in drafts for token in draft.tokens)
            return drafts

        drafter.propose = watched  # type: ignore[method-assign]
    return guesses


PAIRS = [("few", "many"), ("many", "few.gguf")]  # which lacks ids
FORMS = [("few.gguf", "many.gguf"), ("many.gguf", "few")]
ALONE = ["model:{0}", "model:tree:{0}"]
WRITTEN = [*ALONE, "model:{0}+model:{1}", "model:{0}+ngram", "ngram//model:{0}", "tli:{0}", "slem:{0}"]
WRITTEN += [f"{each} ahead" for each in ALONE]
CASES = [(*PAIRS[0], each, "match") for each in WRITTEN]
CASES += [(*PAIRS[0], each, "rejection") for each in ALONE]
CASES += [(*pair, ALONE[0], "match") for pair in (PAIRS[1], *FORMS)]


@cache
def wanted_of(target: str, rule: str) -> list[Completion]:
    """The plain answers of a model."""
    return load(options(target, drafter="none")).generate(asked(open_model(target)[1].spec.vocab, rule), concurrency=4)


@pytest.mark.slow  # by default test_prove.py shows it of every drafter
@pytest.mark.parametrize(("target", "draft", "written", "rule"), CASES)
def test_no_text_changes(models: dict[str, str], target: str, draft: str, written: str, rule: str) -> None:
    rows, known = ROWS[target.removesuffix(".gguf")], min(ROWS.values())
    requests, wanted = asked(rows, rule), wanted_of(models[target], rule)
    written, _, ahead = written.format(models[draft], models[target]).partition(" ")
    further = {"draft_threads": 1} if ahead else {}
    engine = load(options(models[target], drafter=written, depth=4, verify=rule, **further))
    assert engine.spec.vocab == rows
    guesses = count_guesses(engine)
    for concurrency in (1, 4):
        got = engine.generate(requests, concurrency=concurrency)
        assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
    assert engine.drafter_name != "none" and not engine.proposer.failed
    engine.close()
    assert max(guesses) < (rows if "//" in written else known)
    every = [token for each in wanted for token in each.token_ids]
    assert any(token >= TOKENS for token in every) and any(token >= known for token in every) == (rows > known)
    if written.startswith(("tli", "slem")):  # these spell what the draft model lacks, and go on
        return
    for request, each in zip(requests, got, strict=True):
        lacks = rows > known and max(request.prompt) >= known
        assert each.stats.drafted > 0 or lacks
        assert each.stats.drafted == 0 or not lacks or "//" in written
    if written.startswith("model:") and ":tree:" not in written:  # a model that has the same numbers for what both have
        right = sum(each.stats.accepted for each in got)
        assert right > 0.8 * sum(each.stats.drafted for each in got)


LAW = ToyDistribution(vocab=20, order=2, sharpness=5.0)
GREEDY = SamplingParams()


def ask(known: Sequence[int], params: SamplingParams = GREEDY, *, probs: bool = False) -> DraftRequest:
    return DraftRequest("s", len(known), 4, params, 3, needs_draft_probs=probs)


@pytest.mark.parametrize("trees", [False, True])
def test_a_sequence_is_declined_from_an_unknown_id_on(trees: bool) -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=20), vocab=24, trees=trees)
    known = list(range(18)) * 2
    drafter.begin("s", known, GREEDY)
    drafter.begin("other", known, GREEDY)
    (draft,) = drafter.propose([ask(known)])
    assert len(draft) == 4 and drafter.block_pool.block_table("s")
    drafter.accept("s", [draft.tokens[0], 23, 1])
    assert not drafter.block_pool.block_table("s") and drafter.alternatives("s") == []
    known += [draft.tokens[0], 23, 1]
    for _ in range(3):
        mine, others = drafter.propose([ask(known), ask(known[:36])._replace(seq_id="other")])
        assert len(mine) == 0 and len(others) == 4
        drafter.accept("s", [2])
        known.append(2)
    drafter.fork("s", "fork", [1], GREEDY)
    assert len(drafter.propose([ask([*known, 1])._replace(seq_id="fork")])[0]) == 0
    drafter.rewind("s", 38)
    assert len(drafter.propose([ask(known[:38])])[0]) == 0
    drafter.rewind("s", 37)
    assert len(drafter.propose([ask(known[:37])])[0]) == 4
    for lowest in ([1, 20, 3], [20]):
        drafter.begin("s", lowest, GREEDY)
        assert len(drafter.propose([ask(lowest)])[0]) == 0
    for seq_id in ("s", "other", "fork"):
        drafter.end(seq_id)
    drafter.block_pool.check({})


def test_a_drafter_of_its_own_gives_a_draft_model_no_id_that_it_lacks() -> None:
    """The n-gram 1, 2 was followed by an id that the draft model, which is asked about another text, has no row for."""

    class Remembers(NgramDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> Any:
            return [replace(draft, tokens=(22, *draft.tokens[1:])) for draft in super().propose(requests) if len(draft)]

    model = ToyTarget(LAW)
    parts = DrafterParts(24, model=model, inner=Remembers())
    drafter, known = build_drafter(DrafterSpec("model", "x"), parts), [1, 2, 3, 1, 2]
    drafter.begin("s", known, GREEDY)
    (draft,) = drafter.propose([ask(known)])
    assert len(draft) == 4 and max(draft.tokens) < 20
