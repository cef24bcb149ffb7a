"""Makes mutants by number, opens each as production does, and writes one line of JSON about it: a process of its own.

Started by watchdog.py, which ends it when a mutant takes too long. A mutant is determined by its kind and its number.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import fuzz_models
from binary_mutators import mutate_gguf, mutate_safetensors
from examine import examine
from json_mutators import mutate_json, mutate_template

from wager.arch.families import FAMILIES

MEMORY = 6 << 30
"""Bytes of address space that a worker may have."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def make(kind: str, number: int, models: Mapping[str, Path], folder: Path) -> tuple[Path, str]:
    """Writes the mutant into `folder`: the path of its model, and what was done."""
    rng = random.Random(f"{kind} {number}")
    if kind == "gguf":
        name = rng.choice(("gguf", "gguf-sentencepiece"))
        raw, done = mutate_gguf(models[name].read_bytes(), rng)
        path = folder / f"{kind}-{number}.gguf"
        path.write_bytes(raw)
        return path, f"{name}: {done}"
    if kind == "shape":
        values = {**fuzz_models.SHAPE, "model_type": rng.choice(tuple(FAMILIES))}
        text, done = mutate_json(json.dumps(values), "config.json", rng)
        path = folder / f"{kind}-{number}.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path, f"{values['model_type']}: {done}"
    name = rng.choice(tuple(fuzz_models.CONFIGS)) if kind in ("config", "safetensors") else "qwen3"
    path = folder / f"{kind}-{number}"
    shutil.copytree(models[name], path)
    if kind == "safetensors":
        raw, done = mutate_safetensors((path / "model.safetensors").read_bytes(), rng)
        (path / "model.safetensors").write_bytes(raw)
        return path, f"{name}: {done}"
    if kind == "template":
        text, done = mutate_template(fuzz_models.TEMPLATE, rng)
        (path / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
        return path, f"{name}: {done} {text[:80]!r}"
    file = path / ("config.json" if kind == "config" else rng.choice(_TOKENIZER_FILES))
    text, done = mutate_json(file.read_text(encoding="utf-8"), file.name, rng)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path, f"{name}: {file.name}: {done}"


def main(folder: Path) -> None:
    """Reads `KIND NUMBER` lines; answers `{"done"}`, then `{"outcome", "detail"}`. Faulty mutants stay in `folder`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    bases = folder / "bases"
    models = fuzz_models.build(bases)
    examined = [(name, examine(path)) for name, path in models.items()]
    print(json.dumps({"ready": [(name, found.outcome, found.detail) for name, found in examined]}), flush=True)  # noqa: T201
    for line in sys.stdin:
        kind, number = line.split()
        path, done = make(kind, int(number), models, folder)
        print(json.dumps({"done": done}), flush=True)  # noqa: T201
        found = examine(path)
        if found.outcome != "fault":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(json.dumps({"outcome": found.outcome, "detail": found.detail}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
