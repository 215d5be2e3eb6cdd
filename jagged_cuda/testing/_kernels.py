"""Which kernel path an operator took."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

from jagged_cuda import _load


def last_kernel(device: str) -> str:
    """Return the name of the kernel path taken last on "cpu" or "cuda", such as "cpu.avx2".

    Each library keeps one name for the whole process: call it right after the operator, without
        other threads at work.
    """
    path = _load.cpu_library if device == "cpu" else _load.cuda_library
    if path is None:
        raise RuntimeError(f"last_kernel: no library is loaded for {device}")
    return _reader(path, device)().decode()


@functools.cache
def _reader(path: Path, device: str) -> Callable[[], bytes]:
    read = getattr(ctypes.CDLL(str(path)), f"jagged_cuda_last_kernel_{device}")
    read.restype = ctypes.c_char_p
    return read


def kernel_paths(device: str) -> frozenset[str]:
    """Return the names of every kernel path that the library of "cpu" or "cuda" has.

    They are read from the library itself, where each name is a literal behind any byte; empty
    without a library.
    """
    path = _load.cpu_library if device == "cpu" else _load.cuda_library
    if path is None:
        return frozenset()
    literal = re.compile(rb"(?<![_./])%s(?:\.[a-z0-9_]+)+(?=\0)" % device.encode())
    return frozenset(name.decode() for name in literal.findall(path.read_bytes()))
