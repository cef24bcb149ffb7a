"""How often a model calls the right function with the right arguments, of 24 fixed questions with four tools each.

python dev/measure_tools.py [--model NAME] [--choice auto|required] [--chat-template FILE]

Four of the questions need no tool. Answers are greedy, of one call at most, and follow the grammar that the
server gives them.
"""

from __future__ import annotations

import json
from typing import Any

import click

import wager
from wager.serve.bodies import ChatBody
from wager.serve.formats import read_calls
from wager.serve.parsing import ChatTools, template_message


def _tool(name: str, description: str, **arguments: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": arguments, "required": [*arguments], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


TOOLS = [
    _tool("get_weather", "The weather of a city", city=_text("Name of the city")),
    _tool("convert_currency", "Converts money", amount={"type": "number"}, currency=_text("Target, such as EUR")),
    _tool("send_email", "Sends an email", to=_text("Address"), subject=_text("Subject")),
    _tool("set_alarm", "Sets an alarm", hour={"type": "integer"}, minute={"type": "integer"}),
]

QUESTIONS: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (text, "get_weather", {"city": city})
        for text, city in (
            ("What is the weather in Oslo?", "Oslo"),
            ("Is it raining in Madrid right now?", "Madrid"),
            ("Tell me the weather of Tokyo, please.", "Tokyo"),
            ("Do I need an umbrella in London today?", "London"),
            ("How warm is it in Cairo?", "Cairo"),
        )
    ),
    *(
        (text, "convert_currency", {"amount": amount, "currency": currency})
        for text, amount, currency in (
            ("Convert 100 dollars to EUR.", 100, "EUR"),
            ("How much is 25 dollars in GBP?", 25, "GBP"),
            ("Change 500 to JPY.", 500, "JPY"),
            ("I have 40 dollars. What is that in CHF?", 40, "CHF"),
            ("Convert 12 to INR please.", 12, "INR"),
        )
    ),
    *(
        (f'Send an email to {address} with the subject "{subject}".', "send_email", {"to": address, "subject": subject})
        for address, subject in (
            ("anna@example.org", "Lunch"),
            ("bob@example.com", "Meeting"),
            ("team@example.net", "Report"),
            ("eva@example.org", "Holiday"),
            ("max@example.com", "Invoice"),
        )
    ),
    *(
        (text, "set_alarm", {"hour": hour, "minute": minute})
        for text, hour, minute in (
            ("Set an alarm for 7:30.", 7, 30),
            ("Wake me up at 6:15.", 6, 15),
            ("I need an alarm at 8:45.", 8, 45),
            ("Set the alarm to 5:10 please.", 5, 10),
            ("Wake me at 9:20 tomorrow.", 9, 20),
        )
    ),
    *((text, "", {}) for text in ("Hello!", "Thank you very much.", "Who are you?", "Write a poem about the sea.")),
]


@click.command()
@click.option("--model", default="SmolLM2-135M-Instruct")
@click.option("--choice", default="auto")
@click.option("--chat-template")
def main(model: str, choice: str, chat_template: str | None) -> None:
    right_names = right_calls = 0
    with wager.LLM(model=model, drafter="none", chat_template=chat_template) as llm:
        for question, name, arguments in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            asked = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
            body = ChatBody.model_validate(asked)
            tools = ChatTools.of(body, llm.tokenizer)
            if tools is None:
                raise SystemExit("There are no tools.")
            turns = tools.messages([template_message(each, tools.form) for each in body.messages])
            variables = {"tools": TOOLS} if tools.form.in_template else None
            prompt = llm.tokenizer.encode_parts(llm.tokenizer.chat_parts(turns, variables=variables))
            params = wager.SamplingParams(max_tokens=80, grammar=tools.grammar)
            answer: Any = llm.generate(prompt, params)
            calls = read_calls(tools.form, answer.text)[1]
            called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            named = [found for found, _ in called] == ([name] if name else [])
            right = named and (not name or _same(called[0][1], arguments))
            right_names += named
            right_calls += right
            click.echo(
                f"{'right' if right else 'name' if named else '-':5} {question!r} {called or answer.text[:60]!r}"
            )
    click.echo(
        f"{model}, {choice}: {right_names} right functions, {right_calls} with the right arguments, of {len(QUESTIONS)}"
    )


def _same(text: str, arguments: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == arguments)
    except ValueError:
        return False


if __name__ == "__main__":
    main()
