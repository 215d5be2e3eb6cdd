"""Every operator, forward and backward, against the padded float64 definition."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import jagged_cuda
from jagged_cuda.testing import samples
from jagged_cuda.testing.__main__ import judge_seed
from jagged_cuda.testing.cases import CASES, DTYPES, EVERY, Case
from jagged_cuda.testing.judge import check, judge
from jagged_cuda.testing.lengths import Layout

CASE = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
GPU = pytest.mark.cuda

# (profile, device, number of seeds); profile "large" is beyond what a CPU can judge quickly.
RUNS = [
    pytest.param("small", "cpu", 6, id="small-cpu"),
    pytest.param("edge", "cpu", 6, id="edge-cpu"),
    pytest.param("small", "cuda", 20, id="small-cuda", marks=GPU),
    pytest.param("edge", "cuda", 60, id="edge-cuda", marks=GPU),
    pytest.param("large", "cuda", 6, id="large-cuda", marks=GPU),
]


@CASE
@DTYPE
@pytest.mark.parametrize(("profile", "device", "seeds"), RUNS)
def test_agrees_with_the_definition(
    case: Case,
    dtype: str,
    profile: str,
    device: str,
    seeds: int,
    request: pytest.FixtureRequest,
) -> None:
    if profile == "large":
        request.getfixturevalue("room_on_gpu")
    for seed in range(seeds):
        judge_seed(case, profile, seed, dtype, device)


NOTHING = {
    "no_sequence": Layout(()),
    "no_sequence_but_rows": Layout((), base=3, tail=2),
    "one_empty": Layout((0,)),
    "all_empty": Layout((0, 0, 0), base=2, tail=1),
    "empty_ends": Layout((0, 5, 0, 0, 1, 0)),
}


@CASE
@pytest.mark.parametrize("layout", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty(case: Case, layout: Layout, dtype: str, device: torch.device) -> None:
    spec = dataclasses.replace(case.spec("small", 1), layout=layout, kv_layout=None, storage={})
    judge(case, spec, DTYPES[dtype], device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [((0, 4, 7, 0), (5, 0, 9, 0)), ((3, 40), (0, 0))])
def test_attention_sides_of_different_lengths(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], dtype: str, device: torch.device
) -> None:
    """Queries without keys, keys without queries, and causal rows before their first key."""
    case = CASES["jagged_flash_attention"]
    choices = {"heads": (4, 2), "dims": (16, 8), "scale": None, "max_len": False, "cross": True}
    for causal in (False, True):
        spec = samples.Spec(
            seed=5,
            layout=Layout(lengths[0], base=1, tail=2),
            kv_layout=Layout(lengths[1], base=3),
            choices=choices | {"causal": causal, "window_size": (-1, -1)},
        )
        judge(case, spec, DTYPES[dtype], device)


@pytest.mark.parametrize("name", ["jagged_flash_attention", "jagged_target_attention"])
@pytest.mark.parametrize("outputs", [("out",), ("lse",)])
@DTYPE
def test_attention_gradient_of_one_output(
    name: str, outputs: tuple[str, ...], dtype: str, device: torch.device
) -> None:
    case = CASES[name]
    for seed in range(4):
        judge(case, case.spec("small", seed), DTYPES[dtype], device, outputs=outputs)


@DTYPE
def test_target_attention_of_the_same_queries(dtype: str, device: torch.device) -> None:
    """The same for every sequence, without a copy of them."""
    offsets = torch.tensor((1, 4, 4, 9), device=device)
    k, v, q = (
        torch.randn(s, device=device, dtype=DTYPES[dtype]) for s in ((10, 8), (10, 4), (6, 8))
    )
    leaves = [t.requires_grad_() for t in (k, v, q)]
    shared = jagged_cuda.jagged_target_attention(q.expand(3, 6, 8), k, v, offsets)
    copied = jagged_cuda.jagged_target_attention(q.repeat(3, 1, 1), k, v, offsets)
    torch.testing.assert_close(shared, copied, rtol=0, atol=0)
    found, expected = (torch.autograd.grad(out.sum(), leaves) for out in (shared, copied))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


NONFINITE = [
    pytest.param(case, name, value, id=f"{case.name}-{name}-{value}")
    for case in CASES.values()
    for name in case.inputs
    for value in (math.nan, math.inf, -math.inf)
    if case.rows[name] not in ("seq", "features")
    # An infinite logit makes a row of the result NaN everywhere, but its LSE depends on the
    # algorithm: infinity in two passes, NaN in an online softmax.
    if name not in ("q", "k") or math.isnan(value)
]


@pytest.mark.parametrize(("case", "name", "value"), NONFINITE)
def test_nonfinite_values_stand_where_they_belong(
    case: Case, name: str, value: float, device: torch.device
) -> None:
    """NaN and inf within a sequence spread as in PyTorch, and stay within the sequence."""
    choices = case.spec("small", 0).choices | {"D": 5, "N": 4, "trailing": (6,), "heads": (2, 1)}
    # A small scale, so that no probability is zero in float32 and positive in float64.
    choices |= {"dims": (8, 8), "causal": False, "window_size": (-1, -1), "scale": 0.03}
    layout = Layout((3, 0, 20, 1, 9), base=1, tail=1)
    spec = samples.Spec(seed=2, layout=layout, choices=choices)
    sample = case.sample(spec, torch.float32, device)
    row = sample.tensors[name][layout.base + 7].view(-1)
    row[min(2, row.shape[0] - 1)] = value
    check(case, sample, case.call(jagged_cuda, sample), None)
