"""What each operator means: its definition on padded tensors, so plain that it needs no test.

Each operator has up to three functions.

- ``<op>`` is the definition, padded and differentiable; in float64 it judges.
- ``<op>_rounded`` is the same padded PyTorch as one would run it in the operands' precision:
  operands, results and what is stored between two products are rounded to ``storage``, sums run in
  the dtype of the arguments. Its error is the measure of what can be asked of a kernel. Products
  store nothing in between: their definition serves.
- ``<op>_terms`` is the size of the terms that are summed into each result and gradient: what
  rounding errors within the sums are relative to. Of the products, which are bilinear, it is the
  definition on absolute values.

Arguments and results are jagged; padding is internal: `[T, ...]` -> `[B, M, ...]` and back.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from jagged_cuda.testing.lengths import Layout, matrices


@functools.lru_cache(maxsize=16)
def _inside(layout: Layout, device: torch.device) -> Tensor:
    """`[B, M]`: True where a padded position holds a row of the sequence."""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64, device=device)
    return torch.arange(layout.max_len, device=device) < lengths[:, None]


@functools.lru_cache(maxsize=16)
def _rows(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`[B * M]` the row of each padded position, T where there is none; both ends of `[sum L]`."""
    inside = _inside(layout, device)
    row = layout.offsets(device)[:-1, None] + torch.arange(layout.max_len, device=device)
    source = row.where(inside, layout.total).flatten()
    position = inside.flatten().nonzero().squeeze(1)
    return source, position, source[position]


def pad(values: Tensor, layout: Layout) -> Tensor:
    """`[T, ...]` -> `[B, M, ...]`, zeros beyond each sequence."""
    source, _, _ = _rows(layout, values.device)
    zero_row = values.new_zeros((1, *values.shape[1:]))
    padded = torch.cat([values, zero_row]).index_select(0, source)
    return padded.unflatten(0, (layout.num_seqs, layout.max_len))


def unpad(padded: Tensor, layout: Layout, outside: float = 0.0) -> Tensor:
    """`[B, M, ...]` -> `[T, ...]`; rows outside every sequence are ``outside``."""
    _, position, row = _rows(layout, padded.device)
    values = padded.new_full((layout.total, *padded.shape[2:]), outside)
    return values.index_copy(0, row, padded.flatten(0, 1).index_select(0, position))


def _matrix_elements(
    layout: Layout, kv_layout: Layout, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`[B, M, N]`: where each element of a matrix `[L, Lk]` stands, and whether it is there."""
    begin = matrices(layout, kv_layout, capacity).offsets(device)[:-1]
    fits = matrices(layout, kv_layout, capacity).offsets(device).diff() > 0
    len_k = torch.tensor(kv_layout.lengths, dtype=torch.int64, device=device)
    i = torch.arange(layout.max_len, device=device)[None, :, None]
    j = torch.arange(kv_layout.max_len, device=device)[None, None, :]
    there = _inside(layout, device)[:, :, None] & _inside(kv_layout, device)[:, None, :]
    return begin[:, None, None] + i * len_k[:, None, None] + j, there & fits[:, None, None]


def pad_matrices(values: Tensor, layout: Layout, kv_layout: Layout) -> Tensor:
    """`[sum L*Lk]` -> `[B, M, N]`, zeros beyond each matrix, and for one that does not fit."""
    capacity = values.shape[0]
    element, there = _matrix_elements(layout, kv_layout, capacity, values.device)
    return torch.cat([values, values.new_zeros(1)])[element.where(there, capacity)]


def unpad_matrices(padded: Tensor, layout: Layout, kv_layout: Layout, capacity: int) -> Tensor:
    """`[B, M, N]` -> `[sum L*Lk]` in `capacity` elements; those outside every matrix are 0."""
    element, there = _matrix_elements(layout, kv_layout, capacity, padded.device)
    return padded.new_zeros(capacity).index_copy(0, element[there], padded[there])


# --- the products


def jagged_dense_bmm(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """x `[T, D]`, y `[B, D, N]` -> `[T, N]`"""
    return unpad(pad(x, layout) @ y, layout)


def jagged_jagged_bmm(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """x `[T, D]`, y `[T, N]` -> `[B, D, N]`"""
    return pad(x, layout).transpose(1, 2) @ pad(y, layout)


def jagged_jagged_bmm_jagged_out(
    x: Tensor, y: Tensor, layout: Layout, kv_layout: Layout, capacity: int
) -> Tensor:
    """x `[Tx, D]`, y `[Ty, D]` -> `[capacity]`, a matrix `[L, Lk]` a sequence"""
    scores = pad(x, layout) @ pad(y, kv_layout).transpose(1, 2)
    return unpad_matrices(scores, layout, kv_layout, capacity)


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, layout: Layout, kv_layout: Layout, transpose: bool
) -> Tensor:
    """a `[sum L*Lk]`, y `[Ty, N]` -> `[Tx, N]`; with transpose the matrices are `[Lk, L]`"""
    if transpose:
        weights = pad_matrices(a, kv_layout, layout).transpose(1, 2)
    else:
        weights = pad_matrices(a, layout, kv_layout)
    return unpad(weights @ pad(y, kv_layout), layout)


# --- jagged_softmax


def jagged_softmax(x: Tensor, layout: Layout, scale: float) -> Tensor:
    """x `[T, ...]` -> like x"""
    logits = scale * pad(x, layout)
    inside = _inside(layout, x.device)
    inside = inside.reshape(*inside.shape, *(1,) * (x.dim() - 1))
    return unpad(_masked_softmax(logits, inside, dim=1), layout)


def _masked_softmax(logits: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Softmax of the logits under the mask; zeros where the mask admits nothing."""
    some = mask.any(dim=dim, keepdim=True)
    masked = logits.where(mask, -math.inf).where(some, 0.0)
    return masked.softmax(dim).where(mask, 0.0) if masked.numel() > 0 else masked


class _RoundedSoftmax(torch.autograd.Function):
    """Masked softmax of padded values whose backward reads the rounded result, as torch's does.

    The order of sums moves the last bits of a float32 result, which decide between two 16-bit
    values where it lies halfway: `toward` 1 or -1 decides for the upper or the lower one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor,
        dim: int,
        scale: float,
        storage: torch.dtype,
        toward: int,
    ) -> Tensor:
        out = _masked_softmax(scale * x, mask, dim)
        if storage.itemsize == 2:
            out = out * (1 + toward * 2.0**-20)
        out = out.to(storage).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.dim, ctx.scale = dim, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        delta = (out * grad_out).sum(ctx.dim, keepdim=True)
        return ctx.scale * out * (grad_out - delta), None, None, None, None, None


def _softmax_terms(
    x: Tensor, out: Tensor, grad_out: Tensor | None, dim: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Of out and of dx, padded. An error e of the logits is one of out of
    ``out * (e + sum(out * e))``."""
    logits = (scale * x).abs()
    out_terms = out * (1 + logits + (out * logits).sum(dim, keepdim=True))
    if grad_out is None:
        return out_terms, None
    delta_terms = (out_terms * grad_out.abs()).sum(dim, keepdim=True)
    return out_terms, abs(scale) * (out_terms * grad_out.abs() + out * delta_terms)


def jagged_softmax_rounded(
    x: Tensor, layout: Layout, scale: float, storage: torch.dtype, toward: int
) -> Tensor:
    inside = _inside(layout, x.device)
    inside = inside.reshape(*inside.shape, *(1,) * (x.dim() - 1))
    return unpad(_RoundedSoftmax.apply(pad(x, layout), inside, 1, scale, storage, toward), layout)


def jagged_softmax_terms(
    x: Tensor, grad_out: Tensor | None, layout: Layout, scale: float
) -> tuple[Tensor, Tensor | None]:
    out = pad(jagged_softmax(x, layout, scale), layout)
    padded_grad = None if grad_out is None else pad(grad_out, layout)
    out_terms, grad_terms = _softmax_terms(pad(x, layout), out, padded_grad, 1, scale)
    return unpad(out_terms, layout), None if grad_terms is None else unpad(grad_terms, layout)


# --- jagged2_softmax


def jagged2_softmax(a: Tensor, layout: Layout, kv_layout: Layout, dim: int, scale: float) -> Tensor:
    """a `[sum L*Lk]` -> like a"""
    _, there = _matrix_elements(layout, kv_layout, a.shape[0], a.device)
    out = _masked_softmax(scale * pad_matrices(a, layout, kv_layout), there, dim)
    return unpad_matrices(out, layout, kv_layout, a.shape[0])


def jagged2_softmax_rounded(
    a: Tensor,
    layout: Layout,
    kv_layout: Layout,
    dim: int,
    scale: float,
    storage: torch.dtype,
    toward: int,
) -> Tensor:
    _, there = _matrix_elements(layout, kv_layout, a.shape[0], a.device)
    padded = pad_matrices(a, layout, kv_layout)
    out = _RoundedSoftmax.apply(padded, there, dim, scale, storage, toward)
    return unpad_matrices(out, layout, kv_layout, a.shape[0])


def jagged2_softmax_terms(
    a: Tensor, grad_out: Tensor | None, layout: Layout, kv_layout: Layout, dim: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    def padded(values: Tensor) -> Tensor:
        return pad_matrices(values, layout, kv_layout)

    def unpadded(values: Tensor) -> Tensor:
        return unpad_matrices(values, layout, kv_layout, a.shape[0])

    out = padded(jagged2_softmax(a, layout, kv_layout, dim, scale))
    padded_grad = None if grad_out is None else padded(grad_out)
    out_terms, grad_terms = _softmax_terms(padded(a), out, padded_grad, dim, scale)
    return unpadded(out_terms), None if grad_terms is None else unpadded(grad_terms)


# --- conversions and reductions


def jagged_to_padded(x: Tensor, layout: Layout, max_len: int, fill: float) -> Tensor:
    """x `[T, ...]` -> `[B, max_len, ...]`"""
    lengths = torch.tensor(layout.lengths, dtype=torch.int64, device=x.device)
    i = torch.arange(max_len, device=x.device)
    row = layout.offsets(x.device)[:-1, None] + i
    filled = torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])
    return filled[row.where(i < lengths[:, None], layout.total)]


def padded_to_jagged(x: Tensor, layout: Layout) -> Tensor:
    """x `[B, M, ...]` -> `[T, ...]`"""
    missing = max(0, layout.max_len - x.shape[1])
    beyond = x.new_zeros((x.shape[0], missing, *x.shape[2:]))
    return unpad(torch.cat([x, beyond], 1)[:, : layout.max_len], layout)


def jagged_sum(x: Tensor, layout: Layout) -> Tensor:
    """x `[T, ...]` -> `[B, ...]`"""
    return pad(x, layout).sum(1)


def jagged_mean(x: Tensor, layout: Layout) -> Tensor:
    """x `[T, ...]` -> `[B, ...]`"""
    lengths = torch.tensor(layout.lengths, dtype=x.dtype, device=x.device).clamp(min=1)
    return jagged_sum(x, layout) / lengths.reshape(-1, *(1,) * (x.dim() - 1))


def jagged_broadcast(x: Tensor, layout: Layout) -> Tensor:
    """x `[B, ...]` -> `[T, ...]`"""
    return unpad(x[:, None].expand(-1, layout.max_len, *x.shape[1:]), layout)


# --- jagged_flash_attention


def _visible(
    layout: Layout, kv_layout: Layout, window: tuple[int, int], device: torch.device
) -> Tensor:
    """`[B, M, N]`: whether query i sees key j.

    That is ``i + Lk - Lq - left <= j <= i + Lk - Lq + right``, where -1 is unbounded.
    """
    left, right = window
    len_q = torch.tensor(layout.lengths, dtype=torch.int64, device=device)[:, None, None]
    len_k = torch.tensor(kv_layout.lengths, dtype=torch.int64, device=device)[:, None, None]
    i = torch.arange(layout.max_len, device=device)[None, :, None]
    j = torch.arange(kv_layout.max_len, device=device)[None, None, :]
    visible = (i < len_q) & (j < len_k)
    if left >= 0:
        visible &= j >= i + len_k - len_q - left
    if right >= 0:
        visible &= j <= i + len_k - len_q + right
    return visible


def _heads_first(values: Tensor, layout: Layout, heads: int) -> Tensor:
    """`[T, G, D]` -> `[B, H, M, D]`, each key/value head repeated for those that read it."""
    padded = pad(values, layout).transpose(1, 2)
    return padded.repeat_interleave(heads // max(values.shape[1], 1), dim=1)


def _rows_first(padded: Tensor, layout: Layout, heads: int) -> Tensor:
    """`[B, H, M, D]` -> `[T, G, D]`, summed over the query heads that read one key/value head."""
    group = padded.shape[1] // max(heads, 1)
    return unpad(padded.unflatten(1, (heads, group)).sum(2).transpose(1, 2), layout)


def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    kv_layout: Layout,
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q `[Tq, H, D]`, k `[Tk, G, D]`, v `[Tk, G, Dv]` -> out `[Tq, H, Dv]`, lse `[Tq, H]`"""
    heads = q.shape[1]
    visible = _visible(layout, kv_layout, window, q.device)[:, None]
    q, k, v = (
        _heads_first(values, rows, heads)
        for values, rows in ((q, layout), (k, kv_layout), (v, kv_layout))
    )
    logits = scale * (q @ k.transpose(2, 3))
    out = _masked_softmax(logits, visible, dim=3) @ v
    some = visible.any(3, keepdim=True)
    lse = (
        logits.where(visible, -math.inf)
        .where(some, 0.0)
        .logsumexp(3)
        .where(some[..., 0], -math.inf)
    )
    return unpad(out.transpose(1, 2), layout), unpad(lse.transpose(1, 2), layout, -math.inf)


class _RoundedAttention(torch.autograd.Function):
    """Attention that rounds what it stores between two products: P, the result and dS.

    P is stored after its division by the sum, as softmax and a product do, or before it
    (`divide_last`), as an online softmax must.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        kv_layout: Layout,
        window: tuple[int, int],
        scale: float,
        storage: torch.dtype,
        divide_last: bool,
    ) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        visible = _visible(layout, kv_layout, window, q.device)[:, None]
        pq, pk, pv = (
            _heads_first(values, rows, heads)
            for values, rows in ((q, layout), (k, kv_layout), (v, kv_layout))
        )
        probs = _masked_softmax(scale * (pq @ pk.transpose(2, 3)), visible, dim=3)
        # The largest probability of a row is 1 before the division.
        divisor = probs.amax(3, keepdim=True) if divide_last and probs.numel() > 0 else 1.0
        stored = (probs / divisor).nan_to_num().to(storage).to(q.dtype)
        out = ((stored @ pv) * divisor).to(storage).to(q.dtype)
        _, lse = jagged_flash_attention(q, k, v, layout, kv_layout, window, scale)
        ctx.save_for_backward(pq, pk, pv, probs, out)
        ctx.layout, ctx.kv_layout, ctx.kv_heads = layout, kv_layout, k.shape[1]
        ctx.scale, ctx.storage = scale, storage
        return unpad(out.transpose(1, 2), layout), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probs, out = ctx.saved_tensors
        heads = q.shape[1]
        grad_out = _heads_first(grad_out, ctx.layout, heads)
        grad_lse = _heads_first(grad_lse.unsqueeze(2), ctx.layout, heads)
        delta = (grad_out * out).sum(3, keepdim=True) - grad_lse
        grad_logits = probs * (grad_out @ v.transpose(2, 3) - delta)
        grad_logits = grad_logits.to(ctx.storage).to(q.dtype)
        stored_probs = probs.to(ctx.storage).to(q.dtype)
        return (
            _rows_first(ctx.scale * (grad_logits @ k), ctx.layout, heads),
            _rows_first(ctx.scale * (grad_logits.transpose(2, 3) @ q), ctx.kv_layout, ctx.kv_heads),
            _rows_first(stored_probs.transpose(2, 3) @ grad_out, ctx.kv_layout, ctx.kv_heads),
            *(None,) * 6,
        )


def jagged_flash_attention_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    kv_layout: Layout,
    window: tuple[int, int],
    scale: float,
    storage: torch.dtype,
    divide_last: bool,
) -> tuple[Tensor, Tensor]:
    return _RoundedAttention.apply(q, k, v, layout, kv_layout, window, scale, storage, divide_last)


def jagged_flash_attention_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    layout: Layout,
    kv_layout: Layout,
    window: tuple[int, int],
    scale: float,
) -> tuple[Tensor, ...]:
    """Of out and lse, and of dq, dk and dv if there are gradients.

    A logit is a sum of terms of size ``a = scale * sum(|q| * |k|)``, so that its error is one of P
    of ``P * (a + sum(P * a))``.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    visible = _visible(layout, kv_layout, window, q.device)[:, None]
    pq, pk, pv = (
        _heads_first(values, rows, heads)
        for values, rows in ((q, layout), (k, kv_layout), (v, kv_layout))
    )
    probs = _masked_softmax(scale * (pq @ pk.transpose(2, 3)), visible, dim=3)
    logit_terms = abs(scale) * (pq.abs() @ pk.abs().transpose(2, 3))
    mean_logit_terms = (probs * logit_terms).sum(3, keepdim=True)
    prob_terms = probs * (1 + logit_terms + mean_logit_terms)
    out_terms = prob_terms @ pv.abs()
    lse_terms = 1 + mean_logit_terms[..., 0]
    results = (
        unpad(out_terms.transpose(1, 2), layout),
        unpad(lse_terms.transpose(1, 2), layout),
    )
    if grad_out is None or grad_lse is None:
        return results
    grad_out = _heads_first(grad_out, layout, heads)
    grad_lse = _heads_first(grad_lse.unsqueeze(2), layout, heads)
    delta = (grad_out * (probs @ pv)).sum(3, keepdim=True) - grad_lse
    delta_terms = (grad_out.abs() * out_terms).sum(3, keepdim=True) + grad_lse.abs()
    grad_probs = grad_out @ pv.transpose(2, 3)
    grad_logit_terms = (prob_terms - probs) * (grad_probs - delta).abs() + probs * (
        grad_out.abs() @ pv.abs().transpose(2, 3) + delta_terms
    )
    return (
        *results,
        _rows_first(abs(scale) * (grad_logit_terms @ pk.abs()), layout, heads),
        _rows_first(
            abs(scale) * (grad_logit_terms.transpose(2, 3) @ pq.abs()), kv_layout, kv_heads
        ),
        _rows_first(prob_terms.transpose(2, 3) @ grad_out.abs(), kv_layout, kv_heads),
    )


# --- jagged_target_attention


def _dense_rows(values: Tensor) -> tuple[Tensor, Layout]:
    """`[B, N, ...]` as jagged rows `[B * N, ...]` of sequences that are all N long."""
    return values.flatten(0, 1), Layout((values.shape[1],) * values.shape[0])


def jagged_target_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """q `[B, N, H, D]`, k `[T, G, D]`, v `[T, G, Dv]` -> out `[B, N, H, Dv]`, lse `[B, N, H]`"""
    rows, queries = _dense_rows(q)
    out, lse = jagged_flash_attention(rows, k, v, queries, layout, (-1, -1), scale)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def jagged_target_attention_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scale: float,
    storage: torch.dtype,
    divide_last: bool,
) -> tuple[Tensor, Tensor]:
    rows, queries = _dense_rows(q)
    out, lse = jagged_flash_attention_rounded(
        rows, k, v, queries, layout, (-1, -1), scale, storage, divide_last
    )
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def jagged_target_attention_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, ...]:
    """Of out and lse, and of dq, dk and dv if there are gradients."""
    rows, queries = _dense_rows(q)
    grad_rows = None if grad_out is None else grad_out.flatten(0, 1)
    grad_lse_rows = None if grad_lse is None else grad_lse.flatten(0, 1)
    out, lse, *rest = jagged_flash_attention_terms(
        rows, k, v, grad_rows, grad_lse_rows, queries, layout, (-1, -1), scale
    )
    dense = [out, lse, *rest[:1]]
    return (*(t.unflatten(0, q.shape[:2]) for t in dense), *rest[1:])
