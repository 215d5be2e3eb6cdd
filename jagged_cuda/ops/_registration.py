"""Registering the Python half of an operator: fake kernel, autograd and autocast.

Schemas stand in csrc/library.cpp, kernels in csrc/cpu and csrc/cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from jagged_cuda.ops._eager import add_formula

_LIBRARY = torch.library.Library("jagged_cuda", "IMPL")
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def register(
    name: str,
    *,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    autocast: Literal["lower_precision", "float32", "unchanged"] = "unchanged",
) -> None:
    """Register what torch.ops.jagged_cuda.<name> needs beside its kernels.

    Args:
        name: the operator, defined in csrc/library.cpp.
        fake: shapes, dtypes and errors of the operator on fake tensors.
        setup_context, backward: its autograd formula. None for operators without one: then it is
            an error to differentiate them (autograd would only warn, and give wrong gradients).
        autocast: "lower_precision" casts floating tensors to torch.get_autocast_dtype, "float32"
            to float32, "unchanged" casts nothing.
    """
    qualified_name = f"jagged_cuda::{name}"
    backward = backward or _no_gradient(name)
    torch.library.register_fake(qualified_name, fake)
    torch.library.register_autograd(qualified_name, backward, setup_context=setup_context)
    add_formula(getattr(torch.ops.jagged_cuda, name).default, setup_context, backward)
    if autocast != "unchanged":
        for device_type in _AUTOCAST_KEYS:
            _register_autocast(name, device_type, autocast)


def _no_gradient(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f"{name}: gradients of this operator (double backward) are not supported"
        )

    return backward


def _register_autocast(name: str, device_type: str, policy: str) -> None:
    op = getattr(torch.ops.jagged_cuda, name).default
    autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    )

    def kernel(*args: Any) -> Any:
        dtype = (
            torch.get_autocast_dtype(device_type) if policy == "lower_precision" else torch.float32
        )
        with torch._C._ExcludeDispatchKeyGuard(autocast_keys):
            return op(*(_cast(arg, device_type, dtype) for arg in args))

    _LIBRARY.impl(name, kernel, _AUTOCAST_KEYS[device_type])


def _cast(arg: Any, device_type: str, dtype: torch.dtype) -> Any:
    if (
        isinstance(arg, Tensor)
        and arg.device.type == device_type
        and arg.is_floating_point()
        and arg.dtype is not torch.float64
    ):
        return arg.to(dtype)
    return arg
