"""Devices: their peaks, memory and links, how they are found by name, and the CPU against measured passes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from wager.arch import TABLE, Precision
from wager.errors import UsageError
from wager.planner.cost import CostModel, SequenceLoad
from wager.planner.devices import DEVICES, Device, find_device
from wager.planner.plan import tokens_at_constant_rate

B200, H100, LLAMA = DEVICES["B200"], DEVICES["H100"], TABLE["Llama-3.1-8B"]


def test_ridges() -> None:
    ridges = {
        "B300": (281, 563, 1688),
        "B200": (281, 563, 1125),
        "H200": (206, 412),
        "GH200": (247, 495),
        "H100": (295, 591),
        "A100-80GB": (153,),
        "CPU-2core-AVX512": (8.33,),
    }
    for name, expected in ridges.items():
        device = DEVICES[name]
        found = [device.ridge(kind) for kind in ("bf16", "fp8", "fp4") if kind in device.peaks]
        assert found == pytest.approx(list(expected), rel=4e-3)


def test_dense_knees_in_tokens() -> None:
    """R b / 2: bf16, fp8, 4 bits computed as bf16, 4 bits computed as fp4."""
    for name, expected in {
        "B200": (281, 281, 75, 298),
        "H100": (295, 295, 78, 78),
        "H200": (206, 206, 55, 55),
        "GH200": (247, 247, 66, 66),
    }.items():
        device = DEVICES[name]
        wide, fp8, fp4 = (device.ridge(kind) for kind in ("bf16", "fp8", "fp4"))
        knees = (wide, fp8 / 2, wide * 0.265, fp4 * 0.265)
        assert knees == pytest.approx(expected, abs=0.55)
    assert DEVICES["A100-80GB"].ridge("fp8") == DEVICES["A100-80GB"].ridge("bf16")


def test_a_device_that_cannot_do_an_arithmetic_says_so() -> None:
    with pytest.raises(UsageError, match="H100 has no known peak for fp32"):
        H100.peak("fp32")
    with pytest.raises(UsageError, match="no known peak for fp32"):
        CostModel(replace(LLAMA, precision=Precision.of("fp32")), H100).seconds([SequenceLoad(0, 1)])


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("b200", "B200"),
        ("H100-SXM", "H100"),
        ("cpu", "CPU-2core-AVX512"),
        ("RTX4090", "RTX-4090"),
        ("H100 80GB", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-PCIe", "H100-PCIe"),
        ("H200 141GB", "H200"),
        ("A100", "A100-80GB"),
        ("A100 40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100 80GB PCIe", "A100-80GB-PCIe"),
        ("rtx 4090 24gb", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi325x 256GB", "MI325X"),
        ("B200 180GB", "B200"),
    ],
)
def test_devices_are_found_by_the_names_that_people_type(name: str, device: str) -> None:
    assert find_device(name).name == device


@pytest.mark.parametrize(
    ("name", "near"),
    [("H10", "H100"), ("MI300", "MI300X"), ("4090", "RTX-4090"), ("A10", "A10G"), ("L40", "L40S"), ("h2oo", "H200")],
)
def test_an_unknown_device_is_named_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is not known") as caught:
        find_device(name)
    assert re.search(rf"Did you mean [^?]*{near}[^?]*\?", caught.value.hint or "")
    assert "`this` is this machine" in (caught.value.hint or "")


def test_a_device_of_another_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="No H100 of 94 GB is known") as caught:
        find_device("H100 94GB")
    assert "85.52 GB" in (caught.value.hint or "")


def test_memory_is_in_bytes_of_the_driver() -> None:
    """Cards are sold in units of 2^30 bytes, less what the driver keeps; HBM stacks of B200 and B300 are 1e9 each."""
    for name, found in {
        "H100": 85.5e9,
        "H200": 150.8e9,
        "A100-40GB": 42.9e9,
        "B200": 192.3e9,
        "B300": 288.4e9,
        "MI300X": 206.1e9,
        "RTX-4090": 25.8e9,
        "T4": 16.1e9,
    }.items():
        assert DEVICES[name].memory == pytest.approx(found, rel=2e-3)


def test_8_bit_integers_run_at_their_own_rate() -> None:
    """W8A8 in integers is as fast as in floats on an H100, faster than bf16 on an A100; the B300 gave its units up."""
    for name, teraflops in {
        "A100-80GB": 624,
        "H100": 1979,
        "L4": 242.5,
        "T4": 130,
        "L40S": 733,
        "A10G": 140,
        "MI300X": 2614.9,
        "RTX-4090": 660.6,
        "B200": 4500,
        "B300": 150,
    }.items():
        assert DEVICES[name].peak("int8") == teraflops * 1e12
    model = replace(LLAMA, precision=Precision.of("int8"))
    wide, narrow = (CostModel(each, DEVICES["A100-80GB"]).step([SequenceLoad(0, 1, 512)]) for each in (LLAMA, model))
    assert narrow.parts["ffn"].seconds == pytest.approx(wide.parts["ffn"].seconds / 2)
    alone = replace(LLAMA, precision=Precision.of("w8a16"))
    assert CostModel(alone, H100).step([SequenceLoad(0, 1, 512)]).parts["ffn"].seconds == pytest.approx(
        CostModel(LLAMA, H100).step([SequenceLoad(0, 1, 512)]).parts["ffn"].seconds
    )


def test_16_bits_of_either_kind() -> None:
    """The T4 has no bf16 and serves such weights in fp16; the others list one rate for both kinds."""
    t4 = DEVICES["T4"]
    assert t4.peak("bf16") == t4.peak("fp16") == t4.peak("fp4") == 65e12
    assert H100.peak("fp16") == H100.peak("bf16")
    assert CostModel(LLAMA, t4).seconds([SequenceLoad(100, 1)]) == pytest.approx(
        CostModel(replace(LLAMA, precision=Precision.of("fp16")), t4).seconds([SequenceLoad(100, 1)])
    )


def test_links_of_amd_devices() -> None:
    """7 links of 64 GB/s a direction: two all-reduces a layer, each 2 x 7/8 of the activations."""
    sent = 2 * 32 * 4 * 4096 * 2 * 2 * 7 / 8
    step = CostModel(LLAMA, DEVICES["MI300X"], tp=8).step([SequenceLoad(0, 1, 4)])
    assert step.parts["all-reduce"].seconds == pytest.approx(sent / 448e9)


KERNEL_MS = {1: 5.25, 2: 5.79, 4: 6.26, 8: 6.87, 12: 9.9, 16: 11.3}


def test_the_cpu_follows_measured_passes_within_7_percent() -> None:
    """The measured passes of SmolLM2-135M in bf16 by rows: a larger-of-both roofline at the best rate seen (814
    GFLOP/s) takes 16 rows for free and is 54 % too fast there."""
    cost = CostModel(TABLE["SmolLM2-135M"], find_device("cpu"))
    for rows, measured in KERNEL_MS.items():
        found = cost.seconds([SequenceLoad(0, rows)]) * 1e3
        assert found == pytest.approx(measured, rel=0.07)
        read, computed = 2 * 134_479_872 / 51e9, 2 * 134_479_872 * rows / 425e9
        assert found == pytest.approx(1e3 * (read**2 + computed**2) ** 0.5, rel=1e-3)


def test_the_cpus_speed_ups_are_those_of_the_measured_passes() -> None:
    """Free drafts for one request at acceptance 0.8: the measured rows put the best of these depths at 7, 3.18 times;
    the old roofline had 4.8 times at 15."""
    cost = CostModel(TABLE["SmolLM2-135M"], find_device("cpu"))
    steps = [cost.seconds([SequenceLoad(0, depth + 1)]) for depth in range(16)]
    found = {depth: tokens_at_constant_rate(0.8, depth) * steps[0] / steps[depth] for depth in (1, 3, 7, 11, 15)}
    assert found == pytest.approx({1: 1.632, 3: 2.476, 7: 3.180, 11: 2.469, 15: 2.258}, rel=0.09)
    assert max(found, key=lambda depth: found[depth]) == 7


@pytest.mark.parametrize(
    ("precision", "measured"),
    [("q8_0", {1: 2.76, 4: 3.47, 8: 4.51, 16: 7.33}), ("q4_1::q8_0", {1: 1.85, 4: 2.54, 8: 4.20, 16: 7.61})],
)
def test_the_cpu_follows_quantised_passes(precision: str, measured: dict[int, float]) -> None:
    model = replace(TABLE["SmolLM2-135M"], precision=Precision.parse(precision))
    cost = CostModel(model, find_device("cpu"))
    for rows, milliseconds in measured.items():
        assert cost.seconds([SequenceLoad(0, rows)]) * 1e3 == pytest.approx(milliseconds, rel=0.08)


def test_how_far_reading_and_computing_overlap() -> None:
    """Powers of small seconds do not vanish, nothing to compute costs the reading alone, and 1 is their sum."""
    for overlap, expected in ((None, 4.0), (1.0, 7.0), (2.0, 5.0)):
        device = Device("x", {"bf16": 1e12}, 1e12, None, overlap=overlap)
        assert device.seconds(3e12, 4e12, compute="bf16") == pytest.approx(expected)
        assert device.seconds(3e-300, 4e-300, compute="bf16") == pytest.approx(expected * 1e-312)
        assert device.seconds(3e12, 0, compute="bf16") == 3
    wide = Device("x", {"bf16": 1e12}, 1e12, None, overlap=1e6)
    assert wide.seconds(3e12, 4e12, compute="bf16") == pytest.approx(4)


def test_a_machine_of_ones_own() -> None:
    assert Device.from_dict({key: value for key, value in B200.as_dict().items() if key != "label"}) == replace(
        B200, label="given"
    )
    for values, message in (
        ({"name": "x", "peaks": {"bf16": 1e12}}, "lacks 'bandwidth'"),
        ({"name": "x", "peaks": {}, "bandwidth": 1e9}, "lacks 'peaks'"),
        ({"name": "x", "peaks": {"bf16": -1}, "bandwidth": 1e9}, "peaks.bf16 = -1"),
        ({"name": "x", "peaks": {"bf16": 1e12}, "bandwidth": 1e9, "bandwith": 1}, "no 'bandwith'"),
    ):
        with pytest.raises(UsageError, match=message):
            Device.from_dict(values)
