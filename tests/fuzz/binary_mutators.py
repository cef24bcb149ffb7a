"""Mutants of GGUF and safetensors files: headers taken apart, changed and written again, and damaged bytes."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass, field
from typing import Any

from json_mutators import TEMPLATES, damage_text, mutate_template

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_COUNTS = (0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
_FLOATS = (0.0, -1.0, 1.0, 1e-30, 1e30, 3.4e38, float("nan"), float("inf"), float("-inf"), 10000.0)
_STRING, _ARRAY = 8, 9
_LLAMA_KEYS = """
expert_count attention.sliding_window rope.scale_linear rope.scaling.attn_factor rope.scaling.yarn_attn_factor
rope.scaling.yarn_ext_factor rope.scaling.yarn_beta_fast rope.scaling.type attention.scale attention.head_count
rope.freq_base
"""
_TOKENIZER_KEYS = """
eot_token_id eom_token_id unknown_token_id padding_token_id add_space_prefix add_eos_token scores merges tokens
token_type
"""
_KEYS = (
    *("general.architecture", "general.alignment", "split.count"),
    *(f"llama.{key}" for key in _LLAMA_KEYS.split()),
    *(f"tokenizer.ggml.{key}" for key in _TOKENIZER_KEYS.split()),
)


@dataclass
class Entry:
    """A metadata value as it is written: its type and its bytes."""

    key: bytes
    kind: int
    raw: bytes


@dataclass
class Info:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class _Parts:
    """A GGUF file taken apart. The counts are written as they stand here, true or not."""

    entries: list[Entry] = field(default_factory=list)
    infos: list[Info] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    more_entries: int = 0
    more_infos: int = 0


def mutate_gguf(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A mutant of a GGUF file, and what was done to it."""
    if rng.random() < 0.25:
        return damage_bytes(raw, rng, header=_header_size(raw))
    parts, done = take_apart(raw), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        done.append(rng.choice((_value, _value, _value, _array, _infos, _infos, _structure, _vocabulary))(parts, rng))
    return put_together(parts), "; ".join(done)


def mutate_safetensors(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A mutant of a safetensors file, and what was done to it."""
    size = struct.unpack_from("<Q", raw)[0]
    if rng.random() < 0.3:
        return damage_bytes(raw, rng, header=size + 8)
    header, data = raw[8 : 8 + size].decode(), raw[8 + size :]
    if rng.random() < 0.2:
        header, done = damage_text(header, rng)
    else:
        values = json.loads(header)
        done = "; ".join(_tensor_entry(values, rng) for _ in range(rng.choice((1, 1, 2))))
        header = json.dumps(values)
    written = header.encode("utf-8", errors="surrogatepass")
    length = len(written) if rng.random() < 0.85 else rng.choice((*_COUNTS, len(written) + 1, len(written) - 1))
    return struct.pack("<Q", max(0, length)) + written + data, f"{done}; length {length}"


def damage_bytes(raw: bytes, rng: random.Random, *, header: int) -> tuple[bytes, str]:
    """Bits flipped in the header or in the data, bytes exchanged, cut, inserted, or the file cut short."""
    data, limit = bytearray(raw), header if rng.random() < 0.6 else len(raw)
    kind = rng.choice(("flip", "flip", "bytes", "truncate", "remove", "insert", "extend"))
    at = rng.randrange(max(1, limit))
    if kind == "flip":
        places = [rng.randrange(limit) for _ in range(rng.choice((1, 1, 4, 64)))]
        for place in places:
            data[place] ^= 1 << rng.randrange(8)
        return bytes(data), f"bits flipped at {places[:4]}"
    size = rng.choice((1, 2, 4, 8, 64))
    if kind == "bytes":
        data[at : at + size] = rng.choice((b"\xff", b"\x00", b"\x7f", b"\x80")) * len(data[at : at + size])
    elif kind == "truncate":
        del data[at:]
    elif kind == "remove":
        del data[at : at + size]
    elif kind == "insert":
        data[at:at] = rng.randbytes(size)
    else:
        data += rng.randbytes(size)
    return bytes(data), f"{kind} {size} at {at}"


def _tensor_entry(values: dict[str, Any], rng: random.Random) -> str:
    """Of a safetensors header: an entry changed, exchanged, doubled, lost or replaced by something else."""
    name = rng.choice([key for key in values if key != "__metadata__"] or ["x"])
    entry = values.get(name)
    changes: dict[str, list[Any]] = {
        "dtype": ["F64", "I8", "U8", "BOOL", "F16", "BF16", "F8_E4M3", "I64", "Q4", 3, None, ""],
        "shape": [[], [0], [-1], [2**63], [2**32, 2**32], None, "a", [1.5], [[1]], [True]],
        "data_offsets": [[0, 0], [0, 2**63], [-4, 0], [8, 4], [0], None, [0.5, 4], [2**64, 2**64 + 4]],
    }
    kind = rng.choice((*changes, "overlap", "delete", "rename", "extra", "value", "metadata", "swap"))
    if not isinstance(entry, dict) or kind == "value":
        values[name] = rng.choice((None, [], 1, "a", {}))
    elif kind in changes:
        shape = entry.get("shape") if kind == "shape" else None
        nearly = [shape[::-1], [*shape, 1], [0, *shape], shape[:1]] if isinstance(shape, list) else []
        entry[kind] = rng.choice([*changes[kind], *nearly])
    elif kind in ("overlap", "swap"):
        other = values[rng.choice([key for key in values if key != "__metadata__"])]
        if isinstance(other, dict) and "data_offsets" in entry and "data_offsets" in other:
            mine, entry["data_offsets"] = entry["data_offsets"], other["data_offsets"]
            if kind == "swap":
                other["data_offsets"] = mine
    elif kind == "delete":
        del values[name]
    elif kind == "rename":
        values[rng.choice((name + "x", "", "model.layers.99.x", "x" * 5000, "\x00"))] = values.pop(name)
    elif kind == "extra":
        values["extra"] = dict(entry)
    else:
        values["__metadata__"] = rng.choice((None, 1, {"format": 1}, {"format": "tf"}, {}, []))
    return f"{kind} of {name}"


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def take_apart(raw: bytes) -> _Parts:
    """Of a file whose header is undamaged; struct.error, KeyError or ValueError of another."""
    version, num_infos, num_entries = struct.unpack_from("<IQQ", raw, 4)
    at, parts = 24, _Parts(version=version)

    def text() -> bytes:
        nonlocal at
        size = struct.unpack_from("<Q", raw, at)[0]
        at += 8 + size
        return raw[at - size : at]

    for _ in range(num_entries):
        key, kind = text(), struct.unpack_from("<I", raw, at)[0]
        at += 4
        first = at
        at = _end(raw, at, kind)
        parts.entries.append(Entry(key, kind, raw[first:at]))
    for _ in range(num_infos):
        name, count = text(), struct.unpack_from("<I", raw, at)[0]
        dims = list(struct.unpack_from(f"<{count}Q", raw, at + 4))
        kind, offset = struct.unpack_from("<IQ", raw, at + 4 + 8 * count)
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


def _header_size(raw: bytes) -> int:
    return len(raw) - len(take_apart(raw).data)


def put_together(parts: _Parts) -> bytes:
    counts = len(parts.infos) + parts.more_infos, len(parts.entries) + parts.more_entries
    out = b"GGUF" + struct.pack("<IQQ", parts.version, *(count % 2**64 for count in counts))
    for entry in parts.entries:
        out += string(entry.key) + struct.pack("<I", entry.kind % 2**32) + entry.raw
    for info in parts.infos:
        out += string(info.name) + struct.pack(f"<I{len(info.dims)}Q", len(info.dims), *info.dims)
        out += struct.pack("<IQ", info.kind % 2**32, info.offset % 2**64)
    return out + b"\0" * (-len(out) % 32) + parts.data


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _scalar(rng: random.Random, kind: int | None = None) -> tuple[int, bytes]:
    kind = rng.choice([*_CODES, _STRING]) if kind is None else kind
    if kind == _STRING:
        templates = [template.encode("utf-8", "replace") for template in TEMPLATES[:6]]
        return kind, string(rng.choice((b"", b"llama", b"\xff\xfe", b"yarn", b"1", b"x" * 3000, *templates)))
    code = _CODES[kind]
    if code in "fd":
        return kind, struct.pack("<" + code, rng.choice(_FLOATS))
    bits = 8 * struct.calcsize(code)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if code.islower() else (0, (1 << bits) - 1)
    values = [value for value in (*_COUNTS, -1, low, high, 16, 17, 64, 128, 256) if low <= value <= high]
    return kind, struct.pack("<" + code, rng.choice(values))


def _new_array(rng: random.Random) -> bytes:
    element = rng.choice([*_CODES, _STRING, _ARRAY, 13, 2**32 - 1])
    count = rng.choice((0, 1, 2, 300))
    known = element in _CODES or element == _STRING
    body = b"".join(_scalar(rng, element)[1] for _ in range(count)) if known else b"\0" * 16
    return struct.pack("<IQ", element, rng.choice((count, count, count, *_COUNTS))) + body


def _value(parts: _Parts, rng: random.Random) -> str:
    """A value of the same type, of another type, an array, or a key that the file lacks."""
    entry = rng.choice(parts.entries)
    kind = rng.choice(("same", "same", "type", "array", "new", "reinterpret"))
    if kind == "new":
        entry = Entry(rng.choice(_KEYS).encode(), 0, b"")
        parts.entries = [old for old in parts.entries if old.key != entry.key]
        parts.entries.insert(rng.randrange(len(parts.entries) + 1), entry)
    if kind == "reinterpret":
        entry.kind = rng.choice((*_CODES, _STRING, _ARRAY, 13, 2**32 - 1))
    elif kind == "array":
        entry.kind, entry.raw = _ARRAY, _new_array(rng)
    elif kind == "same" and entry.kind == _STRING and entry.key.endswith(b"template"):
        size = len(entry.raw) - 8
        text, _ = mutate_template(entry.raw[8 : 8 + size].decode("utf-8", "replace"), rng)
        entry.raw = string(text.encode("utf-8", "replace"))
    else:
        same = kind == "same" and entry.kind in _CODES
        entry.kind, entry.raw = _scalar(rng, entry.kind if same else None)
    return f"{entry.key.decode(errors='replace')}: {kind}"


def _array(parts: _Parts, rng: random.Random) -> str:
    """An array whose count, element type or elements are wrong."""
    entry = rng.choice([entry for entry in parts.entries if entry.kind == _ARRAY] or [parts.entries[0]])
    if len(entry.raw) < 12:
        return "no array"
    element, count = struct.unpack_from("<IQ", entry.raw)
    kind = rng.choice(("count", "type", "element", "shorter"))
    if kind == "count":
        entry.raw = struct.pack("<IQ", element, rng.choice((*_COUNTS, count + 1, max(0, count - 1)))) + entry.raw[12:]
    elif kind == "type":
        entry.raw = struct.pack("<I", rng.choice((*_CODES, _STRING, _ARRAY, 13))) + entry.raw[4:]
    elif kind == "shorter" and element in _CODES:
        size, kept = struct.calcsize(_CODES[element]), rng.randrange(count + 1)
        entry.raw = struct.pack("<IQ", element, kept) + entry.raw[12 : 12 + kept * size]
    elif element in _CODES and count:
        size = struct.calcsize(_CODES[element])
        place = 12 + rng.randrange(count) * size
        entry.raw = entry.raw[:place] + _scalar(rng, element)[1] + entry.raw[place + size :]
    elif len(entry.raw) > 20:  # the length of the first string
        entry.raw = entry.raw[:12] + struct.pack("<Q", rng.choice(_COUNTS)) + entry.raw[20:]
    return f"{entry.key.decode(errors='replace')}: {kind} of the array"


def _vocabulary(parts: _Parts, rng: random.Random) -> str:
    """One string of the vocabulary or of the merges exchanged, doubled or removed."""
    found = [entry for entry in parts.entries if entry.key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges")]
    entry = rng.choice(found or parts.entries[:1])
    if entry.kind != _ARRAY or len(entry.raw) < 12 or struct.unpack_from("<I", entry.raw)[0] != _STRING:
        return "no vocabulary"
    strings, at = [], 12
    while at + 8 <= len(entry.raw):
        size = struct.unpack_from("<Q", entry.raw, at)[0]
        strings.append(entry.raw[at + 8 : at + 8 + size])
        at += 8 + size
    place = rng.randrange(len(strings)) if strings else 0
    new = rng.choice((b"", b" ", b"a", b"zz zz", b"q", b"\xff", b"<|end|>", "é".encode(), b"x" * 400))
    old = strings[place : place + 1]
    strings[place : place + 1] = rng.choice(([new], [], old * 2, [new, *old]))
    entry.raw = struct.pack("<IQ", _STRING, len(strings)) + b"".join(map(string, strings))
    return f"{entry.key.decode()}: string {place}"


def _infos(parts: _Parts, rng: random.Random) -> str:
    """A tensor's name, shape, type or place; a tensor doubled, lost or invented."""
    if not parts.infos:
        return "no tensors"
    info = rng.choice(parts.infos)
    other = rng.choice(parts.infos)
    kind = rng.choice(("name", "dims", "dims", "type", "offset", "offset", "double", "lose", "exchange", "factors"))
    if kind == "name":
        info.name = rng.choice((other.name, b"", b"\xff", b"x" * 3000, info.name + b"x"))
    elif kind == "dims":
        place = rng.randrange(len(info.dims)) if info.dims else 0
        one = [rng.choice(_COUNTS) if i == place else size for i, size in enumerate(info.dims)]
        several = [rng.choice(_COUNTS)] * rng.choice((1, 2, 4, 5, 100))
        info.dims = rng.choice(([], several, info.dims[::-1], [*info.dims, 1], info.dims[:1], one))
    elif kind == "type":
        info.kind = rng.choice((0, 1, 2, 3, 6, 8, 10, 12, 14, 16, 24, 26, 28, 30, 34, 99, 2**32 - 1))
    elif kind == "offset":
        info.offset = rng.choice((other.offset, *_COUNTS, info.offset + 1, info.offset + 32, max(0, info.offset - 32)))
    elif kind == "double":
        parts.infos.append(Info(info.name, list(info.dims), info.kind, info.offset))
    elif kind == "lose":
        parts.infos.remove(info)
    elif kind == "factors":
        parts.infos.append(Info(b"rope_freqs.weight", [rng.choice((0, 7, 8, 16))], 0, other.offset))
    else:
        info.offset, other.offset = other.offset, info.offset
    return f"tensor {info.name[:40].decode(errors='replace')}: {kind}"


def _structure(parts: _Parts, rng: random.Random) -> str:
    """Counts, version, an entry lost or doubled, data cut or removed."""
    kind = rng.choice(("entries", "infos", "version", "lose", "double", "cut"))
    if kind == "entries":
        parts.more_entries = rng.choice((1, -1, *_COUNTS[6:]))
    elif kind == "infos":
        parts.more_infos = rng.choice((1, -1, *_COUNTS[6:]))
    elif kind == "version":
        parts.version = rng.choice((0, 1, 2, 3, 4, 2**24 * 3, 2**32 - 1))
    elif kind == "lose" and len(parts.entries) > 1:
        gone = parts.entries.pop(rng.randrange(len(parts.entries)))
        return f"{gone.key.decode(errors='replace')} lost"
    elif kind == "double":
        entry = rng.choice(parts.entries)
        parts.entries.append(Entry(entry.key, *_scalar(rng)))
    else:
        parts.data = parts.data[: rng.randrange(len(parts.data) + 1)]
    return kind
