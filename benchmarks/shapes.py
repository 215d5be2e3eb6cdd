"""Lengths of sequences, and precisions.

Lengths are drawn by Python's own generator, so that they are the same on every machine.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from jagged_cuda.testing.lengths import Layout

# With this seed the lengths of the paper's shape, 1024 times U[1, 200], sum to 103,145.
SEED = 281

QUICK_SEQS = 6
QUICK_MAX_LEN = 40


def uniform(num_seqs: int, max_len: int, min_len: int = 1) -> Callable[[random.Random], list[int]]:
    """Lengths U[min_len, max_len]."""
    return lambda rng: [rng.randint(min_len, max_len) for _ in range(num_seqs)]


def log_normal(
    num_seqs: int, median: float, sigma: float, max_len: int
) -> Callable[[random.Random], list[int]]:
    """Lengths LogNormal(median, sigma), clipped to [1, max_len]."""
    return lambda rng: [
        min(max_len, max(1, round(rng.lognormvariate(math.log(median), sigma))))
        for _ in range(num_seqs)
    ]


def constant(num_seqs: int, length: int) -> Callable[[random.Random], list[int]]:
    """Lengths that are all the same."""
    return lambda rng: [length] * num_seqs


def filled(num_seqs: int, max_len: int, fill: float) -> Callable[[random.Random], list[int]]:
    """Lengths max_len * u^(1 / fill - 1), u uniform: fill * max_len on average; one is max_len."""

    def draw(rng: random.Random) -> list[int]:
        powers = (rng.random() ** (1 / fill - 1) for _ in range(num_seqs - 1))
        return [max_len, *(min(max_len, max(1, round(max_len * power))) for power in powers)]

    return draw


def giant(num_seqs: int, giant_len: int, max_len: int) -> Callable[[random.Random], list[int]]:
    """One giant, the first sequence, among lengths U[1, max_len]."""
    return lambda rng: [giant_len, *uniform(num_seqs - 1, max_len)(rng)]


def layout(draw: Callable[[random.Random], list[int]], quick: bool) -> Layout:
    """The layout of a batch; `quick` keeps its first sequences, cut short."""
    lengths = draw(random.Random(SEED))
    if quick:
        longest = max(lengths)
        lengths = [math.ceil(n * QUICK_MAX_LEN / longest) for n in lengths[:QUICK_SEQS]]
    return Layout(tuple(lengths))


@dataclass(frozen=True)
class Precision:
    """A dtype and what products may do with it."""

    name: str
    dtype: torch.dtype

    @property
    def allow_tf32(self) -> bool:
        return self.name == "tf32"

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """PyTorch's own setting for float32 products, which operators and peers obey."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.allow_tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("tf32", torch.float32),
        Precision("fp32", torch.float32),
        Precision("bf16", torch.bfloat16),
        Precision("fp16", torch.float16),
    )
}
