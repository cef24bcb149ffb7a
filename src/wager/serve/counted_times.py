"""A histogram of times for Prometheus that counts many equal ones at once, as steps of many streams have them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric


class CountedTimes:
    """Seconds by the `bounds` of their buckets, in ascending order; a value that equals a bound is below it."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *, model: str) -> None:
        self._name, self._text, self._model = name, text, model
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        names = [*map(str, self._bounds), "+Inf"]
        family.add_metric((self._model,), list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family
