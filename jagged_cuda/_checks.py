"""The mode in which operators check offsets, and the errors that the GPU has found."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Literal

from jagged_cuda import _load


def set_checks(mode: bool | Literal["async"]) -> None:
    """Choose how operators check offsets, beyond what they always check.

    Order and bounds of offsets on the CPU are always checked, since that costs nothing. On CUDA
    wrong offsets give unspecified values, though never an access outside the tensors, unless a
    check is asked for.

    Args:
        mode: True: on CUDA each call waits for the GPU, and raises RuntimeError with the operator,
            the argument and the first bad index; max_len and capacities are checked too, on the CPU
            as well. A call that is captured into a CUDA graph is not checked.
            "async": each call on CUDA launches one small kernel more and waits for nothing. What
            it finds is raised by the next call of an operator, or by check_errors(); calls that
            are captured into a CUDA graph are checked at every replay.
            False: neither. This is the default.

    Raises:
        RuntimeError: mode is something else; or "async" and there is no room for the errors.

    Sets the environment variable JAGGED_CUDA_CHECK of this process, to 1, async or 0.
    """
    if mode not in (True, False, "async"):
        raise RuntimeError(f'set_checks: mode must be True, False or "async", got {mode!r}')
    if mode == "async" and _load.cuda_library is not None and not _cuda().allocate_error_word():
        raise RuntimeError("set_checks: pinned memory for errors found on the GPU cannot be had")
    os.environ["JAGGED_CUDA_CHECK"] = mode if isinstance(mode, str) else str(int(mode))


def check_errors() -> None:
    """Raise what set_checks("async") has found on the GPU since the last time, and forget it.

    Waits for nothing: after `torch.cuda.synchronize()` it has seen every call before. Only the
    first finding is kept until it is raised.

    Raises:
        RuntimeError: offsets were wrong; the message names operator, argument and index.
    """
    if _load.cuda_library is None:
        return
    error = _cuda().take_error().decode()
    if error:
        raise RuntimeError(error)


class _Cuda:
    """Functions that the CUDA library exports."""

    def __init__(self, library: Any) -> None:
        self.allocate_error_word = library.jagged_cuda_allocate_error_word
        self.allocate_error_word.restype = ctypes.c_bool
        self.take_error = library.jagged_cuda_take_error
        self.take_error.restype = ctypes.c_char_p


@functools.cache
def _cuda() -> _Cuda:
    return _Cuda(ctypes.CDLL(str(_load.cuda_library)))
