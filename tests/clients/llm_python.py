# requires: llm
import os
import pathlib
import tempfile

from feature import MODEL, PERSON, QUESTION, URL, report

os.environ["LLM_USER_PATH"] = folder = tempfile.mkdtemp()
pathlib.Path(folder, "extra-openai-models.yaml").write_text(
    f"- model_id: wager\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: none\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
import llm  # noqa: E402  # which reads its folder

model = llm.get_model("wager")
model.key = "none"


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chat():
    assert model.prompt(QUESTION, stream=False, max_tokens=20).text()


def stream():
    assert len(list(model.prompt(QUESTION, max_tokens=20))) > 3


def tools():
    answer = model.prompt(QUESTION, tools=[weather], stream=False, max_tokens=60)
    answer.text()
    assert isinstance(answer.tool_calls(), list)


def structured():
    assert model.prompt(QUESTION, schema=PERSON, stream=False, max_tokens=200).text().startswith('{"name"')


report(chat=chat, stream=stream, tools=tools, structured=structured)
