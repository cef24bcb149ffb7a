"""The draft model: whatever is asked, skipped, accepted or refused, its chains and trees are those of its own closed
form."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from faulty_drafters import FailingDrafter, OutsideVocabularyDrafter, OverlongDrafter

from wager.draft.base import Drafter
from wager.draft.combined import InnerDrafter
from wager.draft.guessing import GuessedRow, GuessSampler
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.draft.trees import GrowingTree, TokenTree, children, sequoia
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.testing import (
    AdversaryDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.types import Draft, DraftRequest, PackedBatch, SamplingParams
from wager.verify.distribution import History, process, without_replacement

VOCAB = 32
LAW = ToyDistribution(vocab=VOCAB)
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=1.1, frequency_penalty=0.8, min_p=0.02, logit_bias={3: 2.0}),
]


def _seen(ask: DraftRequest, known: Sequence[int], prompt: int) -> tuple[int, ...]:
    """What the draft model's law says, computed without a cache."""
    return tuple(ToyOracle(LAW).next_tokens(ask, known, prompt))


class _Text:
    """One sequence as an engine would keep it."""

    def __init__(self, name: str, params: SamplingParams, *, length: int, seed: int) -> None:
        self.name, self.params, self.prompt, self.seed, self.choice = name, params, length, seed, seed % 3
        self.known = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()

    def ask(self, depth: int, *, law: bool = False, min_survival: float = 0.0) -> DraftRequest:
        return DraftRequest(self.name, len(self.known), depth, self.params, self.seed, self.choice, law, min_survival)

    def accept(self, drafter: DraftModel, tokens: Sequence[int]) -> None:
        self.known += tokens
        drafter.accept(self.name, tokens)

    def history(self) -> History:
        return History(self.known[: self.prompt], self.known[self.prompt :])


def _begun(drafter: DraftModel, params: SamplingParams, *, length: int, seed: int, name: str = "s") -> _Text:
    text = _Text(name, params, length=length, seed=seed)
    drafter.begin(name, text.known, params)
    return text


def tree_of(ask: DraftRequest, text: _Text, *, width: int = 4, levels: int = 8) -> TokenTree:
    """What the draft model's law gives, computed without a cache or a batch."""
    tree, sampler = GrowingTree(ask.depth, min_survival=ask.min_survival), GuessSampler(VOCAB, vocab=VOCAB)
    level = 0
    while level < min(levels, ask.depth) and (frontier := tree.expandable(min(width, ask.depth))):
        found = []
        for node in frontier:
            path = tuple(tree.tokens[each] for each in tree.path(node))
            logits = LAW([*text.known, *path])[None]
            output = TargetOutput(logits, logits.argmax(axis=1))
            row = GuessedRow(0, ask, path, None if ask.params.plain else text.history())
            found.append((node, sampler.candidates(output, row, min(ask.depth, 8))))
        tree.extend(found)
        level += 1
    return tree.best()


INNER: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "right": lambda: OracleDrafter(ToyOracle(LAW)),
    "wrong": lambda: AdversaryDrafter(VOCAB, oracle=ToyOracle(LAW)),
    "trees": lambda: RandomTreeDrafter(VOCAB, oracle=ToyOracle(LAW)),
    "invalid": lambda: OutsideVocabularyDrafter(VOCAB),
    "overlong": OverlongDrafter,
    "failing": lambda: FailingDrafter(calls=30),
    "another model": lambda: DraftModel(ToyTarget(NEAR, num_blocks=30, max_rows=16), prefix_cache=False),
    "a staged model": lambda: DraftModel(ToyTarget(NEAR, num_blocks=30), inner=_inner("ngram")),
    "a model of trees": lambda: DraftModel(ToyTarget(NEAR, num_blocks=30), trees=True),
}
NEAR = replace(LAW, drift=0.3, salt=4)


def _inner(name: str) -> InnerDrafter | None:
    return InnerDrafter(INNER[name](), vocab=VOCAB) if name else None


def _through_any_history(
    drafter: DraftModel,
    check: Callable[[DraftRequest, _Text, Draft], None],
    *,
    seed: int,
    steps: int,
    thresholds: Sequence[float] = (0.0,),
) -> tuple[int, int]:
    """Sequences come, are asked, accept some path of a draft and then something else, and end; how many guesses there
    were, and how many requests were declined."""
    rng, texts = random.Random(seed), list[_Text]()
    declined = guessed = 0
    for step in range(steps):
        if len(texts) < 5 and rng.random() < 0.4:
            seed = step if rng.random() < 0.5 else 1  # half of them share a prompt
            length = rng.choice((1, 17, 40))
            texts.append(_begun(drafter, rng.choice(PARAMS), length=length, seed=seed, name=f"s{step}"))
        chosen = [text for text in texts if rng.random() < 0.7]
        asks = [text.ask(rng.randint(0, 5), min_survival=rng.choice(thresholds)) for text in chosen]
        drafts = drafter.propose(asks)
        assert [draft.seq_id for draft in drafts] == [ask.seq_id for ask in asks]
        for text, ask, draft in zip(chosen, asks, drafts, strict=True):
            guessed += len(draft)
            if len(draft):
                check(ask, text, draft)
            else:
                declined += ask.depth > 0
        for text in texts:  # those not asked go on as well
            draft = next((d for d in drafts if d.seq_id == text.name), Draft(""))
            right = [draft.tokens[node] for node in draft.path(rng.randint(-1, len(draft) - 1))]
            half = rng.randint(0, len(right))
            text.accept(drafter, right[:half])
            text.accept(drafter, right[half:])
            if rng.random() < 0.8:
                text.accept(drafter, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))])
            drafter.block_pool.check()
        for text in [text for text in texts if len(text.known) > 70 or rng.random() < 0.03]:
            drafter.end(text.name)
            texts.remove(text)
    for text in texts:
        drafter.end(text.name)
    drafter.block_pool.check({})
    assert drafter.block_pool.num_free_blocks == drafter.block_pool.num_blocks
    return guessed, declined


@pytest.mark.parametrize(
    ("inner", "max_rows", "blocks"),
    [(inner, *sizes) for inner in ("", *INNER) for sizes in ((64, 200), (5, 14))] + [("", 64, 14), ("", 5, 200)],
)
def test_guesses_are_its_own_law_through_any_history(inner: str, max_rows: int, blocks: int) -> None:
    def check(ask: DraftRequest, text: _Text, draft: Draft) -> None:
        assert draft.tokens == _seen(ask, text.known, text.prompt) and len(draft.scores) == ask.depth

    target = ToyTarget(LAW, num_blocks=blocks, max_rows=max_rows, max_sequences=3)
    drafter = DraftModel(target, inner=_inner(inner))
    guessed, declined = _through_any_history(drafter, check, seed=blocks + max_rows, steps=60)
    assert guessed > 70 and (declined > 3) == (blocks == 14)


@pytest.mark.parametrize("blocks", [300, 15])
@pytest.mark.parametrize("max_rows", [64, 20])
@pytest.mark.parametrize("logits_rows", [None, 5])
def test_trees_are_those_of_its_law_through_any_history(blocks: int, max_rows: int, logits_rows: int | None) -> None:
    branched = 0

    def check(ask: DraftRequest, text: _Text, draft: Draft) -> None:
        nonlocal branched
        branched += not draft.is_chain
        expected, narrow = tree_of(ask, text), tree_of(ask, text, width=1)
        if blocks == 15 and (draft.tokens, draft.parents) == narrow[:2]:
            expected = narrow  # where blocks are too few for more rows
        assert (draft.tokens, draft.parents) == expected[:2] and len(draft) <= ask.depth
        assert draft.scores == pytest.approx(expected.scores)

    target = ToyTarget(LAW, num_blocks=blocks, max_rows=max_rows, max_sequences=3)
    drafter = DraftModel(target, trees=True, max_logits_rows=logits_rows)
    thresholds = (0.0, 0.1)
    guessed, declined = _through_any_history(drafter, check, seed=blocks, steps=60, thresholds=thresholds)
    assert guessed > 120 and branched > 15 and (declined > 3) == (blocks == 15)


@pytest.mark.parametrize("params", PARAMS)
def test_under_a_law_it_draws_privately_and_says_from_what(params: SamplingParams) -> None:
    drafter = DraftModel(ToyTarget(LAW))
    text = _begun(drafter, params, length=20, seed=5)
    text.accept(drafter, [3, 3])
    ask = text.ask(3, law=True)
    (draft,) = drafter.propose([ask])
    if params.plain and params.greedy:
        assert draft.draft_probs is None and draft.tokens == _seen(ask, text.known, text.prompt)
        return
    history = History(text.known[:20], text.known[20:])
    path: list[int] = []
    assert draft.draft_probs is not None and draft.draft_probs.shape == (3, VOCAB)
    for depth, (token, row) in enumerate(zip(draft.tokens, draft.draft_probs, strict=True), 1):
        shaped = process(LAW([*text.known, *path]), params, history.extended(path))
        assert np.array_equal(row, shaped.probabilities(VOCAB))
        assert token == shaped.choose(text.seed, ask.position + depth - 1, text.choice, private=depth)
        path.append(token)
    assert drafter.samples


@pytest.mark.parametrize("params", PARAMS)
def test_under_a_law_siblings_are_drawn_privately_in_a_fixed_shape(params: SamplingParams) -> None:
    drafter = DraftModel(ToyTarget(LAW), trees=True)
    text = _begun(drafter, params, length=20, seed=5)
    text.accept(drafter, [3, 3])
    ask = text.ask(7, law=True)
    template = sequoia(drafter.rank_rates.get("").rates, 7, 7)
    (draft,) = drafter.propose([ask])
    if params.greedy:
        assert draft.draft_probs is None
        assert (draft.tokens, draft.parents) == tree_of(ask, text)[:2]
        return
    assert draft.draft_probs is not None and draft.draft_probs.shape == (len(draft), VOCAB)
    assert draft.parents == template and not draft.is_chain
    for parent in {*draft.parents}:
        nodes = children(draft.parents, parent)
        path = [draft.tokens[node] for node in draft.path(parent)]
        q = process(LAW([*text.known, *path]), params, text.history().extended(path)).probabilities(VOCAB)
        tokens = [draft.tokens[node] for node in nodes]
        assert len(set(tokens)) == len(tokens)
        for node, row in zip(nodes, without_replacement(q, tokens), strict=True):
            assert draft.draft_probs[node] == pytest.approx(row)


@pytest.mark.slow
def test_private_draws_of_all_nodes_and_rounds_are_independent() -> None:
    """Nodes of one depth below different parents, and the same position in two rounds: a flat law shows shared noise
    as equal tokens."""
    flat = ToyDistribution(vocab=VOCAB, sharpness=1e-6)
    drafter = DraftModel(ToyTarget(flat, num_blocks=600), trees=True)
    drafter.rank_rates.get("").learn = lambda children, right: None  # type: ignore[method-assign]
    seen: list[list[int]] = []
    for seed in range(200):
        text = _begun(drafter, SamplingParams(temperature=1.0), length=4, seed=seed, name=f"s{seed}")
        (draft,) = drafter.propose([text.ask(8, law=True)])
        firsts = {p: next(n for n, above in enumerate(draft.parents) if above == p) for p in set(draft.parents)}
        second = [draft.tokens[child] for parent, child in firsts.items() if parent >= 0 and draft.parents[parent] < 0]
        text.accept(drafter, [draft.tokens[0]])
        (later,) = drafter.propose([text.ask(8, law=True)])
        seen.append([*second[:2], later.tokens[0]])
        drafter.end(text.name)
    columns = np.array(seen)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (columns[:, one] == columns[:, other]).mean() < 0.1  # 1/32 if independent


def test_what_is_right_at_each_rank_is_measured() -> None:
    drafter = DraftModel(ToyTarget(LAW), trees=True)
    before = drafter.rank_rates.get("").rates
    oracle = ToyOracle(LAW)
    for seed in range(40):
        text = _begun(drafter, PARAMS[1], length=5, seed=seed, name=f"s{seed}")
        ask = text.ask(6)
        drafter.propose([ask])
        text.accept(drafter, oracle.next_tokens(ask, text.known, text.prompt)[:3])
    after = drafter.rank_rates.get("").rates
    assert after[0] > 0.8 > before[0] and after[1] < before[1]


class _Counting(ToyTarget):
    """Records the rows of every pass."""

    def __init__(self, **options: int) -> None:
        super().__init__(LAW, **options)
        self.widths: list[int] = []

    def forward(self, batch: PackedBatch) -> TargetOutput:
        self.widths.append(batch.rows)
        return super().forward(batch)


def test_k_guesses_cost_k_passes_and_full_acceptance_owes_two_tokens() -> None:
    target = _Counting()
    drafter = DraftModel(target)
    texts = [_begun(drafter, PARAMS[0], length=10, seed=7, name=name) for name in ("a", "b")]
    drafts = drafter.propose([text.ask(3) for text in texts])
    assert target.widths == [20, 2, 2]
    texts[0].accept(drafter, [*drafts[0].tokens, 9])  # all right: the last guess was never fed
    texts[1].accept(drafter, [(drafts[1].tokens[0] + 1) % VOCAB])  # all wrong
    target.widths.clear()
    drafts = drafter.propose([text.ask(2) for text in texts])
    assert target.widths == [3, 2]
    texts[0].accept(drafter, [drafts[0].tokens[0], (drafts[0].tokens[1] + 1) % VOCAB])
    target.widths.clear()
    drafter.propose([texts[0].ask(1)])
    assert target.widths == [1]


def test_a_level_is_one_pass_for_all_sequences() -> None:
    target = _Counting()
    drafter = DraftModel(target, trees=True)
    texts = [_begun(drafter, PARAMS[0], length=10, seed=seed, name=name) for seed, name in enumerate("abc")]
    drafts = drafter.propose([text.ask(6) for text in texts])
    assert target.widths[0] == 30 and len(target.widths) <= 6
    assert max(max(draft.depths) for draft in drafts) in (len(target.widths), len(target.widths) - 1)
    assert min(len(draft) for draft in drafts) == 6 > max(max(draft.depths) for draft in drafts)


def test_an_accepted_path_is_not_computed_again() -> None:
    target = _Counting()
    drafter = DraftModel(target, trees=True)
    moved = 0
    for seed in range(30):
        text = _begun(drafter, PARAMS[0], length=10, seed=seed, name=f"s{seed}")
        (draft,) = drafter.propose([text.ask(8)])
        paths = [draft.path(node) for node in range(len(draft))]
        path = next((path for path in paths if len(path) > 1 and path[0] > 0), ())
        text.accept(drafter, [draft.tokens[node] for node in path[:-1]])
        moved += len(path) > 1
        target.widths.clear()
        drafter.propose([text.ask(1)])
        assert target.widths == [1]
    assert moved > 3


def _passes(inner: InnerDrafter | None, params: SamplingParams, *, rounds: int = 12, depth: int = 6) -> int:
    """Of a drafter whose guesses all come true."""
    target = _Counting()
    drafter = DraftModel(target, inner=inner)
    text = _begun(drafter, params, length=12, seed=4)
    for _ in range(rounds):
        ask = text.ask(depth)
        (draft,) = drafter.propose([ask])
        assert draft.tokens == _seen(ask, text.known, text.prompt)
        text.accept(drafter, draft.tokens)
    return len(target.widths)


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
def test_an_inner_drafter_that_is_right_saves_passes(params: SamplingParams) -> None:
    alone = _passes(None, params)
    assert alone == 12 * 6 and _passes(_inner("right"), params) == 12
    assert 12 < _passes(_inner("trees"), params) < 0.8 * alone
    assert _passes(_inner("wrong"), params) == alone >= _passes(_inner("failing"), params)
    assert _passes(_inner("another model"), params) < alone


def test_a_truth_that_overtakes_a_cut_draft_is_recognised() -> None:
    target = _Counting()
    drafter = DraftModel(target)
    text = _begun(drafter, PARAMS[0], length=30, seed=3)
    (draft,) = drafter.propose([text.ask(4)])
    text.accept(drafter, draft.tokens[:1])
    text.accept(drafter, draft.tokens[1:3])  # the engine verified fewer guesses than were made; its own token agreed
    target.widths.clear()
    ask = text.ask(3)
    assert drafter.propose([ask])[0].tokens == _seen(ask, text.known, text.prompt)
    assert sum(target.widths) <= 4
    assert drafter.propose([ask])[0].tokens == _seen(ask, text.known, text.prompt)  # asked twice, nothing accepted


def test_pages_of_refuted_guesses_are_given_back_and_the_last_token_stays_open() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=8))
    text = _begun(drafter, PARAMS[0], length=BLOCK_SIZE - 3, seed=3)
    (draft,) = drafter.propose([text.ask(BLOCK_SIZE)])
    assert drafter.block_pool.num_free_blocks == 6
    text.accept(drafter, draft.tokens[:3])  # known up to the page's end; the rows behind may still turn out true
    assert drafter.block_pool.num_free_blocks == 6
    assert drafter.block_pool.match_prefix("probe", [*text.known, 0]) == 0
    text.accept(drafter, [(draft.tokens[3] + 1) % VOCAB])
    assert drafter.block_pool.num_free_blocks == 7


def test_equal_prompts_are_computed_once() -> None:
    target = _Counting()
    drafter = DraftModel(target)
    for name in ("a", "b"):
        text = _begun(drafter, PARAMS[0], length=3 * BLOCK_SIZE + 1, seed=2, name=name)
        drafter.propose([text.ask(1)])
        text.accept(drafter, [1])
    assert target.widths == [3 * BLOCK_SIZE + 1, 1]


def test_it_declines_beyond_its_context_and_its_cache() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=2), max_context=24)
    text = _begun(drafter, PARAMS[0], length=20, seed=2)
    assert len(drafter.propose([text.ask(9)])[0]) == 5  # the last guess is never fed: 20 + 4 positions
    text.accept(drafter, [1] * 5)
    assert len(drafter.propose([text.ask(3)])[0]) == 0
    other = _begun(drafter, PARAMS[0], length=10, seed=3, name="t")
    assert len(drafter.propose([other.ask(3)])[0]) == 0
    drafter.end("s")
    assert len(drafter.propose([other.ask(3)])[0]) == 3


def test_beginning_again_starts_afresh() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=8))
    for seed in (1, 2, 3):
        text = _Text("s", PARAMS[1], length=60, seed=seed)
        drafter.begin("s", text.known, text.params)
        ask = text.ask(3)
        assert drafter.propose([ask])[0].tokens == _seen(ask, text.known, text.prompt)
    drafter.end("s")
    drafter.end("s")
    drafter.block_pool.check({})


def test_scores_are_the_probability_of_the_whole_path_under_its_own_law() -> None:
    drafter = DraftModel(ToyTarget(LAW))
    for number, params in enumerate(PARAMS):
        text = _begun(drafter, params, length=5, seed=number, name=f"s{number}")
        (draft,) = drafter.propose([text.ask(3)])
        survival, known = 1.0, list(text.known)
        for token, score in zip(draft.tokens, draft.scores, strict=True):
            logits = LAW(known).astype(np.float64)
            survival *= float(np.exp(logits[token]) / np.exp(logits).sum())
            assert score == pytest.approx(survival, rel=1e-4)
            known.append(token)


@pytest.mark.parametrize("law", [False, True])
def test_a_chain_ends_after_the_guess_that_is_in_doubt(law: bool) -> None:
    """And that guess stays: dropping it would make what is verified depend on the draw it is (verification under an
    exact rule)."""
    drafter = DraftModel(ToyTarget(LAW))
    ended = set()
    for number in range(30):
        text = _begun(drafter, SamplingParams(temperature=1.0), length=5, seed=number, name=f"s{number}")
        whole = drafter.propose([text.ask(5, law=law)])[0]
        (draft,) = drafter.propose([text.ask(5, law=law, min_survival=0.05)])
        assert draft.tokens == whole.tokens[: len(draft)]
        assert all(score >= 0.05 for score in draft.scores[:-1])
        assert len(draft) == 5 or draft.scores[-1] < 0.05
        assert draft.draft_probs is None or len(draft.draft_probs) == len(draft)
        ended.add(len(draft))
    assert len(ended) > 2


class _Damaged(ToyTarget):
    def forward(self, batch: PackedBatch) -> TargetOutput:
        output = super().forward(batch)
        return TargetOutput(output.logits * float("nan"), np.full_like(output.greedy_tokens, -1))


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("law", [False, True])
@pytest.mark.parametrize("params", PARAMS)
def test_logits_that_are_not_numbers_decline_their_ask(params: SamplingParams, law: bool, trees: bool) -> None:
    drafter = DraftModel(_Damaged(LAW), trees=trees)
    drafter.begin("s", [1, 2], params)
    (draft,) = drafter.propose([DraftRequest("s", 2, 4, params, 0, needs_draft_probs=law)])
    assert draft.tokens == ()


def test_a_tree_keeps_to_its_context_and_declines_beyond_its_cache() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=3), max_context=24, trees=True)
    text = _begun(drafter, PARAMS[0], length=22, seed=2)
    (draft,) = drafter.propose([text.ask(8)])
    assert 0 < max(draft.depths) <= 3
    text.accept(drafter, [1] * 3)
    assert len(drafter.propose([text.ask(3)])[0]) == 0
    other = _begun(drafter, PARAMS[0], length=20, seed=3, name="t")
    assert len(drafter.propose([other.ask(4)])[0]) == 0
    drafter.end("s")
    assert len(drafter.propose([other.ask(4)])[0]) == 4
