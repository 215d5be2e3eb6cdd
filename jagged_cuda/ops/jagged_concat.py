"""jagged_concat: tensors joined sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _plan
from jagged_cuda.ops._dispatch import call, overridable, refuse_transforms, register


@overridable
def jagged_concat(
    xs: Sequence[Tensor],
    offsets_list: Sequence[Tensor | None],
    *,
    total: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Join tensors sequence by sequence: a prefix, a history and targets, say.

    For each sequence b: ``z_b = [x0_b, x1_b, ...]``, the rows of b in each tensor, one tensor after
    the other.

    Args:
        xs: tensors of one dtype and device, and of rows of one shape: `[T, ...]` jagged, or
            `[B, M, ...]` dense with M rows for each sequence; any float or integer dtype, or bool.
        offsets_list: for each of them its offsets `[B + 1]`, all int32 or all int64, or None, which
            marks a dense one.
        total: rows of the result, a capacity: the sum of all rows always suffices. None reads how
            many rows the result has, which waits for the GPU, unless all are dense.

    Returns:
        ``(y, offsets)``: y `[total, ...]`; rows after the last sequence are 0. offsets `[B + 1]`
        of the dtype of the others, int64 without any, begin at 0.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; or total is None while a CUDA graph is captured.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Rows beyond total are left out, and the offsets end there, so
        that they are always right for y; ``JAGGED_CUDA_CHECK`` names the first sequence that does
        not fit. With total nothing synchronises; torch.compile without graph breaks needs it too.
        Values are copied, once for up to four tensors, and so are gradients. Derivatives of any
        order exist. Autocast leaves the dtype alone. Deterministic. jagged_split undoes it. A
        tensor is read in place if each of its rows is contiguous (a dense one, if it is contiguous
        as a whole); any other layout costs one copy of it.

    Source: concat_2D_jagged of generative-recommenders, for any number of tensors.

    Example:
        >>> history, targets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[7.0], [8.0]])
        >>> jagged_concat([history, targets], [torch.tensor([0, 2, 3]), None])
        (tensor([1., 2., 7., 3., 8.]), tensor([0, 3, 5]))
    """
    op = "jagged_concat"
    refuse_transforms(op, xs)
    parts, like = _as_parts(op, xs, offsets_list)
    while True:
        group, parts = parts[:_MOST_PARTS], parts[_MOST_PARTS:]
        capacity = sum(x.shape[0] for x, _ in group) if total is None or parts else total
        joined, offsets = _join(group, like, capacity)
        if not parts:
            break
        # More parts than one move takes: those joined so far are the first of the next move.
        parts.insert(0, (joined, offsets))
    if total is None and any(given is not None for given in offsets_list):
        joined = joined[: _plan.read_total(op, offsets)]
    return joined, offsets


# Parts of one move.
_MOST_PARTS = 4

# Rows of all sequences, and their offsets; without any, as many rows of each sequence.
_Part = tuple[Tensor, Tensor | None]


def _as_parts(
    op: str, xs: Sequence[Tensor], offsets_list: Sequence[Tensor | None]
) -> tuple[list[_Part], Tensor]:
    """All with one leading dimension, and offsets `[B + 1]` of the dtype of the result's."""
    if len(xs) == 0 or len(xs) != len(offsets_list):
        expected = f"a sequence of {len(xs) or 'one or more'} offsets"
        _contract.fail_argument(op, "offsets_list", expected, f"{len(offsets_list)}")
    given = [offsets for offsets in offsets_list if offsets is not None]
    dtype = given[0].dtype if given else torch.int64
    num_seqs = given[0].shape[0] - 1 if given and given[0].dim() == 1 else xs[0].shape[0]
    parts: list[_Part] = []
    for position, (x, offsets) in enumerate(zip(xs, offsets_list, strict=True)):
        name = f"xs[{position}]"
        if x.dtype != xs[0].dtype:
            expected, actual = map(_contract.dtype_name, (xs[0].dtype, x.dtype))
            _contract.fail_argument(op, name, expected, actual)
        if x.device != xs[0].device:
            _contract.fail_argument(op, name, f"on {xs[0].device}", f"on {x.device}")
        leading = 1 if offsets is not None else 2
        first_leading = 1 if offsets_list[0] is not None else 2
        trailing = list(xs[0].shape[first_leading:])
        if x.dim() < leading or list(x.shape[leading:]) != trailing:
            expected = _contract.shape_text([*("BM" if leading == 2 else "T"), *trailing])
            _contract.fail_argument(op, name, expected, _contract.shape_text(x.shape))
        if offsets is None:
            if x.shape[0] != num_seqs:
                expected = _contract.shape_text([num_seqs, "M", *trailing])
                _contract.fail_argument(op, name, expected, _contract.shape_text(x.shape))
            parts.append((x.reshape(x.shape[0] * x.shape[1], *trailing), None))
            continue
        label = f"offsets_list[{position}]"
        if offsets.dtype not in (torch.int32, torch.int64) or offsets.dtype != dtype:
            expected = "int32 or int64" if offsets is given[0] else _contract.dtype_name(dtype)
            _contract.fail_argument(op, label, expected, _contract.dtype_name(offsets.dtype))
        if offsets.device != x.device:
            _contract.fail_argument(op, label, f"on {x.device}", f"on {offsets.device}")
        if offsets.shape != (num_seqs + 1,):
            expected = _contract.shape_text([num_seqs + 1 if offsets is not given[0] else "B + 1"])
            _contract.fail_argument(op, label, expected, _contract.shape_text(offsets.shape))
        parts.append((x, offsets))
    if given:
        return parts, given[0]
    return parts, torch.arange(num_seqs + 1, device=xs[0].device)


def _join(parts: list[_Part], like: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Up to four parts joined, and the offsets of the result; `like`: offsets of its sequences."""
    (first, bounds), *others = parts
    rest = [argument for part in others for argument in part]
    op = torch.ops.jagged_cuda.jagged_concat.default
    joined, offsets = call(op, first, bounds, like, total, *rest)
    return joined, offsets


# Where x, y, z and w, and their offsets, are among the arguments.
_PARTS, _OFFSETS = (0, 4, 6, 8), (1, 5, 7, 9)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    inputs = (*inputs, *(None,) * (10 - len(inputs)))
    ctx.rows = [0 if inputs[place] is None else inputs[place].shape[0] for place in _PARTS]
    ctx.is_part = [inputs[place] is not None for place in _PARTS]
    ctx.save_for_backward(inputs[2], *(inputs[place] for place in _OFFSETS))


def _backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    like, *bounds = ctx.saved_tensors
    sizes = [argument for pair in zip(ctx.rows, bounds, strict=True) for argument in pair]
    op = torch.ops.jagged_cuda.jagged_concat_backward.default
    found = call(op, grad_out, like, *sizes)
    gradients: list[Tensor | None] = [None] * 10
    for place, is_part, gradient in zip(_PARTS, ctx.is_part, found, strict=True):
        gradients[place] = gradient if is_part and ctx.needs_input_grad[place] else None
    return tuple(gradients)


register(
    "jagged_concat",
    setup_context=_setup_context,
    backward=_backward,
    autocast="unchanged",
)


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.total = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1], *(*inputs[3::2], *(None,) * 4)[:4])


def _differentiate_gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    like, *bounds = ctx.saved_tensors
    first, *others = zip(grads, bounds, strict=True)
    rest = [argument for part in others for argument in part]
    op = torch.ops.jagged_cuda.jagged_concat.default
    joined, _ = call(op, first[0], first[1], like, ctx.total, *rest)
    return joined, *(None,) * 9


register(
    "jagged_concat_backward",
    setup_context=_setup_gradient,
    backward=_differentiate_gradient,
)
