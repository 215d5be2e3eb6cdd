"""Implementations of attention, made ready to run: ours, and each peer in the layout it wants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jagged_cuda
from benchmarks import cudnn_frontend, peers, shapes
from benchmarks.candidate import Candidate
from benchmarks.checking import AttentionCheck
from benchmarks.operands import Operands
from benchmarks.peers import AbsentError
from benchmarks.session import HINTED, OURS, UNFUSED, Row, Session
from benchmarks.shapes import Precision
from benchmarks.timing import memory_bytes
from jagged_cuda import unfused
from jagged_cuda.testing import padding

# Padded operands, results and gradients may take this part of the memory; else padding is left out.
PADDED_PART = 0.25

Maker = Callable[[], Candidate]


def ours(operands: Operands, hinted: bool) -> Candidate:
    options: dict[str, Any] = {"max_len": operands.layout.max_len if hinted else None}
    operator: Callable[..., Any] = jagged_cuda.jagged_target_attention
    if operands.queries is None:
        operator, options["causal"] = jagged_cuda.jagged_flash_attention, operands.causal
    return Candidate(
        lambda q, k, v: operator(q, k, v, operands.offsets, **options),
        operands.qkv,
        operands.grad_out,
    )


def unfused_attention(operands: Operands) -> Candidate:
    """Three operators of ours, the scores in memory: self-attention of one head."""
    offsets = operands.offsets
    matrix_offsets = jagged_cuda.matrix_offsets(offsets)
    total_scores = sum(length**2 for length in operands.layout.lengths)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = unfused.jagged_attention(
            q.squeeze(1),
            k.squeeze(1),
            v.squeeze(1),
            offsets,
            matrix_offsets=matrix_offsets,
            total_scores=total_scores,
        )
        return out.unsqueeze(1)

    return Candidate(function, operands.qkv, operands.grad_out)


# --- peers on jagged data: q and the gradient as [rows, H, D], queries as sequences of N


def _jagged(operands: Operands, function: Callable[..., Tensor], backward: bool) -> Candidate:
    q, grad_out = (tensor.flatten(0, -3) for tensor in (operands.q, operands.grad_out))
    return Candidate(
        function,
        (q, operands.k, operands.v),
        grad_out if backward else None,
        lambda result: result.reshape(operands.q.shape),
    )


def _sizes(operands: Operands, dtype: torch.dtype) -> peers.Sizes:
    offsets = (operands.query_offsets.to(dtype), operands.offsets.to(dtype))
    return (*offsets, operands.max_queries, operands.layout.max_len)


def varlen(operands: Operands) -> Candidate:
    peers.need_cuda("varlen", operands.q.device)
    options = (_sizes(operands, torch.int32), operands.scale, operands.causal)
    return _jagged(operands, lambda q, k, v: peers.VarlenAttention.apply(q, k, v, *options), True)


def cudnn_graph(operands: Operands) -> Candidate:
    peers.need_cuda("cudnn_frontend", operands.q.device)
    options = (_sizes(operands, torch.int64), operands.scale, operands.causal)
    ragged = cudnn_frontend.RaggedAttention(operands.q.flatten(0, -3), operands.k, *options)
    return _jagged(operands, lambda q, k, v: cudnn_frontend.Attention.apply(q, k, v, ragged), True)


def fa3(operands: Operands) -> Candidate:
    peers.need_cuda("fa3", operands.q.device)
    function, has_backward = peers.flash_attention_3()
    sizes = _sizes(operands, torch.int32)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, *sizes, causal=operands.causal)
        return found[0] if isinstance(found, tuple) else found

    return _jagged(operands, attention, has_backward)


def flex(operands: Operands) -> Candidate:
    """Self-attention under a block mask by sequence, which is made before the clock starts."""
    from torch.nn.attention import flex_attention

    peers.need_cuda("flex", operands.q.device)
    seq_of_row = operands.layout.seq_of_row(operands.q.device)

    def mask(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        same = seq_of_row[row] == seq_of_row[key]
        return same & (row >= key) if operands.causal else same

    rows = operands.layout.total
    block_mask = flex_attention.create_block_mask(
        mask, None, None, rows, rows, operands.q.device, _compile=True
    )
    torch.compiler.reset()  # else it would give up after a few shapes, and run unfused
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    return Candidate(
        lambda q, k, v: compiled(q, k, v, block_mask=block_mask, scale=operands.scale),
        tuple(tensor.transpose(0, 1)[None].contiguous() for tensor in operands.qkv),
        None,
        lambda result: result[0].transpose(0, 1),
    )


def sll(operands: Operands, precision: Precision) -> Candidate:
    peers.need_cuda("sll", operands.q.device)
    if operands.queries is not None:
        return _sll_target(operands, precision)
    if operands.causal:
        raise AbsentError("sll has no causal attention")
    function = peers.sll(
        "triton_multi_head_jagged_flash_attention"
    ).multi_head_jagged_flash_attention
    options = (operands.offsets, operands.layout.max_len, precision.allow_tf32)
    # It knows no scale and divides by max_len: q is scaled beforehand, and the result multiplied
    # for the check.
    scaled = (operands.q * operands.scale, operands.k, operands.v)
    return Candidate(
        lambda q, k, v: function(q, k, v, *options),
        tuple(tensor.transpose(0, 1).contiguous() for tensor in scaled),
        operands.grad_out.transpose(0, 1).contiguous(),
        lambda result: result.transpose(0, 1).float() * operands.layout.max_len,
    )


def _sll_target(operands: Operands, precision: Precision) -> Candidate:
    """Three operators: logits as a jagged product, their softmax, and the weighted sum."""
    products, softmax = peers.sll("triton_jagged_bmm"), peers.sll("triton_jagged_softmax")
    offsets, max_len, tf32 = operands.offsets, operands.layout.max_len, precision.allow_tf32

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        transposed = (operands.scale * q).transpose(1, 2).contiguous()
        logits = products.jagged_dense_bmm(
            k, transposed, offsets, max_len, tf32, use_fbgemm_kernel=False
        )
        weights = softmax.jagged_softmax(logits, offsets, max_len, use_fbgemm_kernel=False)
        return products.jagged_jagged_bmm(
            weights, v, offsets, max_len, tf32, use_fbgemm_kernel=False
        )

    q, grad_out = operands.q.squeeze(2), operands.grad_out.squeeze(2)
    inputs = (q, operands.k.squeeze(1), operands.v.squeeze(1))
    return Candidate(attention, inputs, grad_out, lambda result: result.unsqueeze(2))


# --- peers on padded data


def sdpa(operands: Operands) -> Candidate:
    layout, device = operands.layout, operands.q.device
    kv_elems = operands.k.numel() // layout.total * layout.num_seqs * layout.max_len
    q_elems = kv_elems if operands.queries is None else operands.q.numel()
    # q, k, v, out and their gradients; FlashAttention adds dq in float32.
    needed = 4 * (q_elems + kv_elems) * operands.q.element_size() + 4 * q_elems
    if needed > PADDED_PART * memory_bytes(device):
        raise AbsentError(
            f"sdpa: padded, the batch of {layout.num_seqs} x {layout.max_len} rows needs"
            f" {needed / 2**30:.0f} GiB, more than {PADDED_PART:.0%} of the memory"
        )

    def pad(tensor: Tensor) -> Tensor:  # -> [B, H, M, D]
        padded = tensor if tensor.dim() == 4 else padding.pad(tensor, layout)
        return padded.transpose(1, 2).contiguous()

    def rows(result: Tensor) -> Tensor:
        rows = result.transpose(1, 2)
        return rows if operands.queries is not None else padding.unpad(rows, layout)

    mask = None
    if device.type == "cpu":
        mask = padding.inside(layout, device)[:, None, None, :]
        if operands.causal:
            ones = torch.ones(layout.max_len, layout.max_len, dtype=torch.bool, device=device)
            mask = mask & ones.tril()
    exact = mask is not None or operands.causal or min(layout.lengths) == layout.max_len
    options = {"attn_mask": mask, "scale": operands.scale}
    options["is_causal"] = operands.causal and mask is None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # On a GPU FlashAttention, nothing else.
        backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext()
        with backend:
            return F.scaled_dot_product_attention(q, k, v, **options)

    return Candidate(
        attention,
        tuple(pad(tensor) for tensor in operands.qkv),
        pad(operands.grad_out),
        rows if exact else None,
    )


def dense(operands: Operands) -> Candidate:
    """Unfused self-attention of one head on padded data."""
    layout = operands.layout
    outside = ~padding.inside(layout, operands.q.device)[:, None, :]

    def pad(tensor: Tensor) -> Tensor:  # [T, 1, D] -> [B, M, D]
        return padding.pad(tensor.squeeze(1), layout)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.bmm(q, k.transpose(1, 2)) * operands.scale
        weights = logits.masked_fill(outside, -torch.inf).softmax(2)
        return torch.bmm(weights, v)

    return Candidate(
        attention,
        tuple(pad(tensor) for tensor in operands.qkv),
        pad(operands.grad_out),
        lambda result: padding.unpad(result, layout).unsqueeze(1),
    )


def makers(operands: Operands, precision: Precision) -> dict[str, Maker]:
    """Every implementation by name; nothing is made yet."""
    return {
        OURS: functools.partial(ours, operands, False),
        HINTED: functools.partial(ours, operands, True),
        UNFUSED: functools.partial(unfused_attention, operands),
        "dense": functools.partial(dense, operands),
        "varlen": functools.partial(varlen, operands),
        "sdpa": functools.partial(sdpa, operands),
        "fa3": functools.partial(fa3, operands),
        "cudnn_frontend": functools.partial(cudnn_graph, operands),
        "flex": functools.partial(flex, operands),
        "sll": functools.partial(sll, operands, precision),
    }


# --- shared by all commands of attention


def row(command: str, case: str, pass_name: str, operands: Operands, precision: Precision) -> Row:
    moved, flops = operands.counts(pass_name)
    return Row(
        command=command,
        case=case,
        pass_name=pass_name,
        precision=precision.name,
        shape=operands.shape(),
        seed=shapes.SEED,
        bytes=moved,
        flops=flops,
    )


def measure(
    session: Session,
    rows: Sequence[Row],
    operands: Operands,
    precision: Precision,
    names: Sequence[str],
) -> None:
    """Check and time these implementations, those that have their scores in memory as such."""
    found = makers(operands, precision)
    checks = [
        AttentionCheck(operands, in_memory)
        for in_memory in ((False, True) if UNFUSED in names else (False,))
    ]
    for name in names:
        session.run(rows, {name: found[name]}, checks[name == UNFUSED])
