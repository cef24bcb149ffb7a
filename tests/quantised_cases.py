"""Random quantised rows of every type of GGUF and of every format of the kernels, with scales that keep the values of
order one or below."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from wager.kernels.blocks import BLOCK_FORMATS, CODEBOOKS, QuantisedMatrix
from wager.models.gguf import GgufType, convert_blocks

HALVES: dict[Kind, tuple[int, ...]] = {
    Kind.Q8_0: (0,),
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ1_S: (0,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
}
"""Where a type's blocks keep their float16; everything else may be any bits, but exponents and parts of IQ1_M."""


def raw_rows(kind: Kind, n: int, k: int, seed: int = 0, *, size: float = 1e-2) -> np.ndarray:
    """Random rows uint8 [n, bytes] of k inputs."""
    inputs, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // inputs, width), dtype=np.uint8)
    for at in HALVES.get(kind, ()):
        signs = rng.choice([-1.0, 1.0], raw.shape[:2])
        scales = rng.uniform(0.2, 1, raw.shape[:2]) * size * signs
        raw[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = rng.integers(110, 130, raw.shape[:2])
    elif kind == Kind.NVFP4:
        raw[..., :4] &= 63
    elif kind == Kind.IQ1_M:  # the four high halves of the last bytes are a float16: of 2^-7 or so, or `size` if less
        high = np.array([0, 0, 0x40, 0x20 if size >= 1e-2 else 0x10 if size > 1e-5 else 0], dtype=np.uint8)
        raw[..., -7::2] = raw[..., -7::2] & 15 | high
    elif kind in (Kind.TQ1_0,):  # five base-3 digits a byte
        raw[..., :52] = gguf.quants.quantize(rng.choice([-1.0, 0.0, 1.0], (n, k)).astype(np.float32), kind).reshape(
            raw.shape
        )[..., :52]
    elif kind == Kind.TQ2_0:  # two bits, never 3
        raw[..., :64] &= 0b01010101 * np.uint8(2)
    return raw.reshape(n, -1)


def floats_of_eight_bits(name: str, codes: np.ndarray, scales: np.ndarray) -> QuantisedMatrix:
    """Codes [n, k], of which NaN become 0, with the first of the scales of each row or of each 128 inputs."""
    n, k = codes.shape
    inputs = k if name == "e4m3" else 128
    numbers = np.where(codes & 127 == 127, 0, codes).astype(np.uint8).reshape(n, -1, inputs)
    parts = scales[:, : k // inputs, None].astype("<f4").view(np.uint8), numbers
    return QuantisedMatrix(BLOCK_FORMATS[name], np.concatenate(parts, axis=-1).reshape(n, -1), k)


def matrix(name: str, n: int, k: int, seed: int = 0, *, size: float = 1e-2) -> QuantisedMatrix:
    """Random rows in a format of the kernels."""
    known = BLOCK_FORMATS[name]
    if name in CODEBOOKS:  # as they are read; a type of both halves where the format has two
        kind = {"iq1": GgufType.IQ1_M}.get(name) or GgufType[name.upper()]
        return convert_blocks(raw_rows(Kind(kind), n, k, seed, size=size * 0.02), kind, k)
    if name.upper() in Kind.__members__:
        return QuantisedMatrix(known, raw_rows(Kind[name.upper()], n, k, seed, size=size), k)
    rng = np.random.default_rng(seed)
    if name in ("e4m3", "e4m3_128"):
        return floats_of_eight_bits(name, rng.integers(0, 256, (n, k)), rng.uniform(0.2, 1, (n, k // 32)) * size)
    blocks = rng.integers(0, 256, (n, k // known.inputs, known.bytes), dtype=np.uint8)
    blocks[..., :2] = (rng.uniform(0.2, 1, blocks.shape[:2]) * size).astype("<f2")[..., None].view(np.uint8)
    blocks[..., 2] %= 17
    return QuantisedMatrix(known, blocks.reshape(n, -1), k)
