"""Number formats: bytes per stored element and the arithmetic of its products; and Stream, the work of one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class Format:
    """`bytes` of one stored element, scales included; `compute` is the arithmetic of its products."""

    name: str
    bytes: float
    compute: str


FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        Format("fp32", 4.0, "fp32"),
        Format("bf16", 2.0, "bf16"),
        Format("fp8", 1.0, "fp8"),
        Format("int8", 1.0, "int8"),
        Format("fp4", 0.53, "fp4"),  # 4 bits and a scale of 8 bits per 32 elements
        Format("mxfp4", 0.53, "bf16"),  # the same bytes, multiplied as bf16
        Format("int4", 0.53, "bf16"),
    )
}


def find_format(name: str) -> Format:
    """The format of that name, or UsageError."""
    if name not in FORMATS:
        raise UsageError(f"Number format {name!r} is not known.", f"Known are: {', '.join(FORMATS)}.")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats of a model: of its dense weights, routed `experts` and `shared` experts.

    `cache` and `query` are bytes per element of cached keys and values (or latents) and of query vectors, `activations`
    and `dispatch` of activations sent between devices and to experts on other devices; `attention` is the
    arithmetic of attention, `index` that of an indexer's scores.
    """

    weights: Format
    experts: Format
    shared: Format
    cache: float
    query: float = 2.0
    attention: str = "bf16"
    index: str = "fp8"
    activations: float = 2.0
    dispatch: float = 2.0

    @classmethod
    def of(
        cls, weights: str, experts: str | None = None, *, shared: str | None = None, cache: str = "bf16"
    ) -> Precision:
        """By format names; `experts` defaults to `weights`, `shared` to `experts`. UsageError names an unknown format.

        Activations are sent in 8 bits to experts that compute in 8 or 4.
        """
        kinds = find_format(weights), find_format(experts or weights), find_format(shared or experts or weights)
        narrow = kinds[1].compute in ("fp8", "fp4", "int8")
        return cls(*kinds, cache=find_format(cache).bytes, dispatch=1.0 if narrow else 2.0)


@dataclass(frozen=True, slots=True)
class Stream:
    """The work of one kind of kernel (`part`) in a step: `flops` in the arithmetic `compute`, `bytes` of weights or
    queries, and `cached` bytes of cache. FLOPs and `bytes` divide among all tensor-parallel devices, the cache among
    `shards` of them at most."""

    part: str
    flops: float
    bytes: float
    compute: str
    cached: float = 0.0
    shards: int = 1
