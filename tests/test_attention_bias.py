"""Biases and kv_lengths of the attention operators, beside what the table's cases of them show."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import sentence
from torch.nn import functional as F

from jagged_cuda import (
    PositionBias,
    TimeBias,
    hstu_key_ranges,
    jagged_flash_attention,
    jagged_hstu_attention,
    jagged_target_attention,
    log_boundaries,
    sqrt_boundaries,
)
from jagged_cuda.testing import last_kernel

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def drawn(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


# --- boundaries


@pytest.mark.parametrize(
    ("make", "bucket_of"),
    [
        (log_boundaries, lambda x, divisor: math.floor(math.log(max(x, 1.0)) / divisor)),
        (sqrt_boundaries, lambda x, divisor: math.floor(math.sqrt(x) / divisor)),
    ],
)
def test_boundaries_are_those_of_the_formula(
    make: Callable[..., torch.Tensor], bucket_of: Callable[[float, float], int]
) -> None:
    rng = random.Random(1)
    for _ in range(60):
        buckets = rng.randint(1, 200)
        divisor, unit = (
            rng.uniform(0.05, 3),
            rng.choice((0.5, 1.0, 60.0, 3600.0, rng.random() + 0.1)),
        )
        boundaries = make(buckets, divisor, unit)
        assert boundaries.dtype is torch.int64
        assert boundaries.shape == (buckets - 1,)
        assert (boundaries.diff() >= 0).all()
        near = [int(b) + step for b in boundaries.tolist() for step in (-1, 0, 1)]
        distances = [d for d in near if 0 <= d < 2**52] + [rng.randint(0, 10**9) for _ in range(20)]
        found = torch.searchsorted(boundaries, torch.tensor(distances), right=True)
        expected = [min(bucket_of(d / unit, divisor), buckets - 1) for d in distances]
        assert found.tolist() == expected


def test_boundaries_beyond_int64_are_its_largest() -> None:
    assert log_boundaries(100, 1.0)[-1] == 2**63 - 1
    assert log_boundaries(1, 1.0).shape == (0,)


# --- what they mean


def test_times_are_compared_exactly(device: torch.device) -> None:
    """Nanoseconds since 1970 that differ by one: no float holds them."""
    now = 1_700_000_000_000_000_000
    time = torch.tensor([now, now + 1, now + 2], device=device)
    offsets = torch.tensor([0, 3], device=device)
    zeros = torch.zeros(3, 1, 8, device=device)
    v = torch.eye(3, device=device)[:, None]
    table = torch.tensor([0.0, -math.log(2), -math.log(4)], device=device)
    boundaries = torch.tensor([1, 2], device=device)
    for symmetric, expected in (
        (True, [[1, 1 / 2, 1 / 4], [1 / 2, 1, 1 / 2], [1 / 4, 1 / 2, 1]]),
        (False, [[1, 1, 1], [1 / 2, 1, 1], [1 / 4, 1 / 2, 1]]),
    ):
        bias = TimeBias(table, time, time, boundaries, symmetric)
        out = jagged_flash_attention(zeros, zeros, v, offsets, time_bias=bias)
        weights = torch.tensor(expected, device=device)
        torch.testing.assert_close(out[:, 0], weights / weights.sum(1, keepdim=True))


def test_extreme_times_do_not_overflow(device: torch.device) -> None:
    ends = torch.tensor([-(2**63), 2**63 - 1], device=device)
    offsets, zeros = torch.tensor([0, 2], device=device), torch.zeros(2, 1, 8, device=device)
    bias = TimeBias(
        torch.tensor([0.0, -math.inf], device=device), ends, ends, torch.tensor([5], device=device)
    )
    v = torch.tensor([[[1.0]], [[3.0]]], device=device)
    out = jagged_flash_attention(zeros, zeros, v, offsets, time_bias=bias)
    assert torch.equal(out, v)


def test_positions_are_those_of_key_ranges(device: torch.device) -> None:
    """New rows against a history, whose used part counts."""
    offsets, kv_offsets = (torch.tensor(o, device=device) for o in ([0, 2], [0, 7]))
    zeros, v = torch.zeros(2, 1, 8, device=device), torch.eye(7, device=device)[:, None]
    table = torch.full((4,), -math.inf, device=device)
    table[2] = 0.0
    out = jagged_flash_attention(
        *(zeros, torch.zeros(7, 1, 8, device=device), v, offsets),
        kv_offsets=kv_offsets,
        kv_lengths=torch.tensor([6], device=device),
        position_bias=PositionBias(table, -1),
    )
    # Row i is at i + 6 - 2; bucket 2 is distance 1.
    assert out[:, 0].argmax(1).tolist() == [3, 4]
    assert (out.sum(2) == 1).all()


@pytest.mark.parametrize(
    ("first", "bucket"), [(2**62, 0), (-(2**62), 2), (2**63 - 1, 0), (-(2**63), 2)]
)
def test_positions_beyond_the_table(first: int, bucket: int, device: torch.device) -> None:
    """A distance less `first` does not overflow: every pair has the same end of the table."""
    offsets = torch.tensor([0, 3], device=device)
    zeros, v = torch.zeros(3, 1, 16, device=device), torch.ones(3, 1, 16, device=device)
    table = torch.zeros(3, device=device, requires_grad=True)
    out = jagged_hstu_attention(
        *(zeros, zeros, v, offsets), divisor=1.0, position_bias=PositionBias(table, first)
    )
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient.nonzero().flatten().tolist() == [bucket]


def test_hidden_keys_are_not_seen(device: torch.device) -> None:
    """-inf in kv_bias: for all keys of a sequence, output 0, LSE -inf, gradient 0."""
    offsets = torch.tensor([0, 3, 70], device=device)
    q, k, v = (drawn(70, 2, 16, device=device, seed=s).requires_grad_() for s in range(3))
    kv_bias = torch.zeros(70, device=device)
    kv_bias[:3] = kv_bias[5] = -math.inf
    kv_bias.requires_grad_()
    out, lse = jagged_flash_attention(q, k, v, offsets, kv_bias=kv_bias, return_lse=True)
    assert (out[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()
    assert lse[3:].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse[3:].sum(), (q, k, v, kv_bias))
    assert all(g.isfinite().all() for g in grads)
    assert all((g[:3] == 0).all() for g in grads)
    for g in grads[1:]:
        assert (g[5] == 0).all()


@pytest.mark.parametrize("scale", [None, -0.2])
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_everything_hidden(
    dtype: torch.dtype, dim: int, scale: float | None, device: torch.device
) -> None:
    """The same of many queries, for which scores start from their biases; one sequence has a single
    key, one sees others."""
    offsets, kv_offsets = (
        torch.tensor(o, device=device) for o in ([0, 65, 193, 400, 530], [0, 300, 301, 500, 640])
    )
    q = drawn(530, 4, dim, device=device).to(dtype).requires_grad_()
    k, v = (drawn(640, 2, dim, device=device, seed=s).to(dtype).requires_grad_() for s in (1, 2))
    kv_bias, table = drawn(640, 2, device=device, seed=3), drawn(4, 90, device=device, seed=4)
    kv_bias[300:500] = kv_bias[510] = kv_bias[600:] = -math.inf
    leaves = [q, k, v, kv_bias.requires_grad_(), table.requires_grad_()]
    options: Any = {"kv_offsets": kv_offsets, "kv_bias": kv_bias, "scale": scale}
    options |= {"position_bias": PositionBias(table, -7), "window_size": (250, 40)}
    out, lse = jagged_flash_attention(q, k, v, offsets, **options, return_lse=True)
    if HOPPER and device.type == "cuda":
        name = f"long.d{max(dim, 64)}.general.bias" if dim < 256 else f"mma_sync.d{dim}.general"
        assert last_kernel("cuda") == f"cuda.attention.forward.{name}"
    assert (out[65:400] == 0).all()
    assert (lse[65:400] == -math.inf).all()
    grads = torch.autograd.grad(out, leaves, drawn(530, 4, dim, device=device, seed=5).to(dtype))
    assert all(t.isfinite().all() for t in (out, *grads))
    assert all((g[300:500] == 0).all() and (g[600:] == 0).all() for g in grads[1:4])
    assert (grads[0][65:400] == 0).all()
    assert all((grads[i][rows] != 0).any() for i, rows in ((0, slice(65)), (3, slice(300))))


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_least_float_as_a_mask(
    dtype: torch.dtype, dim: int, timed: bool, scale: float | None, device: torch.device
) -> None:
    """In place of -inf: no NaN where it meets all keys of a row, else what -inf gives."""
    offsets = torch.tensor([0, 3, 103, 233, 243], device=device)
    q, k, v = (drawn(243, 2, dim, device=device, seed=s).to(dtype) for s in range(3))
    hidden = torch.zeros(243, dtype=torch.bool, device=device)
    hidden[:103] = hidden[110:150] = hidden[238:] = True
    time = torch.arange(243, device=device) if timed else None
    boundaries, table = log_boundaries(9, 0.7).to(device), drawn(9, device=device)

    def results(least: float) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        kv_bias = torch.zeros(243, device=device).masked_fill(hidden, least).requires_grad_()
        options: Any = {"kv_bias": kv_bias, "scale": scale}
        if time is not None:
            options["time_bias"] = TimeBias(table, time, time, boundaries)
        out = jagged_flash_attention(*leaves, offsets, **options)
        return out, *torch.autograd.grad(out.sum(), (*leaves, kv_bias))

    least = results(torch.finfo(torch.float32).min)
    assert all(t.isfinite().all() for t in least)
    for got, want in zip(least, results(-math.inf), strict=True):
        torch.testing.assert_close(got[103:], want[103:])


# Of size and sign; beside it the head dim and scale. Heads have values of their own, a tenth apart:
# how a product with log2(e) rounds depends on each.
FAR = [-1e8, -1e9, -1e10, -1e30, 1e9, 1e30]
DIMS_AND_SCALES = [(32, None), (64, None), (64, -0.2), (96, None), (256, None)]


def far_biases(kind: str, size: float, total: int, device: torch.device) -> dict[str, Any]:
    """Biases of 4 heads that are about `size` for all scores."""
    values = size * (1 + torch.arange(4, device=device) / 10)
    time = torch.arange(total, device=device) ** 2
    boundaries = log_boundaries(9, 0.7).to(device)
    return {
        "keys": lambda: {"kv_bias": values.repeat(total, 1)},
        "positions": lambda: {"position_bias": PositionBias(values[:, None].repeat(1, 90), -7)},
        "times": lambda: {
            "time_bias": TimeBias(values[:, None].repeat(1, 9), time, time, boundaries)
        },
    }[kind]()


@pytest.mark.parametrize("size", FAR)
@pytest.mark.parametrize("kind", ["keys", "positions", "times"])
@pytest.mark.parametrize(("dim", "scale"), DIMS_AND_SCALES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_same_large_bias_for_all_keys(
    dtype: torch.dtype, dim: int, scale: float | None, kind: str, size: float, device: torch.device
) -> None:
    """The mean of the values, since float32 keeps nothing else of such logits. What a row's LSE has
    lost its gradient lacks: it is 0 below -2^24."""
    offsets = torch.tensor([0, 5, 105, 305], device=device)
    q, k, v = (drawn(305, 4, dim, device=device, seed=s).to(dtype) for s in range(3))
    leaves = [t.requires_grad_() for t in (q / 8, k / 8, v)]
    biases = far_biases(kind, size, 305, device)
    out, lse = jagged_flash_attention(*leaves, offsets, **biases, scale=scale, return_lse=True)
    for begin, end in ((0, 5), (5, 105), (105, 305)):
        mean = v[begin:end].double().mean(0)
        error = (out[begin:end].double() - mean).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * v.abs().max()
    values = size * (1 + torch.arange(4, device=device) / 10)
    torch.testing.assert_close(lse, values.expand(305, 4), rtol=1e-6, atol=0.0)
    grads = torch.autograd.grad(out.float().square().sum() + lse.sum() / 1e9, leaves)
    assert all(g.isfinite().all() for g in grads)
    if size < 0:
        assert all((g == 0).all() for g in grads)


def test_a_key_that_stands_out_far_below_without_a_bias(device: torch.device) -> None:
    """Its probability is 1, its value gets the whole gradient, though the LSE is below -2^24."""
    rows = torch.arange(70, device=device)
    offsets = torch.tensor([0, 70], device=device)
    far = torch.full((70, 1, 16), 4096.0, device=device)
    leaves = [t.requires_grad_() for t in (far, -far, drawn(70, 1, 16, device=device))]
    ranges = torch.stack((rows, rows + 1), -1).int()  # each row sees one key
    grad = drawn(70, 1, 16, device=device, seed=1)
    out, lse = jagged_flash_attention(
        *leaves, offsets, key_ranges=ranges, scale=1.0, return_lse=True
    )
    assert (lse < -(2**24)).all()
    torch.testing.assert_close(out, leaves[2], rtol=0.0, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(out, leaves[2], grad)[0], grad)


@pytest.mark.parametrize("size", FAR[:4])
@pytest.mark.parametrize(("dim", "scale"), DIMS_AND_SCALES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_large_bias_as_a_mask(
    dtype: torch.dtype, dim: int, scale: float | None, size: float, device: torch.device
) -> None:
    """Causal: the first rows see masked keys alone, the others what -inf leaves of theirs; and the
    gradients of others are not those of the first."""
    offsets = torch.tensor([0, 5, 105, 305], device=device)
    q, k, v = (drawn(305, 4, dim, device=device, seed=s).to(dtype) for s in range(3))
    hidden = torch.zeros(305, dtype=torch.bool, device=device)
    hidden[0:2] = hidden[5:40] = hidden[105:180] = hidden[200:230] = True
    alone = hidden & (torch.arange(305, device=device) < 200)  # rows that see hidden keys alone
    grad = drawn(305, 4, dim, device=device, seed=3).to(dtype)

    def results(value: float) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        kv_bias = (hidden[:, None] * (1 + torch.arange(4, device=device) / 10)).mul(value)
        kv_bias = kv_bias.masked_fill(~hidden[:, None], 0.0).requires_grad_()
        out = jagged_flash_attention(*leaves, offsets, causal=True, kv_bias=kv_bias, scale=scale)
        return out, *torch.autograd.grad(out, (*leaves, kv_bias), grad)

    far, none = results(size), results(-math.inf)
    assert all(t.isfinite().all() for t in far)
    torch.testing.assert_close(far[0][~alone], none[0][~alone])
    for got, want in zip(far[1:], none[1:], strict=True):
        torch.testing.assert_close(got, want)
    # A mean of values that are seen, whatever its weights.
    for begin, rows in ((0, 2), (5, 35), (105, 75)):
        seen = v[begin : begin + rows].float()
        most, least = seen.cummax(0).values, seen.cummin(0).values
        slack = 4 * torch.finfo(dtype).eps * seen.abs().max()
        first = far[0][begin : begin + rows].float()
        assert ((first <= most + slack) & (first >= least - slack)).all()
        torch.testing.assert_close(first[0], seen[0])


@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_silu_of_the_least_float_is_zero(
    dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    """So of keys that it masks nothing is left, forward and backward; nor of those at -1e30."""
    offsets = torch.tensor([0, 5, 105, 305], device=device)
    q, k, v = (drawn(305, 2, dim, device=device, seed=s).to(dtype) for s in range(3))
    hidden = torch.arange(305, device=device) % 3 == 0

    def results(value: float) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        kv_bias = torch.zeros(305, device=device).masked_fill(hidden, value)
        out = jagged_hstu_attention(*leaves, offsets, divisor=50.0, causal=True, kv_bias=kv_bias)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    wanted = results(-1e4)
    for value in (torch.finfo(torch.float32).min, -1e30):
        torch.testing.assert_close(results(value), wanted)


@pytest.mark.parametrize("silu", [False, True])
def test_unused_keys_are_not_read(silu: bool, device: torch.device) -> None:
    """The same as without them, whatever they hold."""
    attend: Any = jagged_hstu_attention if silu else jagged_flash_attention
    more = {"divisor": "length"} if silu else {}
    offsets = torch.tensor([0, 90, 100, 130], device=device)
    used = torch.tensor([70, 0, 30], device=device)
    kept = torch.cat([torch.arange(70), torch.arange(100, 130)]).to(device)
    few = torch.tensor([0, 70, 70, 100], device=device)
    q = drawn(130, 2, 16, device=device)
    k, v = (drawn(130, 1, 16, device=device, seed=s) for s in (1, 2))
    for t in (k, v):
        t[70:100] = math.nan
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, offsets, kv_lengths=used, causal=True, **more)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    dense = [t.clone().requires_grad_() for t in (q, k[kept], v[kept])]
    # With lengths here, too: float32 is multiplied otherwise without them.
    whole = {"kv_offsets": few, "kv_lengths": few.diff()}
    expected = attend(*dense, offsets, **whole, causal=True, **more)
    wanted = torch.autograd.grad(expected.square().sum(), dense)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads[0], wanted[0])
    for got, want in zip(grads[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got[kept], want)
        assert (got[70:100] == 0).all()


@pytest.mark.parametrize("attend", [jagged_flash_attention, jagged_hstu_attention])
def test_a_number_of_used_keys_beyond_a_sequence(attend: Any, device: torch.device) -> None:
    """It counts as the sequence's own, for positions and the divisor too, and never reaches the
    next sequence."""
    offsets = torch.tensor([1, 5, 5, 16], device=device)
    leaves = [drawn(20, 2, 16, device=device, seed=s).requires_grad_() for s in range(3)]
    more: Any = {"divisor": "length"} if attend is jagged_hstu_attention else {}
    more |= {"causal": True, "position_bias": PositionBias(drawn(6, device=device, seed=3))}

    def results(used: list[int]) -> tuple[torch.Tensor, ...]:
        lengths = torch.tensor(used, device=device)
        out = attend(*leaves, offsets, kv_lengths=lengths, **more)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    found = results([9, 3, 2**40])
    assert all(torch.equal(a, b) for a, b in zip(found, results([4, 0, 11]), strict=True))


def test_target_attention_takes_them(device: torch.device) -> None:
    """Items against histories, of which the recent part is used and boosted."""
    offsets = torch.tensor([0, 40, 45], device=device)
    q = drawn(2, 3, 2, 8, device=device).requires_grad_()
    k, v = (drawn(45, 2, 8, device=device, seed=s).requires_grad_() for s in (1, 2))
    kv_bias = drawn(45, device=device, seed=3).requires_grad_()
    used = torch.tensor([33, 5], device=device)
    out = jagged_target_attention(q, k, v, offsets, kv_bias=kv_bias, kv_lengths=used)
    expected = []
    for b, (begin, length) in enumerate(((0, 33), (40, 5))):
        keys, values = k[begin : begin + length], v[begin : begin + length]
        scores = torch.einsum("nhd,jhd->hnj", q[b], keys) / 8**0.5
        weights = (scores + kv_bias[begin : begin + length]).softmax(2)
        expected.append(torch.einsum("hnj,jhd->nhd", weights, values))
    wanted = torch.stack(expected)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    leaves = (q, k, v, kv_bias)
    found, right = (torch.autograd.grad(z.square().sum(), leaves) for z in (out, wanted))
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


def test_autocast_of_target_attention_casts_what_differs(device: torch.device) -> None:
    """With a bias as without: queries that are in 16 bits already, beside keys that are not."""
    offsets = torch.tensor([0, 4, 9], device=device)
    q = drawn(2, 3, 2, 8, device=device)
    k, v = (drawn(9, 2, 8, device=device, seed=s) for s in (1, 2))
    more = {"kv_bias": drawn(9, device=device, seed=3), "kv_lengths": offsets.diff() - 1}
    for options in ({}, more):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found = jagged_target_attention(q.bfloat16(), k, v, offsets, **options)
        cast = (t.bfloat16() for t in (q, k, v))
        assert torch.equal(found, jagged_target_attention(*cast, offsets, **options))


def times_of(kind: str, rows: int) -> list[int]:
    rng = random.Random(rows)
    gaps = {"seconds": 7.0, "milliseconds": 16.0}
    if kind in gaps:  # a gap in a hundred is e times as long, or more
        steps = (int(rng.lognormvariate(gaps[kind], 3)) for _ in range(rows))
        return list(itertools.accumulate(steps, initial=1_700_000_000))[:rows]
    return {
        "equal": [5] * rows,
        "any order": [rng.randint(-(2**20), 2**20) for _ in range(rows)],
        "ends": [rng.choice((-(2**63), 2**63 - 1, 0, 2**31, 2**32 - 1)) for _ in range(rows)],
    }[kind]


BOUNDARIES: dict[str, Callable[[], torch.Tensor]] = {
    "logarithms": lambda: log_boundaries(128, 0.3),
    "fine logarithms": lambda: log_boundaries(200, 0.12),
    "square roots": lambda: sqrt_boundaries(2048, 30.0),
    "one by one": lambda: torch.arange(-3, 500),
    "two": lambda: torch.tensor([1, 2**40]),
}


@pytest.mark.parametrize("kind", ["seconds", "milliseconds", "equal", "any order", "ends"])
@pytest.mark.parametrize("of", list(BOUNDARIES))
@pytest.mark.parametrize("symmetric", [False, True])
def test_any_times_find_their_buckets(
    kind: str, of: str, symmetric: bool, device: torch.device
) -> None:
    """Sorted or not, near or far apart, one bucket in a tile or hundreds: without scores, so that
    the bias alone is judged, and its gradient."""
    lengths, heads, dim = (130, 1, 0, 40), 2, 64
    total, boundaries = sum(lengths), BOUNDARIES[of]()
    time = times_of(kind, total)
    table = drawn(heads, len(boundaries) + 1, device=device).requires_grad_()
    v, grad = (drawn(total, heads, dim, device=device, seed=s).bfloat16() for s in (1, 2))
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device)
    stamps = torch.tensor(time, device=device)
    bias = TimeBias(table, stamps, stamps, boundaries.to(device), symmetric)
    zeros, ascending = torch.zeros_like(v), boundaries.tolist()
    expected, begin = [], 0
    for length in lengths:
        of_seq = time[begin : begin + length]
        away = [[abs(a - b) if symmetric else max(a - b, 0) for b in of_seq] for a in of_seq]
        bucket = torch.tensor([[bisect.bisect(ascending, d) for d in row] for row in away])
        weights = table.double()[:, bucket.reshape(length, length).long().to(device)]
        values = v[begin : begin + length].double().transpose(0, 1)
        expected.append([w @ values for w in (weights.softmax(2), F.silu(weights) / 50)])
        begin += length
    for which, attend in enumerate(
        (jagged_flash_attention, functools.partial(jagged_hstu_attention, divisor=50.0))
    ):
        out = attend(zeros, zeros, v, offsets, time_bias=bias)  # type: ignore[operator]
        if HOPPER and device.type == "cuda":
            score = ("general", "silu")[which]
            on_wgmma = f"long.d{dim}.{score}.times"
            path = on_wgmma if len(boundaries) < 256 else f"mma_sync.d{dim}.{score}"
            assert last_kernel("cuda") == f"cuda.attention.forward.{path}"
        wanted = torch.cat([of_seq[which].transpose(0, 1) for of_seq in expected])
        found, right = (
            torch.autograd.grad(o, table, grad.to(o.dtype), retain_graph=True)[0]
            for o in (out, wanted)
        )
        # dS sums to 0 over a row: of one bucket alone roundings are left.
        for a, b, least in ((out, wanted, 0.0), (found, right, 4.0)):
            atol = 2**-6 * max(float(b.detach().abs().max()), least)
            torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_the_same_bits(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    lengths = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    total = int(offsets[-1])
    q, k, v = (drawn(total, 4, 64, device=device, seed=s).to(dtype) for s in range(3))
    time = torch.randint(0, 10**9, (total,), device=device).sort()[0]
    leaves = [
        drawn(total, 4, device=device, seed=4),
        drawn(4, 65, device=device, seed=5),
        drawn(1000, device=device, seed=6),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = jagged_flash_attention(
            *(q, k, v, offsets),
            causal=True,
            kv_bias=leaves[0],
            time_bias=TimeBias(leaves[1], time, time, log_boundaries(65, 0.3).to(device)),
            position_bias=PositionBias(leaves[2]),
        )
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


# --- misuse


def test_misuse_gets_a_sentence(device: torch.device) -> None:
    offsets = torch.tensor([0, 2, 6], device=device)
    x, time = torch.zeros(6, 2, 8, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    table, boundaries = torch.zeros(3, device=device), torch.tensor([1, 2], device=device)
    right = TimeBias(table, time, time, boundaries)
    for options, text in (
        ({"kv_bias": table}, "kv_bias must be [6, Hb], got [3, 1]"),
        (
            {"kv_bias": torch.zeros(6, device=device).double()},
            "kv_bias must be float32, got float64",
        ),
        (
            {"kv_lengths": torch.zeros(2, dtype=torch.int32, device=device)},
            "kv_lengths must be int64, got int32",
        ),
        ({"time_bias": table}, "time_bias must be a TimeBias, got Tensor"),
        (
            {"time_bias": right._replace(kv_time=None)},
            "time_bias.kv_time must be a tensor, got NoneType",
        ),
        ({"time_bias": right._replace(q_time=time.int())}, "q_time must be int64, got int32"),
        (
            {"time_bias": right._replace(boundaries=boundaries[:1])},
            "boundaries must be [2], got [1]",
        ),
        ({"position_bias": table}, "position_bias must be a PositionBias, got Tensor"),
        (
            {"position_bias": PositionBias(torch.zeros(2049, device=device))},
            "position_table must be [Hp, Rp] with Rp from 1 to 2048, got [1, 2049]",
        ),
        (
            {"position_bias": PositionBias(table, 0.5)},
            "position_bias.first must be an int, got float",
        ),
        (
            {"position_bias": PositionBias(table, 2**63)},
            f"position_bias.first must be an int of 64 bits, got {2**63}",
        ),
        (
            {"kv_bias": torch.zeros(6, 3, device=device)},
            "kv_bias must be [6] or [6, 2], got [6, 3]",
        ),
        (
            {"time_bias": right._replace(table=table.expand(4, 3))},
            "time_bias.table must be [R] or [2, R], got [4, 3]",
        ),
        (
            {"position_bias": PositionBias(table.expand(3, 3))},
            "position_bias.table must be [R] or [2, R], got [3, 3]",
        ),
    ):
        found = sentence(jagged_flash_attention, x, x, x, offsets, **options)  # type: ignore[arg-type]
        assert found == f"jagged_flash_attention: {text}"
    op = "jagged_target_attention"
    dense = torch.zeros(2, 3, 2, 8, device=device)
    for options, text in (
        ({"kv_bias": table}, "kv_bias must be [6] or [6, 2], got [3]"),
        ({"kv_lengths": time[:1]}, "kv_lengths must be [2], got [1]"),
    ):
        found = sentence(jagged_target_attention, dense, x, x, offsets, **options)
        assert found == f"{op}: {text}"
    for make in (log_boundaries, sqrt_boundaries):
        name = make.__name__
        assert sentence(make, 0, 1.0) == f"{name}: num_buckets must be from 1 to 2048, got 0"
        assert sentence(make, 4, 0.0) == f"{name}: divisor must be more than 0, got 0.0"


@pytest.mark.parametrize("autocast", [False, True])
def test_target_attention_is_named(
    autocast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias it takes other kernels, whose sentences are about its own arguments."""
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1" if device.type == "cuda" else "0")
    q, x = torch.zeros(2, 3, 2, 8, device=device), torch.zeros(6, 2, 8, device=device)
    right, bias = torch.tensor([0, 2, 6], device=device), torch.zeros(6, device=device)

    def attend(q: torch.Tensor, offsets: torch.Tensor, **options: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            return jagged_target_attention(q, x, x, offsets, **options)

    for options in ({"kv_bias": bias}, {"kv_lengths": right[:2]}):
        for values, text in (
            ([0, 4, 2], "offsets[2] must be >= offsets[1] = 4, got 2"),
            ([0, 2, 9], "offsets[2] must be <= the number of rows 6, got 9"),
        ):
            found = sentence(attend, q, torch.tensor(values, device=device), **options)
            assert found == f"jagged_target_attention: {text}"
        found = sentence(attend, q[0], right, **options)
        assert found == "jagged_target_attention: q must be [B, N, H, D], got [3, 2, 8]"
    found = sentence(attend, q, right, kv_lengths=right[:2] - 1)
    assert found == "jagged_target_attention: kv_lengths[0] must be >= 0, got -1"
    found = sentence(torch.func.grad(lambda b: attend(q, right, kv_bias=b).sum()), bias)
    assert found.startswith("jagged_target_attention: torch.func.grad, vjp and jacrev are not")


@pytest.mark.parametrize("dynamic", [False, True])
def test_target_attention_is_named_where_it_is_compiled(dynamic: bool) -> None:
    q, x, right = torch.zeros(2, 3, 2, 8), torch.zeros(6, 2, 8), torch.tensor([0, 2, 6])

    def attend(*operands: torch.Tensor) -> Any:
        bias = torch.zeros(operands[1].shape[0], device=operands[1].device)
        return jagged_target_attention(*operands, kv_bias=bias)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for operands, text in (
        ((q[0], x, x, right), "q must be [B, N, H, D], got [3, 2, 8]"),
        ((q, x, x[None], right), "v must be [6, 2, Dv], got [1, 6, 2, 8]"),
        ((q, x, x[:3], right), "v must be [6, 2, Dv], got [3, 2, 8]"),
        ((q, x[..., :4], x, right), "k must be [6, 2, 8], got [6, 2, 4]"),
        ((q, x.bfloat16(), x, right), "k must be float32, got bfloat16"),
        ((q, x, x, right[:2]), "offsets must be [3], got [2]"),
        (
            (q, *x.repeat(2, 1, 2, 1)[:, :, :3], right),
            "q must be [B, N, H, D] with H a multiple of 3, got [2, 3, 2, 8]",
        ),
    ):
        torch._dynamo.reset()
        found = sentence(compiled, *operands)
        assert f"'jagged_target_attention: {text}'" in found, found
        assert "jagged_flash_attention" not in found


def test_checks_hold_target_attention_to_max_len(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias as without; more queries than that are no fault."""
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1")
    x, offsets = torch.zeros(6, 2, 8, device=device), torch.tensor([0, 2, 6], device=device)
    few, many = (torch.zeros(2, n, 2, 8, device=device) for n in (3, 9))
    op = "jagged_target_attention"
    for options in ({}, {"kv_bias": torch.zeros(6, device=device)}):
        for q in (few, many):
            jagged_target_attention(q, x, x, offsets, max_len=4, **options)
        found = sentence(jagged_target_attention, few, x, x, offsets, max_len=3, **options)
        assert found == f"{op}: sequence 1 of offsets must have at most max_len = 3 rows, got 4"
        found = sentence(jagged_target_attention, few, x, x, offsets, max_len=-1, **options)
        assert found == f"{op}: max_len must be >= 0, got -1"


def test_boundaries_that_fall_are_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU always; equal ones may stand beside each other."""
    monkeypatch.setenv("JAGGED_CUDA_CHECK", "1" if device.type == "cuda" else "0")
    offsets, x = torch.tensor([0, 3], device=device), torch.zeros(3, 1, 8, device=device)
    table, time = torch.zeros(5, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    for values, expected in (
        ([1, 7, 3, 9], "time_bias.boundaries[2] must be >= time_bias.boundaries[1] = 7, got 3"),
        ([1, 7, 7, 9], ""),
    ):
        bias = TimeBias(table, time, time, torch.tensor(values, device=device))
        for op, more in ((jagged_flash_attention, {}), (jagged_hstu_attention, {"divisor": 1})):
            found = sentence(op, x, x, x, offsets, time_bias=bias, **more)  # type: ignore[arg-type]
            assert found == (f"{op.__name__}: {expected}" if expected else "")


def biases_on_cuda(names: str, tables: dict[str, torch.Tensor], time: torch.Tensor) -> Any:
    """Of `names`, initials of kv, position and time, as operators take them."""
    boundaries = log_boundaries(tables["t"].shape[1], 0.3).to(time.device)
    every = {
        "k": {"kv_bias": tables["k"]},
        "p": {"position_bias": PositionBias(tables["p"], -9)},
        "t": {"time_bias": TimeBias(tables["t"], time, time, boundaries)},
    }
    return {name: value for initial in names for name, value in every[initial].items()}


# Milliseconds over months: their distances fit into 32 bits only if counted from the nearest one.
STAMPS = [
    ("k", "seconds"),
    ("p", "seconds"),
    *(("t", stamps) for stamps in ("seconds", "milliseconds", "any order", "equal")),
    ("kt", "milliseconds"),
    ("kpt", "any order"),
]


@pytest.mark.cuda
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("names", "stamps"), STAMPS)
def test_path_of_biases(
    names: str,
    stamps: str,
    dtype: torch.dtype,
    dim: int,
    silu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper results of times alone and all gradients come from wgmma, and are those of
    mma.sync."""
    device = torch.device("cuda")
    # More than 512 keys, of which a step has 64, and so many tiles that a CTA takes several.
    lengths = [1, 0, 147, 650, *((1300,) * 36 if names in "pt" else ())]
    offsets = (F.pad(torch.tensor(lengths).cumsum(0), (1, 0)) + 2).to(device)
    rows, heads = int(offsets[-1]) + 10, 2
    q, k, v, grad = (drawn(rows, heads, dim, device=device, seed=s).to(dtype) for s in range(4))
    time = torch.tensor(times_of(stamps, rows), device=device)
    shapes = {"k": (rows,), "p": (heads, 300), "t": (heads, 128)}
    tables = {
        name: drawn(*shape, device=device, seed=4).requires_grad_()
        for name, shape in shapes.items()
    }
    ranges = hstu_key_ranges(offsets, contextual_len=3, max_attn_len=450, total=rows)
    attend: Any = jagged_hstu_attention if silu else jagged_flash_attention
    more: dict[str, Any] = {"divisor": "length"} if silu else {}

    kind = "silu" if silu else "general"

    def results(on_wgmma: bool = HOPPER) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        options = {"key_ranges": ranges, **biases_on_cuda(names, tables, time), **more}
        out = attend(*leaves, offsets, **options)
        if on_wgmma and names == "t":
            assert last_kernel("cuda") == f"cuda.attention.forward.long.d{dim}.{kind}.times"
        return out, *torch.autograd.grad(out, [*leaves, *(tables[n] for n in names)], grad)

    found = results()
    if HOPPER:
        assert last_kernel("cuda") == f"cuda.attention.backward.wgmma.d{dim}.{kind}.bias"
    assert all(torch.equal(a, b) for a, b in zip(found, results(), strict=True))
    monkeypatch.setenv("JAGGED_CUDA_TENSOR_CORES", "mma_sync")
    # Over one bucket alone dS of softmax sums to 0, up to the rounding of each row's output.
    least = rows**0.5 if stamps == "equal" and not silu else 0.0
    for got, want in zip(found, results(on_wgmma=False), strict=True):
        largest = max(float(want.float().abs().max()), least if want.dim() == 2 else 0.0)
        assert (got.float() - want.float()).abs().max() <= 8 * torch.finfo(dtype).eps * largest
