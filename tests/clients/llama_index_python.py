# requires: llama-index-llms-openai-like
from feature import MODEL, QUESTION, URL, report
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

OPTIONS = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 80, "max_retries": 0}
model = OpenAILike(**OPTIONS, is_chat_model=True, is_function_calling_model=True, context_window=2048)
ASKED = [ChatMessage(role="user", content=QUESTION)]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chat():
    assert model.chat(ASKED).message.content


def stream():
    assert len(list(model.stream_chat(ASKED))) > 3


def tools():
    answer = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True)
    assert model.get_tool_calls_from_response(answer)[0].tool_name == "weather"


def structured():
    assert isinstance(model.as_structured_llm(Person).complete("Ann is 30.").raw, Person)


def completions():
    assert OpenAILike(**OPTIONS, is_chat_model=False).complete("One, two,").text


report(chat=chat, stream=stream, tools=tools, structured=structured, completions=completions)
