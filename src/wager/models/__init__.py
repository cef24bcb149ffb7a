"""Models on disk and in memory: fetching, tensors and weights, the decoder, tokenizers and chat templates.

Kernels are used through kernels/cpu.py and kernels/tape.py only.
"""
