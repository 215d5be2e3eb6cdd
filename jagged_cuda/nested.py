"""torch.nested tensors with layout=torch.jagged as (values, offsets), and back, without copies.

A jagged nested tensor holds values and offsets as this package's functions take them. Two of them
have equal shapes only if they hold the same offsets object: `to_jagged` gives the caller's own, and
what `from_jagged` and `with_values` make of it can be added to the tensor that it came from.

Example:
    >>> import torch, jagged_cuda
    >>> parts = [torch.ones(2, 4), torch.ones(3, 4)]
    >>> nt = torch.nested.nested_tensor(parts, layout=torch.jagged)
    >>> values, offsets = jagged_cuda.nested.to_jagged(nt)
    >>> out = jagged_cuda.jagged_softmax(values, offsets)
    >>> jagged_cuda.nested.with_values(nt, out).shape == nt.shape
    True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._contract import check_offsets, fail_argument, shape_text

__all__ = ["from_jagged", "to_jagged", "with_values"]


def to_jagged(nt: Any, *, compact: bool = False) -> tuple[Tensor, Tensor]:
    """Take a nested tensor apart.

    Args:
        nt: `[B, j, ...]` with layout=torch.jagged, or with heads in front of the rows,
            `[B, H, j, D]`.
        compact: copy a tensor with holes (made with ``lengths``) into one without. Offsets are then
            new ones. False refuses such a tensor.

    Returns:
        ``(values, offsets)``: values `[T, ...]`, `[T, H, D]` of heads in front, a view through
        which gradients reach nt; offsets `[B + 1]`, the tensor that nt itself holds.

    Raises:
        RuntimeError: nt is no nested tensor, is a strided one, or has holes.

    Notes:
        Nothing is copied, except by compact, and nothing synchronises.
    """
    _check("to_jagged", nt)
    if nt.lengths() is not None:
        if not compact:
            expected = "without holes"
            remedy = "one made with lengths: pass compact=True, or its contiguous()"
            fail_argument("nested.to_jagged", "nt", expected, remedy)
        nt = nt.contiguous()
    return _rows_first(nt.values(), nt), nt.offsets()


def from_jagged(
    values: Tensor, offsets: Tensor, *, min_len: int | None = None, max_len: int | None = None
) -> Tensor:
    """Make a nested tensor `[B, j, ...]` of rows and offsets.

    Args:
        values: `[T, ...]`.
        offsets: `[B + 1]` int32 or int64. Pass the same tensor for those of equal shape.
        min_len, max_len: the shortest and the longest length, where known; PyTorch synchronises
            where it needs one that was not given.

    Returns:
        A view of values that holds this offsets tensor.

    Raises:
        RuntimeError: a shape or dtype does not fit; the message names the argument.
    """
    for name, tensor in (("values", values), ("offsets", offsets)):
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            actual = "a nested tensor" if is_nested(tensor) else f"a {type(tensor).__name__}"
            fail_argument("nested.from_jagged", name, "a tensor", actual)
    check_offsets("nested.from_jagged", offsets)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=min_len, max_seqlen=max_len
    )


def with_values(nt: Any, values: Tensor) -> Tensor:
    """Make a nested tensor of other rows, where nt's lie.

    Args:
        nt: a nested tensor that `to_jagged` takes, without holes.
        values: `[T, ...]`, one row for each of nt's; `[T, H, D]` if nt is `[B, H, j, D]`.

    Returns:
        `[B, j, ...]`, or `[B, H, j, D]` like nt, a view of values that holds nt's own offsets: its
        ragged size equals nt's.

    Raises:
        RuntimeError: nt is no nested tensor, is a strided one, or has holes; the number of rows is
            another.
    """
    _check("with_values", nt)
    if nt.lengths() is not None:
        fail_argument("nested.with_values", "nt", "without holes", "one made with lengths")
    if not isinstance(values, Tensor) or values.is_nested:
        actual = "a nested tensor" if is_nested(values) else f"a {type(values).__name__}"
        fail_argument("nested.with_values", "values", "a tensor", actual)
    total = _rows_first(nt.values(), nt).shape[0]
    if values.shape[0] != total:
        expected = shape_text([total, "..."])
        fail_argument("nested.with_values", "values", expected, shape_text(values.shape))
    jagged_dim = _jagged_dim(nt)
    return torch.nested.nested_tensor_from_jagged(
        values.movedim(0, jagged_dim - 1),
        nt.offsets(),
        jagged_dim=jagged_dim,
        # Known lengths stay known, so that nobody has to compute them, and wait, again.
        min_seqlen=getattr(nt, "_maybe_min_seqlen", None),
        max_seqlen=getattr(nt, "_maybe_max_seqlen", None),
    )


def is_nested(x: Any) -> bool:
    """Whether x is a nested tensor, of either layout."""
    return isinstance(x, Tensor) and x.is_nested


def _check(function: str, nt: Any) -> None:
    if not is_nested(nt):
        fail_argument(f"nested.{function}", "nt", "a nested tensor", f"a {type(nt).__name__}")
    if nt.layout is not torch.jagged:
        expected = "a nested tensor with layout=torch.jagged"
        fail_argument(f"nested.{function}", "nt", expected, "a strided one")


def _jagged_dim(nt: Tensor) -> int:
    """Which dimension of nt is ragged; 1 unless it was transposed."""
    jagged_dim: int = getattr(nt, "_ragged_idx", 1)
    return jagged_dim


def _rows_first(values: Tensor, nt: Tensor) -> Tensor:
    return values.movedim(_jagged_dim(nt) - 1, 0)
