"""Make a failing draw as small as possible."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jagged_cuda.testing.draws import Draw
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec


def shrink(draw: Draw, fails: Callable[[Draw], bool], seconds: float) -> Draw:
    """Return the smallest draw found within the time that still fails.

    Simpler draws are tried one change at a time, the large changes first, until none fails.
    """
    deadline = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(draw):
            if time.monotonic() > deadline:
                return draw
            if fails(simpler):
                draw, progress = simpler, True
                break
    return draw


def _simpler(draw: Draw) -> Iterator[Draw]:
    """Draws with one change each."""
    simplest: tuple[tuple[str, Any], ...] = (
        ("environment", {}),
        ("gradient_storage", {}),
        ("threads", 1),
        ("deterministic", False),
        ("backward", False),
        ("outputs", None),
        ("tf32", False),
    )
    for name, simple in simplest:
        if getattr(draw, name) != simple:
            yield dataclasses.replace(draw, **{name: simple})
    for name in draw.environment if len(draw.environment) > 1 else ():
        kept = {each: v for each, v in draw.environment.items() if each != name}
        yield dataclasses.replace(draw, environment=kept)
    for spec in _simpler_specs(draw):
        yield dataclasses.replace(draw, spec=spec)


def _simpler_specs(draw: Draw) -> Iterator[Spec]:
    spec = draw.spec

    def changed(**changes: Any) -> Spec:
        return dataclasses.replace(spec, **changes)

    for kept in _fewer(spec.layout.num_seqs):
        yield changed(
            layout=_part(spec.layout, kept),
            kv_layout=None if spec.kv_layout is None else _part(spec.kv_layout, kept),
        )
    for name in ("layout", "kv_layout"):
        layout = getattr(spec, name)
        if layout is not None:
            for shorter in _shorter(layout):
                yield changed(**{name: shorter})
    if spec.storage:
        yield changed(storage={})
        for name in spec.storage:
            yield changed(storage={n: v for n, v in spec.storage.items() if n != name})
    for name, value in spec.choices.items():
        for simple in _simpler_choices(value, draw.case.choices.get(name, ())):
            choices = dict(spec.choices) | {name: simple}
            if name == "cross" and not simple and spec.kv_layout is not None:
                yield changed(choices=choices, kv_layout=None)
            else:
                yield changed(choices=choices)
    if spec.offsets_dtype is not torch.int64:
        yield changed(offsets_dtype=torch.int64)
    if spec.poisoned:
        yield changed(poisoned=False)
    if spec.seed > 9:
        yield changed(seed=spec.seed % 10)


def _fewer(num_seqs: int) -> Iterator[list[int]]:
    """Sequences to keep: halves, quarters, ..., all but one."""
    size = num_seqs // 2
    while size >= 1:
        for first in range(0, num_seqs, size):
            dropped = range(first, min(first + size, num_seqs))
            yield [seq for seq in range(num_seqs) if seq not in dropped]
        size //= 2
    if num_seqs == 1:
        yield []


def _part(layout: Layout, kept: list[int]) -> Layout:
    return dataclasses.replace(layout, lengths=tuple(layout.lengths[seq] for seq in kept))


def _shorter(layout: Layout) -> Iterator[Layout]:
    if layout.base or layout.tail:
        yield dataclasses.replace(layout, base=0, tail=0)
    for name in ("base", "tail"):
        rows = getattr(layout, name)
        for fewer in sorted({0, 1, rows // 2} - {rows}):
            if fewer < rows:
                yield dataclasses.replace(layout, **{name: fewer})
    for divisor in (2, 4):
        halved = tuple(n // divisor for n in layout.lengths)
        if halved != layout.lengths:
            yield dataclasses.replace(layout, lengths=halved)
    if layout.num_seqs > 16:
        return
    for seq, rows in enumerate(layout.lengths):
        for fewer in sorted({0, 1, rows // 2, rows - rows // 4, rows - 1} - {rows}):
            if 0 <= fewer < rows:
                lengths = (*layout.lengths[:seq], fewer, *layout.lengths[seq + 1 :])
                yield dataclasses.replace(layout, lengths=lengths)


def _simpler_choices(value: Any, candidates: Any) -> Iterator[Any]:
    """Candidates listed before this one; for sizes, those with smaller numbers."""
    size = _size(value)
    if size == 0:
        for each in candidates:
            if each == value:
                return
            yield each
        return
    yield from sorted(
        {each for each in candidates if 0 < _size(each) < size},
        key=lambda each: (_size(each), each),
    )
    if type(value) is int and value > 1:
        yield value - 1


def _size(value: Any) -> int:
    """The sum of positive numbers; 0 if there are others, or none."""
    numbers = value if isinstance(value, tuple) else (value,)
    return sum(numbers) if all(type(n) is int and n > 0 for n in numbers) else 0
