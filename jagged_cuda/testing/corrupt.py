"""Call every operator, forward and backward, with wrong offsets, and see that it stays in bounds.

The tensors lie between guard rows. What an operator writes there is found afterwards; what it reads
there is so large that it shows in the results of the products and of attention. Values are
unspecified with such offsets, so elements may stay unwritten: every other call runs in PyTorch's
deterministic mode, which fills new memory with NaN, and only there are results looked at. Under
compute-sanitizer::

    compute-sanitizer python -m jagged_cuda.testing.corrupt --device cuda --count 20
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import CASES, Case, Tensors
from jagged_cuda.testing.judge import run
from jagged_cuda.testing.samples import Sample, draw_cotangents

GUARD_ROWS = 400
GUARD = 3e4
# Sums over all rows and features at hand stay below this.
LIMIT = 5e3


class Guarded:
    """Tensors in the middle of larger ones."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int, int]] = []

    def place(self, values: Tensor) -> Tensor:
        rows = values.shape[0]
        buffer = values.new_full((GUARD_ROWS + rows + GUARD_ROWS, *values.shape[1:]), GUARD)
        buffer[GUARD_ROWS : GUARD_ROWS + rows] = values
        self.buffers.append((buffer, GUARD_ROWS, GUARD_ROWS + rows))
        return buffer[GUARD_ROWS : GUARD_ROWS + rows]

    def intact(self) -> bool:
        return all(
            bool((buffer[:begin] == GUARD).all() and (buffer[end:] == GUARD).all())
            for buffer, begin, end in self.buffers
        )


def corrupt(rng: random.Random, offsets: Tensor, total: int) -> Tensor:
    """Offsets that decrease, are negative, reach past the end or are extreme."""
    wrong = offsets.cpu().clone()
    extreme = torch.iinfo(offsets.dtype)
    for _ in range(rng.randint(1, 3)):
        wrong[rng.randrange(wrong.shape[0])] = rng.choice(
            (
                rng.randint(0, total),
                rng.randint(-total - 200, -1),
                total + rng.randint(1, 300),
                extreme.max,
                extreme.min,
            )
        )
    if rng.random() < 0.2:
        wrong = wrong.flip(0)
    return wrong.to(offsets.device)


def with_wrong_matrix_offsets(rng: random.Random, case: Case, sample: Sample) -> Any:
    """jagged_cuda, whose function of this case is given the beginnings of matrices, wrong ones."""
    right = jagged_cuda.matrix_offsets(sample.offsets, sample.kv_offsets)
    wrong = corrupt(rng, right, sample.spec.capacity)
    function = functools.partial(getattr(jagged_cuda, case.name), matrix_offsets=wrong)
    return SimpleNamespace(**{case.name: function})


def call_with_wrong_offsets(case: Case, seed: int, dtype: torch.dtype, device: str) -> None:
    """Raise AssertionError if the operator was seen out of bounds."""
    rng = random.Random(f"{case.name} {seed}")
    spec = case.spec(rng.choice(("small", "edge")), seed)
    choices = dict(spec.choices) | ({"scale": 0.5} if "scale" in spec.choices else {})
    spec = dataclasses.replace(spec, choices=choices, storage={}, poisoned=False)
    drawn = case.sample(spec, dtype, device)
    guarded = Guarded()
    tensors = {name: guarded.place(t.clamp(-1, 1)) for name, t in drawn.tensors.items()}
    offsets = corrupt(rng, drawn.offsets, spec.layout.total)
    kv_offsets = drawn.kv_offsets
    if kv_offsets is not None and rng.random() < 0.7:
        kv_offsets = corrupt(rng, kv_offsets, spec.kv.total)
    sample = Sample(spec, tensors, offsets, kv_offsets)
    ops: Any = jagged_cuda
    if "matrix" in case.rows.values() and rng.random() < 0.6:
        if rng.random() < 0.5:  # nothing else is wrong
            sample = dataclasses.replace(sample, offsets=drawn.offsets, kv_offsets=drawn.kv_offsets)
        ops = with_wrong_matrix_offsets(rng, case, sample)

    def cotangents(outputs: Tensors) -> Tensors:
        drawn = draw_cotangents(outputs, spec, case.rows)
        return {name: guarded.place(t.clamp(-1, 1)) for name, t in drawn.items()}

    torch.use_deterministic_algorithms(seed % 2 == 0)
    found = run(case, sample, lambda s: case.call(ops, s), cotangents)
    if device != "cpu":
        torch.cuda.synchronize()
    assert guarded.intact(), f"{case.name}, seed {seed}: wrote outside a tensor"
    if torch.are_deterministic_algorithms_enabled():
        for name, values in found.items():
            outside = values.isfinite() & (values.abs() > LIMIT)
            assert not outside.any(), f"{case.name}, {name}, seed {seed}: read outside a tensor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for case in CASES.values():
        for seed in range(options.seed, options.seed + options.count):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                call_with_wrong_offsets(case, seed, dtype, options.device)


if __name__ == "__main__":
    main()
