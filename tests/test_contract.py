"""What an operator's line refuses: every check of every line, in one sentence, the same everywhere.

Wrong calls are derived from the lines of csrc/contract/operators.h: a right call in which one thing
is changed. The kernels (C++) and the fake kernels (Python) interpret the lines, so each checks the
other.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain import sentence
from torch._subclasses.fake_tensor import FakeTensorMode

import jagged_cuda
from jagged_cuda.ops._contract import Contract, operators

SIZES = {
    **{"B": 2, "T": 6, "Tq": 6, "Tk": 6, "Tx": 6, "Ty": 6, "M": 4, "N": 5, "D": 3, "Dv": 7},
    **{"H": 4, "G": 2, "R": 2, "sum Lx*Ly": 10, "...": (3, 2)},
    **{"Hb": 2, "Ht": 2, "Hp": 2, "Rt": 4, "Rp": 5},
}
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int16, torch.bool, torch.complex64),
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A tensor of zeros; `elsewhere` puts it on the CPU where others are on a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elsewhere: bool = False

    def make(self, device: torch.device) -> torch.Tensor:
        place = torch.device("cpu") if self.elsewhere else device
        return torch.zeros(self.shape, dtype=self.dtype, device=place)


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A call that is refused: the check, the argument that is named, and words of the sentence."""

    check: str
    arguments: dict[str, Any]
    named: str
    words: str
    needs_gpu: bool = False


def right_call(op: str, sizes: dict[str, Any], optional: bool = True) -> dict[str, Any]:
    """All arguments of the schema; `optional` gives the tensors that may be None."""
    _, contract = operators()[op]
    rules = {rule.name: rule for rule in contract.rules}
    arguments: dict[str, Any] = {}
    for argument in getattr(torch.ops.jagged_cuda, op).default._schema.arguments:
        rule = rules.get(argument.name)
        if rule is None:
            value = argument.default_value
            bounds = [r.words for r in contract.relations if argument.name in r.words]
            if bounds and isinstance(value, int | None):
                value = next(int(word) for word in bounds[0] if word.lstrip("-").isdigit())
            arguments[argument.name] = 1.0 if str(argument.type) == "float" else value or 0
        elif optional or not isinstance(argument.type, torch.OptionalType):
            arguments[argument.name] = Described(tuple(rule.shape(sizes)), torch.float32)
    for rule in contract.rules:
        if rule.name in arguments:
            dtype = rule.dtypes[0] if rule.dtypes else rule.dtype(arguments)
            arguments[rule.name] = dataclasses.replace(arguments[rule.name], dtype=dtype)
    names = operators()[op][0]
    return {name: arguments.get(name) for name in names}


def wrong_tensors(op: str, contract: Contract) -> Iterator[Wrong]:
    """Each tensor with another rank, dtype, place, and with each size that must agree changed."""
    right = right_call(op, SIZES)
    known: set[str] = set()
    for position, rule in enumerate(contract.rules):
        tensor = right[rule.name]

        def wrong(
            check: str,
            words: str,
            needs_gpu: bool = False,
            *,
            name: str = rule.name,
            tensor: Described = tensor,
            **changed: Any,
        ) -> Wrong:
            arguments = right | {name: dataclasses.replace(tensor, **changed)}
            return Wrong(f"{name}: {check}", arguments, name, words, needs_gpu)

        shape = tensor.shape
        if rule.dims[-1] != "..." or "..." in known:
            yield wrong("rank", "[", shape=(*shape, 1))
        yield wrong("rank", "[", shape=shape[: len(rule.leading) - 1])
        allowed = rule.dtypes or (rule.dtype(right),)
        for dtype in set(DTYPES) - set(allowed):
            yield wrong("dtype", str(allowed[-1])[6:], dtype=dtype)
        if position > 0:
            yield wrong("device", "on cuda:0, got on cpu", needs_gpu=True, elsewhere=True)
        for dim, size in enumerate(shape):
            name = rule.dims[min(dim, len(rule.dims) - 1)]
            letter = name.partition(" + ")[0]
            if letter in known or letter.isdigit():
                for other in (0, size - 1, size + 1):
                    changed = (*shape[:dim], other, *shape[dim + 1 :])
                    yield wrong(f"size {letter}", "[", shape=changed)
            elif name != letter:
                yield wrong(f"size {letter}", name, shape=(*shape[:dim], 0, *shape[dim + 1 :]))
        known |= {name.partition(" + ")[0] for name in rule.dims}


def wrong_relations(op: str, contract: Contract) -> Iterator[Wrong]:
    """Each relation broken, on each side of it."""
    for relation in contract.relations:
        words, unless = relation.words, relation.unless
        check, text = " ".join(words), " ".join(words)
        numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
        if len(words) == 5 and words[1] == "<=":
            subject, values, text = words[2], (numbers[0] - 1, numbers[1] + 1), "from"
        elif words[1] == "%":
            subject, values, text = words[0], (1, 2 * SIZES["G"] + 1), "a multiple of 2"
        elif "*" in words:
            subject, text = words[0], "* H <= 16777216 * 2"
            values = (numbers[0] * SIZES["G"] // SIZES["H"] + 1,)
        elif unless:
            subject, values, text = words[0], (0, 7), f"== 6 unless {unless} is given"
        else:
            bound = numbers[0]
            subject, values = words[0], (bound - 1 if words[1] == ">=" else bound + 1,)
            text = " ".join(words[1:])
        for value in values:
            if subject not in SIZES:
                arguments = right_call(op, SIZES) | {subject: value}
                yield Wrong(check, arguments, subject, text)
                continue
            sizes = SIZES | {subject: value} | ({"B": 0} if value > 70000 else {})
            owner = next(rule for rule in contract.rules if subject in rule.dims)
            yield Wrong(check, right_call(op, sizes, optional=not unless), owner.name, text)
        if words[1] == "%":
            no_keys = right_call(op, SIZES | {words[2]: 0})
            yield Wrong(check, no_keys, owner.name, "a multiple of 0")


def wrong_calls(op: str) -> list[Wrong]:
    _, contract = operators()[op]
    return [*wrong_tensors(op, contract), *wrong_relations(op, contract)]


def call(op: str, arguments: dict[str, Any], device: torch.device) -> Any:
    made = [a.make(device) if isinstance(a, Described) else a for a in arguments.values()]
    return getattr(torch.ops.jagged_cuda, op)(*made)


OPS = pytest.mark.parametrize("op", operators())


@OPS
@pytest.mark.parametrize("optional", [False, True], ids=["required", "all"])
def test_a_right_call_is_taken(op: str, optional: bool, device: torch.device) -> None:
    """And the fake kernel's results, which the line describes, are like the kernel's."""
    arguments = right_call(op, SIZES, optional)
    results = call(op, arguments, device)
    with FakeTensorMode():
        fakes = call(op, arguments, device)
    for result, fake in itertools.zip_longest(
        *(each if isinstance(each, tuple) else (each,) for each in (results, fakes))
    ):
        assert (result.shape, result.dtype) == (fake.shape, fake.dtype)
        assert result.stride() == fake.stride()


@OPS
def test_wrong_calls_are_refused_in_the_same_words(op: str, device: torch.device) -> None:
    for wrong in wrong_calls(op):
        with FakeTensorMode():
            gpu = torch.device("cuda", 0) if wrong.needs_gpu else device
            text = sentence(call, op, wrong.arguments, gpu)
        assert text.startswith(f"{op}: {wrong.named} must be "), (wrong, text)
        assert re.fullmatch(r".*, got \S.*", text) and wrong.words in text, (wrong, text)
        if not wrong.needs_gpu or device.type == "cuda":
            kernels = sentence(call, op, wrong.arguments, device)
            assert kernels == text, wrong


@OPS
def test_whatever_is_changed_both_say_the_same(op: str, device: torch.device) -> None:
    """The same sentence, or none in both: a size that changes may fit still."""
    for optional in (False, True):
        right = right_call(op, SIZES, optional)
        for name, value in right.items():
            others: list[Any] = [-7, 0, 99] if type(value) is int else []
            if isinstance(value, Described):
                others = [dataclasses.replace(value, dtype=dtype) for dtype in DTYPES]
                for dim, size in enumerate(value.shape):
                    shapes = [
                        (*value.shape[:dim], other, *value.shape[dim + 1 :])
                        for other in (0, 1, size + 1, 257)
                    ]
                    others += [dataclasses.replace(value, shape=shape) for shape in shapes]
            for other in others:
                arguments = right | {name: other}
                text = sentence(call, op, arguments, device)
                if "the number of one of 0 sequences" in text:  # of values, which fakes have not
                    continue
                with FakeTensorMode():
                    assert sentence(call, op, arguments, device) == text
                assert re.fullmatch(rf"({op}: \w+ must be .+, got .+)?", text), text


@OPS
def test_every_check_of_a_line_is_reached(op: str) -> None:
    """Some call breaks each tensor's rank, dtype, place and sizes, and each relation."""
    _, contract = operators()[op]
    expected, known = {" ".join(relation.words) for relation in contract.relations}, set()
    for rule in contract.rules:
        expected |= {f"{rule.name}: rank", f"{rule.name}: dtype"}
        if rule is not contract.rules[0]:
            expected.add(f"{rule.name}: device")
        for dim in rule.dims:
            letter = dim.partition(" + ")[0]
            if letter in known or letter != dim or letter.isdigit():
                expected.add(f"{rule.name}: size {letter}")
            known.add(letter)
    assert {wrong.check for wrong in wrong_calls(op)} == expected


def test_the_lines_name_what_the_dispatcher_has() -> None:
    for op, (names, contract) in operators().items():
        schema = getattr(torch.ops.jagged_cuda, op).default._schema
        assert names == tuple(argument.name for argument in schema.arguments)
        assert len(contract.results) == len(schema.returns)
        tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
        assert {rule.name for rule in contract.rules} == tensors


# --- some sentences, as users see them

X, Y, OFFSETS = torch.zeros(6, 4), torch.zeros(2, 4, 5), torch.tensor([0, 2, 6])
Q, K = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
GOLDEN: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("jagged_dense_bmm", (X[0], Y, OFFSETS), {}, "x must be [T, D], got [4]"),
    ("jagged_dense_bmm", (X, Y[:, :3], OFFSETS), {}, "y must be [2, 4, N], got [2, 3, 5]"),
    ("jagged_dense_bmm", (X, Y.double(), OFFSETS), {}, "y must be float32, got float64"),
    ("jagged_dense_bmm", (X, Y, OFFSETS[:0]), {}, "offsets must be [B + 1], got [0]"),
    (
        "jagged_dense_bmm",
        (X, Y, OFFSETS),
        {"activation": "softplus"},
        "activation must be None, relu, gelu, silu, sigmoid or tanh, got softplus",
    ),
    ("jagged_jagged_bmm", (X, X[1:], OFFSETS), {}, "y must be [6, N], got [5, 4]"),
    ("jagged_softmax", (X, OFFSETS.float()), {}, "offsets must be int32 or int64, got float32"),
    ("jagged_sum", (X[0, 0], OFFSETS), {}, "x must be [T, ...], got []"),
    (
        "jagged_sum",
        (X.long(), OFFSETS),
        {},
        "x must be float32, float64, float16 or bfloat16, got int64",
    ),
    ("jagged_to_padded", (X, OFFSETS, -1), {}, "max_len must be >= 0, got -1"),
    ("jagged2_softmax", (X[:, 0], OFFSETS), {"dim": 0}, "dim must be from -2 to -1, got 0"),
    (
        "jagged_jagged_bmm_jagged_out",
        (X, X[:5], OFFSETS),
        {"total_out": 20},
        "y must be [Ty, D] with Ty == 6 unless y_offsets is given, got [5, 4]",
    ),
    (
        "jagged_flash_attention",
        (Q[:, :3], K, K, OFFSETS),
        {},
        "q must be [Tq, H, D] with H a multiple of 2, got [6, 3, 8]",
    ),
    (
        "jagged_flash_attention",
        (torch.zeros(6, 2, 300),) * 3 + (OFFSETS,),
        {},
        "q must be [Tq, H, D] with D from 1 to 256, got [6, 2, 300]",
    ),
    (
        "jagged_flash_attention",
        (Q, K, K, OFFSETS),
        {"window_size": (-2, 0)},
        "window_size must be (left, right), each -1 or more, got (-2, 0)",
    ),
    (
        "jagged_target_attention",
        (Q, K, K, OFFSETS),
        {},
        "q must be [B, N, H, D], got [6, 4, 8]",
    ),
]


@pytest.mark.parametrize(("op", "args", "options", "text"), GOLDEN)
def test_golden_sentences(
    op: str, args: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    assert sentence(getattr(jagged_cuda, op), *args, **options) == f"{op}: {text}"
