"""A random order of any number of things in no memory: position -> index by arithmetic.

A stored permutation of a billion samples takes 8 GB on every rank and must be made anew when a run resumes. A Feistel network over
pairs (left, right) with about sqrt(size) values each, walked along its cycle in the rare case that it leaves the range, is a permutation
too, and position 10**9 costs as much as position 0. (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.)
"""

from __future__ import annotations

import math

import numpy as np

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


def mix64(values: np.ndarray) -> np.ndarray:
    """A hash of uint64 to uint64 in which every bit of the input reaches every bit of the output (the finaliser of SplitMix64)."""
    values = np.asarray(values, dtype=np.uint64)
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def combine_seeds(*parts: int) -> int:
    """One 64-bit seed from several numbers; the order of the numbers matters."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = int(mix64(np.array([(state * 0xD1342543DE82EF95 + (part & _MASK64) + 1) & _MASK64], dtype=np.uint64))[0])
    return state


class Permutation:
    """A pseudo-random permutation of range(size), the same on every machine.

    Args:
        size: how many things; at least 1.
        seed: any integer.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        self._keys = [np.uint64(combine_seeds(seed, size, number)) for number in range(_ROUNDS)]

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        num_left, num_right = np.uint64(self._left), np.uint64(self._right)
        left, right = np.divmod(values, num_right)
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = (left + mix64(right ^ first) % num_left) % num_left
            right = (right + mix64(left ^ second) % num_right) % num_right
        return left * num_right + right

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Indices (n,) int64 at positions (n,), each in range(size)."""
        values = self._encrypt(np.asarray(positions, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):  # fewer than 2 sqrt(size) of all values
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)
