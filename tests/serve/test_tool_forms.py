"""Tools with chat templates that know them: calls in the template's own form, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve.serving import NAME, Running, called_both_ways, running, tool

_TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call: OPEN{"name": ..., "ARGUMENTS": ...}CLOSE<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
OPEN{"name": "{{ call.function.name }}", "ARGUMENTS": {{ call.function.arguments | tojson }}}CLOSE{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORMS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>", "arguments"),
    "mistral": ("[TOOL_CALLS][", "]", "arguments"),
    "llama3": ("{# ipython #}", "", "parameters"),
}
MESSAGES: Any = [{"role": "user", "content": "one two"}]
TOOLS: Any = [tool("weather", at={"enum": ["Oslo", "Röm"]}), tool("open", at={"type": ["boolean", "null"]})]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[tuple[Running, tuple[str, str, str]]]:
    opening, closing, arguments = FORMS[request.param]
    with running({"max_context": 1024}) as server:
        template = _TEMPLATE.replace("OPEN", opening).replace("CLOSE", closing).replace("ARGUMENTS", arguments)
        server.llm.tokenizer.chat_template = template
        yield server, FORMS[request.param]


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "open"}}])
def test_calls_are_found_in_the_templates_form(form: tuple[Running, tuple[str, str, str]], choice: Any) -> None:
    ended = 0
    with openai.OpenAI(base_url=f"{form[0].url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(4):
            options: Any = dict(
                model=NAME,
                messages=MESSAGES,
                tools=TOOLS,
                tool_choice=choice,
                seed=seed,
                max_tokens=150,
                parallel_tool_calls=seed % 2 == 0,
            )
            whole, calls = called_both_ways(client, **options)
            if choice != "auto":
                assert calls and not whole.message.content
            if whole.finish_reason == "tool_calls":
                ended += 1
                for name, arguments in calls:
                    assert (
                        json.loads(arguments)["at"] in {"weather": ("Oslo", "Röm"), "open": (True, False, None)}[name]
                    )
    assert ended or choice == "auto"


def test_what_the_model_writes_is_the_templates_form(form: tuple[Running, tuple[str, str, str]]) -> None:
    server, (opening, closing, arguments) = form
    body = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 150,
        "seed": 1,
        "logprobs": True,
    }
    [choice] = server.post("/v1/chat/completions", body).json()["choices"]
    written = b"".join(bytes(item["bytes"]) for item in choice["logprobs"]["content"]).decode()
    [call] = choice["message"]["tool_calls"]
    name, given = call["function"]["name"], call["function"]["arguments"]
    shown = opening.replace("{# ipython #}", "")
    assert written == f'{shown}{{"name": "{name}", "{arguments}": {given}}}{closing}'


def test_earlier_calls_are_written_in_it(form: tuple[Running, tuple[str, str, str]]) -> None:
    server, (opening, closing, arguments) = form
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Röm"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    tokens = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    shown = opening.replace("{# ipython #}", "")
    assert f'{shown}{{"name": "weather", "{arguments}": {{"at": "Röm"}}}}{closing}<|im_end|>' in prompt
    assert prompt.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")
