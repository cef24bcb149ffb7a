"""Command lines of valid, extreme and wrong values, composed from the parameters that the commands themselves declare.

A line begins with a short valid call of its command, in which some options are replaced or added. Values are drawn by
what a parameter is: a number, a choice, a file, or a text whose valid forms VALID lists.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from wager.cli.verbs import VERBS, cli

MODEL = "random:llama:tiny"


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NOT_NUMBERS = ("", " ", "nan", "inf", "-inf", "²", "1" * 5000, "0x10", "1,5", "one", "-", "1e999", "NaN%", "１")
"""No option takes these as one number; the last is a fullwidth digit, which int() reads."""
NOT_WHOLE = ("1.5", "1e-400", "1e3", "1_000", "2+2")
HUGE = (str(10**30), "-" + str(10**30))
NUMBERS = words(
    "-1 0 1 2 3 7 -2147483649 2147483648 4294967296 -9223372036854775809 9223372036854775808 18446744073709551616 00 -0"
)
FRACTIONS = ("0.0", "0.5", "0.999", "1.0", "1.5", "-0.5", "1e-400", "1e-30", "1e30", "1e308", "5e-324")
TEXTS = (
    *words(
        "~nosuchuser/x ~ é ² １ 😀 , : = -- - nan inf -1 0 1e-400 1e999 .. . /dev/null /dev/full /proc/x "
        "a:b:c:d none auto none,none % {} []"
    ),
    "",
    " ",
    "\t",
    "x" * 5000,
    "/" * 300,
    str(2**63),
    str(10**30),
    "\x1b[31m",
    "a\nb",
)

_TIMES = (*words("0us 20us 2ms 0.1s 1e6s 1e7s 20 -1us nanus 1e-400s 1e400s infs"), "20 parsecs")
_MODELS = ("Llama-3.1-8B", "DeepSeek-V3", "Qwen3-30B-A3B", "gpt-oss-120b", "llama", "x/y/z", "{config}", "{text}")
_SHAPES = words(
    "free mtp eagle eagle:32000 eagle:0 eagle:9999999999 block block:8 block:257 medusa:3 medusa:0 "
    "model:Llama-3.2-1B model: model:x block:² free:1"
)
_HARDWARE = ("H100", "B200", "cpu", "this", "RTX-4090", "H10", "{device}", "{text}", "{missing}.json", "")
_LISTS = (
    *words("1 1,2 4k 0 1,,2 1, -1 1.5 nan inf 1e308 ² １ 100000000 9007199254740993 1,2,3,4,5,6,7,8,9 1m 1k"),
    "1" * 400,
    str(2**63),
)
_CURVES = words("mtp dflash 0.5 0 1 nan inf -0.1 1.1 1e-400 {curve} {text} {missing} mtp,mtp mtp,0.5 ０.5 0_1")
_FORMATS = ("fp8", "bf16:mxfp4", "awq", "q4_k_m", "fp8::fp8", ":", "::", "fp", "bf16:bf16:bf16:bf16", "int8")

VALID: dict[str, tuple[str, ...]] = {
    "prompt": ("hello", "a b a b a b", "x" * 10_000, "-"),
    "system": ("be brief", "é" * 100),
    "model": (MODEL, "random:mixtral:tiny", "random:qwen3:huge", "random:", "random:llama:tiny:1", *_MODELS),
    "drafter": (
        *words(
            "none auto ngram ngram:3 ngram:0 ngram:9 ngram:² suffix:tree recycle model model:{missing} "
            "ngram,recycle ngram,ngram ngram:１ ngrm"
        ),
        f"model:{MODEL}",
    ),
    "models": ("no-such-org/no-such-model", "no-such-model:1b", "{missing}"),
    "policy": words("adaptive fixed threshold threshold:0.3 threshold:nan threshold:2 threshold: fixed:3 adaptve"),
    "policies": (
        *words(
            "none adaptive fixed:3 fixed:mtp:3 fixed:² fixed:１ fixed:x:3 fixed:-1 threshold:0.3 threshold:mtp:0.3 "
            "threshold:x:0.3 threshold:nan adaptve"
        ),
        f"fixed:{10**30}",
        "fixed:" + "9" * 5000,
    ),
    "objective": ("throughput", "latency", "slo:20ms", "slo:0us", "slo:", "slo:1e400s", "slo:1", "fast"),
    "memory": (*words("64MiB 256MiB 1 1k 0 1e9 1.5GiB -1GiB nan ４GiB 0.5 0.0001k"), f"{10**30}TiB", "9" * 5000),
    "stop": ("a", "\n", "stop" * 1000),
    "batches": _LISTS,
    "contexts": _LISTS,
    "concurrency": _LISTS,
    "prompt_tokens": _LISTS,
    "depth": _LISTS,
    "rate": (*_LISTS, "0.5", "1e-300"),
    "load": words("recorded {arrivals} {text} {missing} day:10"),
    "curves": _CURVES,
    "acceptances": (*_CURVES, "75%", "0.1,0.5"),
    "shape": (*_SHAPES, "mtp=free", "x=free", "mtp="),
    "hardware": _HARDWARE,
    "believed": _HARDWARE,
    "tree": words("2 3:0.2 1 0 2:0 2:1 2:nan 2: :0.1 99 ２ x"),
    "drafter_cost": ("0", "0.1", "10", "11", "nan", *_TIMES),
    "link_latency": _TIMES,
    "overhead": _TIMES,
    "precision": _FORMATS,
    "dispatch": _FORMATS,
    "cache": _FORMATS,
    "output": ("{folder}/trained", "{folder}", "{missing}", "{text}"),
    "folder": ("{folder}", "{missing}", "{text}"),
    "learn": ("{folder}/learned", "{text}", "/proc/x"),
    "learn_bytes": ("1MiB", "1k", "0", "nan", "4GiB", "x"),
    "tenant": ("a", "0123", "é", "../.."),
    "user": ("alice", "é" * 50, "../.."),
    "tenant_by": words("user metadata.team metadata. x user.x é"),
    "head": ("{folder}", "{missing}", "{text}", MODEL, "SmolLM2-135M-Instruct"),
    "url": words(
        "http://127.0.0.1:9 https://127.0.0.1:9/v1 127.0.0.1:9 http:// http://[::1 ftp://x "
        "http://127.0.0.1:99999 http://127.0.0.1:9/é http://u:p@127.0.0.1:9"
    ),
    "metrics": words("http://127.0.0.1:9 {text} {prompts} {empty} {long} {missing} {folder} http:// ftp://x {~}"),
    "body": ("{}", "[]", '{"a": 1}', "{", '{"stream": 1}', "[" * 5000),
    "timeout": _TIMES,
    "size": ("1MiB", "1k", "1", "0", "nan", "4GiB", "x"),
    "taps": ("1,2", "0", "2,1", "1,1", "9", *_LISTS),
    "host": ("127.0.0.1", "::1", "localhost", "256.1.1.1", "no-such-host.invalid", "", "é", "a" * 300),
    "served_names": ("m", "m,n", "é" * 50),
    "cors": ("*", "https://example.org", ""),
    "layers": ("1", "0", "0,1", "1,1", "9", "300", *_LISTS),
}
"""Forms of each text, right and nearly right, by the name of its parameter."""

_LIGHT = ("--memory", "64MiB", "--threads", "1")
_TINY = ("--model", MODEL, *_LIGHT)
BASES: dict[str, tuple[str, ...]] = {
    "pull": ("{missing}.gguf",),
    "list": (),
    "rm": ("no-such-org/no-such-model",),
    "drafters": (),
    "completion": ("bash",),
    "run": ("hello", *_TINY, "--max-tokens", "3"),
    "chat": (*_TINY, "--max-tokens", "3"),
    "serve": ("--model", "{missing}.gguf", "--port", "0"),
    "bench": (*_TINY, *words("--max-tokens 2 --limit 1")),
    "prove": (*_TINY, *words("--max-tokens 2 --limit 1 --drafter ngram --concurrency 2")),
    "verify": ("{text}", *_TINY),
    "plan": words("--model Llama-3.1-8B --hardware H100 --batch 1,8"),
    "acceptance": (*_TINY, *words("--max-tokens 2 --limit 1")),
    "calibrate": (*_TINY, *words("--seconds 0.2 --drafter none")),
    "train": (
        *(*_TINY, "--prompts", "{prompts}", "--output", "{folder}/trained"),
        *words("--answer-tokens 2 --steps 1 --batch 16 --vocabulary 100"),
    ),
    "export": ("{folder}", "--model", MODEL, *words("--to vllm --output {folder}/exported")),
    "replay": words("--rounds 50 --concurrency 1 --output 16"),
    "lesson": ("2",),
    "doctor": (),
    "corpus": ("list", "{folder}"),
}
"""A short call of each command that succeeds (`pull`: that fails without a network; `rm`, `serve`
and `export`: that find no model and no head; `corpus`: that finds nothing learned; `verify`: that finds no receipt)."""

FAILS = {"pull", "rm", "serve", "export", "corpus", "verify"}
"""Commands whose base fails."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One call: its arguments, what is on stdin, and the options that were drawn, by flag (or name) and value."""

    arguments: tuple[str, ...]
    stdin: bytes
    drawn: tuple[tuple[str, str | None], ...]

    @property
    def verb(self) -> str:
        return self.arguments[0]


def make_files(folder: Path) -> dict[str, str]:
    """Files that options may name, by the name under which VALID has them."""
    texts = {
        "prompts": '{"id": 1, "category": "qa", "prompt": "hello"}\n'
        '{"question_id": 2, "category": "x", "turns": ["a"]}\n',
        "text": "not JSON at all\n",
        "empty": "",
        "list": "[1, 2]",
        "deep": "[" * 100_000,
        "long": '{"id": 1, "category": "qa", "prompt": "' + "a" * 1_000_000 + '"}\n',
        "wrong": '{"id": 1, "category": "qa", "prompt": "x"}\n{"id": 2, "category": "qa", "prompt": 3}\n',
        "digits": '{"id": ' + "9" * 6000 + ', "category": "qa", "prompt": "x"}\n',
        "surrogate": '{"id": "\\ud800", "category": "\\ud800", "prompt": "\\ud800"}\n',
        "zero": '{"id": "\\u0000", "category": "\\u0000", "prompt": "a\\u0000b"}\n',
        "config": json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}),
        "device": '{"name": "x", "memory": 1e11, "bandwidth": 1e12, "peaks": {"bf16": 1e14}}',
        "curve": '{"survival": [0.7, 0.5, 0.3]}',
        "popularity": '{"popularity": [0.5, 0.5, 0.5, 0.5], "locality": 0.9}',
        "arrivals": "0\n0.5\n1e-400\n",
        "steps": json.dumps([{"rows": n, "context": 64, "batch": 1, "seconds": n / 100} for n in (1, 2, 8)]),
        "options": "temperature = 0.5\nseed = 3\n",
        "options_wrong": f"threads = {10**30}\n",
        "options_user": 'model = "~nosuchuser/x"\n',
    }
    found = {}
    shutil.rmtree(folder / "trained", ignore_errors=True)  # a run that is there would be gone on with
    for name, text in texts.items():
        suffix = {"prompts": ".jsonl", "options": ".toml"}.get(name.partition("_")[0], ".json")
        path = folder / f"{name}{suffix}"
        path.write_text(text, encoding="utf-8")
        found[name] = str(path)
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00{")
    (folder / "nul.json").write_bytes(b'{"id": 1, \x00')
    found |= {"bytes": str(folder / "bytes.json"), "nul": str(folder / "nul.json"), "folder": str(folder)}
    return found | {"missing": str(folder / "missing" / "x"), "out": str(folder / "out.json"), "~": "~nosuchuser/x"}


def parameters(verb: str) -> list[click.Parameter]:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return [param for param in command.params if param.name != "help"]


def kind(param: click.Parameter) -> str:
    """flag, whole, number, choice, file or text."""
    if getattr(param, "is_flag", False):
        return "flag"
    if isinstance(param.type, click.Choice):
        return "choice"
    if isinstance(param.type, click.Path):
        return "file"
    name = param.type.name.lower()
    return "whole" if "integer" in name else "number" if "float" in name else "text"


class Composer:
    """Draws command lines; equal seeds draw the same."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._random, self._folder = random.Random(seed), folder
        self._files = make_files(folder)
        self._parameters = {verb: parameters(verb) for verb in VERBS}
        self._bag: list[str] = []

    def line(self) -> CommandLine:
        """The commands take turns; one that loads a model comes less often than the others."""
        make_files(self._folder)  # results may have replaced them
        if not self._bag:
            self._bag = [*VERBS, *["plan", "replay", "run"] * 4]
            self._random.shuffle(self._bag)
        verb = self._bag.pop()
        params = self._parameters[verb]
        count = min(len(params), self._random.choice((0, 1, 1, 1, 1, 2, 2, 3)))
        drawn = [(param, self._value(param)) for param in self._random.sample(params, count)]
        return self._compose(verb, drawn)

    def every_option(self, *, most: int) -> list[CommandLine]:
        """Each option of each command alone, with up to `most` different values."""
        lines = []
        for verb, params in self._parameters.items():
            for param in params:
                values = list(dict.fromkeys(self._value(param) for _ in range(3 * most)))[:most]
                lines += [self._compose(verb, [(param, value)]) for value in values]
        return lines

    def _compose(self, verb: str, drawn: list[tuple[click.Parameter, str | None]]) -> CommandLine:
        words = [self._fill(word) for word in BASES[verb]]
        named: list[tuple[str, str | None]] = []
        for param, value in drawn:
            if isinstance(param, click.Argument):
                base = BASES[verb]
                words = words[bool(base) and not base[0].startswith("-") :]
                words = [*words, "--", value or ""] if param is drawn[-1][0] else [value or "", *words]
                named.append((param.name or "", value))
                continue
            flag = self._random.choice([*param.opts, *param.secondary_opts])
            if value is None:
                words.append(flag)
            elif self._random.random() < 0.5 and flag.startswith("--"):
                words.append(f"{flag}={value}")
            else:
                words += [flag, value]
            named.append((flag, value))
        stdin = self._random.choice((b"", b"hello\n", b"a\x00b\n", b"\xff\xfe\n", b"/reset\nhi\n/what\n"))
        return CommandLine((verb, *words), stdin, tuple(named))

    def _fill(self, text: str) -> str:
        for name, path in self._files.items():
            text = text.replace("{" + name + "}", path)
        return text

    def _value(self, param: click.Parameter) -> str | None:
        """A value of the parameter; None for a flag."""
        draw, what = self._random.choice, kind(param)
        if what == "flag":
            return None
        if param.name == "max_tokens":  # a large number is work, not a mistake
            return draw(("0", "1", "3", "-1", *NOT_NUMBERS, *NOT_WHOLE, *HUGE, "9223372036854775808"))
        if what == "whole":
            return draw(draw((NUMBERS, NUMBERS, NOT_NUMBERS, NOT_WHOLE, HUGE)))
        if what == "number":
            return draw(draw((NUMBERS, FRACTIONS, FRACTIONS, NOT_NUMBERS, HUGE)))
        if what == "choice":
            return draw((*param.type.choices, *TEXTS))  # type: ignore[attr-defined]
        if what == "file":
            return draw((*self._files.values(), *TEXTS, str(self._files["folder"]) + "/x.svg"))
        return self._fill(draw(draw((VALID.get(param.name or "", TEXTS), VALID.get(param.name or "", TEXTS), TEXTS))))
