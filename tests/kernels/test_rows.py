"""Embedding, norms, rotation, choice of rows and the largest logit, each against its formula."""

from __future__ import annotations

import pytest
import torch
from cases import Piece, World, angles, chain_inputs, run_chain

SHAPE = {"max_rows": 64, "max_sequences": 1, "max_blocks": 4, "heads": 1, "kv_heads": 1, "head_dim": 16}


def chain_tape(kernels):
    tape = kernels.tape(**SHAPE)
    chain_inputs(tape)
    return tape


@pytest.mark.parametrize("hidden", [16, 40, 576])
def test_embed_widens_the_token_rows(kernels, hidden):
    table, out = torch.randn(50, hidden).bfloat16(), torch.zeros(64, hidden)
    tape = chain_tape(kernels)
    tape.embed(table, out)
    tokens = torch.randint(0, 50, (20,), dtype=torch.int32)
    tape.inputs.tokens[:20] = tokens
    run_chain(tape, 20)
    assert torch.equal(out[:20], table[tokens.long()].float())
    assert out[20:].abs().sum() == 0


@pytest.mark.parametrize("n", [1, 16, 40, 100, 576, 577, 1536])
def test_rms_norm(kernels, n):
    x, weight = torch.randn(64, n) * 3, torch.rand(n) + 0.5
    out, last = torch.zeros(64, n, dtype=torch.bfloat16), torch.zeros(64, n, dtype=torch.bfloat16)
    tape = chain_tape(kernels)
    tape.rms_norm(x, weight, 1e-5, out)
    tape.rms_norm(x, weight, 1e-5, last, of="logits")
    run_chain(tape, 37, 5)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(out[:37].double(), exact[:37], rtol=2**-8, atol=1e-6)
    assert torch.equal(last[:5], out[:5]) and last[5:].abs().sum() == 0
    whole = out[:37].clone()
    rows = x[:37].clone()
    for row in (0, 7, 36):  # alone, in another place
        x[0] = rows[row]
        run_chain(tape, 1, 1)
        assert torch.equal(out[0], whole[row])


@pytest.mark.parametrize("d", [16, 48, 64, 128])
def test_rotation_and_cache_write(kernels, d):
    world = World(kernels, heads=4, kv_heads=2, d=d, norms=(torch.rand(d) + 0.5, torch.rand(d) + 0.5, 1e-6))
    rows = world.rows(40, seed=d)
    world.step(Piece([9, 3, 7], 0, rows))
    heads = rows.view(40, 8, d).double()
    q_weight, k_weight = (w.double() for w in world.norms[:2])
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
    turned = heads * scale
    turned[:, :4] *= q_weight
    turned[:, 4:6] *= k_weight
    cos, sin = angles(40, d).double()[:, None].chunk(2, dim=-1)
    a, b = turned.chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    near = {"rtol": 2**-8, "atol": 2e-3}
    torch.testing.assert_close(world.q[:40].view(40, 4, d).double(), turned[:, :4], **near)
    for position in (0, 15, 16, 39):
        slot = [9, 3, 7][position // 16] * 16 + position % 16
        keys, values = world.cache.read(slot)[0]
        torch.testing.assert_close(keys.double(), turned[position, 4:6], **near)
        assert torch.equal(values, rows.view(40, 8, d)[position, 6:].bfloat16())


def test_select_copies_the_logits_rows(kernels):
    x, out = torch.randn(64, 33), torch.zeros(64, 33)
    tape = chain_tape(kernels)
    tape.select(x, out)
    tape.inputs.logits_indices[:3] = torch.tensor([5, 0, 30], dtype=torch.int32)
    run_chain(tape, 31, 3)
    assert torch.equal(out[:3], x[[5, 0, 30]]) and out[3:].abs().sum() == 0


@pytest.mark.parametrize("n", [1, 5, 16, 17, 1000, 49152])
def test_argmax_takes_the_lowest_of_equals(kernels, n):
    logits, out = torch.randn(8, n), torch.full((8,), -7, dtype=torch.int32)
    top = [0, n - 1, n // 2, n // 3]
    for row, where in enumerate(top):
        logits[row, where:] = logits[row, where:].clamp(max=4.0)
        logits[row, where] = 50.0
        logits[row, -1] = 50.0
    logits[4] = -1.5
    logits[5] = -torch.rand(n) - 1e30
    logits[6, n // 2] = float("nan")
    logits[7, n - 1] = -float("inf")
    tape = chain_tape(kernels)
    tape.argmax(logits, out)
    run_chain(tape, 8, 8)
    assert out.tolist() == [*top, 0, int(logits[5].argmax()), -1, -1]
    logits[0, 0] = float("inf")
    out.fill_(-7)
    run_chain(tape, 8, 1)
    assert out.tolist() == [-1] + [-7] * 7


def test_numbers_too_small_to_be_normal_do_not_depend_on_the_caller(kernels):
    """Flush-to-zero set by another library in the calling thread must not reach a row."""
    out = torch.zeros(64, 320)  # ten panels: the caller's thread has a share
    tape = chain_tape(kernels)
    packed = kernels.pack(torch.zeros(320, 16), torch.full((320,), 1e-40))
    tape.linear(torch.zeros(64, 16, dtype=torch.bfloat16), packed, out)
    torch.set_flush_denormal(True)
    try:
        run_chain(tape, 8)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out[:8], torch.full((8, 320), 1e-40))
