"""Which kinds of value each argument of a public function takes, and the error for others.

The dispatcher takes a tensor as a number, which drops its gradient or waits for the GPU, and its
errors for a list, a method or None help nobody. So the gate of the public functions
(_dispatch.overridable) compares types first. Kinds are read from the functions' own annotations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.ops._contract import fail_argument

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_NONE = type(None)

# By annotation: the types that pass without a closer look, and what the error asks for.
_KINDS: Mapping[str, tuple[frozenset[type], str]] = {
    "Tensor": (_TENSORS, "a tensor"),
    "Tensor | None": (_TENSORS | {_NONE}, "a tensor or None"),
    "int": (frozenset((int,)), "an int"),
    "int | Tensor": (_TENSORS | {int}, "an int or a tensor"),
    "int | Tensor | None": (_TENSORS | {int, _NONE}, "an int or a tensor or None"),
    "int | None": (frozenset((int, _NONE)), "an int or None"),
    "float": (frozenset((float, int)), "a number"),
    "float | Literal['length']": (frozenset((float, int, str)), 'a number or "length"'),
    "float | None": (frozenset((float, int, _NONE)), "a number or None"),
    "bool": (frozenset((bool,)), "True or False"),
    "Tensor | Sequence[Tensor]": (_TENSORS, "a tensor or a sequence of tensors"),
    "Sequence[Tensor]": (frozenset(), "a sequence of tensors"),
    "Sequence[Tensor | None]": (frozenset(), "a sequence of tensors and Nones"),
    "tuple[int, int] | None": (frozenset((_NONE,)), "two ints or None"),
    "tuple[int, int]": (frozenset(), "(left, right), two ints"),
}
_ADVICE = {
    "an int": "the host would wait for the tensor's device; pass int(...) of it",
    "a number": "no gradient would reach it; multiply the operand by it instead",
    "True or False": "the host would wait for the tensor's device; pass bool(...) of it",
}


class Arguments:
    """The parameters of a public function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.op = function.__name__
        parameters = inspect.signature(function).parameters.values()
        # Annotations are text: `from __future__ import annotations`. Others pass as they are.
        known = {p.name: _KINDS[p.annotation] for p in parameters if p.annotation in _KINDS}
        self.texts = {name: text for name, (_, text) in known.items()}
        self.takes_sequences = any("a sequence of" in text for text in self.texts.values())
        self.by_name = {name: types for name, (types, _) in known.items()}
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.by_position = tuple((name, self.by_name[name]) for name in names)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise RuntimeError for the first argument of a wrong kind."""
        for (name, types), value in zip(self.by_position, args, strict=False):
            if type(value) not in types:
                self.look_at(name, value)
        for name, value in kwargs.items():
            if name in self.by_name and type(value) not in self.by_name[name]:
                self.look_at(name, value)

    def look_at_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """check(), whatever the types."""
        named = zip((name for name, _ in self.by_position), args, strict=False)
        for name, value in (*named, *kwargs.items()):
            if name in self.texts and value is not None:
                self.look_at(name, value)

    def look_at(self, name: str, value: object) -> None:
        """Raise RuntimeError unless the value fits, though its type is not the usual one."""
        text = self.texts[name]
        if "two ints" in text and type(value) is tuple and list(map(type, value)) == [int, int]:
            return  # the usual pair, without the slower questions below
        if not _will_do(text.removesuffix(" or None"), value):
            fail_argument(self.op, name, text, _describe(name, text, value))


def _will_do(text: str, value: Any) -> bool:
    if " or " in text and text not in _ADVICE:
        return any(_will_do(each, value) for each in text.split(" or "))
    if text.startswith("a sequence of tensors"):
        may_be_none = text.endswith("Nones")
        return isinstance(value, (list, tuple)) and all(
            (may_be_none and each is None) or _will_do("a tensor", each) for each in value
        )
    if text == "a tensor":
        return isinstance(value, Tensor) and not value.is_nested
    if isinstance(value, Tensor):
        return False
    if text == '"length"':
        return isinstance(value, str)  # the function says which words it knows
    if text == "an int":
        return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)
    if text == "a number":
        return isinstance(value, (Real, torch.SymInt, torch.SymFloat))
    if text == "True or False":
        return isinstance(value, torch.SymBool) or type(value).__name__ in ("bool", "bool_")
    pair = isinstance(value, Sequence) and len(value) == 2
    return pair and all(_will_do("an int", number) for number in value)


def _describe(name: str, text: str, value: Any) -> str:
    """What the value is, and what to pass in its place."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if not value.is_nested:
            advice = _ADVICE.get(text.removesuffix(" or None"))
            return "a tensor" + (f": {advice}" if advice else "")
        if value.layout is not torch.jagged:
            return "a strided nested tensor: make it with layout=torch.jagged"
        parts = f"pass its {name}.values() and {name}.offsets()"
        if getattr(value, "_lengths", None) is not None:
            parts = f"which has holes: take its contiguous() and {parts}"
            return f"a nested tensor, {parts}"
        return f"a nested tensor: {parts}"
    if value is None:
        return "None"
    if callable(value) and hasattr(value, "__self__"):
        return f"a method: call it, {value.__name__}()"
    if callable(getattr(value, "values", None)) and callable(getattr(value, "offsets", None)):
        return f"a {kind}: pass its values() and offsets()"
    if kind == "ndarray":
        return "a numpy array: pass torch.from_numpy(...) of it"
    if "tensor" in text:
        return f"a {kind}" + (
            ": pass torch.tensor(...) of it" if kind == "list" and "sequence" not in text else ""
        )
    return f"{value!r}" if isinstance(value, (int, float, str, tuple)) else f"a {kind}"
