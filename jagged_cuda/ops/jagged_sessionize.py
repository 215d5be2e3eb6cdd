"""jagged_sessionize: where the sessions of each sequence begin."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_cuda.ops import _contract, _matrices
from jagged_cuda.ops._dispatch import call, overridable, register


@overridable
def jagged_sessionize(
    time: Tensor, offsets: Tensor, gap: float, *, sessions: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cut each sequence into sessions, wherever time rises by more than a gap.

    A session starts at the first row of each sequence b, and at row i where
    ``time_b[i] - time_b[i - 1] > gap``. The results are offsets of two levels: session s is rows
    ``session_offsets[s]:session_offsets[s + 1]``, and sequence b is sessions
    ``first_session[b]:first_session[b + 1]``. So every operator on sequences works on sessions,
    and on sequences of what it gives for each session.

    Args:
        time: `[T]` jagged; any float or integer dtype. A fall starts no session.
        offsets: `[B + 1]` int32 or int64, on time's device; sequence b is rows
            ``offsets[b]:offsets[b + 1]``.
        gap: at least 0, in the unit of time.
        sessions: how many sessions the result holds; T always suffices. Those that do not fit are
            left out: their rows are outside every session. None reads how many there are, which
            waits for the GPU.

    Returns:
        session_offsets `[sessions + 1]`, which repeats the last of offsets behind the last session,
        and first_session `[B + 1]`, at most sessions; both of offsets' dtype.

    Raises:
        RuntimeError: a shape, dtype, device or option does not fit, the message names the
            argument; sessions is None while a CUDA graph is captured; or, under ``set_checks``,
            sessions is too small.
        torch.OutOfMemoryError: the GPU has no room for the result.

    Notes:
        Empty sequences have no session. With sessions nothing synchronises; torch.compile without
        graph breaks needs it too. Differences of integers are exact, whatever their size, those of
        floating numbers are taken in float64; NaN starts nothing. No gradient. Deterministic. A
        time whose elements do not lie one after another costs one copy.

    Source: sessions of clicks, as in "Session-based Recommendations with Recurrent Neural
    Networks", ICLR '16.

    Example:
        >>> time = torch.tensor([10, 20, 90, 95, 5])
        >>> jagged_sessionize(time, torch.tensor([0, 4, 4, 5]), 30)
        (tensor([0, 2, 4, 5]), tensor([0, 2, 2, 3]))
    """
    op = "jagged_sessionize"
    if not gap >= 0:
        _contract.fail_argument(op, "gap", ">= 0", gap)
    if isinstance(gap, int) and float(gap) != gap:
        _contract.fail_argument(op, "gap", "a number that float64 holds", gap)
    capacity = time.shape[:1].numel() if sessions is None else sessions
    operator = torch.ops.jagged_cuda.jagged_sessionize.default
    session_offsets, first_session = call(operator, time, offsets, float(gap), capacity)
    if sessions is None:
        found = _matrices.read_size(op, "sessions", first_session)
        if torch.compiler.is_compiling():
            torch._check(found <= capacity)
        session_offsets = session_offsets[: found + 1]
    return session_offsets, first_session


register(
    "jagged_sessionize",
    autocast="unchanged",
)
