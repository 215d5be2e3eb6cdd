"""The Triton twins against the padded definition in fp64.

On a GPU they run there; without one in Triton's CPU interpreter, in the types that it gets right.
`python tests/test_triton_ref.py` compiles every kernel for Hopper, GPU or not.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU and __name__ != "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import triton_ref  # noqa: E402
from triton_ref.common import find_tile, load_rows, num_tiles  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = (FP32, FP16, BF16) if ON_GPU else (FP32, FP64)

# NumPy, under the interpreter, warns of what happens in masked lanes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def make_offsets(lengths, base=0, dtype=torch.int64):
    return torch.tensor([base, *lengths]).cumsum(0).to(DEVICE, dtype)


def make_values(offsets, rows_after, *shape, dtype=FP32):
    """Normal values with one outlier; NaN in the rows outside every sequence."""
    total = int(offsets[-1]) + rows_after
    x = torch.randn(total, *shape, dtype=FP64)
    x[total // 2 :: 97] *= 8
    x[: int(offsets[0])] = float("nan")
    x[int(offsets[-1]) :] = float("nan")
    return x.to(DEVICE, dtype).requires_grad_()


def padded_rows(offsets):
    """Row of each padded position, and which of them exist: [B, M] both."""
    offsets = offsets.long()
    lengths = offsets[1:] - offsets[:-1]
    rows = torch.arange(int(max(lengths.tolist(), default=0)), device=offsets.device)
    exists = rows < lengths[:, None]
    return torch.where(exists, offsets[:-1, None] + rows, 0), exists


def pad(x, offsets):
    rows, exists = padded_rows(offsets)
    exists = exists.reshape(*exists.shape, *[1] * (x.dim() - 1))
    return torch.where(exists, x[rows], 0)


def unpad(padded, offsets, total, fill=0.0):
    rows, exists = padded_rows(offsets)
    out = padded.new_full((total, *padded.shape[2:]), fill)
    return out.index_put((rows[exists],), padded[exists])


def padded_dense_bmm(x, y, offsets):
    return unpad(pad(x, offsets) @ y, offsets, len(x))


def padded_jagged_bmm(x, y, offsets):
    return pad(x, offsets).transpose(1, 2) @ pad(y, offsets)


def matrices_of(padded, offsets, y_offsets):
    """[B, M, N] -> the matrices [Lx, Ly] one after another"""
    pieces = [
        matrix[:rows, :columns].reshape(-1)
        for matrix, rows, columns in zip(
            padded, offsets.diff().tolist(), y_offsets.diff().tolist(), strict=True
        )
    ]
    return torch.cat([padded.new_zeros(0), *pieces])


def padded_matrices(x, y, offsets, y_offsets):
    return matrices_of(pad(x, offsets) @ pad(y, y_offsets).transpose(1, 2), offsets, y_offsets)


def padded_weighted(a, y, offsets, y_offsets, total, transpose):
    lengths, y_lengths = offsets.diff().tolist(), y_offsets.diff().tolist()
    pieces = a.split([m * n for m, n in zip(lengths, y_lengths, strict=True)])
    result = []
    begins = (y_offsets, offsets) if not transpose else (offsets, y_offsets)
    for i, piece in enumerate(pieces):
        weights = piece.reshape(lengths[i], y_lengths[i])
        rows = y[begins[0][i] : begins[0][i + 1]]
        result.append((weights.t() if transpose else weights) @ rows)
    before, after = int(begins[1][0]), total - int(begins[1][-1])
    return torch.cat([y.new_zeros(before, y.shape[1]), *result, y.new_zeros(after, y.shape[1])])


def padded_softmax(x, offsets, scale=1.0):
    _, exists = padded_rows(offsets)
    exists = exists.reshape(*exists.shape, *[1] * (x.dim() - 1))
    lowest = torch.finfo(x.dtype).min
    weights = torch.softmax(torch.where(exists, pad(x, offsets) * scale, lowest), dim=1)
    return unpad(weights, offsets, len(x))


def padded_attention(q, k, v, offsets, kv_offsets=None, causal=False, window=(-1, -1), scale=None):
    kv_offsets = offsets if kv_offsets is None else kv_offsets
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = window[0], 0 if causal else window[1]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    i_row, j_row = padded_rows(offsets)[1], padded_rows(kv_offsets)[1]
    len_q, len_k = i_row.sum(1)[:, None, None], j_row.sum(1)[:, None, None]
    i = torch.arange(i_row.shape[1], device=q.device)[:, None]
    j = torch.arange(j_row.shape[1], device=q.device)[None, :]
    sees = i_row[:, :, None] & j_row[:, None, :]
    if left >= 0:
        sees = sees & (j >= i + len_k - len_q - left)
    if right >= 0:
        sees = sees & (j <= i + len_k - len_q + right)
    sees = sees[:, None]
    blind = ~sees.any(-1, keepdim=True)

    logits = torch.einsum("bihd,bjhd->bhij", pad(q, offsets), pad(k, kv_offsets)) * scale
    if logits.shape[-1] == 0:
        logits, sees = logits.new_zeros(*logits.shape[:-1], 1), sees.new_zeros(*blind.shape)
        v = v.new_zeros(1, *v.shape[1:])
        padded_v = v.expand(len(logits), *v.shape)
    else:
        padded_v = pad(v, kv_offsets)
    logits = logits.masked_fill(~sees, float("-inf")).masked_fill(blind, 0)
    lse = logits.logsumexp(-1, keepdim=True)
    weights = torch.where(sees, (logits - lse).exp(), 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, padded_v)
    lse = lse.masked_fill(blind, float("-inf"))[..., 0].transpose(1, 2)
    return unpad(out, offsets, len(q)), unpad(lse, offsets, len(q), fill=float("-inf"))


def assert_close(got, want, same_precision, parts, eps, eps_accumulator):
    """Each part's error within twice PyTorch's own, plus two roundings, plus those of the sums."""
    assert got.shape == want.shape
    assert torch.equal(got.isinf(), want.isinf())
    got, want, same = (
        t.detach().double().nan_to_num(nan=float("nan"), posinf=0.0, neginf=0.0)
        for t in (got, want, same_precision)
    )
    if want.numel() == 0:
        return
    largest = want.abs().max().item()
    for part in parts:
        if want[part].numel() == 0:
            continue
        error = (got[part] - want[part]).abs().max().item()
        limit = 2 * (same[part] - want[part]).abs().max().item()
        limit += 2 * eps * want[part].abs().max().item() + 64 * eps_accumulator * largest
        assert error <= limit, f"rows {part}: error {error:.3e} above {limit:.3e}"


def parts_of(offsets):
    """The rows before, of each sequence, and after."""
    return [slice(*bounds) for bounds in pairwise([0, *offsets.tolist(), None])]


def round_to_tf32(x):
    return ((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(FP32)


def compare(operator, reference, tensors, all_parts, tf32=False):
    """Results and gradients of the operator against the reference in fp64.

    all_parts: how to cut each result and then each gradient, since every sequence is judged alone.
    """
    dtype = tensors[0].dtype
    eps = 2**-10 if tf32 else torch.finfo(dtype).eps
    eps_accumulator = torch.finfo(FP64 if dtype == FP64 else FP32).eps
    exact = [t.detach().double().requires_grad_() for t in tensors]
    same = [t.detach().clone().requires_grad_() for t in tensors]
    if tf32:  # PyTorch takes small products in full fp32 even where TF32 is allowed
        same = [round_to_tf32(t).requires_grad_() for t in tensors]
    results = []
    grads = None
    for function, inputs in ((reference, exact), (reference, same), (operator, tensors)):
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if grads is None:
            grads = [torch.randn_like(z) for z in outputs]
        grad_outputs = [g.to(z.dtype) for g, z in zip(grads, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, inputs, grad_outputs)
        results.append((*outputs, *gradients))
    for parts, want, same_precision, got in zip(all_parts, *results, strict=True):
        assert_close(got, want, same_precision, parts, eps, eps_accumulator)
    for z, x in zip(results[-1][-len(tensors) :], tensors, strict=True):
        assert z.dtype == x.dtype


# Both edges of every tile size in use (16, 32, 64), empty, one row.
LENGTHS = {"edges": [0, 1, 31, 32, 33, 0], "wide": [63, 64, 65], "short": [0, 5, 1]}


PRODUCTS = {
    "edges": ("edges", 3, 5, 40, 24),
    "wide": ("wide", 0, 0, 33, 65),
    "narrow": ("short", 1, 0, 1, 1),
    "rows-after": ("short", 0, 70, 8, 8),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
        for name, case in PRODUCTS.items()
        for dtype in (DTYPES if ON_GPU or case[0] == "short" else (FP32,))
    ],
)
def test_products(case, dtype):
    torch.manual_seed(1)
    lengths, base, rows_after, D, N = case
    offsets = make_offsets(LENGTHS[lengths], base, torch.int32 if base else torch.int64)
    x = make_values(offsets, rows_after, D, dtype=dtype)
    y = torch.randn(len(offsets) - 1, D, N).to(DEVICE, dtype).requires_grad_()
    rows, sequences = parts_of(offsets), range(len(offsets) - 1)
    compare(
        lambda x, y: triton_ref.jagged_dense_bmm(x, y, offsets),
        lambda x, y: padded_dense_bmm(x, y, offsets),
        (x, y),
        (rows, rows, sequences),
    )
    y = make_values(offsets, rows_after, N, dtype=dtype)
    compare(
        lambda x, y: triton_ref.jagged_jagged_bmm(x, y, offsets),
        lambda x, y: padded_jagged_bmm(x, y, offsets),
        (x, y),
        (sequences, rows, rows),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [((0, 5, 33, 1), (7, 1, 65, 0)), ((64, 63, 0), None)], ids=str)
def test_products_with_matrices(lengths, dtype):
    torch.manual_seed(9)
    offsets = make_offsets(lengths[0], 3, torch.int32)
    y_offsets = None if lengths[1] is None else make_offsets(lengths[1], 1, torch.int32)
    columns = offsets if y_offsets is None else y_offsets
    x, y = make_values(offsets, 2, 33, dtype=dtype), make_values(columns, 2, 33, dtype=dtype)
    sizes = (offsets.diff() * columns.diff()).tolist()
    rows, y_rows, matrices = parts_of(offsets), parts_of(columns), parts_of(make_offsets(sizes))
    compare(
        lambda x, y: triton_ref.jagged_jagged_bmm_jagged_out(x, y, offsets, y_offsets=y_offsets),
        lambda x, y: padded_matrices(x, y, offsets, columns),
        (x, y),
        (matrices, rows, y_rows),
    )
    a = torch.randn(sum(sizes)).to(DEVICE, dtype).requires_grad_()
    for transpose, operand, parts in ((False, y, (rows, y_rows)), (True, x, (y_rows, rows))):
        total = len(y) if transpose else len(x)
        compare(
            lambda a, y, transpose=transpose, total=total: triton_ref.array_jagged_bmm_jagged_out(
                a, y, offsets, y_offsets=y_offsets, transpose=transpose, total=total
            ),
            lambda a, y, transpose=transpose, total=total: padded_weighted(
                a, y, offsets, columns, total, transpose
            ),
            (a, operand),
            (parts[0], matrices, parts[1]),
        )


def test_matrices_that_do_not_fit_are_zero():
    offsets = make_offsets([2, 3], 1)
    x = torch.ones(7, 4, device=DEVICE, requires_grad=True)
    z = triton_ref.jagged_jagged_bmm_jagged_out(x, x, offsets, total_out=12)
    assert z.tolist() == [4.0] * 4 + [0.0] * 8
    (grad,) = torch.autograd.grad(z.sum(), x)
    assert grad[:, 0].tolist() == [0.0] + [4.0] * 2 + [0.0] * 4
    found = triton_ref.array_jagged_bmm_jagged_out(z.detach() + 1, x, offsets)
    assert found[:, 0].tolist() == [0.0] + [10.0] * 2 + [0.0] * 4
    found = triton_ref.jagged_jagged_bmm_jagged_out(
        x, x, offsets, matrix_offsets=torch.tensor([3, 7, 16], device=DEVICE), total_out=18
    )
    assert found.tolist() == [0.0] * 3 + [4.0] * 13 + [0.0] * 2


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_activation(activation, dtype):
    torch.manual_seed(11)
    offsets = make_offsets([5, 0, 34], 2)
    x = make_values(offsets, 3, 8, dtype=dtype)
    y, bias = (torch.randn(3, *shape).to(DEVICE, dtype) for shape in ((8, 20), (20,)))
    rows, sequences = parts_of(offsets), range(3)

    def padded(x, y, bias):
        z = pad(x, offsets) @ y + bias[:, None]
        function = getattr(torch.nn.functional, activation) if activation else lambda z: z
        return unpad(function(z), offsets, len(x))

    compare(
        lambda x, y, bias: triton_ref.jagged_dense_bmm(
            x, y, offsets, bias=bias, activation=activation
        ),
        padded,
        (x, y.requires_grad_(), bias.requires_grad_()),
        (rows, rows, sequences, sequences),
    )


def test_products_differentiate_twice():
    torch.manual_seed(2)
    offsets = make_offsets([3, 0, 2], 1)
    x = make_values(offsets, 1, 3)
    y = torch.randn(3, 3, 2, device=DEVICE, requires_grad=True)

    def gradients(operator):
        z = operator(x, y, offsets)
        first = torch.autograd.grad(z.pow(3).sum(), (x, y), create_graph=True)
        return torch.autograd.grad(sum(g.nan_to_num().pow(2).sum() for g in first), (x, y))

    inside = slice(1, -1)
    got, want = gradients(triton_ref.jagged_dense_bmm), gradients(padded_dense_bmm)
    torch.testing.assert_close(got[0][inside], want[0][inside], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "shape", "scale"),
    [([0, 1, 31, 32, 33], (2, 20), 1.0), ([1025, 2, 1024], (), -0.5), ([6, 0, 9], (3,), 40.0)],
)
def test_softmax(lengths, shape, scale, dtype):
    torch.manual_seed(3)
    offsets = make_offsets(lengths, 2)
    x = make_values(offsets, 3, *shape, dtype=dtype)
    rows = parts_of(offsets)
    compare(
        lambda x: triton_ref.jagged_softmax(x, offsets, scale=scale),
        lambda x: padded_softmax(x, offsets, scale),
        (x,),
        (rows, rows),
    )


def test_softmax_of_infinities_agrees_with_torch():
    x = torch.tensor([[-float("inf")] * 3, [1.0, -float("inf"), float("inf")]], device=DEVICE)
    out = triton_ref.jagged_softmax(x, make_offsets([2]))
    torch.testing.assert_close(out, torch.softmax(x, 0), equal_nan=True)


def matrix_softmax(a, offsets, y_offsets, dim, scale):
    lengths, y_lengths = offsets.diff().tolist(), y_offsets.diff().tolist()
    sizes = [m * n for m, n in zip(lengths, y_lengths, strict=True)]
    pieces = [
        torch.softmax(piece.reshape(m, n) * scale, dim).reshape(-1)
        for piece, m, n in zip(a[: sum(sizes)].split(sizes), lengths, y_lengths, strict=True)
    ]
    return torch.cat([*pieces, a.new_zeros(len(a) - sum(sizes))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    ("lengths", "scale"),
    [(([0, 1, 31, 33], None), 1.0), (([33, 2, 0, 40], [3, 70, 5, 0]), -0.5), (([6], [9]), 40.0)],
)
def test_softmax_of_matrices(lengths, scale, dim, dtype):
    torch.manual_seed(10)
    offsets = make_offsets(lengths[0], 3, torch.int32)
    y_offsets = None if lengths[1] is None else make_offsets(lengths[1], 1, torch.int32)
    columns = offsets if y_offsets is None else y_offsets
    sizes = (offsets.diff() * columns.diff()).tolist()
    a = make_values(make_offsets(sizes), 7, dtype=dtype)
    matrices = parts_of(make_offsets(sizes))
    compare(
        lambda a: triton_ref.jagged2_softmax(a, offsets, y_offsets=y_offsets, dim=dim, scale=scale),
        lambda a: matrix_softmax(a, offsets, columns, dim, scale),
        (a,),
        (matrices, matrices),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "shape"), [([0, 1, 31, 32, 33], (2, 20)), ([1025, 2, 0], ())])
def test_conversions(lengths, shape, dtype):
    torch.manual_seed(8)
    offsets = make_offsets(lengths, 2)
    x = make_values(offsets, 3, *shape, dtype=dtype)
    rows, sequences = parts_of(offsets), range(len(lengths))
    total = len(x)
    for max_len, fill in ((max(lengths) + 2, -1.5), (20, 0.0)):
        exists = torch.arange(max_len, device=DEVICE) < offsets.diff()[:, None]
        exists = exists.reshape(*exists.shape, *[1] * len(shape))

        def to_padded(x, max_len=max_len, fill=fill, exists=exists):
            missing = x.new_zeros(len(lengths), max(0, max_len - max(lengths)), *shape)
            padded = torch.cat([pad(x, offsets), missing], 1)[:, :max_len]
            return torch.where(exists, padded, fill)

        def to_jagged(x, max_len=max_len):
            missing = x.new_zeros(len(lengths), max(0, max(lengths) - max_len), *shape)
            return unpad(torch.cat([x, missing], 1)[:, : max(lengths)], offsets, total)

        compare(
            lambda x, m=max_len, f=fill: triton_ref.jagged_to_padded(x, offsets, m, fill=f),
            to_padded,
            (x,),
            (sequences, rows),
        )
        padded = torch.randn(len(lengths), max_len, *shape).to(DEVICE, dtype).requires_grad_()
        compare(
            lambda x: triton_ref.padded_to_jagged(x, offsets, total=total),
            to_jagged,
            (padded,),
            (rows, sequences),
        )
    assert len(triton_ref.padded_to_jagged(padded, offsets)) == offsets[-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "shape"), [([0, 1, 31, 32, 33], (2, 20)), ([1025, 2, 0], ())])
def test_reductions(lengths, shape, dtype):
    torch.manual_seed(9)
    offsets = make_offsets(lengths, 2)
    x = make_values(offsets, 3, *shape, dtype=dtype)
    rows, sequences = parts_of(offsets), range(len(lengths))
    divisor = offsets.diff().clamp(min=1).reshape(-1, *[1] * len(shape))
    for operator, reference in (
        (triton_ref.jagged_sum, lambda x: pad(x, offsets).sum(1)),
        (triton_ref.jagged_mean, lambda x: pad(x, offsets).sum(1) / divisor),
    ):
        compare(lambda x, f=operator: f(x, offsets), reference, (x,), (sequences, rows))
    total = len(x)
    each = torch.randn(len(lengths), *shape).to(DEVICE, dtype).requires_grad_()
    compare(
        lambda x: triton_ref.jagged_broadcast(x, offsets, total=total),
        lambda x: unpad(x[:, None].expand(-1, max(lengths), *shape), offsets, total),
        (each,),
        (rows, sequences),
    )
    assert len(triton_ref.jagged_broadcast(each, offsets)) == offsets[-1]


@dataclass(frozen=True)
class Attention:
    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None = None
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (40, 24)
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    base: int = 0
    rows_after: int = 0
    offset_dtype: torch.dtype = torch.int64
    scale: float | None = None
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)


ATTENTION = {
    "edges": Attention((0, 1, 31, 32, 33), dims=(40, 40), base=3, rows_after=40),
    "causal-grouped": Attention((33, 0, 7), heads=(4, 2), causal=True, offset_dtype=torch.int32),
    "window": Attention((64, 1, 65), heads=(2, 2), dims=(8, 8), window=(5, 2)),
    "causal-window": Attention((70, 3), heads=(2, 1), causal=True, window=(32, 7), rows_after=2),
    "window-right": Attention((65, 2), dims=(8, 8), window=(-1, 0), base=1),
    "window-itself": Attention((35,), dims=(8, 8), window=(0, 0)),
    "cross": Attention((5, 0, 33, 2, 0), (33, 7, 5, 0, 0), dims=(1, 8), base=2, rows_after=3),
    "cross-causal-blind-rows": Attention(
        (40, 3, 4), (7, 33, 0), heads=(4, 2), causal=True, rows_after=1, dtypes=(FP32, BF16, FP64)
    ),
    "cross-window": Attention((33, 70), (66, 9), dims=(8, 8), window=(3, 4)),
    "square": Attention((63, 64, 65), dims=(64, 64), dtypes=(FP32, BF16, FP16)),
    "widest": Attention((17, 3), dims=(256, 200), scale=0.05),
    "large-logits": Attention((37, 2), dims=(8, 8), scale=-30.0, causal=True),
}


def attention_runs():
    for name, case in ATTENTION.items():
        for dtype in case.dtypes:
            if dtype in (DTYPES if ON_GPU else (FP32, FP16, FP64)):
                yield pytest.param(case, dtype, id=f"{name}-{dtype}".replace("torch.", ""))


def attend(case, dtype, tf32=False):
    torch.manual_seed(4)
    heads, kv_heads = case.heads
    D, Dv = case.dims
    offsets = make_offsets(case.lengths, case.base, case.offset_dtype)
    kv_offsets = None
    if case.kv_lengths is not None:
        kv_offsets = make_offsets(case.kv_lengths, 1, case.offset_dtype)
    key_offsets = offsets if kv_offsets is None else kv_offsets
    tensors = (
        make_values(offsets, case.rows_after, heads, D, dtype=dtype),
        make_values(key_offsets, case.rows_after, kv_heads, D, dtype=dtype),
        make_values(key_offsets, case.rows_after, kv_heads, Dv, dtype=dtype),
    )
    options = {"causal": case.causal, "scale": case.scale, "kv_offsets": kv_offsets}
    rows, key_rows = parts_of(offsets), parts_of(key_offsets)
    compare(
        lambda q, k, v: triton_ref.jagged_flash_attention(
            q, k, v, offsets, window_size=case.window, return_lse=True, **options
        ),
        lambda q, k, v: padded_attention(q, k, v, offsets, window=case.window, **options),
        tensors,
        (rows, rows, rows, key_rows, key_rows),
        tf32,
    )


@pytest.mark.parametrize(("case", "dtype"), list(attention_runs()))
def test_attention(case, dtype):
    attend(case, dtype)


@dataclass(frozen=True)
class Target:
    lengths: tuple[int, ...]
    queries: int
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (40, 24)
    base: int = 0
    rows_after: int = 0
    offset_dtype: torch.dtype = torch.int64
    scale: float | None = None
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)


TARGET = {
    "edges": Target((0, 1, 31, 32, 33), 5, base=3, rows_after=40),
    "grouped": Target(
        (33, 0, 7), 17, heads=(4, 2), offset_dtype=torch.int32, dtypes=(FP32, BF16, FP64)
    ),
    "one-query": Target((65, 2, 64), 1, dims=(8, 8), dtypes=(FP32, BF16, FP16)),
    "many-queries": Target((20, 3), 70, dims=(1, 8), rows_after=1),
    "widest": Target((17, 3), 4, dims=(256, 200), scale=0.05),
    "large-logits": Target((37, 2), 3, dims=(8, 8), scale=-4.0),
}


def target_runs():
    for name, case in TARGET.items():
        for dtype in case.dtypes:
            if dtype in (DTYPES if ON_GPU else (FP32, FP16, FP64)):
                yield pytest.param(case, dtype, id=f"{name}-{dtype}".replace("torch.", ""))


def padded_target(q, k, v, offsets, scale):
    """Attention of jagged queries whose sequences are all as long."""
    rows = make_offsets([q.shape[1]] * len(q))
    out, lse = padded_attention(q.flatten(0, 1), k, v, rows, kv_offsets=offsets, scale=scale)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


@pytest.mark.parametrize(("case", "dtype"), list(target_runs()))
def test_target_attention(case, dtype):
    torch.manual_seed(8)
    heads, kv_heads = case.heads
    D, Dv = case.dims
    offsets = make_offsets(case.lengths, case.base, case.offset_dtype)
    num_seqs = len(case.lengths)
    q = torch.randn(num_seqs, case.queries, heads, D).to(DEVICE, dtype).requires_grad_()
    k = make_values(offsets, case.rows_after, kv_heads, D, dtype=dtype)
    v = make_values(offsets, case.rows_after, kv_heads, Dv, dtype=dtype)
    rows, sequences = parts_of(offsets), range(num_seqs)
    compare(
        lambda q, k, v: triton_ref.jagged_target_attention(
            q, k, v, offsets, scale=case.scale, return_lse=True
        ),
        lambda q, k, v: padded_target(q, k, v, offsets, case.scale),
        (q, k, v),
        (sequences, sequences, sequences, rows, rows),
    )


@pytest.mark.skipif(not ON_GPU, reason="TF32 exists on a GPU only")
def test_attention_in_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        attend(ATTENTION["causal-grouped"], FP32, tf32=True)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("lengths", "total"), [((), 3), ((0, 0), 3), ((0,), 0), ((), 0)])
def test_nothing_to_do(lengths, total):
    """No sequences or empty ones: zeros, LSE -inf and no gradient, whatever the rows hold."""
    offsets = make_offsets(lengths, base=min(total, 1))
    x = torch.full((total, 2, 8), float("nan"), device=DEVICE, requires_grad=True)
    y = torch.full((len(lengths), 16, 3), float("nan"), device=DEVICE, requires_grad=True)
    out, lse = triton_ref.jagged_flash_attention(x, x, x, offsets, return_lse=True)
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))
    rows = x.reshape(total, 16)
    q = torch.full((len(lengths), 4, 2, 8), float("nan"), device=DEVICE)
    target, target_lse = triton_ref.jagged_target_attention(q, x, x, offsets, return_lse=True)
    assert torch.equal(target_lse, torch.full_like(target_lse, float("-inf")))
    results = (
        out,
        target,
        triton_ref.jagged_softmax(x, offsets),
        triton_ref.jagged_dense_bmm(rows, y, offsets),
        triton_ref.jagged_jagged_bmm(rows, rows, offsets),
    )
    grads = torch.autograd.grad((*results, lse), (x, y), [*map(torch.ones_like, (*results, lse))])
    for z in (*results, *grads):
        assert torch.equal(z, torch.zeros_like(z))


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs exist on a GPU only")
def test_graph_replays_with_other_lengths():
    """Nothing synchronises, and the grid depends on shapes alone."""
    torch.manual_seed(7)
    offsets = make_offsets([70, 2, 28])
    x = torch.randn(100, 2, 16, device=DEVICE, requires_grad=True)
    y = torch.randn(3, 32, 8, device=DEVICE)

    def step(attention, softmax, product):
        z = attention(x, x, x, offsets, causal=True)
        z = softmax(z[0] if isinstance(z, tuple) else z, offsets).reshape(100, 32)
        return torch.autograd.grad(product(z, y, offsets).pow(2).sum(), x)[0]

    operators = (
        triton_ref.jagged_flash_attention,
        triton_ref.jagged_softmax,
        triton_ref.jagged_dense_bmm,
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        step(*operators)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*operators)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(*operators)
    for lengths in ([1, 98, 0], [33, 33, 34]):
        offsets.copy_(make_offsets(lengths))
        graph.replay()
        want = step(padded_attention, padded_softmax, padded_dense_bmm)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_attention_reads_strides():
    """One head as [T, D], slices of a fused projection, an expanded gradient, no LSE gradient."""
    torch.manual_seed(5)
    offsets = make_offsets([20, 4])
    fused = torch.randn(24, 3, 16, device=DEVICE, requires_grad=True)
    grads = []
    for operator in (triton_ref.jagged_flash_attention, padded_attention):
        q, k, v = fused.unbind(1)
        if operator is padded_attention:
            out = operator(q[:, None], k[:, None], v[:, None], offsets)[0][:, 0]
        else:
            out = operator(q, k, v, offsets, max_len=20)
        grads.append((out, *torch.autograd.grad(out.sum(), fused)))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_products_read_strides():
    torch.manual_seed(6)
    offsets = make_offsets([5, 0, 3])
    x = torch.randn(4, 8, device=DEVICE).t()
    y = torch.randn(6, 4, device=DEVICE).t().expand(3, 4, 6)
    z = triton_ref.jagged_dense_bmm(x, y, offsets)
    torch.testing.assert_close(z, x @ y[0], rtol=1e-5, atol=1e-5)
    z = triton_ref.jagged_jagged_bmm(x, z[:, :1].expand(8, 3), offsets)
    want = torch.stack([x[:5].t() @ x[:5] @ y[0, :, :1], torch.zeros_like(y[0, :, :1])])
    torch.testing.assert_close(z[:2], want.expand(2, 4, 3), rtol=1e-4, atol=1e-4)


@triton.jit
def list_tiles_kernel(p_offsets, p_tiles, num_seqs, total, TILE: tl.constexpr):
    i_tile = tl.program_id(0)
    i_seq, first_row = find_tile(p_offsets, i_tile, num_seqs, total, TILE)
    begin, end = load_rows(p_offsets, i_seq, num_seqs, total)
    tl.store(p_tiles + i_tile * 4, i_seq)
    tl.store(p_tiles + i_tile * 4 + 1, first_row)
    tl.store(p_tiles + i_tile * 4 + 2, begin)
    tl.store(p_tiles + i_tile * 4 + 3, end)


@pytest.mark.parametrize("wrong", [False, True], ids=["offsets", "wrong-offsets"])
def test_tiles(wrong):
    """Right offsets: each row in one tile, of its sequence. Wrong ones: no row out of bounds."""
    tile, total = 4, 30
    batches = ([2, 2, 5, 9, 13, 17, 29], [0, 30], [7], [0, 0, 0, 30, 30])
    if wrong:
        batches = ([20, 5, 99, -4, 30], [1 << 40, 0], [-1], [40, 40, -(1 << 40), 3])
    for batch in batches:
        num_seqs = len(batch) - 1
        count = num_tiles(total, num_seqs, tile)
        tiles = torch.empty(count, 4, dtype=torch.int64, device=DEVICE)
        offsets = torch.tensor(batch, device=DEVICE)
        list_tiles_kernel[(count,)](offsets, tiles, num_seqs, total, TILE=tile)
        covered = []
        for i_seq, first_row, begin, end in tiles.tolist():
            assert 0 <= begin <= end <= total
            assert begin <= first_row
            rows = range(first_row, min(first_row + tile, end))
            covered += [(row, i_seq) for row in rows]
        if not wrong:
            bounds = [0, *batch, total]
            want = [(r, s - 1) for s in range(num_seqs + 2) for r in range(*bounds[s : s + 2])]
            assert covered == want


def test_errors():
    offsets = make_offsets([2, 1])
    x = torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"^jagged_dense_bmm: y must be \[2, 4, N\], got \[2, 5"):
        triton_ref.jagged_dense_bmm(x, torch.zeros(2, 5, 6, device=DEVICE), offsets)
    with pytest.raises(RuntimeError, match=r"^jagged_jagged_bmm: y must be float32, got"):
        triton_ref.jagged_jagged_bmm(x, x.half(), offsets)
    with pytest.raises(RuntimeError, match=r"^jagged_softmax: offsets must be int32 or int64"):
        triton_ref.jagged_softmax(x, offsets.float())
    with pytest.raises(RuntimeError, match=r"^jagged_flash_attention: q must be \[Tq, H, D\] with H a"):
        q = torch.zeros(3, 4, 8, device=DEVICE)
        triton_ref.jagged_flash_attention(q, q[:, :3], q[:, :3], offsets)
    with pytest.raises(RuntimeError, match=r"^jagged_softmax: x must be one of float32, float16"):
        triton_ref.jagged_softmax(x.to(FP64 if ON_GPU else BF16), offsets)


def test_every_kernel_compiles_for_hopper():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def compile_for_hopper():
    """Run forward and backward on meta tensors, with each launch turned into a compilation."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    def compile_launch(kernel, *args, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        signature, constants = {}, {}
        for i, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            one = value is None or (isinstance(value, int) and value == 1)
            if parameter.is_constexpr or (one and not parameter.do_not_specialize):
                signature[parameter.name], constants[(i,)] = "constexpr", value
            else:
                signature[parameter.name] = mangle_type(value)
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled.add(kernel.__name__)

    compiled = set()
    triton.JITFunction.run = compile_launch
    offsets = torch.tensor([0, 20, 100], device="meta")
    for dtype in (BF16, FP32):

        def values(*shape, dtype=dtype):
            return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

        z = triton_ref.jagged_dense_bmm(values(100, 16), values(2, 16, 8), offsets)
        z.backward(torch.empty_like(z))
        for activation in ("relu", "gelu", "silu", "sigmoid", "tanh"):
            operands = (values(100, 16), values(2, 16, 8), offsets)
            triton_ref.jagged_dense_bmm(*operands, bias=values(2, 8), activation=activation)
        matrices = {"matrix_offsets": offsets, "total_out": 6800}
        z = triton_ref.jagged_jagged_bmm_jagged_out(
            values(100, 16), values(100, 16), offsets, **matrices
        )
        z.backward(torch.empty_like(z))
        z = triton_ref.array_jagged_bmm_jagged_out(
            values(6800), values(100, 16), offsets, matrix_offsets=offsets
        )
        z.backward(torch.empty_like(z))
        z = triton_ref.jagged_softmax(values(100, 16), offsets)
        z.backward(torch.empty_like(z))
        for dim in (-1, -2):
            z = triton_ref.jagged2_softmax(values(6800), offsets, matrix_offsets=offsets, dim=dim)
            z.backward(torch.empty_like(z))
        z = triton_ref.jagged_to_padded(values(100, 16), offsets, 70)
        z.backward(torch.empty_like(z))
        z = triton_ref.jagged_sum(values(100, 16), offsets)
        z.backward(torch.empty_like(z))
        q, k, v = values(100, 2, 16), values(100, 1, 16), values(100, 1, 8)
        z = triton_ref.jagged_flash_attention(q, k, v, offsets, return_lse=True)
        torch.autograd.backward(z, [torch.empty_like(t) for t in z])
        q = values(2, 5, 2, 16)
        z = triton_ref.jagged_target_attention(q, k, v, offsets, return_lse=True)
        torch.autograd.backward(z, [torch.empty_like(t) for t in z])
    expected = {
        "jagged_jagged_bmm_jagged_out_kernel",
        "array_jagged_bmm_jagged_out_kernel",
        "jagged_dense_bmm_kernel",
        "jagged_jagged_bmm_kernel",
        "jagged2_softmax_kernel",
        "jagged2_softmax_backward_kernel",
        "jagged_to_padded_kernel",
        "padded_to_jagged_kernel",
        "jagged_sum_kernel",
        "jagged_softmax_kernel",
        "jagged_softmax_backward_kernel",
        "jagged_flash_attention_kernel",
        "jagged_flash_attention_backward_dq_kernel",
        "jagged_flash_attention_backward_dkdv_kernel",
        "jagged_target_attention_kernel",
        "jagged_target_attention_backward_dq_kernel",
        "jagged_target_attention_backward_dkdv_kernel",
    }
    assert compiled == expected, compiled


if __name__ == "__main__":
    compile_for_hopper()
