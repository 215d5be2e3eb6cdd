"""jagged_topk: which rows of each sequence are its best."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.ops import _counts
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_topk(score: Tensor, offsets: Tensor, k: int | Tensor) -> Tensor:
    """Mark the k rows with the highest scores in each sequence.

    For each sequence b of length L: ``z_b[i]`` is True for min(k, L) rows, whose scores are the
    highest; of equal ones the later row is the better.

    Args:
        score: `[T]` jagged; any float or integer dtype, or bool. NaN ranks last, behind -inf, and
            -0 equals 0.
        offsets: `[B + 1]` int32 or int64, on score's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        k: how many rows: an int, or `[B]` int32 or int64 on score's device, one of each sequence.
            More than L keeps all.

    Returns:
        `[T]` bool, which jagged_select takes; rows outside every sequence are False.

    Raises:
        RuntimeError: a shape, dtype or device does not fit, the message names the argument; or k
            is negative: in a tensor that is found on the CPU and under ``set_checks``, and else
            counts as 0.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. Nothing synchronises. The time is linear in the length of a
        sequence, whatever k is. No gradient: what is selected by the result has its own.
        Deterministic, and a sequence's result does not depend on its neighbours. A score whose
        elements do not lie one after another costs one copy.

    Source: "Search-based User Interest Modeling with Lifelong Sequential Behavior Data" (SIM),
    CIKM '20, soft search.

    Example:
        >>> score = torch.tensor([0.1, 0.5, 0.3, 0.5, 2.0])
        >>> jagged_topk(score, torch.tensor([0, 4, 5]), 1)
        tensor([False, False, False,  True,  True])
    """
    of_each, same = _counts.tensor_and_int("jagged_topk", "k", k)
    return call(torch.ops.jagged_cuda.jagged_topk.default, score, offsets, of_each, same)


register(
    "jagged_topk",
    autocast="unchanged",
)
