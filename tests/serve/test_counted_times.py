"""The histogram that counts many equal times at once says what the library's own one says of each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from wager.serve.metrics import WeightedHistogram

BOUNDS = (0.001, 0.0025, 0.1, 1, 60)
TIMES = st.sampled_from((*BOUNDS, 0.0, 0.0011, 0.5, 1000.0)) | st.floats(0, 100)


@given(st.lists(st.tuples(TIMES, st.integers(1, 5)), max_size=20))
def test_it_says_what_the_librarys_histogram_says(added: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = WeightedHistogram("wager:seconds", "Words.", BOUNDS, model="m")
    ours.register(counted)
    observed = Histogram("wager:seconds", "Words.", ("model_name",), registry=theirs, buckets=BOUNDS).labels("m")
    for seconds, times in added:
        counted.add(seconds, times)
        for _ in range(times):
            observed.observe(seconds)
    said, expected = lines(ours), lines(theirs)
    assert said.keys() == {name for name in expected if "_created" not in name}
    for name, value in said.items():
        assert abs(value - expected[name]) <= 1e-9 * abs(value), name


def lines(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample, by its name with labels."""
    text = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text if not line.startswith("#")}
