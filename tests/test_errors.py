"""Wrong arguments raise one clear sentence, the same everywhere; wrong offsets stay in bounds."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import spec_of
from torch._subclasses.fake_tensor import FakeTensorMode

import jagged_cuda
from jagged_cuda.ops import _contract
from jagged_cuda.testing.cases import CASES, EVERY, Case
from jagged_cuda.testing.lengths import Layout
from tests.tools import corrupt

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# --- each argument of each registered operator, changed in each way


@dataclasses.dataclass(frozen=True)
class Described:
    """A tensor of zeros; `elsewhere` puts it on the CPU where others are on a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elsewhere: bool = False

    def make(self, device: torch.device) -> torch.Tensor:
        place = torch.device("cpu") if self.elsewhere else device
        return torch.zeros(self.shape, dtype=self.dtype, device=place)


def described(case: Case, cross: bool) -> dict[str, tuple[Any, ...]]:
    """The arguments of each registered operator behind a case."""
    layout = Layout((2, 4))
    spec = spec_of(layout, poisoned=False, D=3, N=5, dims=(8, 6), trailing=(3, 2), queries=5)
    spec = dataclasses.replace(spec, kv_layout=Layout((3, 4)) if cross else None)
    calls = case.registered(case.sample(spec, torch.float32, "cpu"))
    return {
        name: tuple(
            Described(tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a
            for a in arguments
        )
        for name, arguments in calls.items()
    }


def changed(argument: Any) -> Iterator[Any]:
    """The argument in another shape, dtype or place, or out of its range."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        yield from (-7, 0, 99)
    if not isinstance(argument, Described):
        return
    shape = argument.shape
    shapes = [(1, *shape), shape[1:], ()]
    for dim, size in enumerate(shape):
        shapes += [(*shape[:dim], other, *shape[dim + 1 :]) for other in (0, 1, size + 1, 257)]
    yield from (dataclasses.replace(argument, shape=each) for each in shapes)
    for name in ("float16", "float32", "float64", "int32", "int64", "bool"):
        dtype = getattr(torch, name)
        if dtype != argument.dtype:
            yield dataclasses.replace(argument, dtype=dtype)
    yield dataclasses.replace(argument, elsewhere=True)


def wrong_calls(case: Case) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Registered operators and arguments of which one is changed; some calls are right still."""
    for cross in case.choices.get("cross", (False,)):
        for name, arguments in described(case, cross).items():
            for index, argument in enumerate(arguments):
                for other in changed(argument):
                    yield name, (*arguments[:index], other, *arguments[index + 1 :])


def text_of(name: str, arguments: tuple[Any, ...], device: torch.device) -> str:
    """What a call raises, or nothing."""
    made = [a.make(device) if isinstance(a, Described) else a for a in arguments]
    try:
        getattr(torch.ops.jagged_cuda, name)(*made)
    except RuntimeError as error:
        return str(error)
    return ""


@CASE
def test_fake_tensors_raise_what_the_kernels_raise(case: Case, device: torch.device) -> None:
    """Whatever is wrong: the same sentence, of the operator that was called, or none in both."""
    count = 0
    for name, arguments in wrong_calls(case):
        if device.type == "cpu" and any(
            isinstance(a, Described) and a.elsewhere for a in arguments
        ):
            continue
        text = text_of(name, arguments, device)
        with FakeTensorMode():
            assert text_of(name, arguments, device) == text, (name, arguments)
        assert re.fullmatch(rf"({name}: \S+ must be .+, got .+)?", text), (name, arguments, text)
        count += bool(text)
    assert count >= 10


COMPOSED = {"check_like", "check_y_offsets", "check_matrix_offsets"}


def test_every_check_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fake kernels check of a right call, some wrong call is refused by."""
    made: set[tuple[str, str, str]] = set()
    refused: set[tuple[str, str, str]] = set()

    def noted(check: str, function: Callable[..., None]) -> Callable[..., None]:
        def noting(op: str, argument: str, *rest: Any) -> None:
            made.add((check, op, argument))
            try:
                function(op, argument, *rest)
            except RuntimeError:
                refused.add((check, op, argument))
                raise

        return noting

    for check in dir(_contract):
        if check.startswith("check_") and check not in COMPOSED:
            monkeypatch.setattr(_contract, check, noted(check, getattr(_contract, check)))
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        for case in CASES.values():
            for cross in case.choices.get("cross", (False,)):
                for name, arguments in described(case, cross).items():
                    assert text_of(name, arguments, device) == ""
        expected = {each for each in made if hasattr(torch.ops.jagged_cuda, each[1])}
        for case in CASES.values():
            for name, arguments in wrong_calls(case):
                text_of(name, arguments, device)
    assert not expected - refused
    assert len(expected) > 150


# (offsets over six rows, what is wrong with them)
BAD_OFFSETS = [
    ((-1, 2, 6), "{name}[0] must be >= 0, got -1"),
    ((0, 4, 2), "{name}[2] must be >= {name}[1] = 4, got 2"),
    ((0, 2, 7), "{name}[2] must be <= the number of rows 6, got 7"),
    ((0, 9, 3), "{name}[1] must be <= the number of rows 6, got 9"),
    ((8,), "{name}[0] must be <= the number of rows 6, got 8"),
]


# Operators over matrices alone, where no tensor says how many rows there are.
ROWS_UNKNOWN = {"jagged2_softmax"}
# Each operator with the bad offsets that it can know to be bad.
NAME_AND_BAD_OFFSETS = [
    pytest.param(name, values, message, id=f"{name}-{'_'.join(map(str, values))}")
    for name in CASES
    for values, message in BAD_OFFSETS
    if name not in ROWS_UNKNOWN or "number of rows" not in message
]


def call_with_offsets(
    name: str,
    offsets: torch.Tensor,
    capacity: int = 36,
    **given: Any,
) -> None:
    """Call an operator on tensors of six rows, whatever the offsets say, with `given` arguments."""
    case = CASES[name]
    spec = case.spec("small", 0)
    layout = Layout((0,) * (offsets.shape[0] - 1), tail=6)
    choices = dict(spec.choices)
    fixed = {"max_len": False, "capacity": capacity, "transpose": False, "padded_len": 6}
    choices |= {name: value for name, value in fixed.items() if name in choices}
    spec = dataclasses.replace(
        spec, layout=layout, kv_layout=None, choices=choices, storage={}, poisoned=False
    )
    tensors = case.sample(spec, torch.float32, offsets.device).tensors
    function = getattr(jagged_cuda, name)
    ops = SimpleNamespace(**{name: lambda *a, **k: function(*a, **(k | given))})
    case.function(ops, spec, tensors, offsets, None)


@pytest.fixture(params=["set_checks", "environment"])
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1" if request.param == "environment" else "0")
    if request.param == "set_checks":
        jagged_cuda.set_checks(True)
    yield


@pytest.mark.parametrize(("name", "values", "message"), NAME_AND_BAD_OFFSETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_checks_name_the_first_bad_index(
    name: str,
    values: tuple[int, ...],
    message: str,
    dtype: torch.dtype,
    checks: None,
    device: torch.device,
) -> None:
    offsets = torch.tensor(values, dtype=dtype, device=device)
    with pytest.raises(RuntimeError) as caught:
        call_with_offsets(name, offsets)
    assert str(caught.value) == f"{name}: {message.format(name='offsets')}"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [bad for bad in NAME_AND_BAD_OFFSETS if "cross" in CASES[str(bad.values[0])].choices],
)
def test_checks_look_at_offsets_of_keys_and_columns(
    name: str, values: tuple[int, ...], message: str, checks: None, device: torch.device
) -> None:
    (argument,) = {"kv_offsets", "y_offsets"} & inspect.signature(
        getattr(jagged_cuda, name)
    ).parameters.keys()
    others = torch.tensor(values, device=device)
    offsets = torch.full_like(others, 6)
    with pytest.raises(RuntimeError) as caught:
        call_with_offsets(name, offsets, **{argument: others})
    assert str(caught.value) == f"{name}: {message.format(name=argument)}"


@pytest.mark.parametrize("name", ["jagged_flash_attention", "jagged_target_attention"])
def test_checks_hold_sequences_to_max_len(name: str, checks: None, device: torch.device) -> None:
    offsets = torch.tensor((0, 2, 6), device=device)
    call_with_offsets(name, offsets, max_len=4)
    with pytest.raises(RuntimeError) as caught:
        call_with_offsets(name, offsets, max_len=3)
    expected = "sequence 1 of offsets must have at most max_len = 3 rows, got 4"
    assert str(caught.value) == f"{name}: {expected}"


MATRICES = [name for name, case in CASES.items() if "matrix" in case.rows.values()]
SHORT_OF = {"jagged_jagged_bmm_jagged_out": "total_out"}
# (matrix_offsets over sequences of 2 and 4 rows, elements, what is wrong with them)
BAD_MATRIX_OFFSETS = [
    ((-1, 3, 19), 36, "matrix_offsets[0] must be >= 0, got -1"),
    ((0, 5, 21), 36, "matrix_offsets[1] must be matrix_offsets[0] + 2 * 2 = 4, got 5"),
    ((3, 7, 0), 36, "matrix_offsets[2] must be matrix_offsets[1] + 4 * 4 = 23, got 0"),
    (
        (0, 4, 20),
        19,
        "{short} must be at least 20 elements (the matrix of sequence 1 ends there), got 19",
    ),
]


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("values", "capacity", "message"), BAD_MATRIX_OFFSETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_checks_look_at_matrices(
    name: str,
    values: tuple[int, ...],
    capacity: int,
    message: str,
    dtype: torch.dtype,
    checks: None,
    device: torch.device,
) -> None:
    offsets = torch.tensor((0, 2, 6), dtype=dtype, device=device)
    given = {"matrix_offsets": torch.tensor(values, device=device)}
    with pytest.raises(RuntimeError) as caught:
        call_with_offsets(name, offsets, capacity=capacity, **given)
    assert str(caught.value) == f"{name}: {message.format(short=SHORT_OF.get(name, 'a'))}"
    # Without a row there is nothing to fit.
    offsets = torch.tensor((2, 2), dtype=dtype, device=device)
    call_with_offsets(name, offsets, capacity=0, matrix_offsets=torch.tensor([7, 7], device=device))


@CASE
def test_checks_let_right_offsets_pass(case: Case, checks: None, device: torch.device) -> None:
    for values in ((0, 2, 6), (1, 1, 5), (0, 0, 0), (6,), (0,)):
        call_with_offsets(case.name, torch.tensor(values, device=device))


@CASE
def test_without_checks_wrong_offsets_raise_nothing(case: Case, device: torch.device) -> None:
    for values, _ in BAD_OFFSETS:
        call_with_offsets(case.name, torch.tensor(values, device=device))


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_wrong_offsets_stay_in_bounds(device_name: str) -> None:
    """In a process of its own, which a write or read out of bounds may kill."""
    command = [sys.executable, "-m", "tests.tools.corrupt"]
    done = subprocess.run(
        [*command, "--device", device_name, "--batches", "630"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "630 batches, forward and backward" in done.stdout


def test_wrong_offsets_reach_every_argument() -> None:
    """Each kind of offsets that an operator takes is wrong in some batch, alone or with others."""
    wrong: dict[str, set[str]] = {name: set() for name in EVERY}
    for number in range(200 * len(EVERY)):
        batch, kinds = corrupt.draw_batch(number)
        wrong[batch.op].add(",".join(kinds))
    for name, case in EVERY.items():
        expected = {"offsets"}
        if True in case.choices.get("cross", ()):
            expected |= {"kv_offsets", "offsets,kv_offsets"}
        if "matrix" in case.rows.values():
            expected |= {f"{kinds},matrix_offsets" for kinds in expected} | {"matrix_offsets"}
        assert wrong[name] == expected


def test_what_leaves_its_bounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = jagged_cuda.jagged_sum

    def after_the_end(x: torch.Tensor) -> torch.Tensor:
        begin = x.storage_offset() + x.shape[0] * x.stride(0)
        return x.as_strided(x.shape, x.stride(), begin)

    def writing(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        after_the_end(x.detach())[:1] = 0.0
        return sums(x, offsets)

    def reading(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return sums(x, offsets) + after_the_end(x.detach()).mean(0)

    first = list(EVERY).index("jagged_sum")
    numbers = range(first, first + 20 * len(EVERY), len(EVERY))
    for function, what in ((writing, "wrote outside a tensor"), (reading, "read outside a tensor")):
        monkeypatch.setattr(jagged_cuda, "jagged_sum", function)
        with pytest.raises(AssertionError, match=f"jagged_sum, .*: {what}"):
            list(corrupt.run_batches(numbers, "cpu", guarded=True))


def test_processes_say_which_batch_fails() -> None:
    """Here by the checks, which raise before anything can go wrong."""
    line = [sys.executable, "-m", "tests.tools.corrupt", "--device", "cpu", "--jobs", "2"]
    environment = {**os.environ, "JAGGED_CUDA_CHECK": "1"}
    done = subprocess.run(
        [*line, "--batches", "2"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for number in range(2):
        command = f"tools.corrupt --device cpu --first {number} --batches 1"
        assert f"reproduce: python -m tests.{command}" in done.stdout
    assert "2 batches, forward and backward" in done.stdout and "must be" in done.stdout


@pytest.mark.parametrize(
    ("script", "findings"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", 0),
        ("echo '========= ERROR SUMMARY: 1 error'; exit 77", 2),
        ("true", 2),
    ],
    ids=["clean", "an error", "silent"],
)
def test_what_the_sanitizer_says_counts(script: str, findings: int, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '@ 8 jagged_sum offsets'\n{script}\n")
    tool.chmod(0o755)
    options = argparse.Namespace(device="cuda", jobs=2, batches=2, first=0, memcheck=True)
    progress = corrupt.Progress(2)
    found = corrupt._run_workers(options, progress, str(tool))
    assert len(found) == findings and progress.counts["jagged_sum"] == 2
    assert all("--device cuda --first 8 --batches 1 --memcheck" in text for text in found)
