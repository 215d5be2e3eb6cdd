"""jagged_hstu_attention, beside what the table's case of it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from plain import DTYPE, sentence
from torch.nn import functional as F

from jagged_cuda import (
    PositionBias,
    TimeBias,
    hstu_key_ranges,
    jagged_hstu_attention,
    log_boundaries,
)
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import judge
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec


@pytest.mark.parametrize("lengths", [((0, 4, 7, 0), (5, 0, 9, 0)), ((3, 40), (0, 0))])
@DTYPE
def test_sides_of_different_lengths(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> None:
    """Queries without keys, keys without queries, and causal rows before their first key."""
    choices = {"heads": (4, 2), "dims": (16, 8), "scale": None, "max_len": False, "cross": True}
    choices |= {"window_size": (-1, -1), "ranges": None, "row_scale": True}
    for causal, divisor in ((False, "length"), (True, 4.0)):
        spec = Spec(
            seed=5,
            layout=Layout(lengths[0], base=1, tail=2),
            kv_layout=Layout(lengths[1], base=3),
            choices=choices | {"causal": causal, "divisor": divisor},
        )
        judge(CASES["jagged_hstu_attention"], spec, dtype, device)


def test_one_sequence_in_plain_torch(device: torch.device) -> None:
    """HSTU's mask, divided by the sequence's own length, whatever else is in the batch."""
    offsets = torch.tensor([0, 12, 15, 215], device=device)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(215, 2, 8, generator=generator).to(device) for _ in range(3))
    targets = torch.tensor([2, 1, 3], device=device)
    ranges = hstu_key_ranges(offsets, num_targets=targets)
    out = jagged_hstu_attention(q, k, v, offsets, divisor="length", key_ranges=ranges)
    sees = torch.ones(12, 12, device=device).tril()
    sees[11, 10] = 0
    scores = torch.einsum("ihd,jhd->hij", q[:12], k[:12]) / 8**0.5
    expected = torch.einsum("hij,jhd->ihd", F.silu(scores) * sees, v[:12]) / 12
    torch.testing.assert_close(out[:12], expected, atol=1e-5, rtol=1e-4)
    alone = jagged_hstu_attention(
        q[:12], k[:12], v[:12], offsets[:2], divisor="length", key_ranges=ranges[:12]
    )
    assert torch.equal(alone, out[:12])


def test_new_rows_against_a_history(device: torch.device) -> None:
    """The last rows alone give what they give among all rows."""
    offsets, kv_offsets = (torch.tensor(o, device=device) for o in ([0, 3, 8], [0, 90, 240]))
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(240, 1, 16, generator=generator).to(device) for _ in range(3))
    options = {"divisor": 50.0, "causal": True}
    whole = jagged_hstu_attention(q, k, v, kv_offsets, **options)
    rows = torch.cat([torch.arange(87, 90), torch.arange(235, 240)]).to(device)
    found = jagged_hstu_attention(q[rows], k, v, offsets, kv_offsets=kv_offsets, **options)
    torch.testing.assert_close(found, whole[rows], atol=1e-5, rtol=1e-4)


def test_misuse_gets_a_sentence(device: torch.device) -> None:
    offsets = torch.tensor([0, 2, 6], device=device)
    x, rows = torch.zeros(6, 2, 8, device=device), torch.ones(6, device=device)
    for options, text in (
        ({"divisor": 0}, 'divisor must be a finite number other than 0, or "length", got 0'),
        (
            {"divisor": math.nan},
            'divisor must be a finite number other than 0, or "length", got nan',
        ),
        (
            {"divisor": "len"},
            "divisor must be a finite number other than 0, or \"length\", got 'len'",
        ),
        ({"divisor": rows[0]}, 'divisor must be a number or "length", got a tensor'),
        (
            {"divisor": 1, "row_scale": rows.clone().requires_grad_()},
            "row_scale must be without requires_grad (it takes no gradient: multiply the result by"
            " it instead), got one that requires it",
        ),
        ({"divisor": 1, "row_scale": rows.double()}, "row_scale must be float32, got float64"),
        ({"divisor": 1, "row_scale": rows[1:]}, "row_scale must be [6], got [5]"),
        (
            {"divisor": 1, "causal": True, "window_size": (-1, 3)},
            "window_size must be (left, 0) or (left, -1) with causal=True, got (-1, 3)",
        ),
    ):
        found = sentence(jagged_hstu_attention, x, x, x, offsets, **options)  # type: ignore[arg-type]
        assert found == f"jagged_hstu_attention: {text}"


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128])
def test_the_backward_pass_replays_with_other_lengths(dim: int) -> None:
    """A captured call serves other lengths and ranges of the same T and B, to the last bit."""
    total, generator = 700, torch.Generator().manual_seed(6)
    drawn = [torch.randn(total, 2, dim, generator=generator) for _ in range(4)]
    q, k, v, grad_out = (x.to("cuda", torch.bfloat16) for x in drawn)
    batches = ((200, 64, 436), (1, 699, 0), (65, 100, 300))
    given = [torch.tensor([0, *lengths], device="cuda").cumsum(0) for lengths in batches]

    def gradients(offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ranges = hstu_key_ranges(offsets, contextual_len=3, max_attn_len=90, total=total)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = jagged_hstu_attention(*leaves, offsets, divisor="length", key_ranges=ranges)
        return torch.autograd.grad(out, leaves, grad_out)

    expected = [gradients(offsets) for offsets in given]
    offsets = given[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(offsets)
    for lengths, results in zip(given, expected, strict=True):
        offsets.copy_(lengths)
        graph.replay()
        for found, result in zip(captured, results, strict=True):
            assert torch.equal(found, result)


@pytest.mark.cuda
@pytest.mark.parametrize("biased", [False, True])
def test_a_giant_needs_no_padding_and_no_matrix(biased: bool) -> None:
    """Peak memory, both ways, beside the packed tensors that go in and come out."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 65, (1024,), generator=generator)
    lengths[7] = 16384
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(device)
    total = int(offsets[-1])
    q, k, v, grad = (
        torch.randn(total, 4, 64, generator=generator).to(device, torch.bfloat16) for _ in range(4)
    )
    time = torch.arange(total, device=device)
    learned = [torch.zeros(*s, device=device) for s in ((total, 4), (4, 128), (4, 1024))]
    leaves = [t.requires_grad_() for t in (q, k, v, *(learned if biased else ()))]
    boundaries = log_boundaries(128, 0.3).to(device)
    ranges = hstu_key_ranges(offsets, num_targets=lengths.to(device) // 4, total=total)
    options: dict[str, Any] = {"divisor": "length", "key_ranges": ranges}

    if biased:
        options["kv_bias"] = leaves[3]
        options["time_bias"] = TimeBias(leaves[4], time, time, boundaries)
        options["position_bias"] = PositionBias(leaves[5])

    def attend() -> torch.Tensor:
        return jagged_hstu_attention(q, k, v, offsets, **options)

    def peak_of(call: Callable[[], Any], given: Sequence[torch.Tensor]) -> None:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = call()
        torch.cuda.synchronize()
        more = torch.cuda.max_memory_allocated() - before
        size = sum(t.nbytes for t in (*given, *made))
        assert more + sum(t.nbytes for t in given) < 1.2 * size

    with torch.no_grad():
        peak_of(lambda: (attend(),), leaves)
    out = attend()
    peak_of(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), (*leaves, out, grad))
