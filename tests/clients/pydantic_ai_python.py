# requires: pydantic-ai-slim[openai,anthropic]
import asyncio

from feature import KEY, MODEL, QUESTION, URL, report
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"max_tokens": 100}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def chat():
    assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output


def stream():
    async def ask():
        async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as answer:
            return [part async for part in answer.stream_text(debounce_by=None)]

    assert len(asyncio.run(ask())) > 3


def tools():
    assert isinstance(Agent(model, output_type=Person, model_settings=SETTINGS).run_sync("Ann is 30.").output, Person)


def structured():
    agent = Agent(model, output_type=NativeOutput(Person), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ann is 30.").output, Person)


def responses():
    assert Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=SETTINGS).run_sync(QUESTION).output


def messages():
    anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    assert Agent(anthropic, model_settings=SETTINGS).run_sync(QUESTION).output


report(chat=chat, stream=stream, tools=tools, structured=structured, responses=responses, messages=messages)
