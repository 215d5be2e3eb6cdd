"""Self-attention, forward and backward apart, on batches from tiny histories to one giant."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.bench import peers, shapes
from jagged_cuda.bench.candidate import Candidate
from jagged_cuda.bench.checking import AttentionCheck
from jagged_cuda.bench.peers import AbsentError
from jagged_cuda.bench.session import HINTED, OURS, Row, Session
from jagged_cuda.bench.shapes import Precision
from jagged_cuda.bench.timing import memory_bytes
from jagged_cuda.testing.lengths import Layout

PEERS = ("varlen", "sdpa", "flex", "fa3", "cudnn", "sll")
DEFAULT_PEERS = ("varlen", "sdpa")
# Padded operands, results and gradients may take this part of the memory; else padding is left out.
PADDED_PART = 0.25


@dataclass(frozen=True)
class Case:
    """Self-attention of H heads of D; goals and peers' recorded times are of bf16 on one H100."""

    name: str
    draw: Callable[[random.Random], list[int]]
    heads: int
    dim: int
    causal: bool
    goal_us: tuple[float, float]  # forward, backward
    # FlashAttention-2, where the lengths, or the bytes, are the same whatever the seed.
    recorded_us: tuple[float, float] | None = None


ATTENTION_CASES = (
    Case("short", shapes.uniform(1024, 200), 4, 64, False, (90, 210), (223, 728)),
    Case("tail", shapes.log_normal(512, 250, 1.2, 4096), 4, 64, False, (900, 2500)),
    Case("u1024", shapes.uniform(256, 1024), 4, 128, False, (400, 1250)),
    Case("u4096_causal", shapes.uniform(64, 4096), 4, 128, True, (665, 2080)),
    Case("full4096", shapes.constant(8, 4096), 16, 128, False, (1680, 4860), (2938, 9013)),
    Case("full4096_causal", shapes.constant(8, 4096), 16, 128, True, (890, 2670), (1648, 4919)),
    Case("full4096_d64", shapes.constant(8, 4096), 16, 64, False, (1240, 2650), (1733, 5165)),
    Case("giant", shapes.giant(1024, 16384, 64), 4, 64, False, (620, 2000)),
    Case("tiny", shapes.uniform(4096, 50), 2, 32, False, (28, 75), (167, 539)),
)
CASES = tuple(case.name for case in ATTENTION_CASES)
# The others take minutes on a CPU: there they are run when they are named.
CASES_ON_CPU = ("short", "tiny")


@dataclass(frozen=True)
class Operands:
    """q, k, v and the gradient of the result, each `[T, H, D]`, drawn from a seed."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    offsets: Tensor
    causal: bool
    scale: float

    @classmethod
    def draw(
        cls,
        layout: Layout,
        heads: int,
        dim: int,
        causal: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Operands:
        torch.manual_seed(shapes.SEED)
        size = (layout.total, heads, dim)
        q, k, v, grad_out = (torch.randn(size, device=device).to(dtype) for _ in range(4))
        offsets = layout.offsets(device)
        return cls(layout, q, k, v, grad_out, offsets, causal, dim**-0.5)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def tensor_bytes(self) -> int:
        return self.q.numel() * self.q.element_size()

    @property
    def lse_bytes(self) -> int:
        return self.q.shape[0] * self.q.shape[1] * 4

    @property
    def forward_bytes(self) -> int:
        """q, k, v, out, LSE."""
        return 4 * self.tensor_bytes + self.lse_bytes

    @property
    def backward_bytes(self) -> int:
        """q, k, v, out, LSE, grad_out; dq, dk, dv."""
        return 8 * self.tensor_bytes + self.lse_bytes

    @property
    def flops(self) -> float:
        """Useful ones of the forward, 4 sum(L^2) H D, half if causal; backward: 2.5 times."""
        _, heads, dim = self.q.shape
        full = 4.0 * sum(n * n for n in self.layout.lengths) * heads * dim
        return full / 2 if self.causal else full

    def shape(self) -> dict[str, int | bool]:
        return {
            "B": self.layout.num_seqs,
            "T": self.layout.total,
            "max_len": self.layout.max_len,
            "H": self.q.shape[1],
            "D": self.q.shape[2],
            "causal": self.causal,
        }


# --- implementations


def ours(operands: Operands, hinted: bool) -> Candidate:
    max_len = operands.layout.max_len if hinted else None

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = jagged_cuda.jagged_flash_attention(
            q, k, v, operands.offsets, causal=operands.causal, max_len=max_len
        )
        return cast(Tensor, out)  # without its LSE

    return Candidate(function, operands.qkv, operands.grad_out)


def varlen(operands: Operands) -> Candidate:
    peers.need_cuda("varlen", operands.q.device)
    return _custom_function(peers.VarlenAttention.apply, operands)


def cudnn(operands: Operands) -> Candidate:
    peers.need_cuda("cudnn", operands.q.device)
    return _custom_function(peers.CudnnAttention.apply, operands)


def _custom_function(apply: Callable[..., Tensor], operands: Operands) -> Candidate:
    offsets, max_len = operands.offsets.int(), operands.layout.max_len
    return Candidate(
        lambda q, k, v: apply(q, k, v, offsets, max_len, operands.scale, operands.causal),
        operands.qkv,
        operands.grad_out,
    )


def fa3(operands: Operands) -> Candidate:
    peers.need_cuda("fa3", operands.q.device)
    function, has_backward = peers.flash_attention_3()
    offsets, max_len = operands.offsets.int(), operands.layout.max_len

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, offsets, offsets, max_len, max_len, causal=operands.causal)
        return found[0] if isinstance(found, tuple) else found

    return Candidate(attention, operands.qkv, operands.grad_out if has_backward else None)


def sdpa(operands: Operands) -> Candidate:
    layout, device = operands.layout, operands.q.device
    padded_bytes = operands.tensor_bytes // layout.total * layout.num_seqs * layout.max_len
    # q, k, v, out and their gradients; FlashAttention adds dq in float32.
    needed = padded_bytes * 8 + padded_bytes // operands.q.element_size() * 4
    if needed > PADDED_PART * memory_bytes(device):
        raise AbsentError(
            f"sdpa: padded, the batch of {layout.num_seqs} x {layout.max_len} rows needs"
            f" {needed / 2**30:.0f} GiB, more than {PADDED_PART:.0%} of the memory"
        )
    exact = operands.causal or min(layout.lengths) == layout.max_len
    mask = None
    if device.type == "cpu":
        mask = peers.inside(layout, device)[:, None, None, :]
        if operands.causal:
            ones = torch.ones(layout.max_len, layout.max_len, dtype=torch.bool, device=device)
            mask = mask & ones.tril()
        exact = True
    return Candidate(
        lambda q, k, v: peers.sdpa(q, k, v, mask, operands.scale, operands.causal),
        tuple(peers.pad_heads(tensor, layout) for tensor in operands.qkv),
        peers.pad_heads(operands.grad_out, layout),
        (lambda result: peers.unpad_heads(result, layout)) if exact else None,
    )


def flex(operands: Operands) -> Candidate:
    peers.need_cuda("flex", operands.q.device)
    function = peers.flex_attention(
        operands.layout, operands.q.device, operands.scale, operands.causal
    )
    inputs = tuple(tensor.transpose(0, 1)[None].contiguous() for tensor in operands.qkv)
    return Candidate(function, inputs, None, lambda result: result[0].transpose(0, 1))


def sll(operands: Operands, precision: Precision) -> Candidate:
    peers.need_cuda("sll", operands.q.device)
    if operands.causal:
        raise AbsentError("sll has no causal attention")
    peers.sll("triton_multi_head_jagged_flash_attention")
    max_len = operands.layout.max_len
    # It knows no scale and divides by max_len: q is scaled beforehand, and the result multiplied
    # for the check.
    scaled = (operands.q * operands.scale, operands.k, operands.v)
    return Candidate(
        lambda q, k, v: peers.sll_attention(
            q, k, v, operands.offsets, max_len, precision.allow_tf32
        ),
        tuple(tensor.transpose(0, 1).contiguous() for tensor in scaled),
        operands.grad_out.transpose(0, 1).contiguous(),
        lambda result: result.transpose(0, 1).float() * max_len,
    )


def candidates(
    session: Session,
    operands: Operands,
    precision: Precision,
    known: Sequence[str],
    default: Sequence[str],
    more: Mapping[str, Callable[[], Candidate]] | None = None,
) -> dict[str, Callable[[], Candidate]]:
    """Ours without and with max_len, and those of the known peers that were asked for."""
    makers: dict[str, Callable[[], Candidate]] = {
        "varlen": functools.partial(varlen, operands),
        "sdpa": functools.partial(sdpa, operands),
        "flex": functools.partial(flex, operands),
        "fa3": functools.partial(fa3, operands),
        "cudnn": functools.partial(cudnn, operands),
        "sll": functools.partial(sll, operands, precision),
        **(more or {}),
    }
    found: dict[str, Callable[[], Candidate]] = {
        OURS: functools.partial(ours, operands, False),
        HINTED: functools.partial(ours, operands, True),
    }
    return found | {name: makers[name] for name in session.peers(known, default)}


def run(session: Session) -> None:
    for precision in session.precisions(("bf16",), ("fp32",)):
        with precision.setting():
            for case in ATTENTION_CASES:
                if _is_selected(session, case):
                    if session.out_of_time():
                        session.note(f"attention: the time was spent before {case.name}")
                        return
                    session.progress(f"attention: {case.name} {precision.name}")
                    _run_case(session, case, precision)


def _is_selected(session: Session, case: Case) -> bool:
    if session.device.type == "cpu" and session.options.cases == ("*",):
        return session.options.quick or case.name in CASES_ON_CPU
    return session.selected(case.name)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    layout = shapes.layout(case.draw, quick)
    heads, dim = (2, 16) if quick else (case.heads, case.dim)
    operands = Operands.draw(layout, heads, dim, case.causal, session.device, precision.dtype)

    def row(pass_name: str, moved: int, flops: float, index: int) -> Row:
        new = Row(
            command="attention",
            case=case.name,
            pass_name=pass_name,
            precision=precision.name,
            shape=operands.shape(),
            seed=shapes.SEED,
            bytes=(moved,),
            flops=flops,
        )
        if session.is_reference_machine and precision.name == "bf16":
            new.goal_us = case.goal_us[index]
            if case.recorded_us is not None:
                new.recorded_us = {"varlen": case.recorded_us[index]}
        return session.add(new)

    forward = row("forward", operands.forward_bytes, operands.flops, 0)
    backward = row("backward", operands.backward_bytes, 2.5 * operands.flops, 1)
    check = AttentionCheck(
        layout,
        (*operands.qkv, operands.grad_out),
        operands.scale,
        case.causal,
        precision.limit,
    )
    session.run(
        forward,
        backward,
        candidates(session, operands, precision, PEERS, DEFAULT_PEERS),
        check.require_out,
        check.require_gradients,
    )
