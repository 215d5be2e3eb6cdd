"""What every operator asks of its arguments, for the fake kernels.

The C++ kernels check in csrc/contract/contract.h; the fake kernels check here, with the same texts
(a test compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def fail_argument(op: str, argument: str, expected: str, actual: str) -> NoReturn:
    raise RuntimeError(f"{op}: {argument} must be {expected}, got {actual}")


def shape_text(shape: Sequence[int | torch.SymInt]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dim(op: str, argument: str, tensor: Tensor, dim: int, expected: str) -> None:
    if tensor.dim() != dim:
        fail_argument(op, argument, expected, shape_text(tensor.shape))


def check_shape(op: str, argument: str, tensor: Tensor, expected: Sequence[int]) -> None:
    if tensor.dim() != len(expected) or any(
        size != wanted for size, wanted in zip(tensor.shape, expected, strict=True)
    ):
        fail_argument(op, argument, shape_text(expected), shape_text(tensor.shape))


def check_floating(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATING:
        fail_argument(
            op, argument, "float32, float64, float16 or bfloat16", dtype_name(tensor.dtype)
        )


def check_copied(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in (*_FLOATING, torch.int32, torch.int64):
        expected = "float32, float64, float16, bfloat16, int32 or int64"
        fail_argument(op, argument, expected, dtype_name(tensor.dtype))


def check_rows(op: str, argument: str, tensor: Tensor, leading: int, expected: str) -> None:
    """That so many dimensions come before those of a row."""
    if tensor.dim() < leading:
        fail_argument(op, argument, expected, shape_text(tensor.shape))


def check_not_negative(op: str, argument: str, value: int) -> None:
    if value < 0:
        fail_argument(op, argument, ">= 0", str(value))


def check_index(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        fail_argument(op, argument, "int32 or int64", dtype_name(tensor.dtype))


def check_dtype(op: str, argument: str, tensor: Tensor, expected: torch.dtype) -> None:
    if tensor.dtype != expected:
        fail_argument(op, argument, dtype_name(expected), dtype_name(tensor.dtype))


def check_device(op: str, argument: str, tensor: Tensor, reference: Tensor) -> None:
    if tensor.device != reference.device:
        fail_argument(op, argument, f"on {reference.device}", f"on {tensor.device}")


def check_like(op: str, argument: str, tensor: Tensor, reference: Tensor) -> None:
    check_dtype(op, argument, tensor, reference.dtype)
    check_device(op, argument, tensor, reference)


def check_offsets(op: str, argument: str, offsets: Tensor, reference: Tensor) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        fail_argument(op, argument, "[B + 1]", shape_text(offsets.shape))
    check_index(op, argument, offsets)
    check_device(op, argument, offsets, reference)


def check_y_offsets(op: str, offsets: Tensor, y_offsets: Tensor) -> None:
    check_offsets(op, "y_offsets", y_offsets, offsets)
    check_dtype(op, "y_offsets", y_offsets, offsets.dtype)
    check_shape(op, "y_offsets", y_offsets, (offsets.shape[0],))


def check_matrix_offsets(
    op: str, offsets: Tensor, y_offsets: Tensor | None, matrix_offsets: Tensor
) -> None:
    """For the operators over `[sum Lx*Ly]`, once offsets are checked (csrc/contract/matrices.h)."""
    if y_offsets is not None:
        check_y_offsets(op, offsets, y_offsets)
    check_dtype(op, "matrix_offsets", matrix_offsets, torch.int64)
    check_shape(op, "matrix_offsets", matrix_offsets, (offsets.shape[0],))
    check_device(op, "matrix_offsets", matrix_offsets, offsets)


def check_capacity(op: str, argument: str, capacity: int) -> None:
    if capacity < 0:
        fail_argument(op, argument, ">= 0", str(capacity))
