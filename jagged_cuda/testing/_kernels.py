"""Which kernel path an operator took."""

from __future__ import annotations

import ctypes

from jagged_cuda import _load


def last_kernel(device: str) -> str:
    """Return the name of the kernel path taken last on "cpu" or "cuda", such as "cpu.avx2".

    Each library keeps one name for the whole process: call it right after the operator, without
        other threads at work.
    """
    path = _load.cpu_library if device == "cpu" else _load.cuda_library
    if path is None:
        raise RuntimeError(f"last_kernel: no library is loaded for {device}")
    read = getattr(ctypes.CDLL(str(path)), f"jagged_cuda_last_kernel_{device}")
    read.restype = ctypes.c_char_p
    return read().decode()
