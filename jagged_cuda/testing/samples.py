"""Inputs drawn from a seed: values with outliers, NaN outside the sequences, every storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from jagged_cuda.testing.lengths import Layout, matrices


@dataclass(frozen=True)
class Spec:
    """Everything that decides a sample except its dtype and device.

    Args:
        seed: of the values.
        layout: of q and of every other jagged tensor but k and v.
        kv_layout: of k and v; None means layout, and kv_offsets=None.
        choices: sizes and options by name, as the case lists them.
        storage: how each tensor lies in memory, by name; contiguous if it is not named.
        offsets_dtype: int32 or int64.
        poisoned: rows outside every sequence hold NaN instead of zeros.
    """

    seed: int
    layout: Layout
    choices: Mapping[str, Any]
    kv_layout: Layout | None = None
    storage: Mapping[str, str] = field(default_factory=dict)
    offsets_dtype: torch.dtype = torch.int64
    poisoned: bool = True

    @property
    def kv(self) -> Layout:
        return self.layout if self.kv_layout is None else self.kv_layout

    @property
    def capacity(self) -> int:
        """Elements of a vector with one matrix `[L, Lk]` per sequence, by the choice "capacity".

        "exact" is as many as there are, "spare" some more, "short" too few for the last ones.
        """
        elems = sum(x * y for x, y in zip(self.layout.lengths, self.kv.lengths, strict=True))
        named = {"exact": elems, "spare": elems + 37, "short": elems * 2 // 3}
        capacity = self.choices["capacity"]
        return capacity if isinstance(capacity, int) else named[capacity]

    def rows_layout(self, rows: Rows) -> Layout:
        """The layout of a tensor by what its rows are, or by a function that says so.

        Rows of "q", of "kv", one per sequence ("seq"), or elements of its matrix ("matrix"); a
        "table" serves all sequences, and has as many rows as the choice "buckets" says, and so does
        what has one element for each of D features ("features"); "total" are those of "q" in a
        tensor with as many rows as the choice "total" says.
        """
        if not isinstance(rows, str):
            return rows(self)
        if rows == "total":
            room = self.choices["total"]
            spare = 0 if room is None else room - self.layout.total
            return replace(self.layout, tail=self.layout.tail + spare)
        if rows == "matrix":
            return matrices(self.layout, self.kv, self.capacity)
        if rows == "features":
            return Layout((self.choices["D"],))
        if rows == "table":
            return Layout((self.choices["buckets"],))
        return {"q": self.layout, "kv": self.kv, "seq": Layout((1,) * self.layout.num_seqs)}[rows]


# What the rows of a tensor are: one of the words of Spec.rows_layout, or for rows that are packed
# anew what gives their layout.
Rows: TypeAlias = str | Callable[[Spec], Layout]


@dataclass(frozen=True)
class Sample:
    """Arguments of an operator: floating tensors by name, and the offsets."""

    spec: Spec
    tensors: dict[str, Tensor]
    offsets: Tensor
    kv_offsets: Tensor | None


def _contiguous(values: Tensor) -> Tensor:
    return values.contiguous()


def _in_buffer(values: Tensor, before: int, after: int) -> Tensor:
    """The rows as a slice of wider ones, whose other elements are NaN."""
    inner = math.prod(values.shape[1:])
    buffer = values.new_full((values.shape[0], before + inner + after), math.nan)
    rows = buffer[:, before : before + inner]
    if values.dim() > 2:
        rows = rows.unflatten(1, values.shape[1:])
    elif values.dim() == 1:
        rows = rows.squeeze(1)
    return rows.copy_(values)


def _fused(values: Tensor) -> Tensor:
    """The middle third of rows that are three times as wide, as in a fused projection."""
    inner = math.prod(values.shape[1:])
    return _in_buffer(values, inner, inner)


def _odd_stride(values: Tensor) -> Tensor:
    """Rows whose distance is no multiple of 16 bytes."""
    inner = math.prod(values.shape[1:])
    return _in_buffer(values, 0, 1 if inner % 2 == 0 else 2)


def _misaligned(values: Tensor) -> Tensor:
    """A storage offset of one element."""
    buffer = values.new_full((values.numel() + 1,), math.nan)
    return buffer[1:].view(values.shape).copy_(values)


def _swapped(values: Tensor, first: int, second: int) -> Tensor:
    """Two dimensions are swapped in memory."""
    if values.dim() < 2:
        return values.contiguous()
    return values.transpose(first, second).contiguous().transpose(first, second)


def _inner_transposed(values: Tensor) -> Tensor:
    """As y.transpose(1, 2) is."""
    return _swapped(values, -2, -1) if values.dim() > 2 else values.contiguous()


def _expanded(values: Tensor) -> Tensor:
    """One element for the whole last dimension (stride 0): the values change."""
    if values.dim() < 2 or values.shape[-1] == 0:
        return values.contiguous()
    return values[..., :1].contiguous().expand(values.shape)


STORAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "fused": _fused,
    "odd_stride": _odd_stride,
    "misaligned": _misaligned,
    "transposed": lambda values: _swapped(values, 0, -1),
    "inner_transposed": _inner_transposed,
    "heads_first": lambda values: _swapped(values, 0, 1),
    "expanded": _expanded,
}


def draw_values(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """Normal values of both signs, one in 61 of them sixteen times as large."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    values.view(-1)[seed % 61 :: 61] *= 16
    return values.to(dtype)


def poison(values: Tensor, layout: Layout) -> Tensor:
    """Set the rows outside every sequence to NaN."""
    values[: layout.base] = math.nan
    values[layout.total - layout.tail :] = math.nan
    return values


def draw_sample(
    spec: Spec,
    shapes: Mapping[str, tuple[int, ...]],
    rows: Mapping[str, Rows],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Sample:
    """Draw every tensor of `shapes`; `rows` says whose rows each has ("q", "kv" or "seq")."""
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items()):
        values = draw_values(shape, dtype, device, 16 * spec.seed + index)
        if spec.poisoned and rows[name] == "seq":
            # What belongs to a sequence without rows must not be read either.
            empty = torch.tensor(spec.layout.lengths, device=values.device) == 0
            values[empty] = math.nan
        elif rows[name] != "seq":
            foreign = spec.rows_layout(rows[name])
            values = poison(values, foreign) if spec.poisoned else values
        tensors[name] = STORAGES[spec.storage.get(name, "contiguous")](values)
    offsets = spec.layout.offsets(device, spec.offsets_dtype)
    kv_offsets = None
    if spec.kv_layout is not None:
        kv_offsets = spec.kv_layout.offsets(device, spec.offsets_dtype)
    return Sample(spec, tensors, offsets, kv_offsets)


def draw_cotangents(
    outputs: Mapping[str, Tensor], spec: Spec, rows: Mapping[str, Rows]
) -> dict[str, Tensor]:
    """A gradient for each output; NaN at rows outside every sequence, which must not leak."""
    cotangents = {}
    for index, (name, output) in enumerate(outputs.items()):
        seed = 16 * spec.seed + 8 + index
        values = draw_values(tuple(output.shape), output.dtype, output.device, seed)
        if spec.poisoned and rows[name] != "seq":
            values = poison(values, spec.rows_layout(rows[name]))
        cotangents[name] = values
    return cotangents
