"""Lengths of sequences, drawn from a seed: as users have them, and as kernels fail on them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Tiles of the kernels; a length beside one of them is where a ragged edge goes wrong.
TILES = (4, 16, 32, 64, 128)


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a jagged tensor lie: ``base`` rows, the sequences, ``tail`` rows."""

    lengths: tuple[int, ...]
    base: int = 0
    tail: int = 0

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        """T: rows of the tensor, those outside every sequence included."""
        return self.base + sum(self.lengths) + self.tail

    @property
    def max_len(self) -> int:
        return max(self.lengths, default=0)

    def offsets(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """`[B + 1]`"""
        lengths = torch.tensor((self.base, *self.lengths), dtype=torch.int64)
        return lengths.cumsum(0).to(device, dtype)

    def seq_of_row(self, device: torch.device | str = "cpu") -> Tensor:
        """`[T]`: the sequence of each row; B for rows outside every sequence."""
        return _seq_of_row(self, str(device))


@functools.lru_cache(maxsize=16)
def _seq_of_row(layout: Layout, device: str) -> Tensor:
    rows = torch.arange(layout.total)
    # How many sequences begin at or before a row; the last of them is the one with that row.
    seq = torch.searchsorted(layout.offsets(), rows, right=True) - 1
    return seq.where(seq >= 0, layout.num_seqs).to(device)


def matrices(rows: Layout, columns: Layout, capacity: int) -> Layout:
    """Where the matrices of sequences lie in a vector of `capacity` elements: each is a "row".

    Matrix b is `[rows.lengths[b], columns.lengths[b]]`, row by row. One that does not fit counts
    as empty, and its elements as outside.
    """
    sizes, end = [], 0
    for height, width in zip(rows.lengths, columns.lengths, strict=True):
        end += height * width
        sizes.append(height * width if end <= capacity else 0)
    return Layout(tuple(sizes), tail=capacity - sum(sizes))


def _uniform(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    return [rng.randint(1, max_len) for _ in range(num_seqs)]


def _long_tailed(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    median = math.log(max(1.0, max_len / 12))
    return [round(min(max_len, rng.lognormvariate(median, 1.2))) for _ in range(num_seqs)]


def _giant_among_tiny(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    lengths = [rng.randint(0, min(4, max_len)) for _ in range(num_seqs)]
    lengths[rng.randrange(num_seqs)] = max_len
    return lengths


def _mostly_empty(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    return [rng.choice((0, 0, 0, rng.randint(1, max_len))) for _ in range(num_seqs)]


def _constant(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    return [rng.randint(1, max_len)] * num_seqs


def _tile_edges(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    edges = [tile + step for tile in TILES for step in (-1, 0, 1) if tile + step <= max_len]
    return [rng.choice(edges or [max_len]) for _ in range(num_seqs)]


def _nearly_full(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    """Between 90 and 100 percent of the longest."""
    return [rng.randint(math.ceil(0.9 * max_len), max_len) for _ in range(num_seqs)]


def _zipf(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    """A length n is as likely as n to the power of -1.2 or -1.5."""
    alpha = rng.choice((1.2, 1.5))
    weights = [n**-alpha for n in range(1, max_len + 1)]
    return rng.choices(range(1, max_len + 1), weights, k=num_seqs)


def _exponential(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    """A mean far below the longest, which one sequence has."""
    lengths = [round(min(max_len, rng.expovariate(16 / max_len))) for _ in range(num_seqs)]
    lengths[rng.randrange(num_seqs)] = max_len
    return lengths


def _eighth_long(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    """One in eight is the longest, the others 8 to 16 times as short."""
    short = (max_len // 16, max(1, max_len // 8))
    return [max_len if rng.random() < 1 / 8 else rng.randint(*short) for _ in range(num_seqs)]


def _third_empty(rng: random.Random, num_seqs: int, max_len: int) -> list[int]:
    """Between 20 and 40 percent are empty."""
    share = rng.uniform(0.2, 0.4)
    return [0 if rng.random() < share else rng.randint(1, max_len) for _ in range(num_seqs)]


DISTRIBUTIONS: dict[str, Callable[[random.Random, int, int], list[int]]] = {
    "uniform": _uniform,
    "long_tailed": _long_tailed,
    "giant_among_tiny": _giant_among_tiny,
    "mostly_empty": _mostly_empty,
    "constant": _constant,
    "tile_edges": _tile_edges,
    "nearly_full": _nearly_full,
    "zipf": _zipf,
    "exponential": _exponential,
    "eighth_long": _eighth_long,
    "third_empty": _third_empty,
}


def draw_lengths(
    rng: random.Random, distribution: str, num_seqs: int, max_len: int
) -> tuple[int, ...]:
    """Draw the lengths of num_seqs sequences of at most max_len (>= 1) rows; one of them is empty.

    Constant lengths, those with a forced longest one, a batch of one and an empty batch stay as
    they are.
    """
    if num_seqs == 0:
        return ()
    lengths = DISTRIBUTIONS[distribution](rng, num_seqs, max_len)
    if num_seqs > 1 and distribution not in ("constant", "giant_among_tiny", "exponential"):
        lengths[rng.choice((0, rng.randrange(num_seqs), num_seqs - 1))] = 0
    return tuple(lengths)


def draw_layout(rng: random.Random, distribution: str, num_seqs: int, max_len: int) -> Layout:
    """Draw lengths, and for half of the batches rows before and after the sequences."""
    lengths = draw_lengths(rng, distribution, num_seqs, max_len)
    outside = rng.random() < 0.5
    base = rng.choice((1, 3, 17, 64)) if outside else 0
    tail = rng.choice((0, 1, 5, 40)) if outside else 0
    return Layout(lengths, base, tail)
