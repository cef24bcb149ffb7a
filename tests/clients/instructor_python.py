# requires: instructor
import instructor
import openai
from feature import MODEL, URL, report
from pydantic import BaseModel, Field

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Ann is 30 years old."}]}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def asked_by(mode):
    answer = instructor.from_openai(plain, mode=mode).chat.completions.create(response_model=Person, **ASKED)
    assert isinstance(answer, Person)


def tools():
    asked_by(instructor.Mode.TOOLS)


def structured():
    asked_by(instructor.Mode.JSON_SCHEMA)


def stream():
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(response_model=Person, **ASKED))
    assert parts[-1].age is not None


report(tools=tools, structured=structured, stream=stream)
