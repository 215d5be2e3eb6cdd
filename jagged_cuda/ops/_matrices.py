"""What the operators over `[sum Lx*Ly]`, one matrix per sequence, share."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from jagged_cuda.ops import _contract
from jagged_cuda.ops._dispatch import call


def matrix_offsets(op: str, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    """The running sum of Lx*Ly, `[B + 1]`, for the operator `op`, which messages name."""
    _contract.check_offsets(op, offsets, y_offsets)
    return call(torch.ops.jagged_cuda.matrix_offsets.default, offsets, y_offsets)


def read_size(op: str, argument: str, offsets: Tensor) -> int:
    """The last of offsets `[B + 1]`: waits for the GPU, for a size `argument` that is not given."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_not_capturing(op, argument, offsets)
    size = cast(int, offsets[-1].item())  # a symbol to a compiler, which int() would fix
    if compiling:
        torch._check(size >= 0)
    return size


def check_not_capturing(op: str, argument: str, offsets: Tensor) -> None:
    """Raise RuntimeError where a size `argument` that is not given cannot be read."""
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        _contract.fail_argument(op, argument, "given while a CUDA graph is captured", "None")
