"""The rule can fail: faults that kernels have had are planted, found and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.comparison import MismatchError, compare, surely_right
from jagged_cuda.testing.judge import judge
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec

LAYOUT = Layout((40, 0, 3, 70), base=2, tail=3)
CHOICES: dict[str, Any] = {"D": 16, "N": 8, "trailing": (8,), "dims": (16, 16), "heads": (2, 1)}
CHOICES |= {
    "causal": False,
    "window_size": (-1, -1),
    "scale": 0.3,
    "max_len": False,
    "ranges": None,
}

Fault = Callable[[Any, Tensor], Any]


def _rows(change: Callable[[Tensor, list[int]], None]) -> Fault:
    """A fault in the rows of the result, which is cloned."""

    def fault(result: Any, offsets: Tensor) -> Any:
        out, *rest = result if isinstance(result, tuple) else (result,)
        out = out.clone()
        change(out, offsets.tolist())
        return (out, *rest) if rest else out

    return fault


def _drop_last_row(out: Tensor, offsets: list[int]) -> None:
    out[offsets[3] - 1] = 0


def _drop_short_sequence(out: Tensor, offsets: list[int]) -> None:
    out[offsets[2] : offsets[3]] = 0


def _shift_by_a_row(out: Tensor, offsets: list[int]) -> None:
    out[offsets[3] : offsets[4]] = out[offsets[3] : offsets[4]].roll(1, 0)


def _write_outside(out: Tensor, offsets: list[int]) -> None:
    out[offsets[4]] = 1e-30


def _nan_in_a_row(out: Tensor, offsets: list[int]) -> None:
    out[offsets[0] + 5, ..., 1] = torch.nan


def _double_a_column(out: Tensor, offsets: list[int]) -> None:
    out[offsets[0] : offsets[1], ..., 0] *= 2


ROW_FAULTS = {
    f.__name__.strip("_"): _rows(f)
    for f in (
        _drop_last_row,
        _drop_short_sequence,
        _shift_by_a_row,
        _write_outside,
        _nan_in_a_row,
        _double_a_column,
    )
}


def broken(name: str, fault: Fault) -> Any:
    """jagged_cuda with one function that goes wrong."""
    function = getattr(jagged_cuda, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        integers = [a for a in args if isinstance(a, Tensor) and not a.is_floating_point()]
        return fault(function(*args, **kwargs), *integers[:1])

    return SimpleNamespace(**(vars(jagged_cuda) | {name: call}))


# The faults are at places that offsets say; these have none.
ROW_OPERATORS = [
    name for name, case in CASES.items() if case.rows["out"] == "q" and case.differentiable
]
ROW_OPERATORS = [n for n in ROW_OPERATORS if n not in ("jagged_take", "layer_norm_mul_dropout")]


@pytest.mark.parametrize("fault", ROW_FAULTS.values(), ids=ROW_FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_faults_are_found(name: str, dtype: torch.dtype, fault: Fault) -> None:
    case = CASES[name]
    spec = Spec(seed=1, layout=LAYOUT, choices=dict(case.spec("small", 0).choices) | CHOICES)
    judge(case, spec, dtype, "cpu", backward=False)
    with pytest.raises(MismatchError):
        judge(case, spec, dtype, "cpu", backward=False, ops=broken(name, fault))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.differentiable])
def test_wrong_gradients_are_found(name: str) -> None:
    """Gradients of 0.97 of what they should be, with a right result."""
    case = CASES[name]
    choices = dict(case.spec("small", 0).choices) | CHOICES | {"function": name}
    spec = Spec(seed=1, layout=LAYOUT, choices=choices)

    def damped(result: Any, *_: Tensor) -> Any:
        out, *rest = result if isinstance(result, tuple) else (result,)
        if isinstance(out, list):
            return ([damped(each) for each in out], *rest)
        out = 0.97 * out + 0.03 * out.detach()
        return (out, *rest) if rest else out

    with pytest.raises(MismatchError, match="grad_"):
        judge(case, spec, torch.float32, "cpu", ops=broken(name, damped))


def test_wrong_window_is_found() -> None:
    """One key too many on the left: an error of one column in a mask."""
    case = CASES["jagged_flash_attention"]
    choices = dict(case.spec("small", 0).choices) | CHOICES | {"window_size": (5, 0)}
    spec = Spec(seed=1, layout=LAYOUT, choices=choices)
    wide = dataclasses.replace(spec, choices=choices | {"window_size": (6, 0)})
    wrong = SimpleNamespace(
        jagged_flash_attention=lambda *a, **k: jagged_cuda.jagged_flash_attention(
            *a, **(k | {"window_size": wide.choices["window_size"]})
        )
    )
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(MismatchError):
            judge(case, spec, dtype, "cpu", backward=False, ops=wrong)


def test_the_message_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_CUDA_CPU_ISA", "avx2")
    reference = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    actual = reference.float()
    actual[4, 1] = 7.5
    with pytest.raises(MismatchError) as caught:
        compare(
            actual,
            reference,
            same_precision=[reference.float()],
            terms=reference,
            seq_of_row=torch.tensor([3, 0, 0, 2, 2, 3]),
            num_seqs=3,
            label="jagged_thing, out",
            seed=17,
        )
    text = str(caught.value)
    for part in (
        "jagged_thing, out, seed 17",
        "sequence 2, row 1 (of the tensor 4), column (1,)",
        "got 7.5, expected 9.0",
        "1 of 3 sequences fail",
        "JAGGED_CUDA_CPU_ISA=avx2 python -m pytest",
        "test_comparison.py::test_the_message_names_what_failed",
    ):
        assert part in text


def test_nan_and_inf_must_stand_in_the_same_places() -> None:
    reference = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan]], dtype=torch.float64)

    def judged(row: list[float]) -> None:
        compare(
            torch.tensor([row]),
            reference,
            same_precision=[reference.float()],
            terms=torch.ones_like(reference),
            seq_of_row=torch.tensor([0]),
            num_seqs=1,
            label="op",
            seed=0,
        )

    inf, nan = torch.inf, torch.nan
    judged([1.0, inf, -inf, nan])
    for row in (
        [nan, inf, -inf, nan],
        [1.0, nan, -inf, nan],
        [1.0, inf, inf, nan],
        [1.0, inf, -inf, 0.0],
        [1.0, 3e38, -inf, nan],
        [inf, inf, -inf, nan],
    ):
        with pytest.raises(MismatchError):
            judged(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_what_is_surely_right_is_right(dtype: torch.dtype) -> None:
    """Errors near the limit and values near the largest: the quick verdict never passes more."""
    generator = torch.Generator().manual_seed(0)
    seq_of_row = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    quick = 0
    for turn in range(400):
        size = 65520.0 if turn % 4 == 0 else 1.0
        reference = size * torch.randn(7, 3, generator=generator, dtype=torch.float64)
        reference[6] = 0
        terms = reference.abs() + 1
        noise = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        noise *= 10 ** (-3 * torch.rand((), generator=generator)) * torch.finfo(dtype).eps * size
        noise[6] *= turn % 3 == 0
        actual = (reference + 4 * noise).clamp(-65504, 65504).to(dtype)
        places = {"seq_of_row": seq_of_row, "num_seqs": 3}
        found = surely_right(actual, reference, **places)
        found |= surely_right(actual, reference, terms=terms, accuracy=1e-6, **places)
        quick += found
        if found:
            compare(
                actual,
                reference,
                same_precision=[actual],
                terms=terms,
                label="op",
                seed=turn,
                rounding=1e-6 - 64 * torch.finfo(torch.float32).eps,
                **places,
            )
    assert 40 < quick < 360
