"""Files of prompts, logs and times of arrival: what is read of each form, and how what is none is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from wager.errors import UsageError
from wager.prompts import OTHER, Prompt, read_arrivals, read_prompts, spread


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
CALLED = '{"name": "f", "arguments": "{}"}'
TOOL = {"role": "tool", "content": "4", "tool_call_id": "c"}
BODY = {"model": "m", "stream": True, "messages": [user("q"), model("w"), user("v")], "max_completion_tokens": 9}
BODY |= {"stop": "\n", "logit_bias": {"5": -1}, "top_logprobs": 2, "metadata": {"task": "sort"}}
SENT = {"max_tokens": 9, "stop": "\n", "logit_bias": {5: -1}, "top_logprobs": 2}
SHARED = [("system", "s"), ("human", "u"), ("gpt", "a"), ("human", "v"), ("gpt", "b")]
FORMS: list[tuple[dict[str, Any], list[Prompt]]] = [
    ({"prompt": "one\u2028two\x85three"}, [Prompt(1, OTHER, "one\u2028two\x85three")]),
    ({"id": "i", "prompt": [3, 4], "top_k": 5}, [Prompt("i", OTHER, (3, 4), {"top_k": 5})]),
    ({"messages": [SYSTEM, PARTS], "task": "t"}, [Prompt(1, "t", (SYSTEM, user("ab")))]),
    ({"messages": [user("a"), model("b"), user("c")]}, [Prompt(1, OTHER, (user("a"), model("b"), user("c")))]),
    (  # with its answers: a recorded conversation
        {"id": 7, "category": "c", "messages": [user("a"), model("b"), user("c"), model("d")], "temperature": 0.5},
        [
            Prompt("7/1", "c", (user("a"),), {"temperature": 0.5}, answer="b"),
            Prompt("7/2", "c", (user("a"), model("b"), user("c")), {"temperature": 0.5}, answer="d"),
        ],
    ),
    (  # the model is called after a tool's answer too
        {"messages": [user("a"), CALL, TOOL, model("d")]},
        [
            Prompt("1/1", OTHER, (user("a"),), answer=CALLED),
            Prompt("1/2", OTHER, (user("a"), {**CALL, "content": ""}, TOOL), answer="d"),
        ],
    ),
    (
        {"id": "s", "conversations": [{"from": who, "value": text} for who, text in SHARED]},
        [
            Prompt("s/1", OTHER, ({"role": "system", "content": "s"}, user("u")), answer="a"),
            Prompt("s/2", OTHER, ({"role": "system", "content": "s"}, user("u"), model("a"), user("v")), answer="b"),
        ],
    ),
    (
        {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        [Prompt("r-1", "sort", (user("q"), model("w"), user("v")), SENT)],
    ),
    (
        {"custom_id": "r-2", "url": "/v1/responses", "body": {"input": "hi", "instructions": "Be brief."}},
        [Prompt("r-2", OTHER, (SYSTEM, user("hi")))],
    ),
    (  # Anthropic's
        {"custom_id": "a", "params": {"system": [{"text": "Be brief."}], "messages": [PARTS], "stop_sequences": ["x"]}},
        [Prompt("a", OTHER, (SYSTEM, user("ab")), {"stop": ["x"]})],
    ),
    ({"prompt": "hi", "system": ["x"]}, [Prompt(1, OTHER, "hi")]),
    ({"prompt": "hi", "params": {"temperature": 0.5}}, [Prompt(1, OTHER, "hi")]),
    ({"system": "Be brief.", "instructions": None, "prompt": "hi"}, [Prompt(1, OTHER, (SYSTEM, user("hi")))]),
    ({"system": "Be brief.", "messages": [SYSTEM, user("hi")]}, [Prompt(1, OTHER, (SYSTEM, user("hi")))]),
    ({"question_id": 81, "category": "writing", "turns": ["x", "y"]}, [Prompt(81, "mt_bench", "x")]),
    ({"question_id": 9, "category": "rag", "turns": ["x"], "reference": "z"}, [Prompt(9, "rag", "x")]),
]


def test_every_form_of_a_request_is_read(tmp_path: Path) -> None:
    for row, prompts in FORMS:
        assert read_prompts(write(tmp_path, row)) == prompts
    rows = [{"prompt": "a"}, {"id": "b", "prompt": "b"}]
    for whole in (json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows)) + "\r\n\r\n"):
        assert [prompt.text for prompt in read_prompts(write(tmp_path, whole))] == ["a", "b"]
    mixed = [{**row, "id": place} for place, (row, _) in enumerate(FORMS)]
    assert len(read_prompts(write(tmp_path, *mixed))) == sum(len(prompts) for _, prompts in FORMS)


TABLES = (
    ("id,Prompt,category,max tokens,top_p,stop", 'a,"Hello, world",qa,5,0.5,', ',"One\ntwo",,,,5'),
    ('"prompt";"id";"task";"max_completion_tokens";"top_p";"stop"', "Hello, world;a;qa;5;0.50;", '"One\ntwo";;;;;5'),
    (  # an index and a column without names
        "\tprompt\tid\tstop\t\tmax_tokens\ttop_p\ttask",
        "0\tHello, world\ta\t\tx\t5\t5e-1\tqa",
        '1\t"One\ntwo"\t\t5\t\t\t\t',
    ),
)


def test_tables_are_read_as_programs_write_them_and_no_value_is_lost(tmp_path: Path) -> None:
    fields = {"max_tokens": 5, "top_p": 0.5}
    asked = [Prompt("a", "qa", "Hello, world", fields), Prompt(2, OTHER, "One\ntwo", {"stop": "5"})]
    for names, first, second in TABLES:
        assert read_prompts(write(tmp_path, names, first, "", second)) == asked, names
    assert [each.content for each in read_prompts(write(tmp_path, "prompt", "a b", "c"))] == ["a b", "c"]
    assert read_arrivals(write(tmp_path, "time", "3", "5")) == (0, 2)
    for rows, complaint in (
        (("prompt,category", "Hello, world,qa"), "line 2 has 3 values for 2 columns"),
        (("prompt,category", 'x,"a', 'b"', "y"), "line 4 has 1 values for 2 columns"),
        (("prompt,Prompt", "x,y"), "line 1 has 'prompt' twice"),
        (("prompt,max_tokens", "x,many"), "line 2: max_tokens = 'many'"),
        (("prompt,max_tokens", f"x,{'[' * 99_999}"), r"line 2: max_tokens = '\[\["),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_prompts(write(tmp_path, *rows))


ANSWERS: list[tuple[dict[str, Any], Any]] = [
    ({"answer": "yes"}, "yes"),
    ({"completion": ""}, None),
    ({"output": [5, 6]}, (5, 6)),
    ({"response": {"error": "busy"}}, None),
    ({"response": {"status_code": 200, "body": {"choices": [{"index": 0, "message": model("yes")}]}}}, "yes"),
    ({"choices": [{"index": 0, "text": "yes"}, {"index": 1, "text": "no"}]}, "yes"),
    ({"response": {"choices": [{"index": 0, "message": CALL}]}}, CALLED),
    ({"response": {"output": [{"type": "reasoning"}, {"content": [{"type": "output_text", "text": "yes"}]}]}}, "yes"),
    ({"response": {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}}, "yes"),
    ({"choices": 5}, None),
]


def test_recorded_answers_are_read(tmp_path: Path) -> None:
    for row, answer in ANSWERS:
        for asked in ({"prompt": "q"}, {"request": {"messages": [user("q")]}}):
            [prompt] = read_prompts(write(tmp_path, {**asked, **row}))
            assert prompt.answer == answer, row


def test_bad_rows_are_named(tmp_path: Path) -> None:
    for row, complaint in (
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"id": ' + "9" * 6000 + ', "prompt": "x"}', "line 2: not JSON"),
        ([1], "line 2: not an object"),
        ({"id": 1, "category": "qa"}, "line 2: there is no prompt"),
        ({"prompt": 5}, "line 2: prompt = 5"),
        ({"prompt": ["a"]}, r"line 2: prompt = \[\"a\"\] is neither"),
        ({"id": 1, "turns": []}, "line 2: the prompt is empty"),
        ({"id": [], "prompt": "x"}, r"line 2: the id \[\]"),
        ({"prompt": "x", "temperature": -1}, "line 2: temperature = -1"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "line 2: a field has the wrong type"),
        ({"messages": []}, r"line 2: messages = \[\]"),
        (
            {"messages": [user("x"), {"role": "user", "content": [{"type": "image_url"}]}]},
            "line 2: message 2 of messages",
        ),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "line 2: message 1 of conversations has no role"),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, 'line 2: url = "/v1/embeddings" asks for no text'),
        ({"timestamp": 1, "input_length": 4, "output_length": 1}, "line 2: there is no prompt"),
        ('{"prompt": "\\ud800"}', "line 2: half a surrogate pair"),
        ({"id": 0, "prompt": "x"}, "two prompts with the id 0"),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_prompts(write(tmp_path, {"id": 0, "prompt": "x"}, row))
    for row in ("\n", {"conversations": []}):
        with pytest.raises(UsageError, match="no prompts"):
            read_prompts(write(tmp_path, row))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bytes.* not UTF-8 \(byte 0xff at 0\)"):
        read_prompts(tmp_path / "bytes")


@pytest.mark.parametrize("header", ['"prompt","category"', "Prompt, category", '"prompt"', "prompt"])
def test_a_table_is_read_however_its_header_is_written(tmp_path: Path, header: str) -> None:
    rows = ['"Hi, you","qa"', "Ho,qa"] if "," in header else ['"Hi, you"', "Ho"]
    found = read_prompts(write(tmp_path, header, *rows))
    assert [(each.content, each.category) for each in found] == [
        (text, "qa" if "," in header else OTHER) for text in ("Hi, you", "Ho")
    ]


def test_times_of_arrival_are_read_of_logs_traces_and_plain_lists(tmp_path: Path) -> None:
    turns = [{**user("u"), "timestamp": 6}, model("a"), {**user("v"), "timestamp": 9.5}, model("b")]
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50,39,9",
    )
    mooncake = [{"timestamp": 1000 * n, "input_length": 9, "output_length": 2, "hash_ids": [n]} for n in (27, 30)]
    served = {"logger": "wager.serve", "level": "info", "prompt_tokens": 9, "completion_tokens": 2}
    log = [{**served, "time": f"2026-11-24T02:00:0{n}.500+00:00", "seconds": n / 2} for n in (1, 2, 3)]
    for rows, times in (
        (("3", "", "0.5", "2"), (0, 1.5, 2.5)),
        (("[3, 1]",), (0, 2)),
        (({"created": 1700000000}, {"created": 1700000010}), (0, 10)),
        (({"timestamp": "2024-01-01T00:00:00Z"}, {"timestamp": 1704067201500}), (0, 1.5)),
        (({"time": "2024-01-01 00:00:00 UTC"}, {"time": "2024-01-01t02:00:01.5+02:00"}), (0, 1.5)),
        (({"time": "2024-01-01 02:00:00 +0200 UTC"}, {"time": "2024-01-01 00:00:01.5 +0000 UTC"}), (0, 1.5)),
        (({"messages": turns},), (0, 3.5)),
        (azure, (0, 3.31941)),
        (mooncake, (0, 3)),
        (
            ({"logger": "wager.serve", "level": "info", "time": "2026-11-24T01:59:00", "path": "/health"}, *log),
            (0, 0.5, 1),
        ),
        (("Timestamp,Model,Request tokens,Response tokens\n5,m,472,18\n45,m,1087,230",), (0, 40)),
    ):
        assert read_arrivals(write(tmp_path, *rows)) == pytest.approx(times, abs=1e-5)
    for row, complaint in (
        ({"arrival": -1}, "line 2: -1 is not a time"),
        ("NaN", "line 2: NaN is not a time"),
        ({"created": "noon"}, 'line 2: "noon" is not a time'),
        ({"prompt": "x"}, "line 2 has no arrival, timestamp, created or time"),
        (
            {"timestamp": 1, "messages": [user("a"), model("b"), user("c"), model("d")]},
            "line 2: turn 2 .* has no arrival",
        ),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_arrivals(write(tmp_path, "1", row))
    with pytest.raises(UsageError, match="no arrivals"):
        read_arrivals(write(tmp_path))


def test_a_limit_is_spread_over_categories_and_within_them() -> None:
    prompts = [Prompt(f"{name}{i}", name, "x") for name in ("qa", "rag", OTHER) for i in range(8)]
    chosen = spread(prompts, 7)
    assert Counter(p.category for p in chosen) == {"qa": 3, "rag": 2, OTHER: 2}
    assert [p.id for p in chosen if p.category == "rag"] == ["rag0", "rag4"]
    assert spread(prompts, 99) == prompts == spread(prompts, None)
    lopsided = prompts[:1] + prompts[8:]
    assert Counter(p.category for p in spread(lopsided, 9)) == {"qa": 1, "rag": 4, OTHER: 4}
