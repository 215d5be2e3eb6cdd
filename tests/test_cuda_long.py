"""Attention of long sequences and of wide heads; heads packed into tiles; the long backward."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from on_cuda import CUDA, HALF_DTYPES, HOPPER, LAYOUT, PATH
from plain import assert_same_bits, calls, cotangents_of, spec_of

import jagged_cuda
from jagged_cuda.testing import last_kernel
from jagged_cuda.testing.case import Case
from jagged_cuda.testing.cases import CASES
from jagged_cuda.testing.judge import judge, run
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Sample, Spec

pytestmark = pytest.mark.cuda


def long_backward(dim: int, *, in_order: bool) -> str:
    """The path of the backward pass of long sequences.

    In order: in deterministic mode, and above 64 dims in causal self-attention where there are few
    of them and heads.
    """
    name = "long_ordered" if in_order else "long"
    return f"cuda.attention.backward.{name}.d{64 if dim <= 64 else 128}"


def judge_in_order(case: Case, spec: Spec, dtype: torch.dtype, in_order: bool) -> None:
    """Judges both passes; `in_order`: under torch.use_deterministic_algorithms."""
    torch.use_deterministic_algorithms(in_order)
    try:
        judge(case, spec, dtype, CUDA)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@PATH
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_long_sequences(dtype: torch.dtype, dim: int, path: str, causal: bool) -> None:
    """Long on average, sequences are cut into larger tiles, or walked in larger steps."""
    case = CASES["jagged_flash_attention"]
    layout = Layout((1300, 129, 1100), base=5, tail=9)
    spec = spec_of(layout, dims=(dim, dim), heads=(2, 2), causal=causal)
    wgmma = HOPPER and path == "best"
    case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
    forward = f"mma_sync.d{dim}.rows128"
    if wgmma:
        forward = "wgmma.d32" if dim == 32 else f"long.d{dim}"
    assert last_kernel("cuda") == f"cuda.attention.forward.{forward}"
    judge(case, spec, dtype, CUDA)
    backward = in_order = f"cuda.attention.backward.mma_sync.d{dim}.rows128"
    if wgmma and dim == 32:
        backward = in_order = "cuda.attention.backward.wgmma.d32.step64"
    elif wgmma:
        backward = long_backward(dim, in_order=causal and dim > 64)
        in_order = long_backward(dim, in_order=True)
    assert last_kernel("cuda") == backward
    judge_in_order(case, spec, dtype, True)
    assert last_kernel("cuda") == in_order


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@PATH
@pytest.mark.parametrize(("dims", "bucket"), [((192, 136), 192), ((256, 256), 256)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_path_of_wide_heads(
    dtype: torch.dtype, dims: tuple[int, int], bucket: int, path: str, causal: bool
) -> None:
    """Sequences of every length, in every mode, go one way."""
    case = CASES["jagged_flash_attention"]
    wgmma = HOPPER and path == "best"
    for layout in (LAYOUT, Layout((1300, 129, 1100), base=5, tail=9)):
        spec = spec_of(layout, dims=dims, causal=causal)
        case.call(jagged_cuda, case.sample(spec, dtype, CUDA))
        forward = f"long.d{bucket}" if wgmma else "mma_sync.d256"
        assert last_kernel("cuda") == f"cuda.attention.forward.{forward}"
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                judge(case, spec, dtype, CUDA)
            finally:
                torch.use_deterministic_algorithms(False)
            backward = f"wide.d{bucket}" if wgmma else "mma_sync.d256"
            assert last_kernel("cuda") == f"cuda.attention.backward.{backward}"


# Beside the longest sequences that are not long, 192 and 256 queries, and edges of larger tiles.
LONG_MIXED = Layout(
    (255, 257, 0, 256, 900, 64, 1, 385, 40, 577, 128, 129, 192, 193), base=5, tail=70
)
LONG_MIXED_KEYS = Layout(
    (300, 129, 3, 700, 128, 64, 0, 0, 257, 800, 40, 130, 193, 64), base=2, tail=66
)


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@pytest.mark.parametrize(
    "dims",
    [
        *((32, 32), (24, 16), (64, 64), (40, 64), (128, 128), (72, 96), (64, 128), (192, 160)),
        *((256, 256), (16, 224)),
    ],
)
def test_long_among_shorter_sequences(
    dims: tuple[int, int], heads: tuple[int, int], cross: bool
) -> None:
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (100, 30)}, {"window_size": (-1, 9)}):
        spec = spec_of(LONG_MIXED, dims=dims, heads=heads, **options)
        spec = dataclasses.replace(spec, kv_layout=LONG_MIXED_KEYS if cross else None)
        judge(case, spec, torch.bfloat16, CUDA)


# Queries that, with the heads of a group, fill a part of a tile, beside edges of tiles of 2, 4, 8.
PACKED = Layout((1, 33, 0, 4, 8, 9, 16, 17, 31, 32, 65, 128, 300, 257, 24), base=5, tail=7)
PACKED_KEYS = Layout((300, 33, 7, 129, 600, 0, 64, 1, 257, 40, 128, 130, 301, 9, 900), base=2)


@pytest.mark.parametrize("longest", [30, 60, 150, 260])
@pytest.mark.parametrize("num_seqs", [40, 128, 300, 900])
@pytest.mark.parametrize("dims", [(64, 64), (72, 96), (128, 128), (192, 136), (256, 256)])
def test_one_longer_among_tiny_sequences(
    dims: tuple[int, int], num_seqs: int, longest: int
) -> None:
    """Likely none is long, or short: the kernels for those look whether any is.

    They are planned by themselves, or by a plan; 900 are too many for one launch (few_forward.cuh).
    """
    lengths = [(7 * i) % 12 for i in range(num_seqs)]
    lengths[num_seqs * 2 // 3] = longest
    spec = spec_of(Layout(tuple(lengths), base=3, tail=300), dims=dims, heads=(2, 2), causal=True)
    judge(CASES["jagged_flash_attention"], spec, torch.bfloat16, CUDA)


@pytest.mark.parametrize("others", [(), (20,), (33,), (64, 192), (193,)])
@pytest.mark.parametrize("dims", [(72, 96), (128, 128)])
def test_few_others_among_long_sequences(dims: tuple[int, int], others: tuple[int, ...]) -> None:
    """Most are long: the kernel for 64-row tiles, behind theirs, looks whether any is its own."""
    layout = Layout((300, 280, 310, *others, 290, 300, 257), base=5, tail=9)
    spec = spec_of(layout, dims=dims, heads=(24, 24))  # too many tiles for one launch
    judge(CASES["jagged_flash_attention"], spec, torch.bfloat16, CUDA)


# Long on average, beside edges of tiles of 64 and 128 rows.
NARROW = Layout((1300, 129, 1, 1100, 64, 0, 127, 1927, 193), base=5, tail=9)
NARROW_KEYS = Layout((900, 64, 1500, 0, 65, 1200, 1, 700, 1030), base=2, tail=66)


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(16, 16), (16, 2)])
@pytest.mark.parametrize("dims", [(32, 32), (24, 16)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_narrow_heads_in_tiles_of_two_warpgroups(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], cross: bool
) -> None:
    """Of 128 rows, whose bits are those of tiles of 64 rows, as a sequence alone has them."""
    case = CASES["jagged_flash_attention"]
    keys = NARROW_KEYS if cross else NARROW
    for options in ({}, {"causal": True}, {"window_size": (100, 30)}, {"window_size": (-1, 9)}):
        spec = spec_of(NARROW, dims=dims, heads=heads, **options)
        spec = dataclasses.replace(spec, kv_layout=keys if cross else None)
        judge(case, spec, dtype, CUDA, backward=False)
        sample = case.sample(spec, dtype, CUDA)
        whole = run(case, sample, calls(case), None)
        if HOPPER:
            assert last_kernel("cuda") == "cuda.attention.forward.wgmma.d32.rows128"
        for (begin, end), (first, last) in zip(
            itertools.pairwise(NARROW.offsets().tolist()),
            itertools.pairwise(keys.offsets().tolist()),
            strict=True,
        ):
            rows = {"q": sample.tensors["q"][begin:end].clone()}
            rows |= {name: sample.tensors[name][first:last].clone() for name in ("k", "v")}
            alone = spec_of(Layout((end - begin,)), dims=dims, heads=heads, **options)
            found = run(
                case,
                Sample(
                    dataclasses.replace(
                        alone, kv_layout=Layout((last - first,)) if cross else None
                    ),
                    rows,
                    torch.tensor([0, end - begin], device=CUDA),
                    torch.tensor([0, last - first], device=CUDA) if cross else None,
                ),
                calls(case),
                None,
            )
            if HOPPER and end - begin > 1000:
                assert last_kernel("cuda") == "cuda.attention.forward.wgmma.d32"
            assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})


@pytest.mark.parametrize("keys", [None, PACKED_KEYS], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(2, 1), (8, 2), (16, 2), (6, 1), (16, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 96)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_packed_heads(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], keys: Layout | None
) -> None:
    """Heads of a group share a tile; a sequence alone gives the bits that it gives among others."""
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (70, 30)}, {"scale": -0.3}):
        spec = spec_of(PACKED, dims=dims, heads=heads, kv_layout=keys, **options)
        sample = case.sample(spec, dtype, CUDA)
        whole = run(case, sample, calls(case), None)
        if HOPPER:
            bucket = 64 if max(dims) <= 64 else 128
            assert last_kernel("cuda") == f"cuda.attention.forward.long.packed.d{bucket}"
        judge(case, spec, dtype, CUDA, backward=False)
        if keys is not None:
            continue
        begin, end = PACKED.offsets().tolist()[-4:-2]
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("q", "k", "v")}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        alone = dataclasses.replace(spec, layout=Layout((end - begin,)))
        found = run(case, Sample(alone, rows, offsets, None), calls(case), None)
        assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})


# The same for the backward pass, where those of 1,024 queries and more are long.
LONG_BACKWARD = Layout((1023, 1025, 0, 1024, 64, 1153, 1, 1300), base=5, tail=70)
LONG_BACKWARD_KEYS = Layout((300, 129, 3, 1200, 64, 0, 7, 1), base=2, tail=66)


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (128, 128), (72, 96), (64, 128)])
@pytest.mark.parametrize("in_order", [False, True], ids=["", "in_order"])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_long_among_shorter_sequences_backward(
    dtype: torch.dtype, in_order: bool, dims: tuple[int, int], heads: tuple[int, int], cross: bool
) -> None:
    case = CASES["jagged_flash_attention"]
    windows = ((100, 30), (-1, 9), (3, 0))  # with the last, items of two or three steps
    for options in ({}, {"causal": True}, *({"window_size": window} for window in windows)):
        spec = spec_of(LONG_BACKWARD, dims=dims, heads=heads, **options)
        spec = dataclasses.replace(spec, kv_layout=LONG_BACKWARD_KEYS if cross else None)
        judge_in_order(case, spec, dtype, in_order)
        if HOPPER:
            first_is_seen = options.get("causal") or options.get("window_size") == (-1, 9)
            is_ordered = in_order or (first_is_seen and not cross and max(dims) > 64)
            assert last_kernel("cuda") == long_backward(max(dims), in_order=bool(is_ordered))


# Where all queries see all keys, and there are rows enough, those of 512 and more are long, too.
UNMASKED_LONG = Layout((*(511, 512, 513, 0, 640, 1, 1023, 300, 767, 64) * 4, 129), base=5, tail=70)


@pytest.mark.parametrize("in_order", [False, True], ids=["", "in_order"])
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (128, 128), (72, 96)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_half_as_long_unmasked_backward(
    dtype: torch.dtype, dims: tuple[int, int], in_order: bool
) -> None:
    case = CASES["jagged_flash_attention"]
    assert UNMASKED_LONG.total * 4 >= 2**16
    for options in ({}, {"causal": True}):
        spec = spec_of(UNMASKED_LONG, dims=dims, heads=(4, 4), max_len=True, **options)
        judge_in_order(case, spec, dtype, in_order)
        if HOPPER:
            takes = not in_order and not options
            long = long_backward(max(dims), in_order=False)
            assert (last_kernel("cuda") == long) == takes


# Beside so many others sequences of 1,024 rows and more have launches of their own, at D up to 32.
LONG_HIDDEN = Layout(
    (*(40, 0, 128, 70, 65, 1, 100) * 2, 1023, 1024, 1100, 300, 1025), base=5, tail=70
)


@pytest.mark.parametrize("dims", [(32, 32), (16, 24)])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_long_hidden_among_shorter_sequences_backward(
    dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    case = CASES["jagged_flash_attention"]
    for options in ({}, {"causal": True}, {"window_size": (100, 30)}):
        for heads in ((2, 2), (3, 1)):
            spec = spec_of(LONG_HIDDEN, dims=dims, heads=heads, max_len=True, **options)
            judge(case, spec, dtype, CUDA)


def test_long_hidden_among_many_shorter_sequences_backward() -> None:
    """The same where there is so much to do that they are looked for without max_len."""
    lengths = torch.tensor((*(100,) * 4100, 2000, *(60,) * 2000, 1024), device=CUDA)
    offsets = jagged_cuda.offsets_from_lengths(lengths)
    total = int(lengths.sum())
    assert 2 * total >= 2**20
    torch.manual_seed(0)
    size = (total, 2, 32)
    leaves = [
        torch.randn(size, device=CUDA, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    out = jagged_cuda.jagged_flash_attention(*leaves, offsets, causal=True)
    given = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, given)
    for seq in (0, 4099, 4100, 5000, 6101):
        rows = slice(int(offsets[seq]), int(offsets[seq + 1]))
        part = [leaf[rows].detach().double().movedim(0, 1).requires_grad_() for leaf in leaves]
        wanted = torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True),
            part,
            given[rows].double().movedim(0, 1),
        )
        for gradient, exact in zip(found, wanted, strict=True):
            expected = exact.movedim(0, 1)
            bound = 2**-6 * expected.abs().max() + 1e-2
            assert ((gradient[rows].double() - expected).abs() <= bound).all(), seq


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (700, 30), (300, -1)])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_backward_gives_the_same_bits(dim: int, window_size: tuple[int, int]) -> None:
    """In deterministic mode tiles of keys add to dq in order, whatever CTAs take them and when."""
    case = CASES["jagged_flash_attention"]
    # The first has more tiles of keys than an H100 has CTAs of this kernel.
    layout = Layout((18000, 4096, 2000, 300, 1025))
    spec = spec_of(layout, dims=(dim, dim), heads=(2, 1), window_size=window_size)
    sample = case.sample(spec, torch.bfloat16, CUDA)
    given = cotangents_of(case, sample)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(case, sample, calls(case), given)
        if HOPPER:
            assert last_kernel("cuda") == long_backward(dim, in_order=True)
        for _ in range(99):
            assert_same_bits(run(case, sample, calls(case), given), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_backward_repeats_all_but_dq(dim: int, causal: bool) -> None:
    """Else the sums of dq alone depend on the order in which CTAs add."""
    case = CASES["jagged_flash_attention"]
    spec = spec_of(Layout((4096, 2000, 1025)), dims=(dim, dim), heads=(4, 2), causal=causal)
    sample = case.sample(spec, torch.bfloat16, CUDA)
    given = cotangents_of(case, sample)
    first, *others = (run(case, sample, calls(case), given) for _ in range(5))
    if HOPPER:
        assert last_kernel("cuda") == long_backward(dim, in_order=causal and dim > 64)
    del first["grad_q"]
    for other in others:
        del other["grad_q"]
        assert_same_bits(other, first)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 2), (128, 128)])
def test_first_tiles_of_keys_store(heads: tuple[int, int], dim: int) -> None:
    """Of many sequences and heads (all but the first of these) nothing is cleared.

    The first tile stores dq, the others add to that: of 128 heads of one long sequence some are
    taken while it does. Beside the same in order, with NaN where the sums will be.
    """
    lengths = torch.randint(1, 2500, (200,), generator=torch.Generator().manual_seed(1))
    if heads[1] == 128:
        lengths = torch.tensor([1500, 40])
    offsets = jagged_cuda.offsets_from_lengths(lengths.to(CUDA))
    torch.manual_seed(0)
    total = int(lengths.sum())
    leaves = [
        torch.randn(total, count, dim, device=CUDA, dtype=torch.bfloat16).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]
    for options in ({}, {"causal": True}, {"window_size": (-1, 100)}):
        out = jagged_cuda.jagged_flash_attention(*leaves, offsets, **options)
        given = torch.randn_like(out)
        torch.use_deterministic_algorithms(True)
        try:
            in_order = jagged_cuda.jagged_flash_attention(*leaves, offsets, **options)
            wanted = torch.autograd.grad(in_order, leaves, given)
        finally:
            torch.use_deterministic_algorithms(False)
        for _ in range(3):  # of workspaces, freed at once
            torch.full((2 * total * heads[0] * dim,), torch.nan, device=CUDA)
        found = torch.autograd.grad(out, leaves, given)
        if HOPPER:
            assert last_kernel("cuda") == long_backward(dim, in_order=False)
        ends = offsets.tolist()
        for gradient, expected in zip(found, wanted, strict=True):
            # By sequence: gradients of short ones are the largest by far.
            for begin, end in itertools.pairwise(ends):
                own, like = gradient[begin:end].double(), expected[begin:end].double()
                assert ((own - like).abs() <= 2**-6 * like.abs().max()).all(), (options, begin, end)


# On average 1,536 rows and more: then shorter ones are looked for by sequence.
MOSTLY_LONG = Layout((2500, 1023, 2200, 40, 300, 2600, 2700), base=100, tail=70)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (128, 128)])
def test_shorter_among_mostly_long_sequences_backward(dims: tuple[int, int], causal: bool) -> None:
    assert MOSTLY_LONG.total >= 1536 * MOSTLY_LONG.num_seqs
    case = CASES["jagged_flash_attention"]
    spec = spec_of(MOSTLY_LONG, dims=dims, heads=(2, 1), causal=causal)
    judge(case, spec, torch.bfloat16, CUDA)
    if HOPPER:
        path = long_backward(max(dims), in_order=causal and max(dims) > 64)
        assert last_kernel("cuda") == path


@pytest.mark.parametrize("dim", [64, 128])
def test_long_backward_does_not_depend_on_neighbours(dim: int) -> None:
    """Nor on the places that a sequence's sums have in the workspace."""
    layout = Layout((1100, 40, 2500, 1024, 4000), base=5, tail=7)
    torch.manual_seed(0)
    size = (layout.total, 2, dim)
    q, k, v, grad_out = (torch.randn(size, device=CUDA, dtype=torch.bfloat16) for _ in range(4))

    def gradients(rows: slice, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        leaves = [tensor[rows].clone().requires_grad_() for tensor in (q, k, v)]
        offsets = torch.tensor(lengths, device=CUDA)
        torch.use_deterministic_algorithms(True)
        try:
            out = jagged_cuda.jagged_flash_attention(*leaves, offsets, causal=True)
            return torch.autograd.grad(out, leaves, grad_out[rows])
        finally:
            torch.use_deterministic_algorithms(False)

    ends = layout.offsets().tolist()
    among_others = gradients(slice(None), ends)
    for begin, end in itertools.pairwise(ends):
        if end - begin >= 1024:
            alone = gradients(slice(begin, end), [0, end - begin])
            for found, wanted in zip(among_others, alone, strict=True):
                assert torch.equal(found[begin:end], wanted), (begin, end)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (400, 30)])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", HALF_DTYPES.values(), ids=HALF_DTYPES)
def test_scores_that_rise_along_the_keys(
    dtype: torch.dtype, dim: int, window_size: tuple[int, int]
) -> None:
    """The long forward keeps the reference of a row's scores until sums show that it is behind."""
    lengths = (900, 300, 1300)
    generator = torch.Generator(device=CUDA).manual_seed(0)
    shape = (sum(lengths), 2, dim)
    q, k, v = (torch.randn(shape, device=CUDA, generator=generator) for _ in range(3))
    rises = torch.cat([torch.linspace(0.1, 16, length, device=CUDA) for length in lengths])
    rises[lengths[0] : lengths[0] + lengths[1]] /= 8  # some rows of a tile only
    q, k, v = q.to(dtype), (k * rises[:, None, None]).to(dtype), v.to(dtype)
    offsets = jagged_cuda.offsets_from_lengths(torch.tensor(lengths, device=CUDA))
    out, lse = jagged_cuda.jagged_flash_attention(
        q, k, v, offsets, window_size=window_size, return_lse=True
    )
    if HOPPER:
        assert last_kernel("cuda") == f"cuda.attention.forward.long.d{dim}"
    # P and the result are rounded once each.
    unit = torch.finfo(dtype).eps / 2
    left, right = (100_000 if rows < 0 else rows for rows in window_size)
    for begin, end in itertools.pairwise(offsets.tolist()):
        rows = slice(begin, end)
        places = torch.arange(end - begin, device=CUDA)
        distance = places[None] - places[:, None]
        hidden = (distance < -left) | (distance > right)
        scores = torch.einsum("ihd,jhd->hij", q[rows].double(), k[rows].double()) * dim**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        values, probs = v[rows].double(), scores.softmax(-1)
        expected = torch.einsum("hij,jhd->ihd", probs, values)
        bound = 3 * unit * torch.einsum("hij,jhd->ihd", probs, values.abs())
        assert ((out[rows].double() - expected).abs() <= bound).all()
        torch.testing.assert_close(lse[rows].double(), scores.logsumexp(-1).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_long_sequences_do_not_depend_on_neighbours(dim: int) -> None:
    """A long sequence alone gives the bits that it gives among others."""
    case = CASES["jagged_flash_attention"]
    sample = case.sample(spec_of(LONG_MIXED, dims=(dim, dim)), torch.bfloat16, CUDA)
    whole = run(case, sample, calls(case), None)
    for begin, end in itertools.pairwise(LONG_MIXED.offsets().tolist()):
        rows = {name: sample.tensors[name][begin:end].clone() for name in ("q", "k", "v")}
        offsets = torch.tensor([0, end - begin], device=CUDA)
        spec = spec_of(Layout((end - begin,)), dims=(dim, dim))
        found = run(case, Sample(spec, rows, offsets, None), calls(case), None)
        assert_same_bits(found, {name: t[begin:end] for name, t in whole.items()})
