"""Make a draft model out of a target in a Hugging Face directory: its first layers, its own norm and head.

usage: python dev/truncate.py MODEL_DIRECTORY LAYERS NEW_DIRECTORY

Untrained, such a draft is right now and then at best; it shares the target's tokenizer exactly, which is what proofs
and cost measurements of `--drafter model:NEW_DIRECTORY` need.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 - makes bfloat16 known to numpy
from safetensors import safe_open
from safetensors.numpy import save_file

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def main(model: Path, layers: int, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, directory)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                found = LAYER.match(name)
                if found is None or int(found[1]) < layers:
                    tensors[name] = file.get_tensor(name)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    print(f"{directory}: {layers} layers, {sum(t.size for t in tensors.values()) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
