"""Calling an operator so that running out of GPU memory is torch.OutOfMemoryError.

Inside the stable ABI a failed allocation loses its type; csrc/contract/contract.h throws a text
that names the device instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from jagged_cuda.ops._eager import run

_OUT_OF_MEMORY = re.compile(r"^(?P<op>\w+): out of memory on cuda:(?P<device>\d+) allocating ")


def call(op: Callable[..., Any], *args: Any) -> Any:
    """Return op(*args); out of memory on CUDA raises torch.OutOfMemoryError."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return run(op, args)
    except RuntimeError as error:
        match = _OUT_OF_MEMORY.match(str(error))
        if match is None:
            raise
        device = int(match["device"])
        raise torch.OutOfMemoryError(f"CUDA {error}. {_allocator_figures(device)}") from None


def _allocator_figures(device: int) -> str:
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    reserved = torch.cuda.memory_reserved(device)
    return (
        f"GPU {device} has a total capacity of {_mebibytes(total)} of which {_mebibytes(free)} is"
        f" free. Of the memory of this process {_mebibytes(allocated)} is allocated by PyTorch, and"
        f" {_mebibytes(reserved - allocated)} is reserved by PyTorch but unallocated."
    )


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"
