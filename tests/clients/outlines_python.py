# requires: outlines[openai]
from typing import Literal

import openai
import outlines
from feature import MODEL, QUESTION, URL, report
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
model = outlines.from_openai(client, MODEL)
served = outlines.from_vllm(client, MODEL)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def chat():
    assert model(QUESTION, max_tokens=20)


def stream():
    assert len(list(model.stream(QUESTION, max_tokens=20))) > 3


def structured():
    for each in (model, served):
        assert Person.model_validate_json(each("Ann is 30.", Person, max_tokens=100))
    assert served("Which?", Literal["red", "blue"], max_tokens=20) in ("red", "blue")
    assert served("A number.", outlines.regex("[0-9]{3}"), max_tokens=20).isdigit()


report(chat=chat, stream=stream, structured=structured)
