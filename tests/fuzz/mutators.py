"""Mutants of model files: headers taken apart and changed, JSON with other types and extremes, damage."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from dataclasses import dataclass, field
from typing import Any

# ---- JSON and templates ---------------------------------------------------------------------------------------------

_WORDS = """
1 llama nan silu full_attention sliding_attention default yarn linear llama3 F64 BF16 F8_E4M3 I8 @1e400 @-1e400
"""
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1.0, 0.5, -0.0, 1e-300, 1e300),
    *(2**31, 2**32 - 1, 2**63, 2**64, 10**30, 10**400, float("nan"), float("inf"), float("-inf")),
    *("", "\x00", "é\ud800", "x" * 5000, "@1" + "0" * 5000, *_WORDS.split()),
    *([], {}, [[]], [None], [1, "a"], [[1, [2]]], {"a": 1}, {"": {}}, [0] * 300, [-1], [1.5], [True], [10**30]),
)
"""Values to put in place of others; a text that begins with @ is written without quotes."""

_CONFIG_KEYS = """
rope_scaling rope_parameters rope_theta layer_types eos_token_id bos_token_id pad_token_id head_dim hidden_size
vocab_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size rms_norm_eps
max_position_embeddings tie_word_embeddings attention_bias sliding_window use_sliding_window max_window_layers
hidden_act quantization_config text_config architectures model_type partial_rotary_factor
original_max_position_embeddings dtype torch_dtype _name_or_path num_nextn_predict_layers mlp_bias rope_interleave
norm_topk_prob moe_layer_freq scoring_func n_group topk_group mlp_only_layers expert_dtype attn_output_gate
"""
_TOKENIZER_CONFIG_KEYS = """
bos_token eos_token unk_token pad_token chat_template add_bos_token added_tokens_decoder eos_token_id bos_token_id
pad_token_id tokenizer_class model_max_length
"""
_TOKENIZER_KEYS = "added_tokens normalizer pre_tokenizer post_processor decoder model truncation padding version"
KEYS = {
    "config.json": _CONFIG_KEYS.split(),
    "generation_config.json": ["eos_token_id", "bos_token_id", "pad_token_id"],
    "tokenizer_config.json": _TOKENIZER_CONFIG_KEYS.split(),
    "tokenizer.json": _TOKENIZER_KEYS.split(),
    "model.safetensors": ["__metadata__", "", "\x00", "model.layers.99.x", "x" * 5000],
}
"""Keys to add, by file."""

_SECTIONS = (
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(a+)+$|\\s"}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace"},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "none", "type_id": 0}}], "special_tokens": {}},
    {"type": "NFKC"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "ByteFallback"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"},
    {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 5},
    {"type": "BPE", "vocab": {"a": 2**31}, "merges": []},
    {"type": "WordPiece", "vocab": {}, "unk_token": "[UNK]"},
    [{"id": 10**6, "content": "zz", "special": True}],
    {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5},
)
"""Sections of a tokenizer.json."""

_LOOP = "{% set n = namespace(t='ab') %}{% for i in range(64) %}{% set n.t = GROWN %}{% endfor %}{{ n.t }}"
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    *(_LOOP.replace("GROWN", grown) for grown in ("n.t ~ n.t", "n.t + n.t", "n.t | replace('a', n.t)")),
    "{{ 'a' * 10 ** 12 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ [0] * 10 ** 11 }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ 'ab'.zfill(10 ** 12) }}",
    "{{ lipsum(10**9) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception }}",
    "{{ raise_exception(1, 2) }}",
    "{{ 1 // 0 }}",
    "{{ strftime_now('\ud800') }}",
    "{{ messages | tojson(indent='x') }}",
    "{{ messages[0]['content'].nothing.more }}",
    "{{ messages | sum }}",
    "{% include 'x' %}",
    "{% break %}",
    "{{ {} | dictsort | first }}",
    "{{ '\ud800' }}",
    "{{ messages.append(1) }}",
    "{% set messages = 1 %}{{ messages | length }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "",
    "{% if %}",
    "{{ caller() }}",
    "{{ tools | tojson }}{{ documents | tojson }}{{ raise_exception | tojson }}",
    "{{ messages[0].content.encode('utf-32').decode('ascii') }}",
)
"""Chat templates that loop, raise, exhaust the memory or touch attributes."""


def mutate_json(text: str, file: str, rng: random.Random) -> tuple[str, str]:
    """A mutant of a JSON file, and what was done to it."""
    if rng.random() < 0.15:
        return damage_text(text, rng)
    value = json.loads(text)
    done = "; ".join(_change_json(value, file, rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return re.sub('"@([^"]*)"', r"\1", json.dumps(value, ensure_ascii=rng.random() < 0.5)), done


def mutate_template(text: str, rng: random.Random) -> tuple[str, str]:
    """A mutant of a chat template, and what was done to it."""
    chosen, at = rng.choice(TEMPLATES), rng.randrange(len(text) + 1)
    kind = rng.choice(("alone", "inserted", "damage", "damage"))
    if kind == "damage":
        return damage_text(text, rng)
    return (chosen if kind == "alone" else text[:at] + chosen + text[at:]), f"{chosen!r} {kind} at {at}"


def damage_text(text: str, rng: random.Random) -> tuple[str, str]:
    """Characters lost, doubled, exchanged; a truncation; brackets nested very deeply."""
    at = rng.randrange(len(text) + 1)
    kind = rng.choice(("cut", "insert", "exchange", "double", "nest", "empty"))
    if kind == "nest":
        depth = rng.choice((10, 500, 100_000))
        nested = "[" * depth + "]" * depth
        return nested if at % 2 else f'{text[:-1]},"q":{nested}}}', f"nested {depth}"
    if kind == "empty":
        return rng.choice(("", " ", "null", "[]", "0", '"a"', "{}", "\ufeff" + text)), "another document"
    character = rng.choice('{}[]":,0-9eE.\\\x00\ud7ffé tn')
    changed = {
        "cut": text[:at],
        "insert": text[:at] + character + text[at:],
        "exchange": text[:at] + character + text[at + 1 :],
        "double": text[: at + 100] + text[at:],
    }
    return changed[kind], f"{kind} at {at} {character!r}"


def _change_json(value: Any, file: str, rng: random.Random) -> str:
    if file in KEYS and isinstance(value, dict) and rng.random() < 0.4:
        holder, key, kind = value, rng.choice(KEYS[file]), "add"
    else:
        holder, key = _pick(value, rng)
        kind = rng.choice(("extreme", "extreme", "delete", "wrap", "scale", "copy"))
    if holder is None:
        return "nothing to change"
    old = None if kind == "add" else holder[key]
    if kind == "delete":
        del holder[key]
        return f"{key} deleted"
    new = rng.choice(EXTREMES)
    if kind == "add" and file == "tokenizer.json" and rng.random() < 0.7:
        new = rng.choice(_SECTIONS)
    elif kind == "wrap":
        new = rng.choice(([old], {"a": old}, str(old), [[old], old]))
    elif kind == "scale" and type(old) in (int, float) and abs(old) < 1e300:
        new = rng.choice((old + 1, old - 1, -old, old * 2, float(old), old * 10**9, old / 2, int(old) * 10**320))
    elif kind == "copy":
        source, name = _pick(value, rng)
        new = source[name]
    holder[key] = copy.deepcopy(new)
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


# ---- bytes and safetensors ------------------------------------------------------------------------------------------

_COUNTS = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def damage_bytes(raw: bytes, rng: random.Random, *, header: int) -> tuple[bytes, str]:
    """Bits flipped in the header or in the data, bytes exchanged, cut, inserted, or the file cut short."""
    data, limit = bytearray(raw), min(header, len(raw)) if rng.random() < 0.6 else len(raw)
    kind = rng.choice(("flip", "flip", "bytes", "truncate", "remove", "insert", "extend"))
    size, at = rng.choice((1, 2, 4, 8, 64)), rng.randrange(max(1, limit))
    if kind == "flip":
        for place in rng.choices(range(limit), k=rng.choice((1, 1, 4, 64)) if limit else 0):
            data[place] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[at : at + size] = rng.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * len(data[at : at + size])
    elif kind == "truncate":
        del data[at:]
    elif kind == "remove":
        del data[at : at + size]
    elif kind == "insert":
        data[at:at] = rng.randbytes(size)
    else:
        data += rng.randbytes(size)
    return bytes(data), f"{kind} {size} at {at} of {limit}"


def mutate_safetensors(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A mutant of a safetensors file, and what was done to it."""
    size = struct.unpack_from("<Q", raw)[0]
    if rng.random() < 0.3:
        return damage_bytes(raw, rng, header=size + 8)
    text, done = mutate_json(raw[8 : 8 + size].decode(), "model.safetensors", rng)
    header = text.encode("utf-8", errors="surrogatepass")
    length = len(header) if rng.random() < 0.85 else rng.choice((*_COUNTS, len(header) + 1, max(0, len(header) - 1)))
    return struct.pack("<Q", length) + header + raw[8 + size :], f"{done}; length {length}"


# ---- GGUF -----------------------------------------------------------------------------------------------------------

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FLOATS = (0.0, -1.0, 1.0, 1e-30, 1e30, 3.4e38, float("nan"), float("inf"), float("-inf"), 10000.0)
_STRINGS = ("", "llama", "yarn", "1", "x" * 3000, *TEMPLATES[:6])
_GGUF_KEYS = """
general.architecture general.alignment split.count llama.expert_count llama.attention.sliding_window
llama.rope.scale_linear llama.rope.scaling.attn_factor llama.rope.scaling.yarn_attn_factor
llama.rope.scaling.yarn_ext_factor llama.rope.scaling.yarn_beta_fast llama.rope.scaling.type llama.attention.scale
llama.attention.head_count llama.rope.freq_base tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id
tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id tokenizer.ggml.add_space_prefix
tokenizer.ggml.add_eos_token tokenizer.ggml.scores tokenizer.ggml.merges tokenizer.ggml.tokens tokenizer.ggml.token_type
"""


@dataclass
class Entry:
    """A metadata value as it is written: its type and its bytes."""

    key: bytes
    kind: int
    raw: bytes


@dataclass
class Info:
    """A tensor as the file's directory has it."""

    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """A GGUF file taken apart. The counts are written as they stand here, true or not."""

    entries: list[Entry] = field(default_factory=list)
    infos: list[Info] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    more_entries: int = 0
    more_infos: int = 0


def take_apart(raw: bytes) -> Parts:
    """Of a file whose header is undamaged; struct.error, KeyError or ValueError of another."""
    version, num_infos, num_entries = struct.unpack_from("<IQQ", raw, 4)
    at, parts = 24, Parts(version=version)

    def text() -> bytes:
        nonlocal at
        size = struct.unpack_from("<Q", raw, at)[0]
        at += 8 + size
        return raw[at - size : at]

    for _ in range(num_entries):
        key, kind = text(), struct.unpack_from("<I", raw, at)[0]
        first, at = at + 4, _end(raw, at + 4, kind)
        parts.entries.append(Entry(key, kind, raw[first:at]))
    for _ in range(num_infos):
        name, count = text(), struct.unpack_from("<I", raw, at)[0]
        *dims, kind, offset = struct.unpack_from(f"<{count}QIQ", raw, at + 4)
        at += 16 + 8 * count
        parts.infos.append(Info(name, dims, kind, offset))
    parts.data = raw[-(-at // 32) * 32 :]
    return parts


def _end(raw: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", raw, at)[0])
    if kind != _ARRAY:
        return at + struct.calcsize(_CODES[kind])
    element, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if count > len(raw):
        raise ValueError(f"an array of {count} elements in {len(raw)} bytes")
    for _ in range(count):
        at = _end(raw, at, element)
    return at


def put_together(parts: Parts) -> bytes:
    counts = len(parts.infos) + parts.more_infos, len(parts.entries) + parts.more_entries
    out = b"GGUF" + struct.pack("<IQQ", parts.version, *(count % 2**64 for count in counts))
    for entry in parts.entries:
        out += string(entry.key) + struct.pack("<I", entry.kind) + entry.raw
    for info in parts.infos:
        out += string(info.name) + struct.pack(f"<I{len(info.dims)}Q", len(info.dims), *info.dims)
        out += struct.pack("<IQ", info.kind, info.offset % 2**64)
    return out + b"\0" * (-len(out) % 32) + parts.data


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def mutate_gguf(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A mutant of a GGUF file, and what was done to it."""
    parts = take_apart(raw)
    if rng.random() < 0.25:
        return damage_bytes(raw, rng, header=len(raw) - len(parts.data))
    changes = (_value, _value, _value, _value, _tensor, _tensor, _whole)
    done = "; ".join(rng.choice(changes)(parts, rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return put_together(parts), done


def _value(parts: Parts, rng: random.Random) -> str:
    """A value of the same or another type, its bytes damaged, an array, or a key that the file lacks."""
    kind = rng.choice(("same", "same", "other", "array", "damage", "damage", "type", "new"))
    entry = rng.choice(parts.entries)
    if kind == "new":
        entry = Entry(rng.choice(_GGUF_KEYS.split()).encode(), 0, b"")
        parts.entries = [*(old for old in parts.entries if old.key != entry.key), entry]
    if kind == "type":
        entry.kind = rng.choice((*_CODES, _STRING, _ARRAY, 13, 2**32 - 1))
    elif kind == "damage":  # of an array: its count, element type or elements; of a text: its length
        entry.raw, _ = damage_bytes(entry.raw, rng, header=20)
    elif kind == "array":
        element, count = rng.choice([*_CODES, _STRING]), rng.choice((0, 1, 2, 300))
        values = b"".join(_scalar(element, rng) for _ in range(count))
        entry.kind, entry.raw = _ARRAY, struct.pack("<IQ", element, count) + values
    elif kind == "same" and entry.key.endswith(b"template"):
        entry.raw = string(mutate_template(entry.raw[8:].decode("utf-8", "replace"), rng)[0].encode("utf-8", "replace"))
    else:
        same = kind == "same" and entry.kind in _CODES
        entry.kind = entry.kind if same else rng.choice([*_CODES, _STRING])
        entry.raw = _scalar(entry.kind, rng)
    return f"{entry.key.decode(errors='replace')}: {kind}"


def _scalar(kind: int, rng: random.Random) -> bytes:
    if kind == _STRING:
        return string(rng.choice((b"\xff\xfe", *(text.encode() for text in _STRINGS))))
    code = _CODES[kind]
    if code in "fd":
        return struct.pack("<" + code, rng.choice(_FLOATS))
    size = struct.calcsize(code)
    return (rng.choice((*_COUNTS, -1, 16, 17, 64, 128, 256)) % 256**size).to_bytes(size, "little")


def _tensor(parts: Parts, rng: random.Random) -> str:
    """A tensor's name, shape, type or place; a tensor doubled, lost or invented."""
    if not parts.infos:
        return "no tensors"
    info, other, count = rng.choice(parts.infos), rng.choice(parts.infos), rng.choice(_COUNTS)
    kind = rng.choice(("name", "dims", "dims", "kind", "offset", "offset", "double", "lose", "exchange", "factors"))
    if kind == "name":
        info.name = rng.choice((other.name, b"", b"\xff", b"x" * 3000, info.name + b"x"))
    elif kind == "dims":
        sizes = [], [count] * rng.choice((1, 2, 4, 100)), info.dims[::-1], [*info.dims, 1], [*info.dims[:-1], count]
        info.dims = rng.choice(sizes)
    elif kind == "kind":
        info.kind = rng.choice((0, 1, 2, 3, 6, 8, 10, 12, 14, 16, 24, 26, 28, 30, 34, 99, 2**32 - 1))
    elif kind == "offset":
        info.offset = rng.choice((other.offset, count, info.offset + 1, info.offset + 32, max(0, info.offset - 32)))
    elif kind == "double":
        parts.infos.append(copy.copy(info))
    elif kind == "lose":
        parts.infos.remove(info)
    elif kind == "factors":
        parts.infos.append(Info(b"rope_freqs.weight", [rng.choice((0, 7, 8, 16))], 0, other.offset))
    else:
        info.offset, other.offset = other.offset, info.offset
    return f"tensor {info.name[:40].decode(errors='replace')}: {kind}"


def _whole(parts: Parts, rng: random.Random) -> str:
    """Counts, version, an entry lost or doubled, data cut or removed."""
    kind = rng.choice(("entries", "infos", "version", "lose", "double", "cut"))
    if kind == "entries":
        parts.more_entries = rng.choice((1, -1, *_COUNTS[6:]))
    elif kind == "infos":
        parts.more_infos = rng.choice((1, -1, *_COUNTS[6:]))
    elif kind == "version":
        parts.version = rng.choice((0, 1, 2, 3, 4, 2**24 * 3, 2**32 - 1))
    elif kind == "lose" and len(parts.entries) > 1:
        parts.entries.remove(rng.choice(parts.entries))
    elif kind == "double":
        parts.entries.append(Entry(rng.choice(parts.entries).key, 4, _scalar(4, rng)))
    else:
        parts.data = parts.data[: rng.randrange(len(parts.data) + 1)]
    return kind
