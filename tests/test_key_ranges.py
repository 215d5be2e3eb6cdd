"""key_ranges of jagged_flash_attention, beside what the table's case of them shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from plain import DTYPE, assert_same_bits, sentence, spec_of

import jagged_cuda
from jagged_cuda import hstu_key_ranges, jagged_flash_attention, jagged_hstu_attention
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.judge import judge
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops.jagged_flash_attention import RANGES

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
CASE = EVERY["jagged_flash_attention_ranges"]


def operands(
    rows: int, keys: int, dtype: torch.dtype, device: torch.device, heads: int = 2, dim: int = 16
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (rows, keys, keys)
    drawn = (torch.randn(n, heads, dim, generator=generator) for n in sizes)
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def everything(qkv: list[torch.Tensor], offsets: torch.Tensor, **options: Any) -> Any:
    out, lse = jagged_flash_attention(*qkv, offsets, return_lse=True, **options)
    gradients = torch.autograd.grad(out.float().square().sum(), qkv)
    names = ("grad_q", "grad_k", "grad_v")
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("dim", [16, 64])
@DTYPE
def test_keys_that_nobody_sees_are_not_read(
    dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    """Late queries of a long sequence, which see its first keys and their own: NaN in between."""
    q, k, v = operands(80, 1000, dtype, device, dim=dim)
    offsets, kv_offsets = (torch.tensor([0, n], device=device) for n in (80, 1000))
    position = torch.arange(920, 1000, device=device)
    near = torch.stack((position - 60, position + 1), -1)
    first = torch.tensor([0, 5], device=device).expand(80, 2)
    ranges = torch.stack((first, near), 1).int()
    options = {"kv_offsets": kv_offsets, "key_ranges": ranges}
    clean = everything([q, k, v], offsets, **options)
    with torch.no_grad():
        k[256:768], v[256:768] = math.nan, math.nan
    found = everything([q, k, v], offsets, **options)
    assert found["out"].isfinite().all()
    assert_same_bits(found, clean)
    assert not found["grad_k"][5:860].any() and not found["grad_v"][5:860].any()


@DTYPE
def test_a_window_as_ranges(dtype: torch.dtype, device: torch.device) -> None:
    """The same result as causal has, on the CPU to the last bit."""
    offsets = torch.tensor([0, 3, 3, 73, 101], device=device)
    qkv = operands(101, 101, dtype, device)
    causal = everything(qkv, offsets, causal=True)
    ranges = hstu_key_ranges(offsets)
    found = everything(qkv, offsets, key_ranges=ranges[:, 0])
    both = everything(qkv, offsets, key_ranges=ranges, causal=True)
    assert_same_bits(both, found)
    if device.type == "cpu":
        assert_same_bits(found, causal)


def test_any_layout_of_ranges(device: torch.device) -> None:
    """Strided, expanded, at an odd address: the same bits."""
    offsets = torch.tensor([1, 6, 40], device=device)
    qkv = operands(41, 41, torch.float32, device)
    ranges = hstu_key_ranges(offsets, max_attn_len=3, total=41)
    expected = everything(qkv, offsets, key_ranges=ranges)
    buffer = torch.zeros(41 * 4 + 1, dtype=torch.int32, device=device)
    shifted = buffer[1:].view(41, 2, 2).copy_(ranges)
    strided = ranges.repeat_interleave(2, 0)[::2]
    transposed = ranges.transpose(0, 2).contiguous().transpose(0, 2)
    swapped = ranges.flip(1)
    for given in (shifted, strided, transposed, swapped):
        assert_same_bits(everything(qkv, offsets, key_ranges=given), expected)


def test_ranges_may_say_anything(device: torch.device) -> None:
    """Whatever they hold, they only take away from the sequence's own keys."""
    offsets = torch.tensor([0, 30, 41], device=device)
    qkv = operands(41, 41, torch.float32, device)
    low, high = -(2**31), 2**31 - 1
    rows = [(low, high, 0, 0), (high, low, 7, 3), (-5, 2, 28, high), (0, 0, 0, 0), (3, 9, 5, 12)]
    ranges = torch.tensor(rows, dtype=torch.int32, device=device).view(5, 2, 2).repeat(9, 1, 1)[:41]
    found = everything(qkv, offsets, key_ranges=ranges)
    key = torch.arange(41, device=device)
    row = torch.arange(41, device=device)
    begin = torch.where(row < 30, 0, 30)[:, None]
    len_k = torch.where(row < 30, 30, 11)[:, None]
    local = key - begin
    within = (local[:, None] >= ranges[..., :1]) & (local[:, None] < ranges[..., 1:])
    sees = within.any(1) & (local >= 0) & (local < len_k)
    q, k, v = (x.detach().double().transpose(0, 1) for x in qkv)
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(~sees, -math.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ v
    torch.testing.assert_close(found["out"].double().transpose(0, 1), expected, atol=1e-5, rtol=0)
    assert all(found[name].isfinite().all() for name in ("out", "grad_q", "grad_k", "grad_v"))


def test_misuse_gets_a_sentence(device: torch.device) -> None:
    offsets = torch.tensor([0, 2, 6], device=device)
    x = torch.zeros(6, 2, 8, device=device)
    ranges = hstu_key_ranges(offsets)
    for given, text in (
        (ranges.long(), "key_ranges must be int32, got int64"),
        (ranges[:5], "key_ranges must be [6, R, 2], got [5, 2, 2]"),
        (ranges[:, :, :1], "key_ranges must be [6, 2, 2], got [6, 2, 1]"),
        (ranges.repeat(1, 2, 1), "key_ranges must be [Tq, R, 2] with R from 1 to 2, got [6, 4, 2]"),
        ([0, 1], "key_ranges must be a tensor or None, got a list: pass torch.tensor(...) of it"),
    ):
        found = sentence(jagged_flash_attention, x, x, x, offsets, key_ranges=given)
        assert found == f"jagged_flash_attention: {text}"


@pytest.mark.cuda
@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_path_with_ranges(dtype: torch.dtype, dim: int, kind: str) -> None:
    """Short sequences and long ones, tiles left out or not."""
    forward = f"{'long' if HOPPER and dim in (64, 128) else 'mma_sync'}.d{dim}"
    backward = f"wgmma.d{max(dim, 64)}" if HOPPER and dim <= 128 else f"mma_sync.d{dim}"
    batches = [((70, 0, 33, 1, 128, 15), (4, 2)), ((1300, 129, 1100), (2, 2))]
    if dim == 64:
        batches.append(((2500, 64), (1, 1)))  # more tiles than a warp has lanes
    for lengths, heads in batches:
        layout = Layout(lengths, base=5, tail=9)
        spec = spec_of(layout, dims=(dim, dim), heads=heads, ranges=kind)
        CASE.call(jagged_cuda, CASE.sample(spec, dtype, "cuda"))
        assert last_kernel("cuda") == f"cuda.attention.forward.{forward}.general"
        judge(CASE, spec, dtype, "cuda")
        assert last_kernel("cuda") == f"cuda.attention.backward.{backward}.general"


@pytest.mark.cuda
@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fma_with_ranges(dim: int, kind: str) -> None:
    for dtype in (torch.float32, torch.float64):
        layout, keys = Layout((300, 0, 129, 5), base=5), Layout((40, 3, 400, 5), tail=3)
        for kv_layout in (None, keys):
            spec = spec_of(layout, kv_layout=kv_layout, dims=(dim, dim), ranges=kind)
            judge(CASE, spec, dtype, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_mma_sync_with_ranges_and_windows(dim: int) -> None:
    layout, keys = Layout((300, 0, 129, 5), base=5), Layout((40, 3, 800, 5), tail=3)
    for kind in RANGES:
        for mask in ({"causal": True}, {"window_size": (100, 30)}, {"window_size": (-1, 9)}):
            spec = spec_of(layout, kv_layout=keys, dims=(dim, dim), ranges=kind, **mask)
            judge(CASE, spec, torch.bfloat16, "cuda")


# --- the kernel for long sequences

# Around its tiles of 128 and 192 queries and its steps of 128 keys, and the limit of 64.
LONG = Layout((1300, 64, 0, 65, 128, 129, 192, 193, 257, 1, 2000), base=3, tail=5)
LONG_KEYS = Layout((700, 64, 3, 0, 128, 640, 500, 193, 64, 1025, 2500), base=2, tail=4)


@pytest.mark.cuda
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 8), (96, 72)])
@pytest.mark.parametrize("name", ["jagged_flash_attention_ranges", "jagged_hstu_attention"])
def test_long_sequences_with_ranges(name: str, dims: tuple[int, int], cross: bool) -> None:
    """Every kind of range and mask, rows and keys around the edges of tiles."""
    case, kv_layout = EVERY[name], LONG_KEYS if cross else None
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window_size": (300, 70)})
    kinds = (*RANGES, None) if name == "jagged_hstu_attention" else RANGES
    for i, kind in enumerate(kinds):
        choices = {"dims": dims, "heads": (4, 2), "ranges": kind, **masks[i % 3]}
        choices |= {"scale": (None, -0.3)[i % 2]}
        if name == "jagged_hstu_attention":
            choices |= {"row_scale": i % 2 == 0, "divisor": ("length", 11.5)[i // 2 % 2]}
        for dtype in (torch.float16, torch.bfloat16):
            spec = spec_of(LONG, seed=i, kv_layout=kv_layout, **choices)
            judge(case, spec, dtype, "cuda", backward=False)


@pytest.mark.cuda
@pytest.mark.parametrize("tables", [False, "position", "time", True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["jagged_flash_attention_biased", "jagged_hstu_attention_biased"])
def test_long_sequences_with_biases(name: str, dim: int, cross: bool, tables: bool | str) -> None:
    """kv_bias, alone and with one table or both, and times alone; times with others, and a scale of
    0, which nothing is divided by, are another kernel's."""
    case, kv_layout = EVERY[name], LONG_KEYS if cross else None
    for i in range(5):
        scale = (None, -0.3, 2.0, None, 0.0)[i]
        choices = {"dims": (dim, dim), "heads": (4, 2), "ranges": (None, "hstu")[i % 2]}
        choices |= {"tables": tables, "kv_lengths": i >= 2, "bias_heads": (1, True)[i % 2]}
        choices |= {"hidden": name.startswith("jagged_flash") and i % 2 == 1, "causal": i == 0}
        choices |= {"scale": scale, "buckets": (5, 70)[i % 2], "first": (-2, 3)[i // 2 % 2]}
        choices |= {"time": ("symmetric", "past")[i // 2 % 2]}
        spec = spec_of(LONG, seed=i, kv_layout=kv_layout, **choices)
        judge(case, spec, (torch.bfloat16, torch.float16)[i // 2 % 2], "cuda", backward=False)
        found = last_kernel("cuda")
        kind = "silu" if "hstu" in name else "general"
        on_wgmma = HOPPER and scale != 0.0 and tables is not True
        suffix = "times" if tables == "time" else "bias"
        path = f"long.d{dim}.{kind}.{suffix}" if on_wgmma else f"mma_sync.d{dim}.{kind}"
        assert found == f"cuda.attention.forward.{path}"


@pytest.mark.cuda
@pytest.mark.parametrize("silu", [False, True])
def test_a_long_sequence_does_not_depend_on_its_neighbours(silu: bool) -> None:
    """Alone and among others, at another place: the same bits."""
    lengths = (700, 64, 2000, 65, 1)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    total = sum(lengths)
    qkv = [x.detach() for x in operands(total, total, torch.bfloat16, torch.device("cuda"), dim=64)]
    ranges = hstu_key_ranges(offsets, num_targets=offsets.diff() // 9, contextual_len=3)

    def call(rows: slice, offsets: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[rows].contiguous() for x in qkv)
        options: dict[str, Any] = {"key_ranges": ranges[rows].contiguous()}
        if silu:
            return jagged_hstu_attention(q, k, v, offsets, divisor="length", **options)
        return jagged_flash_attention(q, k, v, offsets, **options)

    whole = call(slice(None), offsets)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        alone = call(slice(begin, end), torch.tensor([0, end - begin], device="cuda"))
        assert torch.equal(alone, whole[begin:end])


@pytest.mark.cuda
def test_replay_of_ranges_with_other_lengths() -> None:
    """A captured call serves other lengths and ranges of the same T and B."""
    total = 2500
    qkv = [x.detach() for x in operands(total, total, torch.bfloat16, torch.device("cuda"), dim=64)]
    batches = ((700, 64, 1736), (1, 2499, 0), (100, 100, 300))
    given = [torch.tensor([0, *lengths], device="cuda").cumsum(0) for lengths in batches]

    def call(offsets: torch.Tensor) -> torch.Tensor:
        ranges = hstu_key_ranges(offsets, contextual_len=3, max_attn_len=200, total=total)
        return jagged_hstu_attention(*qkv, offsets, divisor="length", key_ranges=ranges)

    expected = [call(offsets) for offsets in given]
    offsets = given[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(offsets)
    for lengths, result in zip(given, expected, strict=True):
        offsets.copy_(lengths)
        graph.replay()
        assert torch.equal(captured, result)
