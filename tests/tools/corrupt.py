"""Call every operator, forward and backward, with wrong offsets, and check that it stays in bounds.

The CPU must refuse wrong offsets.

Batches take the operators in turn; offsets, those of keys or columns, and beginnings of matrices
decrease, are negative, reach past the end or are extreme. Tensors lie between guard rows. What an
operator writes there is found afterwards; what it reads there is so large that it shows in the
results of the products and of attention. Values are unspecified with such offsets, so elements may
stay unwritten: half of the batches run in PyTorch's deterministic mode, which fills new memory with
NaN, and only there are results looked at::

    python -m tests.tools.corrupt --batches 10000

With ``--bare`` tensors are allocations of their own without guards: so ``make sanitize`` runs them
under compute-sanitizer, which reports the first byte beyond.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import EVERY, Case, Tensors
from jagged_cuda.testing.draws import DTYPES
from jagged_cuda.testing.judge import run
from jagged_cuda.testing.samples import Sample

GUARD_ROWS = 400
GUARD = 3e4
# Sums over all rows and features at hand stay below this.
LIMIT = 5e3

# What may be wrong; "kv_offsets" are y_offsets to the operators over matrices.
KINDS = ("offsets", "kv_offsets", "matrix_offsets")
TENSOR_CORES = "JAGGED_CUDA_TENSOR_CORES"

# The CPU's errors for wrong offsets.
REFUSED = re.compile(r"offsets\[\d+\] must be ")


@dataclass
class Memory:
    """Where tensors lie: in the middle of larger ones, or alone."""

    device: str
    guarded: bool
    buffers: list[tuple[Tensor, int, int]] = field(default_factory=list)

    def place(self, values: Tensor) -> Tensor:
        if not self.guarded:
            return values.to(self.device)
        begin, end = GUARD_ROWS, GUARD_ROWS + values.shape[0]
        buffer = values.new_full((end + GUARD_ROWS, *values.shape[1:]), GUARD, device=self.device)
        buffer[begin:end] = values
        self.buffers.append((buffer, begin, end))
        return buffer[begin:end]

    def intact(self) -> bool:
        return all(
            bool((buffer[:begin] == GUARD).all() and (buffer[end:] == GUARD).all())
            for buffer, begin, end in self.buffers
        )


def corrupt(rng: random.Random, offsets: Tensor, total: int) -> Tensor:
    """Offsets that decrease, are negative, reach past the end or are extreme."""
    wrong = offsets.clone()
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
    return wrong.flip(0) if rng.random() < 0.2 else wrong


@dataclass(frozen=True)
class Batch:
    """A call, on the CPU's memory: its number decides all of it.

    Args:
        op: the key of its case.
        sample: arguments, some of the offsets wrong.
        matrix_offsets: the wrong beginnings of matrices that it is given, or None.
        deterministic: in PyTorch's deterministic mode.
        mma_sync: on Hopper too, by the kernels of all GPUs.
    """

    op: str
    sample: Sample
    dtype: str
    matrix_offsets: Tensor | None
    deterministic: bool
    mma_sync: bool

    @property
    def case(self) -> Case:
        return EVERY[self.op]


def draw_batch(number: int) -> tuple[Batch, tuple[str, ...]]:
    """The batch of a number, and which of KINDS are wrong in it."""
    rng = random.Random(f"wrong offsets {number}")
    op = tuple(EVERY)[number % len(EVERY)]
    case = EVERY[op]
    spec = case.spec(rng.choice(("small", "edge")), rng.randrange(10**6))
    choices = dict(spec.choices)
    if "scale" in choices:
        # Sequences that overlap take each other's LSE in backward: logits below 1/2 keep what comes
        # of that small.
        choices["scale"] = 0.5 / (choices["dims"][0] if "dims" in choices else 1)
    spec = dataclasses.replace(spec, choices=choices, storage={}, poisoned=False)
    dtype = rng.choice(tuple(DTYPES))
    drawn = case.sample(spec, DTYPES[dtype], "cpu")
    wrong = {"offsets"}
    if drawn.kv_offsets is not None:
        wrong = rng.choice(({"offsets"}, {"kv_offsets"}, {"offsets", "kv_offsets"}))
    if "matrix" in case.rows.values() and rng.random() < 0.6:
        wrong = rng.choice(({"matrix_offsets"}, {*wrong, "matrix_offsets"}))
    offsets, kv_offsets, matrix_offsets = drawn.offsets, drawn.kv_offsets, None
    if "matrix_offsets" in wrong:
        right = jagged_cuda.matrix_offsets(offsets, kv_offsets)
        matrix_offsets = corrupt(rng, right, spec.capacity)
    if "offsets" in wrong:
        offsets = corrupt(rng, offsets, spec.layout.total)
    if kv_offsets is not None and "kv_offsets" in wrong:
        kv_offsets = corrupt(rng, kv_offsets, spec.kv.total)
    tensors = {name: t.clamp(-1, 1) for name, t in drawn.tensors.items()}
    sample = Sample(spec, tensors, offsets, kv_offsets)
    batch = Batch(op, sample, dtype, matrix_offsets, rng.random() < 0.5, rng.random() < 0.5)
    return batch, tuple(kind for kind in KINDS if kind in wrong)


def run_batch(batch: Batch, number: int, memory: Memory) -> None:
    """Raise AssertionError if the operator was seen out of bounds."""
    case, device = batch.case, memory.device
    ops: Any = jagged_cuda
    if batch.matrix_offsets is not None:
        given = batch.matrix_offsets.to(device)
        function = functools.partial(getattr(jagged_cuda, case.name), matrix_offsets=given)
        ops = SimpleNamespace(**{case.name: function})
    sample = Sample(
        batch.sample.spec,
        {name: memory.place(t) for name, t in batch.sample.tensors.items()},
        batch.sample.offsets.to(device),
        None if batch.sample.kv_offsets is None else batch.sample.kv_offsets.to(device),
    )
    generator = torch.Generator().manual_seed(number)

    def cotangents(outputs: Tensors) -> Tensors:
        return {
            name: memory.place(torch.rand(t.shape, generator=generator).mul_(2).sub_(1).to(t.dtype))
            for name, t in outputs.items()
        }

    os.environ[TENSOR_CORES] = "mma_sync" if batch.mma_sync else ""
    torch.use_deterministic_algorithms(batch.deterministic)
    try:
        found = run(case, sample, lambda s: case.call(ops, s), cotangents)
    except RuntimeError as error:
        if device == "cpu" and REFUSED.search(str(error)):
            return
        raise
    if device != "cpu":
        torch.cuda.synchronize()
    where = f"{batch.op}, {batch.dtype}, batch {number}"
    assert memory.intact(), f"{where}: wrote outside a tensor"
    if memory.guarded and batch.deterministic:
        for name, values in found.items():
            outside = values.isfinite() & (values.abs() > LIMIT)
            assert not outside.any(), f"{where}, {name}: read outside a tensor"


def run_batches(
    numbers: Iterable[int], device: str, guarded: bool
) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Run batches; yield of each, before it runs, its number, operator and what is wrong."""
    choice = os.environ.get(TENSOR_CORES, "")
    try:
        for number in numbers:
            batch, wrong = draw_batch(number)
            yield number, batch.op, wrong
            run_batch(batch, number, Memory(device, guarded))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ[TENSOR_CORES] = choice


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch")
    parser.add_argument("--bare", action="store_true", help="without guard rows")
    options = parser.parse_args()
    begin = time.monotonic()
    batches, wrong_of = Counter[str](), Counter[tuple[str, str]]()
    numbers = range(options.first, options.first + options.batches)
    for number, op, wrong in run_batches(numbers, options.device, not options.bare):
        # A batch that kills the process leaves this line, which says how to repeat it.
        line = f"--first {number} --batches 1: {op}"
        print(f"{line:<60}", end="\r", file=sys.stderr, flush=True)
        batches[op] += 1
        wrong_of.update((op, kind) for kind in wrong)
    print(f"{'operator':<32}{'batches':>10}" + "".join(f"{'wrong ' + k:>22}" for k in KINDS))
    for op in EVERY:
        print(f"{op:<32}{batches[op]:>10,}" + "".join(f"{wrong_of[op, k]:>22,}" for k in KINDS))
    seconds = time.monotonic() - begin
    print(
        f"{batches.total():,} batches, forward and backward, on {options.device}"
        f" in {seconds:.0f} s: none out of bounds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
