"""The oracle's arithmetic of one row, float32: products, norms, rotation and activations in plain numpy.

Numpy's own loops only: the order of their sums follows from shapes and strides. A BLAS library may choose its order by
alignment and by the number of threads.
"""

from __future__ import annotations

import numpy as np

from wager.kernels.arrays import Array


def matrix_vector(matrix: Array, x: Array) -> Array:
    """[N, K] times [K] -> [N]."""
    y: Array = np.einsum("nk,k->n", matrix, x)
    return y


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis of x [..., n]."""
    mean = np.square(x).mean(axis=-1, keepdims=True)
    normed: Array = x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight
    return normed


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rotate(x: Array, angles: Array) -> Array:
    """x [heads, d], angles [d] = cos | sin: the pair (i, i + d/2) turned by angle i."""
    half = len(angles) // 2
    cos, sin, first, second = angles[:half], angles[half:], x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def sigmoid(x: Array) -> Array:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares
