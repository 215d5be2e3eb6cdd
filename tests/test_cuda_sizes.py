"""200,000 sequences, or none, and more than 2^31 elements."""

from __future__ import annotations

import dataclasses
import gc
import random
from typing import Any

import pytest
import torch
from on_cuda import CUDA
from plain import CASE, TWO_DTYPES, calls, spec_of

from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES, Case, Tensors
from jagged_cuda.testing.judge import check, judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample, Spec

pytestmark = pytest.mark.cuda


@CASE
@TWO_DTYPES
def test_200_000_sequences(case: Case, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    lengths = tuple(rng.choice((0, 1, 1, 2, 5)) for _ in range(200_000))
    spec = spec_of(Layout(lengths, base=1), D=8, N=8, dims=(16, 16), padded_len=4)
    judge(case, spec, dtype, CUDA)


@CASE
@TWO_DTYPES
def test_many_rows_of_no_sequence(case: Case, dtype: torch.dtype) -> None:
    spec = spec_of(Layout((), base=20_000, tail=3_000), D=72, N=8, dims=(72, 72), padded_len=4)
    judge(case, spec, dtype, CUDA)


def last_sequences(case: Case, sample: Sample, found: Tensors, count: int) -> None:
    """Judge the last sequences of a sample that is too large to be judged whole."""
    spec = sample.spec
    part = dataclasses.replace(spec, layout=Layout(spec.layout.lengths[-count:]))

    def tail(name: str, values: torch.Tensor) -> torch.Tensor:
        kept = part.rows_layout(case.rows[name.removeprefix("grad_")]).total
        return values[-kept:]

    tensors = {name: tail(name, t) for name, t in sample.tensors.items()}
    ones = {name: torch.ones_like(tail(name, found[name])) for name in case.outputs}
    check(
        case,
        Sample(part, tensors, sample.offsets, None),
        {name: tail(name, t) for name, t in found.items()},
        ones,
    )


def run_huge(case: Case, spec: Spec, dtype: torch.dtype) -> None:
    """Forward and backward on more than 2^31 elements; the last sequences are judged."""
    # Made in place, and quickly: normal values take too many copies of this size.
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=CUDA).uniform_(-1, 1)
        for name, shape in case.shapes(spec).items()
    }
    sample = Sample(spec, tensors, spec.layout.offsets(CUDA), None)
    gc.collect()
    found = run(
        case,
        sample,
        calls(case),
        lambda outputs: {
            n: torch.ones((), dtype=t.dtype, device=CUDA).expand(t.shape)
            for n, t in outputs.items()
        },
    )
    assert max(t.numel() for t in (*tensors.values(), *found.values())) > 2**31
    last_sequences(case, sample, found, count=5)


# Float32 products have kernels of their own; with as many keys as queries they take 70 GB.
HUGE = [
    pytest.param(case, dtype, path, choices, id=f"{name}-{str(dtype)[6:]}-{path}")
    for name, case in CASES.items()
    if case.huge is not None
    for dtype, path, choices in (
        (torch.bfloat16, "best", case.huge),
        *([(torch.bfloat16, "mma_sync", case.huge)] if "dims" in case.choices else ()),
        *([(torch.float32, "best", {**case.huge, "heads": (8, 1)})] if case.product else ()),
    )
    if name != "jagged_target_attention" or dtype is torch.bfloat16
]


@pytest.mark.parametrize(("case", "dtype", "path", "choices"), HUGE, indirect=["path"])
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements(
    case: Case,
    dtype: torch.dtype,
    path: str,
    choices: dict[str, Any],
) -> None:
    layout = Layout((1,) * 3 + (128,) * 2**15 + (64, 0, 77))
    run_huge(case, spec_of(layout, poisoned=False, **choices), dtype)


@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements_of_jagged_softmax_without_a_ring() -> None:
    """Of sequences so short on average that none goes by a ring."""
    case = CASES["jagged_softmax"]
    layout = Layout((1,) * 3 + (64,) * 2**16 + (64, 0, 77))
    run_huge(case, spec_of(layout, poisoned=False, **(case.huge or {})), torch.bfloat16)
    assert last_kernel("cuda") == "cuda.jagged_softmax_backward.bf16"


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.huge_dense is not None]
)
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements_of_one_row_a_sequence(name: str) -> None:
    case = CASES[name]
    layout = Layout((1, 0, 2) * 10_925)
    run_huge(case, spec_of(layout, poisoned=False, **(case.huge_dense or {})), torch.bfloat16)


MATRICES = [
    pytest.param(case, choices, path, id=f"{name}-{'-'.join(map(str, choices.values()))}-{path}")
    for name, case in CASES.items()
    if "matrix" in case.rows.values()
    for path in (("best", "mma_sync") if case.product else ("best",))
    for choices in (
        *([{"dim": -1}, {"dim": -2}] if "dim" in case.choices else ()),
        *([{"transpose": False}, {"transpose": True}] if "transpose" in case.choices else ()),
        *([{}] if not case.choices.keys() & {"dim", "transpose"} else ()),
    )
]


@pytest.mark.parametrize(("case", "choices", "path"), MATRICES, indirect=["path"])
@pytest.mark.usefixtures("room_on_gpu")
def test_more_than_2_to_the_31_elements_of_matrices(
    case: Case, choices: dict[str, Any], path: str
) -> None:
    layout = Layout((3, 0) + (1025,) * 2100 + (64, 0, 77))
    spec = spec_of(layout, poisoned=False, **choices)
    assert spec.capacity > 2**31
    run_huge(case, spec, torch.bfloat16)
