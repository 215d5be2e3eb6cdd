"""Calling an operator eagerly without the detour of a Python kernel.

torch.library.register_autograd puts a Python kernel between the dispatcher and ours: every argument
is passed on twice, and a call with gradients reads the schema for defaults. That is more than half
of what the host spends on a call. Calls on plain tensors go past it, straight to the kernel, or
through an autograd.Function of the same formula. Whatever else may want to see the call takes the
registered way: subclasses of tensors, modes, torch.func, autocast and tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_SCALARS = frozenset((int, float, bool, type(None)))

# Of PyTorch's own, without a promise: where one is missing, every call takes the registered way.
_PRIVATE = (
    "_AutoDispatchBelowAutograd",
    "_are_functorch_transforms_active",
    "_get_tracing_state",
    "_is_any_autocast_enabled",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
)
_C: Any = torch._C
_HAS_PRIVATE = all(hasattr(_C, name) for name in _PRIVATE)

# Of each operator what applies it differentiably, and the defaults of its arguments.
_formulas: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def add_formula(
    op: torch._ops.OpOverload,
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
) -> None:
    """Let run() differentiate an operator: arguments as for torch.library.register_autograd."""

    def forward(ctx: Any, *args: Any) -> Any:
        with _C._AutoDispatchBelowAutograd():
            output = op(*args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    name = op._schema.name.rpartition("::")[2]
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)
    # Function.apply, without what it does for torch.func.
    apply = super(torch.autograd.Function, function).apply
    defaults = tuple(argument.default_value for argument in op._schema.arguments)
    _formulas[op] = (apply, defaults)


def run(op: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return op(*args)."""
    found = _formulas.get(op)
    if found is None or not _HAS_PRIVATE or _is_watched():
        return op(*args)
    wants_gradient = False
    for arg in args:
        kind = type(arg)
        if kind in _TENSORS:
            wants_gradient = wants_gradient or arg.requires_grad
        elif kind not in _SCALARS:
            return op(*args)
    if wants_gradient and torch.is_grad_enabled():
        apply, defaults = found
        return apply(*args, *defaults[len(args) :])
    with _C._AutoDispatchBelowAutograd():
        return op(*args)


def _is_watched() -> bool:
    """Whether something beside autograd wants to see calls."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._are_functorch_transforms_active()
        or _C._is_any_autocast_enabled()
        or _C._get_tracing_state() is not None
    )
