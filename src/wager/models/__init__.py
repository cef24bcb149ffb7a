"""Models: what they are (spec), where their tensors lie (weights), how they compute (transformer) and read (tokenizer).

Knows kernels only through kernels/base.py; knows no engine, no drafter, no cache accounting.
"""
