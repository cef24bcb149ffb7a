"""A draft model that drafts trees: whatever is asked, accepted or refused, they are the trees of its closed form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from wager.draft.guessing import GuessedRow, GuessSampler
from wager.draft.model import DraftModel
from wager.draft.trees import GrowingTree, TokenTree, sequoia
from wager.kernels.base import TargetOutput
from wager.testing import ToyDistribution, ToyOracle, ToyTarget
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


def check(draft: Draft, expected: TokenTree) -> None:
    assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
    assert draft.scores == pytest.approx(expected.scores)


def walk(draft: Draft, rng: random.Random) -> list[int]:
    """Tokens of a path of the draft, from the root to anywhere."""
    if not len(draft) or rng.random() < 0.2:
        return []
    return [draft.tokens[node] for node in draft.path(rng.randrange(len(draft)))]


@pytest.mark.parametrize("pages", [300, 15])
@pytest.mark.parametrize("max_rows", [64, 20])
@pytest.mark.parametrize("logits_rows", [None, 5])
def test_trees_are_those_of_its_law_through_any_history(pages: int, max_rows: int, logits_rows: int | None) -> None:
    rng = random.Random(pages + max_rows)
    target = ToyTarget(LAW, num_blocks=pages, max_rows=max_rows, max_sequences=3)
    drafter = DraftModel(target, trees=True, max_logits_rows=logits_rows)
    texts: list[_Text] = []
    declined = guessed = branched = 0
    for step in range(100):
        if len(texts) < 5 and rng.random() < 0.4:
            seed = step if rng.random() < 0.5 else 1  # half of them share a prompt
            texts.append(_Text(f"s{step}", rng.choice(PARAMS), length=rng.choice((1, 17, 40)), seed=seed))
            drafter.begin(texts[-1].name, texts[-1].known, texts[-1].params)
        chosen = [text for text in texts if rng.random() < 0.7]
        asks = [text.ask(rng.randint(0, 6), min_survival=rng.choice((0.0, 0.1))) for text in chosen]
        drafts = drafter.propose(asks)
        assert [draft.seq_id for draft in drafts] == [ask.seq_id for ask in asks]
        for text, ask, draft in zip(chosen, asks, drafts, strict=True):
            if len(draft) == 0:
                declined += ask.depth > 0
                continue
            guessed, branched = guessed + len(draft), branched + (not draft.is_chain)
            assert len(draft) <= ask.depth
            narrow = tree_of(ask, text, width=1)  # where blocks are too few for more rows
            is_narrow = pages == 15 and (draft.tokens, draft.parents) == (narrow.tokens, narrow.parents)
            check(draft, narrow if is_narrow else tree_of(ask, text))
        for text in texts:  # some path comes true, in portions, then something else is said
            right = walk(next((d for d in drafts if d.seq_id == text.name), Draft("")), rng)
            half = rng.randint(0, len(right))
            text.accept(drafter, right[:half])
            text.accept(drafter, right[half:])
            if rng.random() < 0.8:
                text.accept(drafter, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))])
            drafter.block_pool.check()
        for text in [text for text in texts if len(text.known) > 70 or rng.random() < 0.03]:
            drafter.end(text.name)
            texts.remove(text)
    assert guessed > 200 and branched > 30 and (declined > 5) == (pages == 15)
    for text in texts:
        drafter.end(text.name)
    drafter.block_pool.check({})
    assert drafter.block_pool.num_free_blocks == pages


class _Counting(ToyTarget):
    """Records the rows of every pass."""

    def __init__(self, law: ToyDistribution = LAW) -> None:
        super().__init__(law)
        self.widths: list[int] = []

    def forward(self, batch: PackedBatch) -> TargetOutput:
        self.widths.append(batch.rows)
        return super().forward(batch)


def test_a_level_is_one_pass_for_all_sequences() -> None:
    target = _Counting()
    drafter = DraftModel(target, trees=True)
    texts = [_Text(name, PARAMS[0], length=10, seed=seed) for seed, name in enumerate("abc")]
    for text in texts:
        drafter.begin(text.name, text.known, text.params)
    drafts = drafter.propose([text.ask(6) for text in texts])
    assert target.widths[0] == 30 and len(target.widths) <= 6
    assert max(max(draft.depths) for draft in drafts) in (len(target.widths), len(target.widths) - 1)
    assert min(len(draft) for draft in drafts) == 6 > max(max(draft.depths) for draft in drafts)


def test_an_accepted_path_is_not_computed_again() -> None:
    target = _Counting()
    drafter = DraftModel(target, trees=True)
    moved = 0
    for seed in range(30):
        text = _Text(f"s{seed}", PARAMS[0], length=10, seed=seed)
        drafter.begin(text.name, text.known, text.params)
        (draft,) = drafter.propose([text.ask(8)])
        paths = [draft.path(node) for node in range(len(draft))]
        path = next((path for path in paths if len(path) > 1 and path[0] > 0), ())
        text.accept(drafter, [draft.tokens[node] for node in path[:-1]])
        moved += len(path) > 1
        target.widths.clear()
        drafter.propose([text.ask(1)])
        assert target.widths == [1]
    assert moved > 3


@pytest.mark.parametrize("params", PARAMS)
def test_under_a_law_siblings_are_drawn_privately_in_a_fixed_shape(params: SamplingParams) -> None:
    drafter = DraftModel(ToyTarget(LAW), trees=True)
    text = _Text("s", params, length=20, seed=5)
    drafter.begin("s", text.known, params)
    text.accept(drafter, [3, 3])
    ask = text.ask(7, law=True)
    template = sequoia(drafter.rank_rates.get("").rates, 7, 7)
    (draft,) = drafter.propose([ask])
    if params.greedy:
        assert draft.draft_probs is None
        check(draft, tree_of(ask, text))
        return
    assert draft.draft_probs is not None and draft.draft_probs.shape == (len(draft), VOCAB)
    assert draft.parents == template and not draft.is_chain
    children = {parent: [n for n, p in enumerate(draft.parents) if p == parent] for parent in (-1, *range(len(draft)))}
    for parent, nodes in children.items():
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
        text = _Text(f"s{seed}", SamplingParams(temperature=1.0), length=4, seed=seed)
        drafter.begin(text.name, text.known, text.params)
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
        text = _Text(f"s{seed}", PARAMS[1], length=5, seed=seed)
        drafter.begin(text.name, text.known, text.params)
        ask = text.ask(6)
        drafter.propose([ask])
        text.accept(drafter, oracle.next_tokens(ask, text.known, text.prompt)[:3])
    after = drafter.rank_rates.get("").rates
    assert after[0] > 0.8 > before[0] and after[1] < before[1]


class _Damaged(ToyTarget):
    def forward(self, batch: PackedBatch) -> TargetOutput:
        output = super().forward(batch)
        return TargetOutput(output.logits * float("nan"), np.full_like(output.greedy_tokens, -1))


@pytest.mark.parametrize("law", [False, True])
@pytest.mark.parametrize("params", PARAMS)
def test_logits_that_are_not_numbers_decline_their_ask(params: SamplingParams, law: bool) -> None:
    drafter = DraftModel(_Damaged(LAW), trees=True)
    drafter.begin("s", [1, 2], params)
    (draft,) = drafter.propose([DraftRequest("s", 2, 4, params, 0, needs_draft_probs=law)])
    assert draft.tokens == ()


def test_it_keeps_to_its_context_and_declines_beyond_its_cache() -> None:
    drafter = DraftModel(ToyTarget(LAW, num_blocks=3), max_context=24, trees=True)
    text = _Text("s", PARAMS[0], length=22, seed=2)
    drafter.begin("s", text.known, text.params)
    (draft,) = drafter.propose([text.ask(8)])
    assert 0 < max(draft.depths) <= 3
    text.accept(drafter, [1] * 3)
    assert len(drafter.propose([text.ask(3)])[0]) == 0
    other = _Text("t", PARAMS[0], length=20, seed=3)
    drafter.begin("t", other.known, other.params)
    assert len(drafter.propose([other.ask(4)])[0]) == 0
    drafter.end("s")
    assert len(drafter.propose([other.ask(4)])[0]) == 4


def test_a_tree_is_expected_to_be_accepted_more_than_a_chain_of_as_many_guesses() -> None:
    """A draft model that resembles the target: mean accepted guesses at equal verified rows."""
    target, near = ToyDistribution(vocab=VOCAB, sharpness=6.0), None
    near = replace(target, drift=0.5, salt=3)
    means = {}
    for trees in (False, True):
        drafter, accepted = DraftModel(ToyTarget(near, num_blocks=2000), trees=trees), 0
        for seed in range(150):
            text = _Text(f"s{seed}", SamplingParams(temperature=seed % 2), length=6, seed=seed)
            drafter.begin(text.name, text.known, text.params)
            ask = text.ask(6)
            (draft,) = drafter.propose([ask])
            truth, node = ToyOracle(target).next_tokens(ask, text.known, text.prompt), -1
            edges = {edge: n for n, edge in enumerate(zip(draft.parents, draft.tokens, strict=True))}
            for token in truth:
                if (node, token) not in edges:
                    break
                node, accepted = edges[node, token], accepted + 1
            drafter.end(text.name)
        means[trees] = accepted / 150
    assert means[True] > 1.15 * means[False]
