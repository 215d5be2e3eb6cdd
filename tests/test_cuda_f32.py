"""float32 in its two precisions: what TF32 rounds and when; attention of long sequences."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from on_cuda import CUDA, HOPPER, LAYOUT, in_precision
from plain import assert_same_bits, calls, cotangents_of, spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import check, judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample

pytestmark = pytest.mark.cuda


PRODUCTS = [name for name, case in CASES.items() if name.endswith(("_bmm", "_jagged_out"))]
TF32_CASES = pytest.mark.parametrize(
    "name", [*PRODUCTS, "jagged_flash_attention", "jagged_target_attention"]
)


@TF32_CASES
@pytest.mark.parametrize("profile", ["edge", "large"])
def test_tf32_agrees_within_its_rounding(name: str, profile: str, tf32: None) -> None:
    case = CASES[name]
    for seed in range(8 if profile == "edge" else 3):
        judge(case, case.spec(profile, seed), torch.float32, CUDA)


@TF32_CASES
def test_tf32_is_taken_only_where_it_is_allowed(name: str, request: pytest.FixtureRequest) -> None:
    """The same inputs: the precise result is within the precise limit, the other one is not."""
    case = CASES[name]
    spec = spec_of(Layout((300, 300)), D=256, N=64)
    sample = case.sample(spec, torch.float32, CUDA)
    precise = case.call(jagged_cuda, sample)
    check(case, sample, precise, None)
    request.getfixturevalue("tf32")
    rounded = case.call(jagged_cuda, sample)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with pytest.raises(AssertionError):
        check(case, sample, rounded, None)


@TF32_CASES
def test_backward_keeps_the_precision_of_forward(name: str, tf32: None) -> None:
    case = CASES[name]
    sample = case.sample(spec_of(LAYOUT), torch.float32, CUDA)
    leaves = {n: t.detach().requires_grad_() for n, t in sample.tensors.items()}
    out = case.call(jagged_cuda, dataclasses.replace(sample, tensors=leaves))["out"]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    out.sum().backward()
    assert last_kernel("cuda").endswith("tf32")


# Long on average, around the tiles of 64, 128 and 256 rows and the steps of 16 to 64.
LONG_F32 = Layout((700, 1300, 0, 255, 1025, 1537), base=3, tail=5)
LONG_F32_KEYS = Layout((1500, 700, 3, 128, 1025, 64), base=2, tail=4)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
@pytest.mark.parametrize("precision", ["tf32", "f32"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_attention_of_long_sequences_in_f32(
    dim: int, precision: str, mask: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In TF32 warps have two blocks of rows, or wgmma runs; the path is named, the result right."""
    dtype, case = in_precision(precision, request), CASES["jagged_flash_attention"]
    tiles = {64: ".rows128", 128: ".rows256"}.get(dim, "") if precision == "tf32" else ""
    for kv_layout, heads in ((None, (2, 2)), (LONG_F32_KEYS, (4, 2))):
        spec = spec_of(
            LONG_F32,
            kv_layout=kv_layout,
            cross=kv_layout is not None,
            dims=(dim, dim),
            heads=heads,
            **mask,
        )
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        path = f"mma_sync.d{dim}{tiles}"
        if HOPPER and precision == "tf32" and dim in (64, 128):
            path = f"long.d{dim}"
        assert last_kernel("cuda") == f"cuda.attention.forward.{path}.{precision}"
        judge(case, spec, dtype, CUDA)


@pytest.mark.parametrize("precision", ["tf32", "f32"])
@pytest.mark.parametrize("dim", [24, 64, 128, 200])
def test_attention_in_f32_is_deterministic_and_batch_invariant(
    dim: int, precision: str, request: pytest.FixtureRequest
) -> None:
    """The same bits at every run, and forward alone or among others, by either size of tiles."""
    dtype, case = in_precision(precision, request), CASES["jagged_flash_attention"]
    layout = Layout((1300, 5, 700, 0, 1100))
    spec = spec_of(layout, dims=(dim, dim), heads=(2, 2))
    sample = case.sample(spec, dtype, CUDA)
    cotangents = cotangents_of(case, sample)
    whole = run(case, sample, calls(case), cotangents)
    for _ in range(3):
        assert_same_bits(run(case, sample, calls(case), cotangents), whole)
    ends = layout.offsets().tolist()
    for begin, end in itertools.pairwise(ends):
        # 300 empty sequences: short on average.
        for empty in (0, 300):
            alone = Layout((end - begin, *(0,) * empty))
            rows = {name: t[begin:end].clone() for name, t in sample.tensors.items()}
            offsets = torch.tensor(alone.offsets().tolist(), device=CUDA)
            found = run(
                case,
                Sample(spec_of(alone, dims=(dim, dim), heads=(2, 2)), rows, offsets, None),
                calls(case),
                None,
            )
            assert_same_bits(found, {n: whole[n][begin:end] for n in found})
