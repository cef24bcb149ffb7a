"""What every client's script begins and ends with: it is run in the client's own environment, which has nothing of
this repository, as `python SCRIPT URL MODEL`, and prints a JSON object of what worked.
"""

import json
import os
import sys
import traceback

URL, MODEL = sys.argv[1:3]
KEY = "no-key-is-needed"
os.environ |= {
    "OPENAI_API_KEY": KEY,
    "OPENAI_BASE_URL": f"{URL}/v1",
    "ANTHROPIC_API_KEY": KEY,
    "ANTHROPIC_BASE_URL": URL,
}

QUESTION = "What is the weather in Oslo?"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class WeakModel(Exception):
    """The request was right, the answer came, and a small model did not do what it asks."""


def weak(condition, answer=""):
    """What depends on the model alone."""
    if not condition:
        raise WeakModel(str(answer)[:80])


def report(**features):
    """Call each feature and print what came of it."""
    found = {}
    for name, feature in features.items():
        try:
            feature()
            found[name] = "yes"
        except WeakModel as error:
            found[name] = f"weak model: {error}"
        except Exception as error:
            traceback.print_exc()
            found[name] = f"no: {type(error).__name__}: {str(error)[:200]}"
    sys.stdout.write(json.dumps(found) + "\n")
