"""Look for races: run the same inputs again and again, and compare every bit.

``python -m tests.tools.races``: draws that together take every kernel path run a thousand
times each, forward and backward, while other work keeps the GPU busy on another stream, so that
CTAs run in another order each time. Results must not differ in a single bit. Processes share the
draws, and are work for each other.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.cases import Tensors
from jagged_cuda.testing.draws import DTYPES, Draw, Wanted, run_draw
from tests.tools.covering import covering_draws

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OtherWork:
    """Products and copies on a stream of their own, which take turns with what is looked at."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.ones(1536, 1536, device=device)
        self.copied = torch.ones(2**22, device=device)

    def launch(self, turn: int) -> None:
        with torch.cuda.stream(self.stream):
            if turn % 3 == 0:
                torch.mm(self.matrix, self.matrix)
            elif turn % 3 == 1:
                self.copied.clone()


def hunt(given: Draw, runs: int, ops: Any = None) -> str | None:
    """Run a draw so many times; return the name of a result that differed, or None."""
    first = run_draw(given, ops).found
    if given.op == "jagged_flash_attention" and not given.deterministic:
        first.pop("grad_q", None)  # long sequences add to it in the order of arrival
    on_gpu = torch.device(given.device).type == "cuda"
    work = OtherWork(given.device) if on_gpu else None
    differs = {name: _bits(values).ne(_bits(values)).any() for name, values in first.items()}
    for turn in range(runs - 1):
        if work is not None:
            work.launch(turn)
        _note_differences(differs, first, run_draw(given, ops).found)
        if turn % 64 == 63 and any(map(bool, differs.values())):
            break
    return next((name for name, found in differs.items() if bool(found)), None)


def _note_differences(differs: Tensors, first: Tensors, found: Tensors) -> None:
    """On the device, so that the host need not wait at each run."""
    for name, values in first.items():
        differs[name] |= (_bits(values) != _bits(found[name])).any()


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(_BITS[values.element_size()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", type=float, default=20.0, help="seconds to look for draws")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes")
    options = parser.parse_args()
    backend = torch.device(options.device).type
    draws, missed = covering_draws(
        Wanted(dtypes=tuple(options.dtype)),
        backend,
        options.device,
        seed=options.seed,
        seconds=options.search,
    )
    found = 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        names = pool.imap(functools.partial(hunt, runs=options.runs), draws)
        for number, (given, name) in enumerate(zip(draws, names, strict=True), 1):
            if name is not None:
                found += 1
                print(f"races: {name} of {given.op} differs\n  reproduce: {given.command()}")
            if sys.stderr.isatty() or number % 10 == 0 or number == len(draws):
                print(f"races: {number} of {len(draws)} draws", file=sys.stderr, flush=True)
    print(f"races: {len(draws)} draws, {options.runs:,} runs each, {found} that differed")
    if missed:
        print(f"races: kernel paths that no draw took: {', '.join(sorted(missed))}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
