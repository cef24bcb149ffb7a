"""DeepSeek-V4's attention over a compressed cache; its figures are defined as in attention.py."""

from __future__ import annotations

from dataclasses import dataclass

from wager.arch.attention import Indexer
from wager.arch.formats import Precision, Stream


@dataclass(frozen=True, slots=True)
class Compressed:
    """DeepSeek-V4's attention: one shared key-value vector of `width` elements (its last `rope` rotary) per position.

    Every layer reads a window of uncompressed entries; with `ratio` r it also reads one compressed entry per r
    positions: all of them (heavily compressed attention, HCA), or those an indexer picks (compressed sparse attention,
    CSA). Keys are values, so FLOPs are 4 n_h width per pair; queries are read and outputs written, n_h width each. An
    indexer's picks are counted as distinct for every row, which is the worst case.
    """

    heads: int
    width: int
    rope: int
    q_rank: int
    groups: int
    group_rank: int
    window: int
    ratio: int = 0
    indexer: Indexer | None = None

    def weights(self, hidden: int) -> int:
        query = self.heads * self.width
        elements = hidden * self.q_rank + self.q_rank * query + hidden * self.width
        elements += query * self.group_rank + self.groups * self.group_rank * hidden
        if self.ratio:
            elements += self._compressor(hidden, self.width)
        if self.indexer:
            elements += self.indexer.weights(hidden, self.q_rank) + self._compressor(hidden, self.indexer.dim)
        return elements

    def _compressor(self, hidden: int, width: int) -> int:
        """Key and gate projections and position biases; with an indexer each entry mixes two strides of positions."""
        strides = 2 if self.indexer else 1
        return strides * width * (2 * hidden + self.ratio)

    def kv_bytes(self, context: float, precision: Precision) -> float:
        entries = min(context, self.window) + (context / self.ratio if self.ratio else 0.0)
        keys = context / self.ratio * self.indexer.key_bytes(precision) if self.indexer else 0.0
        return entries * self._entry(precision) + keys

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        near, far = min(context, self.window), context // self.ratio if self.ratio else 0.0
        attended = read = far
        if self.indexer:
            attended, read = min(self.indexer.picks, far), min(self.indexer.picks * rows, far)
        query = self.heads * self.width
        name = "sparse attention" if self.indexer else "compressed attention" if self.ratio else "window attention"
        flops, cached = 4 * query * (near + attended) * rows, (near + read) * self._entry(precision)
        streams = (Stream(name, flops, 2 * query * precision.query * rows, precision.attention, cached),)
        if not self.indexer:
            return streams
        return (*streams, self.indexer.stream(far, rows, precision))

    def _entry(self, precision: Precision) -> float:
        """Bytes of an entry: at 8 bits the rotary part stays 16 bits wide, and 8 bytes of scales are added."""
        if precision.cache >= 2:
            return self.width * precision.cache
        return (self.width - self.rope) * precision.cache + 2 * self.rope + 8
