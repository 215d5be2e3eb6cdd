"""What modules take as rows: a tensor with offsets, a nested tensor or TorchRec's JaggedTensor.

What is called `any` is one node in a graph that torch.fx traces, where nobody knows yet which of
them will come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module, Parameter
from torch.overrides import handle_torch_function

from jagged_cuda import nested, torchrec
from jagged_cuda.ops._contract import fail_argument, shape_text

# A JaggedTensor has no name here: TorchRec is not imported.
Rows: TypeAlias = Tensor | Any


# What each module is called with as a rule: taken first, since every question costs the host.
_PLAIN = frozenset((Tensor, Parameter))


def _one_node(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def public(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Proxy):
                return handle_torch_function(public, args, *args)
        return function(*args)

    return public


def take_apart(
    module: str,
    name: str,
    x: Rows,
    offsets: Tensor | None,
    width: int,
    default: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`[T, width]` and offsets of x; what does not fit raises RuntimeError with these names.

    Args:
        default: the offsets of a tensor that comes without.
    """
    if type(x) in _PLAIN and offsets is not None and x.dim() == 2 and x.size(1) == width:
        return x, offsets
    rows: tuple[Tensor, Tensor] = take_any_apart(module, name, x, offsets, width, default)
    return rows


@_one_node
def take_any_apart(
    module: str, name: str, x: Rows, offsets: Tensor | None, width: int, default: Tensor | None
) -> tuple[Tensor, Tensor]:
    """take_apart of whatever x is."""
    if isinstance(x, Tensor) and not x.is_nested:
        values = x
        offsets = default if offsets is None else offsets
        if offsets is None:
            expected = f"given with {name}, unless that is a JaggedTensor or a nested tensor"
            fail_argument(module, _offsets_of(name), expected, "None")
    else:
        is_nested = nested.is_nested(x)
        if not is_nested and not torchrec.is_jagged_tensor(x):
            expected = "a tensor, a JaggedTensor or a nested tensor"
            fail_argument(module, name, expected, torchrec.describe(x))
        if offsets is not None:
            fail_argument(module, _offsets_of(name), f"None, since {name} has its own", "a tensor")
        values, offsets = nested.to_jagged(x) if is_nested else torchrec.to_jagged(x)
    if values.dim() != 2 or values.shape[1] != width:
        fail_argument(module, name, shape_text(["T", width]), shape_text(values.shape))
    return values, offsets


def _offsets_of(name: str) -> str:
    return "kv_offsets" if name == "kv" else "offsets"


def check_pair(module: str, name: str, pair: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """pair, if it is one of tensors with offsets of their own beside them."""
    if len(pair) != 2:
        fail_argument(module, name, "a pair of tensors", f"{len(pair)}")
    for part in pair:
        if type(part) in _PLAIN or isinstance(part, Proxy):
            continue
        if not isinstance(part, Tensor) or part.is_nested:
            expected = "a pair of tensors, or one JaggedTensor or nested tensor"
            fail_argument(module, name, expected, f"a pair with {torchrec.describe(part)}")
    return pair[0], pair[1]


def refuse_script(module: Module) -> None:
    """What torch.jit.script calls first."""
    raise RuntimeError(
        f"{type(module).__name__}: torch.jit.script is not supported; use torch.export or"
        " torch.compile"
    )


def check_targets(module: str, targets: Tensor, width: int) -> Tensor:
    """targets, if they are `[B, N, width]`."""
    if type(targets) in _PLAIN and targets.dim() == 3 and targets.size(2) == width:
        return targets
    checked: Tensor = check_any_targets(module, targets, width)
    return checked


@_one_node
def check_any_targets(module: str, targets: Tensor, width: int) -> Tensor:
    """check_targets of whatever targets is."""
    if not isinstance(targets, Tensor) or targets.is_nested:
        fail_argument(module, "targets", "a tensor", torchrec.describe(targets))
    if targets.dim() != 3 or targets.shape[2] != width:
        fail_argument(module, "targets", shape_text(["B", "N", width]), shape_text(targets.shape))
    return targets


def given(options: dict[str, Any], *others: tuple[str, Any]) -> dict[str, Any]:
    """Options, and the others that are not None: the host looks at all that an operator gets."""
    for name, value in others:
        if value is not None:
            options[name] = value
    return options


def put_together(x: Rows, values: Tensor) -> Rows:
    """Other rows as x has its own: of x's kind, with its offsets."""
    return values if type(x) in _PLAIN else put_any_together(x, values)


@_one_node
def put_any_together(x: Rows, values: Tensor) -> Rows:
    """put_together of whatever x is."""
    if isinstance(x, Tensor):
        return nested.with_values(x, values) if x.is_nested else values
    return torchrec.with_values(x, values)
