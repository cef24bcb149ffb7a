"""Number formats by name, and what a precision on the command line says of each part of a model."""

from __future__ import annotations

import pytest

from wager.arch import FORMATS, TABLE, Precision, find_format
from wager.errors import UsageError
from wager.planner.inputs import with_formats

TYPED = """
awq 0.53 bf16       gptq 0.53 bf16    INT4 0.53 bf16     w4a16 0.53 bf16
w8a8 1.0 int8       w8a16 1.0 bf16    fp16 2.0 fp16      half 2.0 fp16
bfloat16 2.0 bf16   W8A8-FP8 1.0 fp8  nvfp4 0.5625 fp4   Q4_K_M 0.6 int8
q4-k-m 0.6 int8     q8_0 1.0625 int8  q4_0 0.5625 int8   q6_k 0.8203 int8
"""


def test_formats_by_the_names_that_people_type() -> None:
    words = TYPED.split()
    for name, size, compute in zip(words[::3], words[1::3], words[2::3], strict=True):
        found = find_format(name)
        assert (found.bytes, found.compute) == (pytest.approx(float(size), rel=2e-3), compute), name


def test_a_misspelt_format_is_named_with_the_nearest() -> None:
    for name, near in (("fp9", "fp8"), ("q4_k", "q4_k_m"), ("awk", "awq"), ("bf6", "bf16")):
        with pytest.raises(UsageError, match=f"'{name}' is not known") as caught:
            find_format(name)
        assert near in (caught.value.hint or "")


def test_a_precision_in_words() -> None:
    assert Precision.parse("bf16") == Precision.of("bf16")
    assert Precision.parse("bf16:mxfp4") == Precision.of("bf16", "mxfp4")
    assert Precision.parse("fp8") == TABLE["DeepSeek-V3"].precision
    assert Precision.parse("fp8::fp8") == Precision.of("fp8", router="bf16", embedding="bf16")
    narrow = Precision.of("int8", "int4", router="bf16", head="fp16", embedding="bf16")
    assert Precision.parse("int8:int4:fp16") == narrow
    q4 = Precision.parse("q4_k_m")
    assert (q4.weights.name, q4.head.name, q4.router.name) == ("q4_k_m", "q6_k", "bf16")
    assert Precision.parse("q8_0").head.name == "q8_0"
    assert Precision.parse("fp32").head == FORMATS["fp32"]
    for text in ("", ":fp8", "a:b:c:d", "fp8:fp8:fp8:fp8"):
        with pytest.raises(UsageError, match="is not understood"):
            Precision.parse(text)


def test_experts_of_a_model_without_experts_are_refused() -> None:
    dense, sparse = TABLE["Llama-3.1-8B"], TABLE["Qwen3-30B-A3B"]
    with pytest.raises(UsageError, match=r"'bf16:fp8' gives experts a format, and Llama-3\.1-8B has no experts"):
        with_formats(dense, "bf16:fp8", None)
    assert with_formats(sparse, "bf16:fp8", None).precision.experts.name == "fp8"
    assert with_formats(dense, "fp8::fp8", None).precision.head.name == "fp8"
