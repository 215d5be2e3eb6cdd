"""A few draws that together take every kernel path of a device."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

from jagged_cuda.testing._kernels import kernel_paths
from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.draws import SIZES, Draw, Wanted, draw, run_draw
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec

# Enough rows for several tiles, and few enough for a sanitizer.
GOOD_TOTAL = 300
GOOD_ELEMS = 200_000


def covering_draws(
    wanted: Wanted, backend: str, device: str, *, seed: int = 0, seconds: float = 30.0
) -> tuple[list[Draw], frozenset[str]]:
    """Search draws for so long; return a set that takes each path found, and the paths not found.

    Each operator is drawn at least once. Of the draws that take a path, the one is kept whose batch
    is nearest to GOOD_TOTAL rows, and whose tensors are small. On a GPU rare_draws() are kept, too:
    a path is that of a launch, which may find nothing to do.
    """
    best: dict[tuple[str, str], tuple[float, Draw]] = {}

    def consider(given: Draw) -> None:
        total = max(given.spec.layout.total, given.spec.kv.total)
        elems = sum(math.prod(shape) for shape in given.case.shapes(given.spec).values())
        badness = abs(math.log(total / GOOD_TOTAL)) + math.log1p(elems / GOOD_ELEMS)
        for path in run_draw(given).paths:
            # On the CPU the kernels of all operators have one name.
            key = (given.op, path)
            if key not in best or badness < best[key][0]:
                best[key] = (badness, given)

    kept: list[Draw] = []
    for given in rare_draws(backend, device) if backend == "cuda" else ():
        if given.op in wanted.ops and given.dtype in wanted.dtypes:
            kept.append(given)
            consider(given)
    deadline = time.monotonic() + seconds
    # Operators and sizes in turn: some paths are taken only by long sequences.
    turns = [
        dataclasses.replace(wanted, ops=(op,), size=size)
        for size in ("edge", "kinds", "giant")
        for op in wanted.ops
        if size in SIZES[backend]
    ]
    for index, turn in enumerate(itertools.cycle(turns)):
        if time.monotonic() > deadline and index >= len(wanted.ops):
            break
        given = draw(turn, seed, backend, device, index).draw
        if given.backward and sum(given.spec.layout.lengths):
            consider(given)
    for _, given in best.values():
        if given not in kept:
            kept.append(given)
    return kept, kernel_paths(backend) - {path for _, path in best}


def rare_draws(backend: str, device: str) -> list[Draw]:
    """Draws for kernels that a search seldom meets, since they take lengths of one kind alone."""

    def attention(
        lengths: tuple[int, ...],
        keys: tuple[int, ...] | None = None,
        deterministic: bool = False,
        **choices: Any,
    ) -> Draw:
        op = "jagged_flash_attention"
        first = {name: values[0] for name, values in EVERY[op].choices.items()}
        choices = first | {"cross": keys is not None, "max_len": False, "causal": False} | choices
        kv_layout = None if keys is None else Layout(keys, base=2, tail=3)
        spec = Spec(0, Layout(lengths, base=5, tail=7), choices, kv_layout)
        return Draw(op, spec, "bfloat16", backend, device, deterministic=deterministic)

    def product(op: str, lengths: tuple[int, ...], **choices: int) -> Draw:
        spec = Spec(0, Layout(lengths, base=5, tail=7), choices)
        return Draw(op, spec, "bfloat16", backend, device)

    narrow, middle, wide = ({"dims": (dim, dim), "heads": (2, 2)} for dim in (64, 128, 256))
    grouped = {"dims": (64, 64), "heads": (2, 1)}
    return [
        # Long sequences, several tiles of keys in turn.
        *(
            attention((1100, 40), deterministic=in_order, **choices)
            for choices in (narrow, middle, grouped, middle | {"causal": True})
            for in_order in (False, True)
        ),
        # Neither short nor long: many keys for few queries; and no row of a long sequence.
        attention((100, 60), (300, 400), **narrow),
        attention((300, 290, 310), **grouped),
        # So many that the kernels for short and tiny sequences have tiles enough; those for longer
        # ones give the path its name unless max_len says that there are none.
        *(attention((100, 70) * 40, max_len=is_known, **narrow) for is_known in (False, True)),
        *(attention((20, 9) * 150, max_len=True, **choices) for choices in (narrow, middle, wide)),
        attention((20, 9) * 150, max_len=True, dims=(32, 32), heads=(2, 2)),
        # Sums over rows that are cut, whose parts another kernel adds: with few columns, so many
        # parts that warps share them, and with many columns, of both forms of a tile.
        product("jagged_jagged_bmm", (600, 0, 40, 257), D=64, N=8),
        product("jagged_jagged_bmm", (9000, 3), D=8, N=40),
        product("jagged_jagged_bmm", (2100, 30), D=64, N=264),
        product("jagged_jagged_bmm", (1100, 0, 40), D=520, N=64),
        # Tiles of each width, with y one way and, in the gradient, the other.
        *(product("jagged_dense_bmm", (150, 0, 33), D=size, N=size) for size in (64, 128, 264)),
    ]
