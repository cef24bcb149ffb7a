"""llama.cpp's CPU arithmetic for comparison, through the library inside xllamacpp.

Finds the library in an environment that has xllamacpp: $WAGER_LLAMA_CPP, or ~/.cache/wager-peers/llama. Structures that
are passed by value are taken from the library's own defaults, larger than any version's, with the fields at the
beginning set; what they hold is checked against the documented defaults.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from wager.kernels.cpu import physical_cores

FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What llama.cpp's quantiser takes instead of a type whose blocks of 256 do not divide a matrix's inputs."""

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")


class _Params(c.Structure):
    _fields_ = [("words", c.c_uint32 * 256)]


class _Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


def find_library() -> Path | None:
    root = Path(os.environ.get("WAGER_LLAMA_CPP", "~/.cache/wager-peers/llama")).expanduser()
    return next(iter(root.glob("lib/python3*/site-packages/xllamacpp/xllamacpp*.so")), None)


class LlamaCpp:
    """The library, silent."""

    def __init__(self, path: Path) -> None:
        lib = self._lib = c.CDLL(str(path))
        self._quiet = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda *_: None)
        lib.llama_log_set(self._quiet, None)
        lib.llama_backend_init()
        lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = _Params
        lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = c.c_void_p
        lib.llama_model_load_from_file.argtypes = [c.c_char_p, _Params]
        lib.llama_init_from_model.argtypes = [c.c_void_p, _Params]
        lib.llama_batch_init.restype = _Batch
        lib.llama_decode.argtypes = [c.c_void_p, _Batch]
        lib.llama_get_logits_ith.restype = c.POINTER(c.c_float)
        lib.llama_get_logits_ith.argtypes = [c.c_void_p, c.c_int32]
        lib.ggml_quantize_chunk.restype = c.c_size_t
        lib.ggml_quantize_chunk.argtypes = [
            c.c_int,
            c.c_void_p,
            c.c_void_p,
            c.c_int64,
            c.c_int64,
            c.c_int64,
            c.c_void_p,
        ]
        lib.llama_get_memory.restype = c.c_void_p
        lib.llama_get_memory.argtypes = [c.c_void_p]
        lib.llama_memory_clear.argtypes = [c.c_void_p, c.c_bool]
        lib.llama_free.argtypes = lib.llama_model_free.argtypes = [c.c_void_p]

    def write(self, source: Path, target: Path, kind: str) -> None:
        """The GGUF file `source` with the matrices of its layers quantised anew by llama.cpp's own quantiser."""
        reader = GGUFReader(source)
        architecture = reader.fields["general.architecture"].contents()
        writer = GGUFWriter(target, architecture)
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
        for tensor in reader.tensors:
            data, found = tensor.data, tensor.tensor_type
            if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
                found = self._fitting(kind, int(tensor.shape[0]))
                data = self._quantised(dequantize(tensor.data, tensor.tensor_type), found)
            writer.add_tensor(tensor.name, data, raw_dtype=found)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _fitting(self, kind: str, inputs: int) -> GGMLQuantizationType:
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        return GGMLQuantizationType[FALLBACKS[kind] if inputs % block else kind]

    def _quantised(self, values: Any, kind: GGMLQuantizationType) -> Any:
        n, k = values.shape
        values = np.ascontiguousarray(values, np.float32)
        block, size = GGML_QUANT_SIZES[kind]
        out = np.empty((n, k // block * size), np.uint8)
        self._lib.ggml_quantize_chunk(kind.value, values.ctypes.data, out.ctypes.data, 0, n, k, None)
        return out


class LlamaModel:
    """A GGUF file whose logits are computed by llama.cpp on the CPU, from an empty context."""

    def __init__(self, library: LlamaCpp, path: Path, *, vocab: int, context: int = 512) -> None:
        lib = self._lib = library._lib
        self._vocab = vocab
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        if list(params.words[:4]) != [512, 2048, 512, 1] or list(params.words[7:9]) != [4, 4]:
            raise SystemExit(f"unknown llama_context_params: {list(params.words[:12])}")
        params.words[0] = context  # n_ctx
        params.words[7] = params.words[8] = physical_cores()  # n_threads, n_threads_batch
        self._context = lib.llama_init_from_model(self._model, params)
        self._batch: Any = lib.llama_batch_init(context, 0, 1)

    def __call__(self, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        batch, lib = self._batch, self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                int(token),
                i,
                1,
                0,
                1,
            )
        batch.n_tokens = len(tokens)
        if lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode")
        rows = [lib.llama_get_logits_ith(self._context, i) for i in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, (self._vocab,)) for row in rows])

    def close(self) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
