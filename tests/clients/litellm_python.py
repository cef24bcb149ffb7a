# requires: litellm
import os

from feature import CITY, MODEL, QUESTION, URL, report

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm

litellm.suppress_debug_info = True
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 60}
ASKED = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": CITY}}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}


def chat():
    assert litellm.completion(messages=ASKED, **OPENAI).choices[0].message.content


def stream():
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(messages=ASKED, stream=True, **OPENAI)]
    assert len(parts) > 3 and "".join(parts)


def tools():
    answer = litellm.completion(messages=ASKED, tools=[TOOL], tool_choice="required", **OPENAI)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def structured():
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = litellm.completion(messages=ASKED, response_format=wanted, **OPENAI)
    assert answer.choices[0].message.content.startswith('{"age"')


def responses():
    options = {name: value for name, value in OPENAI.items() if name != "max_tokens"}
    assert litellm.responses(input=QUESTION, max_output_tokens=20, **options).output


def messages():
    options = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 20}
    assert litellm.completion(messages=ASKED, **options).choices[0].message.content


def errors():
    try:
        litellm.completion(messages=ASKED, **{**OPENAI, "model": "openai/x"})
    except litellm.NotFoundError as error:
        assert "not served" in str(error)
    else:
        raise AssertionError("another model was taken")


report(
    chat=chat,
    stream=stream,
    tools=tools,
    structured=structured,
    responses=responses,
    messages=messages,
    errors=errors,
)
