"""jagged_topk: ties, what is not finite, integers, every length; k of each sequence."""

from __future__ import annotations

import math
import random

import pytest
import torch
from plain import sentence

from jagged_cuda import jagged_topk
from jagged_cuda.testing.lengths import Layout

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# What a warp holds is 256 rows, what one CTA takes 8,192; positions of the last take three bytes.
LENGTHS = (0, 1, 31, 32, 33, 255, 256, 257, 700, 8_192, 8_193, 5, 70_000)


def best(score: list[float], k: int) -> list[bool]:
    """By definition: the greater number, NaN the least of all, and then the later row."""
    order = sorted(
        range(len(score)),
        key=lambda i: (not math.isnan(score[i]), 0 if math.isnan(score[i]) else score[i], i),
    )
    kept = set(order[len(order) - min(k, len(order)) :])
    return [i in kept for i in range(len(score))]


def expected(score: torch.Tensor, layout: Layout, counts: list[int]) -> torch.Tensor:
    found, values, begin = [False] * layout.base, score.tolist(), layout.base
    for length, k in zip(layout.lengths, counts, strict=True):
        found += best(values[begin : begin + length], k)
        begin += length
    return torch.tensor(found + [False] * layout.tail, dtype=torch.bool)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize("distinct", [1, 3, 10**6], ids=["equal", "ties", "random"])
def test_the_best_rows_are_kept(dtype: torch.dtype, distinct: int, device: torch.device) -> None:
    """Few values have many ties; negative numbers and both zeros are among them."""
    layout = Layout(LENGTHS, base=3, tail=2)
    generator = torch.Generator().manual_seed(distinct)
    score = torch.randint(-distinct, distinct + 1, (layout.total,), generator=generator)
    if dtype.is_floating_point:
        score = score.to(torch.float64) / 7 * torch.where(score % 2 == 0, -1.0, 1.0)
    score = score.to(dtype)
    rng = random.Random(distinct)
    counts = [rng.choice((0, 1, n // 3, n - 1, n, n + 5, 40)) for n in layout.lengths]
    counts = [max(0, k) for k in counts]
    k = torch.tensor(counts, device=device, dtype=rng.choice((torch.int32, torch.int64)))
    found = jagged_topk(score.to(device), layout.offsets(device), k)
    assert found.dtype == torch.bool
    assert torch.equal(found.cpu(), expected(score, layout, counts))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", [9, 300], ids=["short", "long"])
def test_what_is_not_finite(dtype: torch.dtype, length: int, device: torch.device) -> None:
    values = [0.0, -0.0, math.inf, math.nan, -math.inf, -math.nan, 0.0, -1.0, math.nan]
    values += [math.nan] * (length - len(values))
    score = torch.tensor(values, dtype=dtype)
    layout = Layout((length,))
    for k in range(12):
        found = jagged_topk(score.to(device), layout.offsets(device), k)
        assert torch.equal(found.cpu(), expected(score, layout, [k])), k


def test_a_strided_score_and_its_gradient(device: torch.device) -> None:
    score = torch.arange(12.0, device=device).reshape(6, 2).requires_grad_()
    keep = jagged_topk(score[:, 1], torch.tensor([0, 4, 6], device=device), 1)
    assert keep.tolist() == [False, False, False, True, False, True]
    assert not keep.requires_grad


def test_k_is_checked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    score, offsets = torch.ones(6, device=device), torch.tensor([0, 2, 6], device=device)
    k = torch.tensor([1, -1], device=device)
    if device.type == "cuda":
        assert jagged_topk(score, offsets, k).tolist() == [False, True] + [False] * 4
        monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    assert sentence(jagged_topk, score, offsets, k) == "jagged_topk: k[1] must be >= 0, got -1"
    assert sentence(jagged_topk, score, offsets, -1) == "jagged_topk: k must be >= 0, got -1"
    assert sentence(jagged_topk, score, offsets, k[:1]) == "jagged_topk: k must be [2], got [1]"
    text = "jagged_topk: k must be int32 or int64, got float32"
    assert sentence(jagged_topk, score, offsets, k.float()) == text
    text = "jagged_topk: k must be an int or a tensor, got a float"
    assert sentence(jagged_topk, score, offsets, 2.0) == text
