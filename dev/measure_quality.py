"""Quality of quantised weights and products: KL, top-1 agreement and perplexity against bf16 on wager's fixed text.

    python dev/measure_quality.py                        the default model, every --dtype
    python dev/measure_quality.py MODEL ... --dtype q8   other models
    python dev/measure_quality.py --files FOLDER         GGUF files of every type, made by llama.cpp's quantiser from
                                                         MODEL (a GGUF file) if they are not in FOLDER yet
    --llama                                              also llama.cpp's CPU arithmetic for the same files

For files of other types the reference is the same file dequantised to bf16 ("own bits": what 8-bit activations cost),
and the model they were made from ("whole": what the format itself costs besides).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import KINDS, LlamaCpp, LlamaModel, find_library

from wager.bench.quality import WINDOW, Quality, compare_logits, fixed_text, logits_of, windows
from wager.config import DEFAULT_MODEL
from wager.kernels.cpu import select
from wager.models import hub
from wager.models.opening import open_model
from wager.models.transformer import Decoder

Arithmetic = Callable[[Any], Any]
COLUMNS = ("model", "arithmetic", "weights", "MB", "KL", "KL 99 %", "top-1", "perplexity", "bf16's", "s")


class Measured:
    """A model's logits on the text, computed once."""

    def __init__(self, arithmetic: Arithmetic, text: list[Any]) -> None:
        start = time.perf_counter()
        self._logits = {window.tobytes(): np.array(arithmetic(window)) for window in text}
        self.seconds = time.perf_counter() - start

    def __call__(self, window: Any) -> Any:
        return self._logits[window.tobytes()]


def load(model: str, dtype: str, kv_dtype: Any, *, blocks: int) -> Decoder:
    _, weights, _ = open_model(model)
    limits = dict(num_blocks=blocks, max_rows=128, max_sequences=1, max_blocks=blocks)
    return Decoder(weights, select(), **limits, dtype=dtype, kv_dtype=kv_dtype)


def wager_logits(model: str, dtype: str, text: list[Any], kv_dtype: str = "bf16") -> tuple[Measured, str, float]:
    decoder = load(model, dtype, kv_dtype, blocks=-(-max(map(len, text)) // 16))
    return Measured(lambda window: logits_of(decoder, window), text), decoder.weight_form, decoder.weight_bytes / 1e6


def show(name: str, arithmetic: str, weights: str, size: float, found: Quality, seconds: float) -> None:
    figures = (
        f"{found.kl:.4f}",
        f"{found.kl_99:.3f}",
        f"{found.top1:.1%}",
        f"{found.perplexity:.2f}",
        f"{found.reference_perplexity:.2f}",
        f"{seconds:.1f}",
    )
    print("| " + " | ".join((name, arithmetic, weights, f"{size:.0f}", *figures)) + " |", flush=True)


def files_of(library: LlamaCpp, source: Path, folder: Path, kinds: list[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for kind in kinds:
        target = folder / f"{source.stem.split('.')[0]}.{kind}.gguf"
        if not target.exists():
            library.write(source, target, kind)
        found.append(target)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL])
    parser.add_argument("--dtype", nargs="*", default=["auto", "q8", "q4"])
    parser.add_argument("--files", type=Path)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--kv-dtype", default="bf16", help="of the cache, in every row but the first")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    path = find_library() if args.llama or args.files else None
    library = LlamaCpp(path) if path else None
    if (args.llama or args.files) and library is None:
        raise SystemExit("llama.cpp was not found: see dev/llama_cpp.py")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for model in args.models:
        _, weights, tokenizer = open_model(model)
        text = list(windows(tokenizer.encode(fixed_text()), size=args.window, most=args.tokens))
        whole, form, size = wager_logits(model, "bf16", text)
        name = Path(model).name
        show(name, "wager bf16", form, size, compare_logits(whole, whole, text), whole.seconds)
        entries = [(model, dtype) for dtype in args.dtype]
        if args.files and library:
            source = Path(hub.resolve(model))
            entries = [(str(file), "auto") for file in files_of(library, source, args.files, args.kinds)]
        for entry, dtype in entries:
            own, form, size = wager_logits(entry, dtype, text, args.kv_dtype)
            label = Path(entry).name
            dtype += "" if args.kv_dtype == "bf16" else f", cache {args.kv_dtype}"
            show(label, f"wager {dtype}, whole", form, size, compare_logits(whole, own, text), own.seconds)
            if args.files or args.llama:
                bf16, _, _ = wager_logits(entry, "bf16", text)
                show(label, f"wager {dtype}, own bits", form, size, compare_logits(bf16, own, text), own.seconds)
            if args.llama and library and Path(hub.resolve(entry)).suffix == ".gguf":
                peer = LlamaModel(library, Path(hub.resolve(entry)), vocab=weights.spec.vocab)
                theirs = Measured(peer, text)
                peer.close()
                show(label, "llama.cpp, own bits", form, size, compare_logits(bf16, theirs, text), theirs.seconds)


if __name__ == "__main__":
    main()
