# requires: anthropic
import anthropic
from feature import CITY, MODEL, PERSON, QUESTION, report

client = anthropic.Anthropic(max_retries=0)
ASKED = [{"role": "user", "content": QUESTION}]
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
TOOL = {"name": "weather", "description": "The weather of a city", "input_schema": CITY}


def messages():
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, messages=ASKED, system=system, max_tokens=20)
    assert answer.content[0].text and answer.usage.output_tokens
    assert client.messages.count_tokens(model=MODEL, messages=ASKED, system=system).input_tokens > 5
    thought = {"type": "thinking", "thinking": "Well.", "signature": "x"}
    turns = [*ASKED, {"role": "assistant", "content": [thought, {"type": "text", "text": "Rain."}]}, *ASKED]
    assert client.messages.create(model=MODEL, messages=turns, max_tokens=5).stop_reason in ("max_tokens", "end_turn")


def stream():
    with client.messages.stream(model=MODEL, messages=ASKED, max_tokens=20) as events:
        assert "".join(events.text_stream) == events.get_final_message().content[0].text


def tools():
    asked = {"model": MODEL, "tools": [TOOL], "max_tokens": 80}
    answer = client.messages.create(**asked, messages=ASKED, tool_choice=ONE_CALL)
    assert answer.stop_reason == "tool_use" and answer.content[0].input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "rain"}
    turns = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked, messages=turns).content


def structured():
    wanted = {"format": {"type": "json_schema", "schema": PERSON}}
    answer = client.messages.create(model=MODEL, messages=ASKED, max_tokens=200, output_config=wanted)
    assert answer.content[0].text.startswith('{"name"')


def errors():
    for wrong, kind in (({"model": "x"}, anthropic.NotFoundError), ({"max_tokens": 0}, anthropic.BadRequestError)):
        try:
            client.messages.create(**{"model": MODEL, "messages": ASKED, "max_tokens": 5, **wrong})
        except kind as error:
            assert error.body["error"]["message"]
        else:
            raise AssertionError(f"{wrong} was taken")
    assert next(iter(client.models.list())).id == MODEL


report(chat=messages, messages=messages, stream=stream, tools=tools, structured=structured, errors=errors)
