"""Wrong arguments raise one clear sentence, the same everywhere; wrong offsets stay in bounds."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import run_python, sentence

import jagged_cuda
from jagged_cuda.testing.cases import CASES, EVERY, Case
from jagged_cuda.testing.lengths import Layout
from tests.tools import corrupt

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# (offsets over six rows, what is wrong with them)
BAD_OFFSETS = [
    ((-1, 2, 6), "{name}[0] must be >= 0, got -1"),
    ((0, 4, 2), "{name}[2] must be >= {name}[1] = 4, got 2"),
    ((0, 2, 7), "{name}[2] must be <= the number of rows 6, got 7"),
    ((0, 9, 3), "{name}[1] must be <= the number of rows 6, got 9"),
    ((8,), "{name}[0] must be <= the number of rows 6, got 8"),
]


# Operators whose rows are a capacity, which may be less than the sequences hold.
CAPACITIES = {"padded_to_jagged", "jagged_broadcast", "jagged_positions"}
# Operators over matrices alone, where no tensor says how many rows there are.
ROWS_UNKNOWN = {"jagged2_softmax"}
# Operators that take numbers of rows, and no offsets, or any offsets: a negative length is 0.
WITHOUT_OFFSETS = {"jagged_take", "layer_norm_mul_dropout", "matrix_offsets"}
# Each operator with the bad offsets that it can recognise.
NAME_AND_BAD_OFFSETS = [
    pytest.param(name, values, message, id=f"{name}-{'_'.join(map(str, values))}")
    for name in CASES
    for values, message in BAD_OFFSETS
    if name not in WITHOUT_OFFSETS and (name not in ROWS_UNKNOWN or "number of rows" not in message)
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
    fixed: dict[str, Any] = {
        "max_len": False,
        "capacity": capacity,
        "transpose": False,
        "padded_len": 6,
    }
    fixed |= {"function": name, "parts": "yx"}
    fixed |= {"ranges": None, "row_scale": False}  # which are made from the offsets first
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
    assert sentence(call_with_offsets, name, offsets) == f"{name}: {message.format(name='offsets')}"


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
    text = sentence(call_with_offsets, name, offsets, **{argument: others})
    assert text == f"{name}: {message.format(name=argument)}"


@pytest.mark.parametrize("name", ["jagged_flash_attention", "jagged_target_attention"])
def test_checks_hold_sequences_to_max_len(name: str, checks: None, device: torch.device) -> None:
    offsets = torch.tensor((0, 2, 6), device=device)
    call_with_offsets(name, offsets, max_len=4)
    expected = "sequence 1 of offsets must have at most max_len = 3 rows, got 4"
    assert sentence(call_with_offsets, name, offsets, max_len=3) == f"{name}: {expected}"


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
    text = sentence(call_with_offsets, name, offsets, capacity=capacity, **given)
    assert text == f"{name}: {message.format(short=SHORT_OF.get(name, 'a'))}"
    # Without a row there is nothing to fit.
    offsets = torch.tensor((2, 2), dtype=dtype, device=device)
    call_with_offsets(name, offsets, capacity=0, matrix_offsets=torch.tensor([7, 7], device=device))


@CASE
def test_checks_let_right_offsets_pass(case: Case, checks: None, device: torch.device) -> None:
    for values in ((0, 2, 6), (1, 1, 5), (0, 0, 0), (6,), (0,)):
        call_with_offsets(case.name, torch.tensor(values, device=device))


@pytest.mark.cuda
@CASE
def test_without_checks_wrong_offsets_raise_nothing_on_a_gpu(case: Case) -> None:
    for values, _ in BAD_OFFSETS:
        call_with_offsets(case.name, torch.tensor(values, device="cuda"))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        bad
        for bad in NAME_AND_BAD_OFFSETS
        if bad.values[0] not in CAPACITIES or "number of rows" not in str(bad.values[2])
    ],
)
def test_the_cpu_checks_always(
    name: str, values: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAGGED_CUDA_CHECK", raising=False)
    offsets = torch.tensor(values)
    assert sentence(call_with_offsets, name, offsets) == f"{name}: {message.format(name='offsets')}"


# --- set_checks("async")


@pytest.fixture
def async_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "0")
    jagged_cuda.set_checks("async")
    yield
    torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError):
        jagged_cuda.check_errors()


def refused() -> str:
    """The text that check_errors() raises once the GPU is done; "" if nothing."""
    torch.cuda.synchronize()
    return sentence(jagged_cuda.check_errors)


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "values", "message"), NAME_AND_BAD_OFFSETS)
def test_async_checks_name_the_first_bad_index(
    name: str, values: tuple[int, ...], message: str, async_checks: None
) -> None:
    offsets = torch.tensor(values, device="cuda")
    call_with_offsets(name, offsets)
    assert refused() == f"{name}: {message.format(name='offsets')}"
    assert refused() == ""  # it is raised only once
    call_with_offsets(name, torch.tensor((0, 2, 6), device="cuda"))
    assert refused() == ""


@pytest.mark.cuda
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("values", "capacity", "message"), BAD_MATRIX_OFFSETS)
def test_async_checks_look_at_matrices(
    name: str, values: tuple[int, ...], capacity: int, message: str, async_checks: None
) -> None:
    given = {"matrix_offsets": torch.tensor(values, device="cuda")}
    call_with_offsets(name, torch.tensor((0, 2, 6), device="cuda"), capacity=capacity, **given)
    assert refused() == f"{name}: {message.format(short=SHORT_OF.get(name, 'a'))}"


@pytest.mark.cuda
def test_async_checks_tell_the_next_call_and_never_wait(async_checks: None) -> None:
    x = torch.ones(6, 2, device="cuda")
    right, wrong = (torch.tensor(values, device="cuda") for values in ((0, 2, 6), (0, 4, 2)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_cuda.jagged_sum(x, wrong)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    message = r"^jagged_sum: offsets\[2\] must be >= offsets\[1\] = 4, got 2 \(found on the GPU"
    with pytest.raises(RuntimeError, match=message):
        jagged_cuda.jagged_softmax(x, right)
    assert refused() == ""


@pytest.mark.cuda
def test_async_checks_look_at_every_replay_of_a_graph(async_checks: None) -> None:
    x, offsets = torch.ones(6, 2, device="cuda"), torch.tensor((0, 2, 6), device="cuda")
    jagged_cuda.jagged_sum(x, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jagged_cuda.jagged_sum(x, offsets)
    graph.replay()
    assert refused() == ""
    offsets.copy_(torch.tensor((0, 7, 6)))
    graph.replay()
    assert refused() == "jagged_sum: offsets[1] must be <= the number of rows 6, got 7"
    offsets.copy_(torch.tensor((0, 6, 6)))
    graph.replay()
    assert refused() == ""


@pytest.mark.cuda
def test_async_checks_keep_the_first_finding(async_checks: None) -> None:
    x = torch.ones(300_000, 1, device="cuda")
    offsets = torch.arange(200_001, device="cuda")
    offsets[[77_777, 150_000]] = -1
    jagged_cuda.jagged_sum(x, offsets)
    offsets[5] = -1
    jagged_cuda.jagged_sum(x, offsets) if refused() else pytest.fail("nothing was found")
    assert refused() == "jagged_sum: offsets[5] must be >= offsets[4] = 4, got -1"


def test_set_checks_takes_nothing_else() -> None:
    message = r'^set_checks: mode must be True, False or "async", got \'later\'$'
    with pytest.raises(RuntimeError, match=message):
        jagged_cuda.set_checks("later")  # type: ignore[arg-type]


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_wrong_offsets_stay_in_bounds(device_name: str) -> None:
    """In a process of its own, which a write or read out of bounds may kill."""
    command = ("-m", "tests.tools.corrupt", "--device", device_name, "--batches", "630")
    done = run_python(*command)
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
    def zeros(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return 0 * x.sum(0).expand(offsets.shape[0] - 1, *x.shape[1:])

    def after_the_end(x: torch.Tensor) -> torch.Tensor:
        begin = x.storage_offset() + x.shape[0] * x.stride(0)
        return x.as_strided(x.shape, x.stride(), begin)

    def writing(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        after_the_end(x.detach())[:1] = 0.0
        return zeros(x, offsets)

    def reading(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return zeros(x, offsets) + after_the_end(x.detach()).mean(0)

    first = list(EVERY).index("jagged_sum")
    numbers = range(first, first + 20 * len(EVERY), len(EVERY))
    for function, what in ((writing, "wrote outside a tensor"), (reading, "read outside a tensor")):
        monkeypatch.setattr(jagged_cuda, "jagged_sum", function)
        with pytest.raises(AssertionError, match=f"jagged_sum, .*: {what}"):
            list(corrupt.run_batches(numbers, "cpu", guarded=True))
