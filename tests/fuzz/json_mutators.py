"""Mutants of JSON files and of chat templates: types swapped, extremes, deletions, nesting, damaged text."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

EXTREMES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    1.0,
    0.5,
    -0.0,
    1e-300,
    1e300,
    2**31,
    2**32 - 1,
    2**63,
    2**64,
    10**30,
    10**400,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "1",
    "llama",
    "nan",
    "\x00",
    "é\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    [[1, [2]]],
    {"a": 1},
    {"": {}},
    [0] * 300,
    [-1],
    [1.5],
    [True],
    [10**30],
    "silu",
    "full_attention",
    "sliding_attention",
    "default",
    "yarn",
    "linear",
    "llama3",
    "@1e400",
    "@-1e400",
    "@1" + "0" * 5000,
)
"""Values to put in place of others; a text that begins with @ is written without quotes."""

KEYS: dict[str, tuple[str, ...]] = {
    "config.json": (
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "layer_types",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "head_dim",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "hidden_act",
        "quantization_config",
        "text_config",
        "architectures",
        "model_type",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "num_nextn_predict_layers",
        "mlp_bias",
        "rope_interleave",
        "norm_topk_prob",
        "moe_layer_freq",
        "scoring_func",
        "n_group",
        "topk_group",
        "mlp_only_layers",
        "expert_dtype",
        "attn_output_gate",
    ),
    "generation_config.json": ("eos_token_id", "bos_token_id", "pad_token_id"),
    "tokenizer_config.json": (
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "chat_template",
        "add_bos_token",
        "added_tokens_decoder",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "tokenizer_class",
        "model_max_length",
    ),
    "tokenizer.json": (
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
        "truncation",
        "padding",
        "version",
    ),
}
"""Keys to add, by file."""

_PATTERNS = (
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(a+)+$|\\s"}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "NFKC"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "ByteFallback"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    {"type": "Metaspace"},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"},
    {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 5},
    {"type": "BPE", "vocab": {"a": 2**31}, "merges": []},
    {"type": "WordPiece", "vocab": {}, "unk_token": "[UNK]"},
    [
        {
            "id": 10**6,
            "content": "zz",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5},
)
"""Sections of a tokenizer.json."""

TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ ('a' * 99999) * 99999 }}",
    "{{ [0] * 10 ** 11 }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ 'a' | center(10 ** 12) }}",
    "{{ '{:>1000000000000}'.format(1) }}",
    "{% set n = namespace(t='ab') %}{% for i in range(64) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "{% set n = namespace(t='ab') %}{% for i in range(64) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "{% set n = namespace(t='ab') %}{% for i in range(64) %}{% set n.t = n.t | replace('a', n.t) %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception() }}",
    "{{ raise_exception(1, 2) }}",
    "{{ 1 // 0 }}",
    "{{ strftime_now('%Q') }}",
    "{{ strftime_now(1) }}",
    "{{ strftime_now('\ud800') }}",
    "{{ messages | tojson(indent='x') }}",
    "{{ messages[5].content }}",
    "{{ messages[0]['content'].nothing.more }}",
    "{{ nothing() }}",
    "{{ messages | sum }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% break %}",
    "{{ lipsum(10**9) }}",
    "{{ cycler() }}",
    "{{ joiner().x.y }}",
    "{{ {} | dictsort | first }}",
    "{% generation %}",
    "{{ '\ud800' }}",
    "{{ messages.append(1) }}",
    "{{ dict(a=1).update(b=2) }}",
    "{% set messages = 1 %}{{ messages | length }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ namespace(a=1).a.b.c }}",
    "",
    "{{",
    "{% if %}",
    "{{ messages | map(attribute='content') | list | tojson }}",
    "{{ self }}",
    "{{ self.__class__ }}",
    "{{ caller() }}",
    "{{ tools | tojson }}{{ documents | tojson }}{{ raise_exception | tojson }}",
    "{{ messages | random }}",
    "{{ messages[0].content.encode('utf-32').decode('ascii') }}",
    "{{ 'x'.join(1) }}",
    "{{ 'ab'.zfill(10 ** 12) }}",
)
"""Chat templates that loop, raise, exhaust the memory or touch attributes."""

_PIECES = (
    "{{ ",
    " }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m %}",
    "{% endif %}",
    "{{ m['content'] }}",
    "| trim",
    "{% set x = m %}",
    "{{ x.y.z }}",
    "{{ 1/0 }}",
    "{% macro q() %}",
    "{% endmacro %}",
    "{#",
    "#}",
    "{{ loop.index }}",
    "* 10**9",
    "{{ '%s' % 1 }}",
    "| tojson",
    "{{ messages[9] }}",
    "{% generation %}",
    "{% endgeneration %}",
    "| int",
    "-",
)


def mutate_json(text: str, file: str, rng: random.Random) -> tuple[str, str]:
    """A mutant of a JSON file, and what was done to it."""
    if rng.random() < 0.15:
        return damage_text(text, rng)
    value, done = json.loads(text), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        done.append(_change(value, file, rng))
    return _dump(value, rng), "; ".join(done)


def mutate_template(text: str, rng: random.Random) -> tuple[str, str]:
    """A mutant of a chat template, and what was done to it."""
    if rng.random() < 0.5:
        chosen = rng.choice(TEMPLATES)
        return (chosen, "template") if rng.random() < 0.6 else (text + chosen, "template appended")
    for _ in range(rng.randint(1, 3)):
        first, last = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        piece = rng.choice(_PIECES)
        text = rng.choice(
            (text[:first] + piece + text[first:], text[:first] + text[last:], text[:first] + piece + text[last:])
        )
    return text, "pieces of a template"


def damage_text(text: str, rng: random.Random) -> tuple[str, str]:
    """Characters lost, doubled, exchanged; a truncation; brackets nested very deeply."""
    at = rng.randrange(len(text) + 1)
    kind = rng.choice(("cut", "insert", "exchange", "double", "nest", "empty"))
    if kind == "cut":
        return text[:at], f"cut at {at}"
    if kind == "nest":
        depth = rng.choice((10, 500, 100_000))
        return "[" * depth + "]" * depth if at % 2 else text[
            :-1
        ] + ',"q":' + "[" * depth + "]" * depth + "}", f"nested {depth}"
    if kind == "empty":
        return rng.choice(("", " ", "null", "[]", "0", '"a"', "{}", "\ufeff" + text)), "another document"
    character = rng.choice('{}[]":,0-9eE.\\\x00\ud7ffé tn')
    if kind == "insert":
        return text[:at] + character + text[at:], f"{character!r} at {at}"
    if kind == "exchange":
        return text[:at] + character + text[at + 1 :], f"{character!r} in place of the character at {at}"
    end = min(len(text), at + rng.randrange(1, 200))
    return text[:end] + text[at:end] + text[end:], f"{at} to {end} doubled"


def _change(value: Any, file: str, rng: random.Random) -> str:
    keys = KEYS.get(file, ())
    if keys and isinstance(value, dict) and rng.random() < 0.4:
        key = rng.choice(keys)
        new = rng.choice(_PATTERNS) if file == "tokenizer.json" and rng.random() < 0.7 else rng.choice(EXTREMES)
        value[key] = copy.deepcopy(new)
        return f"{key} = {str(new)[:80]!r}"
    holder, key = _pick(value, rng)
    if holder is None:
        return "nothing to change"
    old = holder[key]
    kind = rng.choice(("extreme", "extreme", "delete", "wrap", "scale", "copy"))
    if kind == "delete":
        del holder[key]
        return f"{key} deleted"
    if kind == "wrap":
        new: Any = rng.choice(([old], {"a": old}, str(old), [[old], old]))
    elif kind == "scale" and type(old) in (int, float) and abs(old) < 1e300:
        new = rng.choice((old + 1, old - 1, -old, old * 2, float(old), old * 10**9, old / 2, int(old) * 10**320))
    elif kind == "copy":
        source, name = _pick(value, rng)
        new = copy.deepcopy(source[name]) if source is not None else None
    else:
        new = rng.choice(EXTREMES)
    holder[key] = new
    return f"{key} = {str(new)[:80]!r}"


def _pick(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container inside `value` and one of its keys; outer ones are more likely."""
    found: tuple[Any, Any] = (None, None)
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        found = (value, key)
        value = value[key]
        if rng.random() < 0.4:
            break
    return found


def _dump(value: Any, rng: random.Random) -> str:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    while '"@' in text:
        before, _, rest = text.partition('"@')
        number, _, after = rest.partition('"')
        text = before + number + after
    return text
