"""A few draws that together take every kernel path of a device."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

from jagged_cuda.testing._kernels import kernel_paths
from jagged_cuda.testing.draws import Draw, Wanted, draw, run_draw

# Enough rows for several tiles, and few enough for a sanitizer.
GOOD_TOTAL = 300
GOOD_ELEMS = 200_000


def covering_draws(
    wanted: Wanted, backend: str, device: str, *, seed: int = 0, seconds: float = 30.0
) -> tuple[list[Draw], frozenset[str]]:
    """Search draws for so long; return a set that takes each path found, and the paths not found.

    Each operator is drawn at least once. Of the draws that take a path, the one is kept whose batch
    is nearest to GOOD_TOTAL rows, and whose tensors are small.
    """
    best: dict[tuple[str, str], tuple[float, Draw]] = {}
    deadline = time.monotonic() + seconds
    # Operators and sizes in turn: some paths are taken only by long sequences.
    turns = [
        dataclasses.replace(wanted, ops=(op,), size=size)
        for size in ("edge", "giant")
        for op in wanted.ops
    ]
    for index, turn in enumerate(itertools.cycle(turns)):
        if time.monotonic() > deadline and index >= len(wanted.ops):
            break
        given = draw(turn, seed, backend, device, index).draw
        total = max(given.spec.layout.total, given.spec.kv.total)
        if not given.backward or not sum(given.spec.layout.lengths):
            continue
        elems = sum(math.prod(shape) for shape in given.case.shapes(given.spec).values())
        badness = abs(math.log(total / GOOD_TOTAL)) + math.log1p(elems / GOOD_ELEMS)
        for path in run_draw(given).paths:
            # On the CPU the kernels of all operators have one name.
            key = (given.op, path)
            if key not in best or badness < best[key][0]:
                best[key] = (badness, given)
    kept: list[Draw] = []
    for _, given in best.values():
        if given not in kept:
            kept.append(given)
    return kept, kernel_paths(backend) - {path for _, path in best}
