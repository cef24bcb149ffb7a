"""A second cost model, written from published formulas and dimensions alone, to compare the first one with.

It shares no code with wager. Dimensions are of the published configurations. Its conventions:

- A stream takes the larger of bytes / bandwidth and FLOPs / peak (on the CPU a power mean of them), streams add up: the
  roofline (Williams et al., CACM 2009) of kernels that run one after another. Peaks are dense ones of datasheets.
- Weights and experts may be stored in different formats, by the config.json of the release of a name; the head's and
  the router's are inputs, since releases differ in them.
- t tokens read E (1 - (1 - k/E)^t) of E experts; of a step spread over ranks the fullest rank counts.
- Latent attention is absorbed (DeepSeek-V2, arXiv 2405.04434).
- Tensor parallelism: two all-reduces a layer (Megatron-LM, arXiv 1909.08053), each a ring through which 2 (n - 1) / n
  of the 16-bit activations pass (nccl-tests, PERFORMANCE.md).
- Expert parallelism: each row goes to its k experts in fp8 and comes back in bf16, three bytes an element (DeepEP's
  README: "FP8 dispatching and BF16 combining"); rows of experts that compute in bf16 in bf16 both ways. Scales of 8-bit
  rows, 4 bytes for 128 elements, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# ---- devices: dense FLOP/s of bf16, fp8, fp4 and bytes/s ------------------------------------------------------------

PEAKS = {
    "B200": {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9.0e15},
    "H100": {"bf16": 0.9895e15, "fp8": 1.979e15},
    "H200": {"bf16": 0.9895e15, "fp8": 1.979e15},
    "A100-80GB": {"bf16": 0.312e15},
    "CPU-2core-AVX512": {"bf16": 425e9},
}
LINKS = {"B200": (900e9, 50e9, 8), "H200": (450e9, 50e9, 8), "H100": (450e9, 50e9, 8)}
"""Bytes/s per direction inside a node and between nodes, and devices of a node."""

BANDWIDTH = {"B200": 8e12, "H100": 3.35e12, "H200": 4.8e12, "A100-80GB": 2.039e12, "CPU-2core-AVX512": 51e9}
OVERLAP = {"CPU-2core-AVX512": 2.0}
"""Where reading and computing overlap in part, seconds are (a^p + b^p)^(1/p) of both; elsewhere the larger."""

SIZE = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.53, "mxfp4": 0.53, "int4": 0.53, "int4g32": 0.5625}
ARITHMETIC = {"bf16": "bf16", "fp8": "fp8", "fp4": "fp4", "mxfp4": "bf16", "int4": "bf16", "int4g32": "bf16"}
"""Bytes of an element, scales included, and what it is multiplied as where the device can."""


def peak(device: str, arithmetic: str) -> float:
    """Without units of its own an arithmetic runs as bf16."""
    return PEAKS[device].get(arithmetic, PEAKS[device]["bf16"])


# ---- attention: for one sequence and layer, FLOPs and bytes ---------------------------------------------------------


@dataclass
class Work:
    """FLOPs; bytes of queries, which divide among the devices of a group; bytes of cache, of `heads` heads that divide
    among them at most."""

    part: str
    flops: float
    size: float
    cached: float
    heads: int = 1
    arithmetic: str = "bf16"


@dataclass
class GroupedQuery:
    heads: int
    kv_heads: int
    dim: int
    window: float = math.inf

    def projections(self, d: int) -> int:
        return d * self.dim * (2 * self.heads + 2 * self.kv_heads)

    def work(self, s: float, q: float, cache: float) -> list[Work]:
        s = min(s, self.window)
        name = "attention" if self.window == math.inf else "window attention"
        cached = 2 * self.kv_heads * self.dim * cache * s
        return [Work(name, 4 * self.heads * self.dim * s * q, self.heads * self.dim * 2 * q, cached, self.kv_heads)]


@dataclass
class Latent:
    """DeepSeek-V3's attention, absorbed: kv rank 512, rotary 64, query rank 1536, 128 unrotated and 128 of values."""

    heads: int

    def projections(self, d: int) -> int:
        n = self.heads
        return d * 1536 + 1536 * n * (128 + 64) + d * (512 + 64) + 512 * n * (128 + 128) + n * 128 * d

    def work(self, s: float, q: float, cache: float) -> list[Work]:
        flops = 2 * self.heads * (2 * 512 + 64) * s * q
        return [Work("latent attention", flops, self.heads * 576 * 2 * q, 576 * cache * s)]


@dataclass
class V4:
    """A window of 128 entries and, of every 4 positions (CSA: the best `picks`) or 128 (HCA: all), one compressed
    entry. An entry has 448 8-bit and 64 16-bit elements and 8 bytes of scales, an indexer's key 128 and 4."""

    kind: str
    heads: int
    q_rank: int
    groups: int
    picks: int = 0

    def projections(self, d: int) -> int:
        width = self.heads * 512
        size = d * self.q_rank + self.q_rank * width + d * 512 + self.groups * 1024 * d + width * 1024
        if self.kind == "csa":  # two compressors, each of entries that mix two strides of 4; and the indexer's queries
            size += 2 * 512 * (2 * d + 4) + 2 * 128 * (2 * d + 4) + self.q_rank * 64 * 128 + d * 64
        return size + 512 * (2 * d + 128) if self.kind == "hca" else size

    def work(self, s: float, q: float, cache: float) -> list[Work]:
        del cache  # entries are stored as described
        near, rows = min(s, 128), 2 * self.heads * 512 * 2 * q  # queries read, outputs written
        pair = 4 * self.heads * 512
        if self.kind == "window":
            return [Work("window attention", pair * near * q, rows, 584 * near)]
        if self.kind == "hca":
            n = near + s // 128
            return [Work("compressed attention", pair * n * q, rows, 584 * n)]
        entries = s // 4
        main = Work(
            "sparse attention",
            pair * (near + min(self.picks, entries)) * q,
            rows,
            584 * (near + min(self.picks * q, entries)),
        )
        return [main, Work("indexer", 2 * 64 * 128 * entries * q, 0, 132 * entries, arithmetic="fp8")]


@dataclass
class Recurrent:
    """Gated delta network: 16 key and 32 value heads of 128, a convolution over 4 inputs; 16-bit state."""

    def projections(self, d: int) -> int:
        return d * (2 * 16 * 128 + 32 * 128 + 32 * 128) + 32 * 128 * d + 4 * (2 * 16 * 128 + 32 * 128)

    def work(self, s: float, q: float, cache: float) -> list[Work]:
        del s
        state = 32 * 128 * 128
        return [Work("DeltaNet", 8 * state * q, 0, (state + 4 * (2 * 16 * 128 + 32 * 128)) * cache, 32)]


# ---- models ---------------------------------------------------------------------------------------------------------

Kind = GroupedQuery | Latent | V4 | Recurrent


@dataclass
class Shape:
    """`layers` lists (attention, how many, inner size of a dense feed-forward or None for experts); `moe` is (E, k, s,
    inner size). Formats: of dense weights, routed experts, shared experts; `cache` bytes per element."""

    d: int
    vocab: int
    layers: list[tuple[Kind, int, int | None]]
    moe: tuple[int, int, int, int] = (0, 0, 0, 0)
    weights: str = "bf16"
    experts: str = "bf16"
    shared: str = "bf16"
    cache: float = 2.0


def gpt_oss(experts: int, layers: int) -> Shape:
    half = layers // 2
    return Shape(
        2880,
        201_088,
        [(GroupedQuery(64, 8, 64, 128), half, None), (GroupedQuery(64, 8, 64), half, None)],
        (experts, 4, 0, 2880),
        experts="mxfp4",
        shared="mxfp4",
    )


def k2(weights: str, experts: str) -> Shape:
    layers: list[tuple[Kind, int, int | None]] = [(Latent(64), 1, 18_432), (Latent(64), 60, None)]
    return Shape(7168, 163_840, layers, (384, 8, 1, 2048), weights, experts, weights)


def v4(d: int, *, heads: int, q_rank: int, groups: int, picks: int, mix: dict[str, int], moe: tuple[int, ...]) -> Shape:
    kinds: list[tuple[Kind, int, int | None]] = [
        (V4(kind, heads, q_rank, groups, picks), count, None) for kind, count in mix.items() if count
    ]
    return Shape(d, 129_280, kinds, (moe[0], moe[1], 1, moe[2]), "fp8", "fp4", "fp8", 1.0)


SHAPES = {
    "SmolLM2-135M": Shape(576, 49_152, [(GroupedQuery(9, 3, 64), 30, 1536)]),
    "Llama-3.1-8B": Shape(4096, 128_256, [(GroupedQuery(32, 8, 128), 32, 14_336)]),
    "Llama-3.1-70B": Shape(8192, 128_256, [(GroupedQuery(64, 8, 128), 80, 28_672)]),
    "Llama-3.2-1B": Shape(2048, 128_256, [(GroupedQuery(32, 8, 64), 16, 8192)]),
    "Qwen3-0.6B": Shape(1024, 151_936, [(GroupedQuery(16, 8, 128), 28, 3072)]),
    "Qwen3-8B": Shape(4096, 151_936, [(GroupedQuery(32, 8, 128), 36, 12_288)]),
    "Qwen3-30B-A3B": Shape(2048, 151_936, [(GroupedQuery(32, 4, 128), 48, None)], (128, 8, 0, 768)),
    "Qwen3-235B-A22B": Shape(4096, 151_936, [(GroupedQuery(64, 4, 128), 94, None)], (128, 8, 0, 1536)),
    "Qwen3-235B-A22B-FP8": Shape(
        4096, 151_936, [(GroupedQuery(64, 4, 128), 94, None)], (128, 8, 0, 1536), "fp8", "fp8", "fp8"
    ),
    "Qwen3.6-35B-A3B": Shape(
        2048, 248_320, [(GroupedQuery(16, 2, 256), 10, None), (Recurrent(), 30, None)], (256, 8, 1, 512)
    ),
    "gpt-oss-20b": gpt_oss(32, 24),
    "gpt-oss-120b": gpt_oss(128, 36),
    "DeepSeek-V3": Shape(
        7168, 129_280, [(Latent(128), 3, 18_432), (Latent(128), 58, None)], (256, 8, 1, 2048), "fp8", "fp8", "fp8"
    ),
    "Kimi-K2": k2("fp8", "fp8"),
    "Kimi-K2-0905": k2("fp8", "fp8"),
    "Kimi-K2-Thinking": k2("bf16", "int4g32"),
    "DeepSeek-V4-Flash": v4(
        4096, heads=64, q_rank=1024, groups=8, picks=512, mix={"window": 2, "csa": 21, "hca": 20}, moe=(256, 6, 2048)
    ),
    "DeepSeek-V4-Pro": v4(
        7168, heads=128, q_rank=1536, groups=16, picks=1024, mix={"window": 0, "csa": 30, "hca": 31}, moe=(384, 6, 3072)
    ),
}


# ---- a step ---------------------------------------------------------------------------------------------------------

Group = tuple[float, float, float]
"""(sequences, cached positions of each, query rows of each)."""


@dataclass
class Part:
    seconds: float = 0.0
    size: float = 0.0
    flops: float = 0.0


def distinct(experts: int, active: int, tokens: float, popularity: list[float] | None) -> float:
    shares = popularity or [active / experts] * experts
    return sum(1 - (1 - share) ** tokens for share in shares)


@dataclass
class Spread:
    """Devices of a group, which split every matrix; ranks of the experts; seconds of a collective of few bytes; bytes
    of an element on its way to an expert's rank and back."""

    tp: int = 1
    ep: int = 1
    latency: float = 0.0
    out: float = 1.0
    back: float = 2.0
    balanced: bool = False


ALONE = Spread()


def most_of(ranks: int, held: int, share: float) -> float:
    """Expected largest of `ranks` independent counts, of `held` experts each that are read with chance `share`."""
    below, expected = 0.0, 0.0
    for count in range(held):
        below += math.comb(held, count) * share**count * (1 - share) ** (held - count)
        expected += 1 - below**ranks
    return expected


def step(
    name: str,
    device: str,
    groups: list[Group],
    *,
    head: str,
    router: str,
    locality: float = 1.0,
    popularity: list[float] | None = None,
    spread: Spread = ALONE,
) -> dict[str, Part]:
    """Every part of a step in which each group of sequences verifies its rows, on one of the devices."""
    shape, tp, ep = SHAPES[name], spread.tp, spread.ep
    parts: dict[str, Part] = {}

    def stream(part: str, flops: float, size: float, arithmetic: str, times: float = 1.0) -> None:
        total = parts.setdefault(part, Part())
        computed, read = flops / peak(device, arithmetic), size / BANDWIDTH[device]
        power = OVERLAP.get(device)
        total.seconds += times * (
            max(computed, read) if power is None else (computed**power + read**power) ** (1 / power)
        )
        total.size += times * size
        total.flops += times * flops

    def matrix(part: str, elements: float, kept: str, rows: float, times: float = 1.0) -> None:
        elements /= tp
        stream(part, 2 * elements * rows, elements * SIZE[kept], ARITHMETIC[kept], times)

    rows = sum(count * q for count, _, q in groups)
    matrix("projections", sum(n * kind.projections(shape.d) for kind, n, _ in shape.layers), shape.weights, rows)
    dense = sum(n * 3 * shape.d * inner for _, n, inner in shape.layers if inner is not None)
    if dense:
        matrix("ffn", dense, shape.weights, rows)
    for kind, n, _ in shape.layers:
        for count, s, q in groups:
            for work in kind.work(s, q, shape.cache):
                cached = work.cached * math.ceil(work.heads / tp) / work.heads
                stream(work.part, work.flops / tp, work.size / tp + cached, work.arithmetic, n * count)
    mixtures = sum(n for _, n, inner in shape.layers if inner is None)
    if mixtures:
        experts, active, shared, inner_size = shape.moe
        w = 3 * shape.d * inner_size
        matrix("router", mixtures * shape.d * experts, router, rows)
        tokens = max(1, ep // tp) * sum(count * q**locality for count, _, q in groups)  # of all groups
        read = distinct(experts, active, tokens, popularity)
        if ep > 1 and not spread.balanced:
            read = most_of(ep, math.ceil(experts / ep), read / experts)
        else:
            read /= max(tp, ep)
        used = active
        if shared and shape.shared == shape.experts:
            read, used = read + shared / tp, used + shared
        elif shared:
            matrix("shared experts", shared * w, shape.shared, rows, mixtures)
        stream("experts", 2 * used * w * rows / tp, read * w * SIZE[shape.experts], ARITHMETIC[shape.experts], mixtures)
    matrix("head", shape.vocab * shape.d, head, rows)
    if max(tp, ep) > 1:
        parts |= traffic(shape, device, rows, mixtures if ep > 1 else 0, spread)
    return parts


def traffic(shape: Shape, device: str, rows: float, mixtures: int, spread: Spread) -> dict[str, Part]:
    """Two all-reduces of 16-bit activations a layer, of which a layer of experts that are spread replaces its own by
    each row's k copies out and back; the slower of both links bounds these, since they work side by side."""
    inside, outside, node = LINKS[device]
    tp, ep, layers = spread.tp, spread.ep, sum(n for _, n, _ in shape.layers)
    parts, messages = {}, 0
    if tp > 1:
        sent = (2 * layers - mixtures) * rows * shape.d * 2 * 2 * (tp - 1) / tp
        parts["all-reduce"], messages = Part(sent / inside, sent), 2 * layers
    if mixtures:
        sent = rows / tp * mixtures * shape.moe[1] * shape.d * (spread.out + spread.back)
        near = (min(1, node / ep) - 1 / ep) / inside
        parts["dispatch"] = Part(sent * max(near, max(0, 1 - node / ep) / outside), sent)
        messages += 2 * mixtures
    if spread.latency:
        parts["link latency"] = Part(messages * spread.latency)
    return parts


def speedups(seconds: list[float], alpha: float, share: float) -> list[float]:
    """By depth: (1 - a^(g+1)) / (1 - a) tokens a round, each draft token taking a share of a plain step."""
    return [
        (1 - alpha ** (depth + 1)) / (1 - alpha) * seconds[0] / (time + depth * share * seconds[0])
        for depth, time in enumerate(seconds)
    ]
