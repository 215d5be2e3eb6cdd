"""Public functions as PyTorch's own: what implements __torch_function__ takes the call whole.

torch.fx traces a model with proxies, on which a function can't branch, and TorchRec's train
pipelines trace models so; a public function is one node of such a graph. Subclasses of tensors and
modes see it too. Nested tensors are refused in words, since their own answer has none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from jagged_cuda.ops._contract import fail_argument

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def overridable(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Pass calls with arguments that implement __torch_function__ to them."""

    @functools.wraps(function)
    def public(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if has_torch_function(args) or (kwargs and has_torch_function((*kwargs.values(),))):
            relevant: tuple[Any, ...] = (*args, *kwargs.values())
            try:
                result: _Result = handle_torch_function(public, relevant, *args, **kwargs)
            except Exception:
                _refuse_nested(function, args, kwargs)
                raise
            return result
        return function(*args, **kwargs)

    return public


def _refuse_nested(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise RuntimeError if an argument is a nested tensor."""
    arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_nested:
            expected = f"a plain tensor (of a nested one its {name}.values() and {name}.offsets())"
            fail_argument(function.__name__, name, expected, "a nested one")
