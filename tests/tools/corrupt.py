"""Call every operator, forward and backward, with wrong offsets, and see that it stays in bounds.

The CPU refuses wrong offsets, which is all that is asked of it.

Batches go round all operators; offsets, those of keys or columns, and the beginnings of matrices
decrease, are negative, reach past the end or are extreme. Tensors lie between guard rows. What an
operator writes there is found afterwards; what it reads there is so large that it shows in the
results of the products and of attention. Values are unspecified with such offsets, so elements may
stay unwritten: half of the batches run in PyTorch's deterministic mode, which fills new memory with
NaN, and only there are results looked at::

    python -m tests.tools.corrupt --batches 10000 --jobs 4

With ``--memcheck`` the GPU's batches run under compute-sanitizer, each tensor in an allocation of
its own without guards, so that the first byte beyond it is reported::

    python -m tests.tools.corrupt --batches 10000 --jobs 12 --memcheck
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import queue
import random
import re
import subprocess
import sys
import threading
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

# What the CPU says of wrong offsets, always.
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


def run_batches(numbers: Iterable[int], device: str, guarded: bool) -> Iterator[str]:
    """Run batches; say of each, before it runs, its number, operator and what is wrong."""
    choice = os.environ.get(TENSOR_CORES, "")
    try:
        for number in numbers:
            batch, wrong = draw_batch(number)
            yield f"{number} {batch.op} {','.join(wrong)}"
            run_batch(batch, number, Memory(device, guarded))
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ[TENSOR_CORES] = choice


# --- many processes

_MARK = "@ "


@dataclass
class Worker:
    """A process that runs every n-th batch, and what it printed beside its marks."""

    process: subprocess.Popen[str]
    last: str = ""
    output: list[str] = field(default_factory=list)

    def read(self, marks: queue.Queue[str]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_MARK):
                self.last = line.removeprefix(_MARK).strip()
                marks.put(self.last)
            else:
                self.output.append(line)


def _start(options: argparse.Namespace, index: int, sanitizer: str | None) -> Worker:
    from tests.tools.sanitize import Check, command

    end = options.first + options.batches
    numbers = f"{options.first + index}:{end}:{options.jobs}"
    arguments = ("tests.tools.corrupt", "--device", options.device, "--worker", numbers)
    environment = dict(os.environ)
    if sanitizer is None:
        line = [sys.executable, "-m", *arguments]
    else:
        line = command(sanitizer, Check("memcheck", "wrong offsets", (*arguments, "--bare")))
        # Without its cache of blocks, PyTorch's tensors are allocations of their own.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    # One thread each: as many processes as cores may run.
    environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        line,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return Worker(process)


class Progress:
    """Counts batches, and says on stderr how many are left."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts: Counter[str] = Counter()
        self.wrong: Counter[tuple[str, str]] = Counter()
        self.begin = self.shown = time.monotonic()
        self.done = 0

    def add(self, mark: str) -> None:
        _, op, wrong = mark.split()
        self.done += 1
        self.counts[op] += 1
        self.wrong.update((op, kind) for kind in wrong.split(","))
        now = time.monotonic()
        if now - self.shown > (1.0 if sys.stderr.isatty() else 15.0):
            self.shown = now
            rate = self.done / (now - self.begin)
            print(
                f"corrupt: {self.done:,} of {self.total:,} batches, {rate:.0f} a second,"
                f" {(self.total - self.done) / rate:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def table(self) -> str:
        rows = [("operator", "batches", *(f"wrong {kind}" for kind in KINDS))]
        for op in EVERY:
            wrong = (f"{self.wrong[op, kind]:,}" for kind in KINDS)
            rows.append((op, f"{self.counts[op]:,}", *wrong))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])))
            for row in rows
        )


def _run_alone(options: argparse.Namespace, progress: Progress) -> list[str]:
    last = ""
    try:
        numbers = range(options.first, options.first + options.batches)
        for last in run_batches(numbers, options.device, not options.bare):
            progress.add(last)
    except Exception as error:
        return [_finding(last, f"{type(error).__name__}: {error}", options)]
    return []


def _run_workers(
    options: argparse.Namespace, progress: Progress, sanitizer: str | None
) -> list[str]:
    """Run the batches in processes; return what was found."""
    workers = [_start(options, index, sanitizer) for index in range(options.jobs)]
    marks: queue.Queue[str] = queue.Queue()
    readers = [threading.Thread(target=worker.read, args=(marks,)) for worker in workers]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers) or not marks.empty():
        try:
            progress.add(marks.get(timeout=0.2))
        except queue.Empty:
            continue
    findings = []
    for worker in workers:
        status, output = worker.process.wait(), "".join(worker.output)
        # A sanitizer that says nothing has watched nothing.
        silent = sanitizer is not None and "ERROR SUMMARY: 0 errors" not in output
        if status != 0 or silent:
            findings.append(_finding(worker.last, f"status {status}\n{output[-3000:]}", options))
    return findings


def _finding(mark: str, text: str, options: argparse.Namespace) -> str:
    number = mark.split()[0] if mark else str(options.first)
    line = f"python -m tests.tools.corrupt --device {options.device} --first {number}"
    memcheck = " --memcheck" if options.memcheck else ""
    return f"{text.strip()}\n  reproduce: {line} --batches 1{memcheck}"


def _sanitizer(options: argparse.Namespace) -> str | None:
    if not options.memcheck:
        return None
    from tests.tools.sanitize import find_sanitizer

    if options.device == "cpu":
        raise SystemExit("corrupt: --memcheck needs --device cuda")
    found = find_sanitizer()
    if found is None:
        raise SystemExit("corrupt: compute-sanitizer was not found (see make sanitize)")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--memcheck", action="store_true", help="run under compute-sanitizer")
    parser.add_argument("--bare", action="store_true", help="without guard rows")
    parser.add_argument("--worker", metavar="BEGIN:END:STEP", help="print a line before each batch")
    options = parser.parse_args()
    if options.worker is not None:
        numbers = range(*map(int, options.worker.split(":")))
        for mark in run_batches(numbers, options.device, not options.bare):
            print(f"{_MARK}{mark}", flush=True)
        return 0
    sanitizer = _sanitizer(options)
    progress = Progress(options.batches)
    if options.jobs == 1 and sanitizer is None:
        findings = _run_alone(options, progress)
    else:
        findings = _run_workers(options, progress, sanitizer)
    seconds = time.monotonic() - progress.begin
    print(progress.table())
    for finding in findings:
        print(finding)
    verdict = f"{len(findings)} processes stopped" if findings else "none out of bounds"
    print(
        f"{progress.done:,} batches, forward and backward, on {options.device}"
        f"{' under memcheck' if sanitizer else ''} in {seconds:.0f} s: {verdict}"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
