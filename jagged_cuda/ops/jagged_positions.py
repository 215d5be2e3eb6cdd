"""jagged_positions: where in its sequence each row is."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _counts, _matrices
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_positions(
    offsets: Tensor,
    *,
    total: int | None = None,
    from_end: bool = False,
    targets: int | Tensor | None = None,
) -> Tensor:
    """Say where in its sequence each row is, counted from its begin or from its end.

    For each sequence b of length L, whose last ``targets`` rows share one position:
    ``z_b[i] = min(i, L - targets)``, and with from_end ``L - targets - min(i, L - targets)``, so
    that targets get 0, the row before them 1, and the oldest row the most.

    Args:
        offsets: `[B + 1]` int32 or int64; sequence b is rows ``offsets[b]:offsets[b + 1]``.
        total: T, rows of the result: at least the last of offsets. None reads that number, which
            waits for the GPU.
        from_end: count from the end, as recency does.
        targets: how many rows at the end of each sequence are candidates, which get the position
            behind its history: an int, or `[B]` int32 or int64 on offsets' device. More than L
            counts as L. None is 0.

    Returns:
        `[T]` int32, an index into a table of embeddings; rows outside every sequence are 0.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; total is None while a CUDA graph is captured; or targets are negative: those
            of a tensor are found on the CPU and under ``set_checks``, and else count as 0.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences are allowed. With total nothing synchronises; torch.compile without graph
        breaks needs it too. No gradient. Deterministic. Where total cuts a sequence, L is what is
        left of it.

    Source: the positions of generative-recommenders' position and timestamp embeddings.

    Example:
        >>> offsets = torch.tensor([0, 3, 3, 5])
        >>> jagged_positions(offsets)
        tensor([0, 1, 2, 0, 1], dtype=torch.int32)
        >>> jagged_positions(offsets, from_end=True, targets=1)
        tensor([2, 1, 0, 1, 0], dtype=torch.int32)
    """
    op = "jagged_positions"
    of_each, same = _counts.tensor_and_int(op, "targets", targets)
    if total is None:
        _contract.check_offsets(op, offsets)
        total = _matrices.read_size(op, "total", offsets)
    operator = torch.ops.jagged_cuda.jagged_positions.default
    return call(operator, offsets, of_each, total, from_end, same)


register(
    "jagged_positions",
    autocast="unchanged",
)
