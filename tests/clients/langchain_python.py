# requires: langchain-openai
import openai
from feature import MODEL, QUESTION, URL, report
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


def model(**options):
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, max_tokens=80, **options)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chat():
    assert model().invoke(QUESTION).content


def stream():
    assert len([part.content for part in model().stream(QUESTION)]) > 3


def tools():
    answer = model().bind_tools([weather], tool_choice="required").invoke(QUESTION)
    assert answer.tool_calls[0]["name"] == "weather"


def structured():
    for method in ("json_schema", "function_calling"):
        assert isinstance(model().with_structured_output(Person, method=method).invoke("Ann is 30."), Person)


def completions():
    assert OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=9).invoke("One, two,")


def responses():
    assert model(use_responses_api=True).invoke(QUESTION).text


def errors():
    try:
        ChatOpenAI(model="x", base_url=f"{URL}/v1", api_key="none", max_retries=0).invoke(QUESTION)
    except openai.NotFoundError as error:
        assert "not served" in str(error)
    else:
        raise AssertionError("another model was taken")


report(
    chat=chat,
    stream=stream,
    tools=tools,
    structured=structured,
    completions=completions,
    responses=responses,
    errors=errors,
)
