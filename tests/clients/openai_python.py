# requires: openai
import openai
from feature import CITY, MODEL, PERSON, QUESTION, report
from pydantic import BaseModel

client = openai.OpenAI(max_retries=0)
ASKED = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "weather", "description": "The weather of a city", "parameters": CITY, "strict": True}


class Person(BaseModel):
    name: str
    age: int


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=20, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == len(
        answer.choices[0].logprobs.content
    )


def stream():
    chunks = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(chunks)
    assert len(chunks) > 3 and chunks[-1].usage.completion_tokens


def tools():
    asked = {"model": MODEL, "messages": ASKED, "tools": [{"type": "function", "function": TOOL}]}
    answer = client.chat.completions.create(**asked, tool_choice="required", max_tokens=80)
    message = answer.choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    asked["messages"] = [*ASKED, message, result]
    assert client.chat.completions.create(**asked, max_tokens=20).choices


def structured():
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Describe Ann, 30."}], response_format=Person, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def completions():
    answer = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=1, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith("One, two,") and answer.choices[0].logprobs.token_logprobs[0] is None


def responses():
    with client.responses.stream(model=MODEL, input=QUESTION, store=True, max_output_tokens=40) as events:
        kinds = {event.type for event in events}
    assert {"response.created", "response.output_text.delta"} <= kinds
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=20)
    second = client.responses.create(model=MODEL, input="And Rome?", previous_response_id=first.id, max_output_tokens=9)
    assert second.output_text and client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    called = client.responses.create(
        model=MODEL, input=QUESTION, tools=[{"type": "function", **TOOL}], tool_choice="required", max_output_tokens=99
    )
    assert called.output[0].type == "function_call"
    parsed = client.responses.parse(model=MODEL, input="Ann is 30.", text_format=Person, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Person)


def errors():
    for wrong, kind in (({"model": "x"}, openai.NotFoundError), ({"temperature": 9}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": ASKED, **wrong})
        except kind as error:
            assert error.param in wrong
        else:
            raise AssertionError(f"{wrong} was taken")
    assert client.models.list().data[0].id == MODEL


assert PERSON
report(
    chat=chat,
    stream=stream,
    tools=tools,
    structured=structured,
    completions=completions,
    responses=responses,
    errors=errors,
)
