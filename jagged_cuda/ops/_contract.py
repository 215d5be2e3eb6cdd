"""The contract of an operator: its line of csrc/contract/operators.h, which says its grammar.

The kernels check their arguments by it in C++ (csrc/contract/shapes.h). Here the same line, in the
same order and with the same sentences, checks those of fake kernels and of triton_ref, and says
what fake kernels return.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from jagged_cuda import _load

_FLOAT = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INDEX = (torch.int32, torch.int64)
_ANY = (*_FLOAT, *_INDEX, torch.int16, torch.int8, torch.uint8, torch.bool)
_CLASSES = {"float": _FLOAT, "index": _INDEX, "any": _ANY, "int32": (torch.int32,)}
_CLASSES |= {"int64": (torch.int64,), "bool": (torch.bool,)}


def fail_argument(op: str, argument: str, expected: str, actual: object) -> NoReturn:
    raise RuntimeError(f"{op}: {argument} must be {expected}, got {actual}")


def shape_text(shape: Sequence[object]) -> str:
    # torch.compile formats a size that it does not know, and takes no str() of it.
    return "[" + ", ".join([f"{size}" for size in shape]) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Rule:
    """A tensor argument, or a result, whose name is empty: ``name: class [dims]``."""

    name: str
    dtypes: tuple[torch.dtype, ...]  # allowed; empty: that of `like`
    like: str
    accumulates: bool  # the dtype of sums of `like`
    dims: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> _Rule:
        found = re.fullmatch(r"(?:(\w+): )?(acc\()?(\w+)\)?\?? \[(.*)\]", text)
        assert found, text
        dtypes = _CLASSES.get(found[3], ())
        return _Rule(found[1] or "", dtypes, found[3], bool(found[2]), tuple(found[4].split(", ")))

    @property
    def leading(self) -> tuple[str, ...]:
        return self.dims[:-1] if self.dims[-1] == "..." else self.dims

    def dtype(self, arguments: Mapping[str, Any]) -> torch.dtype:
        if self.dtypes:
            return self.dtypes[0]
        like: torch.dtype = arguments[self.like].dtype
        sums = torch.float64 if like is torch.float64 else torch.float32
        return sums if self.accumulates else like

    def shape(self, sizes: Mapping[str, Any]) -> list[Any]:
        """Numbers for the sizes that are known, and words for the others."""
        shape: list[Any] = []
        for dim in self.dims:
            size, _, one = dim.partition(" + ")
            known: Any = int(dim) if dim.isdigit() else sizes.get(size, dim)
            shape += known if size == "..." and size in sizes else [known]
            if one and size in sizes:
                shape[-1] = known + 1
        return shape


@dataclass(frozen=True)
class _Relation:
    """Between sizes and integers: ``words``, or ``words unless argument``."""

    words: tuple[str, ...]
    unless: str
    names: tuple[str, ...]  # of what the words compare
    compare: Callable[..., Any]

    @staticmethod
    def parse(text: str) -> _Relation:
        expression, _, unless = text.partition(" unless ")
        words = tuple(expression.split())
        names = tuple(dict.fromkeys(word for word in words if word.isidentifier()))
        # A function, which torch.compile can trace, as it cannot eval().
        return _Relation(words, unless, names, eval(f"lambda {', '.join(names)}: {expression}"))

    def holds(self, arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> bool:
        """Whether it is true; an integer may be None."""
        values = [sizes[n] if n in sizes else arguments.get(n) for n in self.names]
        if any(value is None for value in values):
            return True
        if self.words[1] == "%" and values[1] == 0:  # of 0, only 0 is a multiple
            return _may_be_true(values[0] == 0)
        return _may_be_true(self.compare(*values))


@dataclass(frozen=True)
class Contract:
    rules: tuple[_Rule, ...]
    relations: tuple[_Relation, ...]
    results: tuple[_Rule, ...]

    @staticmethod
    def parse(line: str) -> Contract:
        left, _, right = line.partition(" -> ")
        rules, *relations = left.split("; ")
        parts = [re.split(r", (?![^\[]*\])", text) for text in (rules, right) if text]
        rule, result = (tuple(map(_Rule.parse, part)) for part in (*parts, [])[:2])
        return Contract(rule, tuple(map(_Relation.parse, relations)), result)

    def check(self, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes of a call of `op`; what does not fit raises RuntimeError."""
        sizes: dict[str, Any] = {}
        for rule in self.rules:
            if arguments.get(rule.name) is not None:
                self._check_tensor(op, rule, arguments, sizes)
        for relation in self.relations:
            unless = relation.unless
            given = unless != "" and arguments.get(unless) is not None
            if not given and not relation.holds(arguments, sizes):
                self._fail_relation(op, relation.words, unless, arguments, sizes)
        return sizes

    def _check_tensor(
        self, op: str, rule: _Rule, arguments: Mapping[str, Any], sizes: dict[str, Any]
    ) -> None:
        tensor, first = arguments[rule.name], arguments[self.rules[0].name]
        rest = tensor.shape[len(rule.leading) :]
        fits = len(tensor.shape) >= len(rule.leading)
        fits = fits and (rule.dims[-1] == "..." or len(rest) == 0)
        if not fits:
            _fail_shape(op, rule, tensor, sizes)
        allowed = rule.dtypes or (rule.dtype(arguments),)
        if tensor.dtype not in allowed:
            *others, last = map(dtype_name, allowed)
            text = f"{', '.join(others)} or {last}" if others else last
            fail_argument(op, rule.name, text, dtype_name(tensor.dtype))
        if tensor.device != first.device:
            fail_argument(op, rule.name, f"on {first.device}", f"on {tensor.device}")
        for dim, actual in zip(rule.leading, tensor.shape, strict=False):
            size, _, one = dim.partition(" + ")
            plus = 1 if one else 0
            if size.isdigit():
                sizes.setdefault(size, int(size))
            if size not in sizes and _may_be_true(actual >= plus):
                sizes[size] = actual - plus
            elif size not in sizes or not _may_be_true(sizes[size] + plus == actual):
                _fail_shape(op, rule, tensor, sizes)
        if rule.dims[-1] == "..." and sizes.setdefault("...", rest) != rest:
            _fail_shape(op, rule, tensor, sizes)

    def _fail_relation(
        self,
        op: str,
        words: tuple[str, ...],
        unless: str,
        arguments: Mapping[str, Any],
        sizes: Mapping[str, Any],
    ) -> NoReturn:
        """Name what the relation bounds: an integer, or the first argument that has this size.

        A size that this argument does not have is given as a number.
        """
        subject = words[2] if words[0] not in sizes and words[0] not in arguments else words[0]
        owner = next((rule for rule in self.rules if subject in rule.dims), None)
        foreign = {} if owner is None else {k: v for k, v in sizes.items() if k not in owner.dims}
        words = tuple([f"{foreign.get(word, word)}" for word in words])
        text = " ".join(words[1:])
        if subject != words[0]:
            text = f"from {words[0]} to {words[4]}"
        elif words[1] == "%":
            text = f"a multiple of {words[2]}"
        if unless:
            text += f" unless {unless} is given"
        if owner is None:
            fail_argument(op, subject, text, arguments[subject])
        expected = f"{shape_text(owner.dims)} with {subject} {text}"
        fail_argument(op, owner.name, expected, shape_text(arguments[owner.name].shape))

    def results_of(self, op: str, arguments: Mapping[str, Any]) -> Any:
        """Describe what a call returns, without values."""
        known = {**arguments, **self.check(op, arguments)}
        first = arguments[self.rules[0].name]
        results = tuple(
            # A size of arguments that are None is 0.
            first.new_empty(
                [0 if isinstance(size, str) else size for size in rule.shape(known)],
                dtype=rule.dtype(arguments),
            )
            for rule in self.results
        )
        return results if len(results) > 1 else results[0]


def _fail_shape(op: str, rule: _Rule, tensor: Tensor, sizes: Mapping[str, Any]) -> NoReturn:
    fail_argument(op, rule.name, shape_text(rule.shape(sizes)), shape_text(tensor.shape))


def _may_be_true(condition: Any) -> bool:
    """Of a condition on sizes. What only the run of a graph knows, its kernels check then."""
    # To what torch.compile traces, a SymBool is a bool.
    if torch.compiler.is_compiling() or isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(condition)
    return bool(condition)


@functools.cache
def operators() -> Mapping[str, tuple[tuple[str, ...], Contract]]:
    """The names of the arguments of each registered operator, and its contract."""
    assert _load.cpu_library is not None
    read = ctypes.CDLL(str(_load.cpu_library)).jagged_cuda_operators
    read.restype = ctypes.c_char_p
    lines = read().decode().splitlines()
    found = {}
    for schema, line in zip(lines[::2], lines[1::2], strict=True):
        op, _, rest = schema.partition("(")
        arguments = rest.partition(")")[0].split(", ")
        names = tuple(text.partition("=")[0].split()[-1] for text in arguments)
        found[op] = names, Contract.parse(line)
    return found


def check(op: str, **arguments: Any) -> None:
    """Check arguments by the contract of a registered operator."""
    operators()[op][1].check(op, arguments)


def fake(op: str) -> Callable[..., Any]:
    """The fake kernel of a registered operator."""
    names, contract = operators()[op]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return contract.results_of(op, dict(zip(names, args, strict=False)) | kwargs)

    return kernel


# What public functions ask of offsets, and of lengths, before they compute with them.
_OFFSETS = Contract.parse("offsets: index [B + 1], y_offsets: offsets? [B + 1]")
_LENGTHS = Contract.parse("lengths: index [B]")


def check_offsets(op: str, offsets: Tensor, y_offsets: Tensor | None = None) -> None:
    _OFFSETS.check(op, {"offsets": offsets, "y_offsets": y_offsets})


def check_numbers(op: str, name: str, offsets: Tensor, numbers: Tensor) -> None:
    """One number for each sequence: `[B]` int32 or int64, on the device of offsets."""
    if numbers.dtype not in _INDEX:
        fail_argument(op, name, "int32 or int64", dtype_name(numbers.dtype))
    if numbers.device != offsets.device:
        fail_argument(op, name, f"on {offsets.device}", f"on {numbers.device}")
    if numbers.shape != (offsets.shape[0] - 1,):
        fail_argument(op, name, f"[{offsets.shape[0] - 1}]", shape_text(numbers.shape))


def may_read(tensor: Tensor) -> bool:
    """Whether its values are there, and reading them costs nothing or was asked for."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    if tensor.is_cpu:
        return True
    # A stream that is being captured into a graph cannot be waited for.
    asked = os.environ.get("JAGGED_CUDA_CHECK") == "1"
    return asked and not torch.cuda.is_current_stream_capturing()


def check_lengths(op: str, lengths: Tensor) -> None:
    _LENGTHS.check(op, {"lengths": lengths})
