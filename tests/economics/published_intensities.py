"""Published intensities of attention, FLOPs per byte: what the shapes of models and the cost model are both held to."""

GQA_PLATEAUS = {"SmolLM2-135M": 3, "Llama-3.1-8B": 4, "Llama-3.1-70B": 8, "Qwen3-30B-A3B": 8, "Qwen3-235B-A22B": 16}
"""Of one row over a long context, by model; keys and values in bf16."""

LLAMA_70B_AT_4096 = {1: 7.99, 2: 15.97, 4: 31.88, 8: 63.50}
"""Of Llama-3.1-70B over 4,096 positions, by rows."""

LATENT = (
    "512 193.4 322.4 483.6 644.7",
    "1024 214.9 386.8 644.7 967.1",
    "8192 238.1 468.9 910.2 1719.3",
    "16384 239.9 476.1 937.8 1820.4",
    "1048576 241.7 483.4 966.6 1932.3",
)
"""Of latent attention in its absorbed form, 64 heads and an fp8 cache: positions, then 1, 2, 4 and 8 rows."""
