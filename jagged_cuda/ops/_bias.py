"""Biases of attention by times and positions: what describes them, and how operators take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged_cuda.ops._contract import fail_argument, may_read, shape_text

MAX_BUCKETS = 2048
_LATEST = 2**63 - 1  # of int64


class TimeBias(NamedTuple):
    """A learned bias of scores by the time between a query and a key.

    Query i and key j get ``table[..., r]``, where r is the number of boundaries that are at most
    ``abs(d)``, ``d = q_time[i] - kv_time[j]``, exact in 64 bits. Without symmetric that is
    ``max(d, 0)``: keys of the future are as close as keys of now.

    Args:
        table: `[R]`, or `[H, R]` with a row for each query head, R from 1 to 2048; float32
            (float64 for float64). It may require a gradient.
        q_time: `[Tq]` int64, in any unit.
        kv_time: `[Tk]` int64, in the same.
        boundaries: `[R - 1]` int64, ascending, such as log_boundaries makes.
        symmetric: count time in both directions alike.

    Example:
        >>> q = k = v = torch.zeros(3, 1, 8)
        >>> time = torch.tensor([0, 10, 500])
        >>> table = torch.zeros(8, requires_grad=True)
        >>> bias = TimeBias(table, time, time, log_boundaries(8, 1.0, unit=10))
        >>> jagged_flash_attention(q, k, v, torch.tensor([0, 3]), time_bias=bias).shape
        torch.Size([3, 1, 8])
    """

    table: Tensor
    q_time: Tensor
    kv_time: Tensor
    boundaries: Tensor
    symmetric: bool = True


class PositionBias(NamedTuple):
    """A learned bias of scores by the distance in rows between a query and a key.

    Query i, at position ``p = i + Lk - Lq``, and key j get
    ``table[..., clamp(p - j - first, 0, R - 1)]``.

    Args:
        table: `[R]`, or `[H, R]` with a row for each query head, R from 1 to 2048; float32
            (float64 for float64). It may require a gradient.
        first: the distance of the first bucket; 0 gives each distance to an earlier key its own.

    Example:
        >>> q = k = v = torch.zeros(3, 1, 8)
        >>> bias = PositionBias(torch.zeros(16))
        >>> jagged_flash_attention(q, k, v, torch.tensor([0, 3]), position_bias=bias).shape
        torch.Size([3, 1, 8])
    """

    table: Tensor
    first: int = 0


def _boundaries(op: str, num_buckets: int, least: Callable[[int], float]) -> Tensor:
    """The first integer of each bucket but the first; `least` is about that."""
    if not 1 <= num_buckets <= MAX_BUCKETS:
        fail_argument(op, "num_buckets", f"from 1 to {MAX_BUCKETS}", num_buckets)
    found = []
    for bucket in range(1, num_buckets):
        try:
            first = least(bucket)
        except OverflowError:
            first = math.inf
        found.append(_LATEST if first >= _LATEST else math.ceil(first))
    return torch.tensor(found, dtype=torch.int64)


def _exact(guess: float, bucket: int, bucket_of: Callable[[int], float]) -> float:
    """The least integer near a guess that bucket_of gives this bucket, or a later one."""
    if guess >= _LATEST:
        return guess
    first = max(math.ceil(guess), 0)
    while first > 0 and bucket_of(first - 1) >= bucket:
        first -= 1
    while bucket_of(first) < bucket:
        first += 1
    return first


def _check_positive(op: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            fail_argument(op, name, "more than 0", number)


def log_boundaries(num_buckets: int, divisor: float, unit: float = 1.0) -> Tensor:
    """Boundaries of logarithmic buckets of time, for TimeBias.

    A distance d falls into bucket ``min(floor(ln(max(d / unit, 1)) / divisor), num_buckets - 1)``,
    computed in float64 once, so that every device picks the same bucket.

    Args:
        num_buckets: R, from 1 to 2048.
        divisor: the width of a bucket, in powers of e; 0.301 is used with unit 1 for seconds.
        unit: of times, in the unit of the tensors.

    Returns:
        `[R - 1]` int64 on the CPU.

    Example:
        >>> import math
        >>> log_boundaries(5, math.log(2))
        tensor([ 2,  4,  8, 16])
    """
    op = "log_boundaries"
    _check_positive(op, divisor=divisor, unit=unit)

    def bucket_of(distance: int) -> float:
        return math.floor(math.log(max(distance / unit, 1.0)) / divisor)

    return _boundaries(
        op, num_buckets, lambda r: _exact(unit * math.exp(r * divisor), r, bucket_of)
    )


def sqrt_boundaries(num_buckets: int, divisor: float, unit: float = 1.0) -> Tensor:
    """Boundaries of buckets of time whose width grows with time, for TimeBias.

    A distance d falls into bucket ``min(floor(sqrt(d / unit) / divisor), num_buckets - 1)``,
    computed in float64 once.

    Args:
        num_buckets: R, from 1 to 2048.
        divisor: the width of a bucket, in square roots of units.
        unit: of times, in the unit of the tensors.

    Returns:
        `[R - 1]` int64 on the CPU.

    Example:
        >>> sqrt_boundaries(4, 2.0)
        tensor([ 4, 16, 36])
    """
    op = "sqrt_boundaries"
    _check_positive(op, divisor=divisor, unit=unit)

    def bucket_of(distance: int) -> float:
        return math.floor(math.sqrt(distance / unit) / divisor)

    return _boundaries(op, num_buckets, lambda r: _exact(unit * (r * divisor) ** 2, r, bucket_of))


def _tensor(op: str, name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        fail_argument(op, name, "a tensor", type(value).__name__)
    return value


def _check_ascending(op: str, boundaries: Tensor) -> None:
    """As offsets are looked at: on the CPU always, on CUDA where checks were asked for."""
    if not may_read(boundaries) or boundaries.dim() != 1 or boundaries.is_floating_point():
        return
    falls = (boundaries[1:] < boundaries[:-1]).nonzero()
    if len(falls):
        place = int(falls[0]) + 1
        before, found = boundaries[place - 1 : place + 1].tolist()
        name = f"time_bias.boundaries[{place}]"
        fail_argument(op, name, f">= time_bias.boundaries[{place - 1}] = {before}", found)


def _check_heads(op: str, name: str, q: Tensor, bias: Tensor) -> None:
    """That all query heads share a bias, a table `[R]` or kv_bias `[Tk]`, or each has its own."""
    if torch.compiler.is_compiling() or q.dim() not in (2, 3):  # then the contract looks
        return
    heads = q.shape[1] if q.dim() == 3 else 1
    given = bias.shape[1 if name == "kv_bias" else 0]
    if given > 0 and heads % given != 0:
        rows = bias.shape[0]
        expected = f"[{rows}] or [{rows}, {heads}]" if name == "kv_bias" else f"[R] or [{heads}, R]"
        fail_argument(op, name, expected, shape_text(bias.shape))


def flatten(
    op: str,
    q: Tensor,
    kv_lengths: Tensor | None,
    kv_bias: Tensor | None,
    time_bias: TimeBias | None,
    position_bias: PositionBias | None,
) -> tuple[Any, ...]:
    """The last arguments of the registered operators; nothing where none is given."""
    if kv_lengths is None and kv_bias is None and time_bias is None and position_bias is None:
        return ()
    if kv_bias is not None:
        if kv_bias.dim() == 1:
            kv_bias = kv_bias.unsqueeze(1)
        elif kv_bias.dim() == 2:
            _check_heads(op, "kv_bias", q, kv_bias)
    time: tuple[Any, ...] = (None, None, None, None, True)
    if time_bias is not None:
        if not isinstance(time_bias, tuple) or len(time_bias) != 5:
            fail_argument(op, "time_bias", "a TimeBias", type(time_bias).__name__)
        names = ("table", "q_time", "kv_time", "boundaries")
        tensors = [_tensor(op, f"time_bias.{n}", t) for n, t in zip(names, time_bias, strict=False)]
        _check_ascending(op, tensors[3])
        time = (_table(op, "time_bias.table", q, tensors[0]), *tensors[1:], bool(time_bias[4]))
    position: tuple[Any, ...] = (None, 0)
    if position_bias is not None:
        if not isinstance(position_bias, tuple) or len(position_bias) != 2:
            fail_argument(op, "position_bias", "a PositionBias", type(position_bias).__name__)
        table, first = position_bias
        if not isinstance(first, int):
            fail_argument(op, "position_bias.first", "an int", type(first).__name__)
        if not -_LATEST - 1 <= first <= _LATEST:
            fail_argument(op, "position_bias.first", "an int of 64 bits", first)
        name = "position_bias.table"
        position = (_table(op, name, q, _tensor(op, name, table)), first)
    return (kv_lengths, kv_bias, *time, *position)


def _table(op: str, name: str, q: Tensor, table: Tensor) -> Tensor:
    """`[heads, R]`"""
    if table.dim() == 1:
        return table.unsqueeze(0)
    if table.dim() == 2:
        _check_heads(op, name, q, table)
    return table
