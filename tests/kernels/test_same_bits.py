"""Every op gives the same bits with every instruction set and on every machine: those that are pinned here.

Inputs are whole numbers times powers of two, which any numpy makes alike; some are zeros of both signs, tiny, or huge.
Where the definition in docs/arithmetic.md changes, raise ARITHMETIC_VERSION (kernels/cpu.py) and replace the digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import CappedWorld, Int8World, Piece, SinkWorld, World, chain_inputs, run_chain

from packing import batch
from quantised_cases import floats_of_eight_bits
from wager.arch import Experts, Gating
from wager.arch.layers import DeltaNet
from wager.arch.rope import Rope
from wager.kernels.arrays import BFLOAT16, FLOAT32, INT32, Array, zeros
from wager.kernels.blocks import BLOCK_FORMATS, Matrix, QuantisedMatrix
from wager.kernels.cpu import ARITHMETIC_VERSION, Kernels, SampleRequest
from wager.kernels.tape import NOISE_KEY, Gates, GuessedIds, Heads, Routing

ROWS = 21
OPS: dict[str, Callable[[Any], list[Array]]] = {}


def op(function: Callable[[Any], list[Array]]) -> Callable[[Any], list[Array]]:
    OPS[function.__name__] = function
    return function


def numbers(*shape: int, seed: int, power: int = 0, spread: int = 6) -> Array:
    """Of either sign, most of them between 2^(power - spread) and 2^power; f32."""
    make = np.random.default_rng(seed)
    whole, powers = make.integers(1 - (1 << 23), 1 << 23, shape), make.integers(power - spread, power + 1, shape)
    return np.ldexp(whole * 2.0**-23, powers).astype(FLOAT32)


def odd_numbers(*shape: int, seed: int) -> Array:
    """The same with some that are zero of either sign, or of any power of two."""
    found, make = numbers(*shape, seed=seed), np.random.default_rng(seed + 1)
    kind = make.integers(0, 40, shape)
    found[kind == 0] = 0
    found[kind == 1] = -0.0
    anything = np.ldexp(numbers(*shape, seed=seed + 2).astype(np.float64), make.integers(-150, 40, shape)).astype(
        FLOAT32
    )
    return np.where(kind == 2, anything, found)


def weights(name: str, n: int, k: int, seed: int = 0) -> Matrix:
    if name == "bf16":
        found = numbers(n, k, seed=seed, power=-3)
        found[:, 3::97] = 1e-30
        return found
    known, make = BLOCK_FORMATS[name], np.random.default_rng(seed)
    if name in ("e4m3", "e4m3_128"):
        scales = make.integers(1 << 10, 1 << 11, (n, k // 32)) * FLOAT32.type(2.0**-22)
        return floats_of_eight_bits(name, make.integers(0, 256, (n, k)), scales)
    data = make.integers(0, 256, (n, k // known.inputs, known.bytes), dtype=np.uint8)
    largest = 4 if known.inputs == 256 else 8
    for at in known.fields:
        halves = make.integers(0, 1 << 10, data.shape[:2]) | make.integers(largest - 2, largest, data.shape[:2]) << 10
        halves |= make.integers(0, 2, data.shape[:2]) << 15
        data[..., at : at + 2] = halves.astype("<u2")[..., None].view(np.uint8)
    if name == "mxfp4":
        data[..., 0] = make.integers(118, 124, data.shape[:2])
    if name in ("q4_z", "q4_z128"):
        data[..., 2] %= 17
    return QuantisedMatrix(known, data.reshape(n, -1), k)


def chain(kernels: Any, rows: int = ROWS) -> Any:
    tape = kernels.tape(max_rows=rows, max_sequences=1, max_blocks=4)
    chain_inputs(tape)
    return tape


@op
def norms(kernels: Any) -> list[Array]:
    tape, found = chain(kernels), []
    for n in (16, 100, 577):
        x, weight = odd_numbers(ROWS, n, seed=n), numbers(n, seed=1)
        out, wide = zeros(ROWS, n, dtype=BFLOAT16), numbers(ROWS, n, seed=2)
        tape.rms_norm(x, weight, 1e-5, out)
        tape.rms_norm(x, weight, 1e-6, wide, add=True, scale=0.37)
        narrowed, squares = zeros(ROWS, n, dtype=BFLOAT16), zeros(ROWS, n, dtype=BFLOAT16)
        tape.narrow(x, narrowed)
        tape.narrow(x, squares, squared_relu=True)
        capped = x * 16
        tape.soft_cap(capped, 30.0)
        found += [out, wide, narrowed, squares, capped]
    run_chain(tape, ROWS)
    return found


@op
def elements(kernels: Any) -> list[Array]:
    n, tape = 48, chain(kernels)
    x, y, z = odd_numbers(ROWS, n, seed=1) * 8, odd_numbers(ROWS, n, seed=5) * 8, numbers(ROWS, n, seed=9, power=1)
    product, of_gelu = zeros(ROWS, n), zeros(ROWS, n, dtype=BFLOAT16)
    tape.multiply(x, y, product)
    tape.multiply(x, y, of_gelu, gelu=True)
    narrowed, added = zeros(ROWS, n, dtype=BFLOAT16), zeros(ROWS, n, dtype=BFLOAT16)
    tape.narrow(z, narrowed)
    tape.add_silu(narrowed, x, added)
    tape.sigmoid_gate(narrowed, y)
    shared = numbers(ROWS, n, seed=3)
    tape.add_gated(narrowed, numbers(n, seed=4), y, shared)
    normed = [zeros(ROWS, n, dtype=BFLOAT16) for _ in range(3)]
    tape.gated_norm(z, x, numbers(16, seed=6), 1e-6, normed[0], heads=3)
    tape.gated_norm(z, x, numbers(n, seed=6), 1e-6, normed[1], heads=3, gate_first=True)
    tape.gated_norm(z, x, None, 1e-6, normed[2], heads=3)
    run_chain(tape, ROWS)
    return [product, of_gelu, narrowed, added, shared, *normed]


def products(name: str) -> Callable[[Any], list[Array]]:
    def found(kernels: Any) -> list[Array]:
        rows, k, found = 70, 1024, []
        x, narrowed = odd_numbers(rows, k, seed=4).clip(-4096, 4096), zeros(rows, k, dtype=BFLOAT16)
        x[3, 32:64] = 0
        for count in (1, 2, 3, rows):
            tape = kernels.tape(max_rows=rows, max_sequences=1, max_blocks=8)
            chain_inputs(tape)
            out, gate, heads = (
                numbers(rows, 70, seed=8),
                zeros(rows, 40, dtype=BFLOAT16),
                zeros(rows, 80, dtype=BFLOAT16),
            )
            table = zeros(rows, k)
            tape.narrow(x, narrowed)
            tape.linear(narrowed, kernels.pack(weights(name, 70, k), numbers(70, seed=3)), out, add=True, scale=0.3)
            both = kernels.pack_gated(weights(name, 40, k, 1), weights(name, 40, k, 2))
            tape.gated(narrowed, both, gate, activation=("silu", "gelu", "clamped")[count % 3])
            tape.per_head(narrowed, kernels.pack_heads([weights(name, 40, k // 2, i) for i in range(2)]), heads)
            tape.embed(kernels.pack(weights(name, 70, k)), table, scale=1.7)
            tape.inputs.tokens[:rows] = np.arange(rows)
            run_chain(tape, count)
            found += [out, gate, heads, table]
        return found

    return found


for _name in ("bf16", *BLOCK_FORMATS):
    OPS[f"products {_name}"] = products(_name)


def routed(kernels: Any, spec: Experts) -> list[Array]:
    hidden = 256
    tape, x, out = chain(kernels), numbers(ROWS, hidden, seed=3).astype(BFLOAT16), numbers(ROWS, hidden, seed=4)
    routing = Routing.allocate(spec, max_rows=ROWS, hidden=hidden, act=BFLOAT16)
    correction = numbers(spec.count, seed=5, power=-4) if spec.gating.correction_bias else None
    biases = numbers(spec.count, seed=6) if spec.biased else None
    tape.route(x, numbers(spec.count, hidden, seed=7, power=-2), correction, spec, routing, logit_bias=biases)
    shapes = [(spec.width, hidden), (spec.width, hidden), (hidden, spec.width)]
    parts = [tuple(weights("q8_0", *shape, 3 * i + j) for j, shape in enumerate(shapes)) for i in range(spec.count)]
    if not spec.gated:
        parts = [(None, up, down) for _, up, down in parts]
    given = [tuple(numbers(n, seed=8 + i) for n, _ in shapes) for i in range(spec.count)] if spec.biased else None
    packed = kernels.pack_experts(iter(parts), count=spec.count, biases=given)
    tape.experts(
        x, packed, spec, routing, out, activation="clamped" if spec.biased else "silu" if spec.gated else "relu2"
    )
    run_chain(tape, ROWS)
    return [routing.logits, routing.ids, routing.shares, out]


@op
def experts(kernels: Any) -> list[Array]:
    soft = Experts(count=9, active=3, shared=0, width=96)
    grouped = Gating(score="sigmoid", correction_bias=True, scale=2.5, groups=3, top_groups=2, group_best=2)
    kinds = (soft, replace(soft, gating=grouped), replace(soft, gated=False), replace(soft, biased=True))
    return [array for spec in kinds for array in routed(kernels, spec)]


def attended(kernels: Any, kind: type[World], **options: Any) -> list[Array]:
    world: Any = kind(kernels, **options)
    rows, found = numbers(330, world.width, seed=6, power=2), []
    rows[:, ::53] = 1e-25
    blocks = list(range(24))
    found += world.step(Piece(blocks, 0, rows[:250]))
    found += world.step(Piece(blocks, 250, rows[250:313]))
    tree = [-1, 0, 0, 1, 1, 2, 5]  # guesses: three paths
    found += world.step(Piece(blocks, 313, rows[313:320], tree))
    found += world.step(Piece(blocks, 314, rows[320:321]), Piece(range(40, 44), 0, rows[:30]))
    return [*found, world.q.copy()]


@op
def attention(kernels: Any) -> list[Array]:
    norm = numbers(64, seed=1), numbers(64, seed=2), 1e-6
    return [
        *attended(kernels, World),
        *attended(kernels, World, d=64, heads=9, kv_heads=3, norms=norm),
        *attended(kernels, World, d=48, window=70, rotated=32),
        *attended(kernels, Int8World, d=64),
        *attended(kernels, CappedWorld),
        *attended(kernels, SinkWorld, heads=8, kv_heads=1),
    ]


@op
def latents(kernels: Any) -> list[Array]:
    heads, rank, rope, nope = 5, 48, 16, 24
    cache = kernels.latent_cache(layers=1, num_blocks=32, rank=rank, rope=rope)
    tape = kernels.tape(max_rows=100, max_sequences=1, max_blocks=20)
    q, kv = numbers(100, heads * (nope + rope), seed=1), numbers(100, rank + rope, seed=2)
    plain, query = zeros(100, heads * nope, dtype=BFLOAT16), zeros(100, heads * (rank + rope), dtype=BFLOAT16)
    out = zeros(100, heads * rank, dtype=BFLOAT16)
    tape.latent(q, kv, Rope(10000.0).table(320, rope), (numbers(rank, seed=3), 1e-6), cache, 0, plain, query)
    tape.per_head(plain, kernels.pack_heads(numbers(heads, rank, nope, seed=4)), query)
    tape.attention(query, cache, 0, window=None, out=out, scale=0.11)
    chain_inputs(tape)
    run_chain(tape, 100)
    return [plain, query, out]


@op
def recurrence(kernels: Any) -> list[Array]:
    found = []
    for delta in (True, False):
        layer, rows = DeltaNet(2, 4, 16, 32, 4), 24
        shape = layer.state if delta else replace(layer.state, width=layer.state.channels + layer.state.heads)
        states = kernels.states(shape, layers=1, slots=2, max_rows=rows)
        tape = kernels.tape(max_rows=rows, max_sequences=1, max_blocks=4)
        x, convolved = (
            numbers(2 * rows, shape.width, seed=1, power=3),
            zeros(2 * rows, shape.channels + 2 * shape.heads),
        )
        out, keys = zeros(rows, layer.value_width), layer.key_heads * layer.key_dim
        gates = Gates(-np.abs(numbers(shape.heads, seed=2)), numbers(shape.heads, seed=3, power=2), delta)
        taps, bias = numbers(shape.taps, shape.channels, seed=4), numbers(shape.channels, seed=5)
        tape.convolve(x, taps, bias, gates, states, 0, convolved)
        skip = None if delta else numbers(shape.heads, seed=6)
        tape.recur(convolved, Heads(layer.key_heads, 0, keys, 2 * keys), states, 0, out, delta=delta, skip=skip)
        uses = np.array([(1, -1, 17, 0, -1, -1, -1, -1)], INT32)
        packed = batch([(0, [0] * 20, [*range(-1, 16), 16, 16, 18], [0, 1])], [])
        tape.inputs.fill(replace(packed, state_uses=uses, replays=np.zeros(0, INT32)))
        tape.run(rows=20, sequences=1, logits_rows=0)
        found += [convolved, out]
    return found


@op
def sampling(kernels: Any) -> list[Array]:
    vocab = 5001
    logits = numbers(8, vocab, seed=1, power=3, spread=3)
    requests = [SampleRequest(i % 8, (0.0, 0.3, 1.0, 1.7)[i % 4], 7 + i, 3 * i, i % 3) for i in range(60)]
    tokens = np.array(kernels.sample(logits, requests), INT32)
    guessed, shares, keys = np.zeros(8, INT32), zeros(8), np.zeros(8, NOISE_KEY)
    keys["temperature"], keys["seed"] = [0, 0.3, 0.7, 1, 1.3, 2, 0, 1], np.arange(8)
    tape = kernels.tape(max_rows=8, max_sequences=1, max_blocks=4)
    chain_inputs(tape)
    own = np.sort(np.random.default_rng(0).permutation(3 * vocab)[:vocab])
    tape.guess(logits, GuessedIds(own, count=vocab), keys, guessed, shares, ahead=3)
    tape.inputs.logits_indices[:8] = np.arange(8)
    run_chain(tape, 8, 8)
    return [tokens, guessed, shares]


def digest(arrays: list[Array]) -> str:
    """NaN is one number whatever its bits."""
    found = hashlib.sha256()
    for array in arrays:
        plain = array.view(np.uint16) if array.dtype == BFLOAT16 else array
        wide = (plain.astype(np.uint32) << 16).view(FLOAT32) if array.dtype == BFLOAT16 else array
        if wide.dtype == FLOAT32:
            plain = np.where(np.isnan(wide), FLOAT32.type(np.nan), wide)
        found.update(plain.tobytes())
    return found.hexdigest()[:16]


PINNED = {
    "norms": "2a4abec6da505c7d",
    "elements": "51f374ef12c68dba",
    "products bf16": "3c97aa5e7dccd474",
    "products q8_0": "4bdc0b45fb15ae1a",
    "products q4_0": "26d0f49f860c3bd0",
    "products q4_1": "37107d6a4f396f52",
    "products q5_0": "57be5669659d8253",
    "products q5_1": "779f3895380b6363",
    "products q4_k": "64480970ab399565",
    "products q5_k": "cef7676a128ba545",
    "products q6_k": "b03437134417fb77",
    "products q2_k": "ed6bc9f6a700ad6c",
    "products q3_k": "9efd25209821bee8",
    "products iq4_nl": "d2c4d54cc49a2ca9",
    "products iq4_xs": "0e8ae9536ba1cee0",
    "products iq3_s": "f64c4f37ce65ced4",
    "products iq3_xxs": "fd82c986da8b8778",
    "products iq2_s": "7756793972821e68",
    "products iq2_xxs": "d94d572eda9b0c07",
    "products iq1": "838a67e93876d59f",
    "products q4_z": "75cf8cdb46ac3fd8",
    "products q4_z128": "14266789878a944d",
    "products mxfp4": "f9a095d50656780c",
    "products e4m3": "2d0588b8c4d30db0",
    "products e4m3_128": "48cdf27f7c5943ae",
    "experts": "b44d05f6d989a2c4",
    "attention": "56b3411a95f8a116",
    "latents": "a37cf6106a3de9c9",
    "recurrence": "f1a43226e823c6c5",
    "sampling": "4056a8aef22cbe64",
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_the_bits_of_the_definition(kernels: Kernels, name: str) -> None:
    assert ARITHMETIC_VERSION == 1
    found = OPS[name](kernels)
    assert all(np.isfinite(array.astype(np.float64)).all() for array in found), "the cases are numbers"
    assert digest(found) == PINNED[name]
