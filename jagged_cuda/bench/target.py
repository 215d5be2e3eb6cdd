"""Target attention, items against histories: forward, and forward and backward together."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

import jagged_cuda
from jagged_cuda.bench import checking, peers, shapes
from jagged_cuda.bench.candidate import Candidate
from jagged_cuda.bench.peers import AbsentError
from jagged_cuda.bench.session import HINTED, OURS, PEER_SLACK, Row, Session
from jagged_cuda.bench.shapes import Precision
from jagged_cuda.bench.timing import memory_bytes
from jagged_cuda.testing import reference
from jagged_cuda.testing.lengths import Layout

PEERS = ("varlen", "sdpa", "sll", "fa3")
DEFAULT_PEERS = ("varlen", "sdpa", "sll")
# Padded operands, results and gradients may take this part of the memory; else padding is left out.
PADDED_PART = 0.25
QUICK_QUERIES, QUICK_DIM = 5, 16


@dataclass(frozen=True)
class Case:
    """N queries of one head of D a sequence; goals are of bf16 on one H100."""

    name: str
    draw: Callable[[random.Random], list[int]]
    dim: int
    queries: int
    goal_us: tuple[float, float]  # forward, forward and backward


TARGET_CASES = (
    Case("paper", shapes.uniform(1024, 200), 256, 8, (46, 140)),
    Case("din", shapes.log_normal(4096, 60, 1.2, 1024), 64, 1, (49, 150)),
    Case("long", shapes.log_normal(256, 1500, 1.0, 10000), 128, 32, (113, 350)),
    Case("u10000", shapes.uniform(64, 10000), 128, 100, (75, 240)),
)
CASES = tuple(case.name for case in TARGET_CASES)
# The others take minutes on a CPU: there they are run when they are named.
CASES_ON_CPU = ("paper",)


@dataclass(frozen=True)
class Operands:
    """q and the gradient of the result `[B, N, D]`, k and v `[T, D]`, drawn from a seed."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    offsets: Tensor
    scale: float

    @classmethod
    def draw(
        cls, layout: Layout, queries: int, dim: int, device: torch.device, dtype: torch.dtype
    ) -> Operands:
        torch.manual_seed(shapes.SEED)
        dense, jagged = (layout.num_seqs, queries, dim), (layout.total, dim)
        q, k, v, grad_out = (
            torch.randn(size, device=device).to(dtype) for size in (dense, jagged, jagged, dense)
        )
        return cls(layout, q, k, v, grad_out, layout.offsets(device), dim**-0.5)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def queries(self) -> int:
        return self.q.shape[1]

    @property
    def forward_bytes(self) -> int:
        """q, k, v, out, LSE."""
        elems = 2 * self.q.numel() + 2 * self.k.numel()
        return elems * self.q.element_size() + self.q.shape[0] * self.queries * 4

    @property
    def backward_bytes(self) -> int:
        """q, k, v, out, LSE, grad_out; dq, dk, dv."""
        elems = 4 * self.q.numel() + 4 * self.k.numel()
        return elems * self.q.element_size() + self.q.shape[0] * self.queries * 4

    @property
    def flops(self) -> float:
        """Of the forward; the backward has 2.5 times as many."""
        return 4.0 * self.queries * self.k.numel()

    def shape(self) -> dict[str, int]:
        return {
            "B": self.layout.num_seqs,
            "T": self.layout.total,
            "max_len": self.layout.max_len,
            "N": self.queries,
            "D": self.q.shape[2],
        }


class Check:
    """Judges a result and gradients on a few sequences, against float64."""

    def __init__(self, operands: Operands, limit: float) -> None:
        self.layout = operands.layout
        self.limit = limit
        order = sorted(range(self.layout.num_seqs), key=lambda seq: self.layout.lengths[seq])
        judged = [s for s in order if self.layout.lengths[s] >= checking.MIN_ROWS_OF_GRADIENTS]
        judged = judged or order
        begins = self.layout.offsets()
        self.samples = []
        seqs = {judged[0], judged[len(judged) // 2], judged[-1], self.layout.num_seqs - 1}
        for seq in sorted(seqs):
            rows = slice(int(begins[seq]), int(begins[seq + 1]))
            q, k, v = operands.q[seq], operands.k[rows], operands.v[rows]
            found = checking.attention_of_one_head(
                q, k, v, operands.grad_out[seq], operands.scale, False
            )
            self.samples.append((seq, rows, found))

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        """Check the result, `[B, N, D]`."""
        for seq, _, found in self.samples:
            self._require("out", seq, out[seq], found[0], slack * self.limit)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Check dq, dk and dv, like q, k and v."""
        dq, dk, dv = gradients
        for seq, rows, found in self.samples:
            if rows.stop - rows.start < checking.MIN_ROWS_OF_GRADIENTS:
                continue
            for name, actual, exact in zip(
                ("dq", "dk", "dv"), (dq[seq], dk[rows], dv[rows]), found[1:], strict=True
            ):
                self._require(name, seq, actual, exact, self.limit)

    def _require(self, name: str, seq: int, actual: Tensor, exact: Tensor, limit: float) -> None:
        if actual.shape != exact.shape:
            raise checking.WrongResultError(
                f"wrong {name}: shape {list(actual.shape)}, expected {list(exact.shape)}"
            )
        owner = torch.zeros(exact.shape[0], dtype=torch.int64, device=exact.device)
        errors = checking.relative_errors(actual, exact, owner, 1)
        length = self.layout.lengths[seq]
        checking.require(f"{name} of sequence {seq} ({length} rows)", errors, limit)


# --- implementations


def ours(operands: Operands, hinted: bool) -> Candidate:
    max_len = operands.layout.max_len if hinted else None

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = jagged_cuda.jagged_target_attention(q, k, v, operands.offsets, max_len=max_len)
        return cast(Tensor, out)  # without its LSE

    return Candidate(function, operands.qkv, operands.grad_out)


def _as_jagged(operands: Operands) -> tuple[Tensor, ...]:
    """q, k, v and the gradient as `[rows, 1, D]`, queries of sequences that are all N long."""
    q, grad_out = operands.q.flatten(0, 1), operands.grad_out.flatten(0, 1)
    return tuple(t.unsqueeze(1) for t in (q, operands.k, operands.v, grad_out))


def _query_offsets(operands: Operands) -> Tensor:
    count = operands.layout.num_seqs + 1
    return operands.queries * torch.arange(count, dtype=torch.int32, device=operands.q.device)


def _dense(operands: Operands, result: Tensor) -> Tensor:
    return result.reshape(operands.q.shape)


def varlen(operands: Operands) -> Candidate:
    peers.need_cuda("varlen", operands.q.device)
    *qkv, grad_out = _as_jagged(operands)
    offsets, query_offsets = operands.offsets.int(), _query_offsets(operands)
    return Candidate(
        lambda q, k, v: peers.VarlenAttention.apply(
            q,
            k,
            v,
            offsets,
            operands.layout.max_len,
            operands.scale,
            False,
            query_offsets,
            operands.queries,
        ),
        tuple(qkv),
        grad_out,
        functools.partial(_dense, operands),
    )


def fa3(operands: Operands) -> Candidate:
    peers.need_cuda("fa3", operands.q.device)
    function, has_backward = peers.flash_attention_3()
    *qkv, grad_out = _as_jagged(operands)
    offsets, query_offsets = operands.offsets.int(), _query_offsets(operands)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longest = (operands.queries, operands.layout.max_len)
        found = function(q, k, v, query_offsets, offsets, *longest)
        return found[0] if isinstance(found, tuple) else found

    return Candidate(
        attention,
        tuple(qkv),
        grad_out if has_backward else None,
        functools.partial(_dense, operands),
    )


def sdpa(operands: Operands) -> Candidate:
    layout, device = operands.layout, operands.q.device
    needed = layout.num_seqs * layout.max_len * operands.k.shape[1] * operands.k.element_size() * 4
    if needed > PADDED_PART * memory_bytes(device):
        raise AbsentError(
            f"sdpa: padded, the batch of {layout.num_seqs} x {layout.max_len} rows needs"
            f" {needed / 2**30:.0f} GiB, more than {PADDED_PART:.0%} of the memory"
        )
    mask = peers.inside(layout, device)[:, None, None, :] if device.type == "cpu" else None
    exact = mask is not None or min(layout.lengths) == layout.max_len
    q, grad_out = operands.q.unsqueeze(1), operands.grad_out.unsqueeze(1)
    return Candidate(
        lambda q, k, v: peers.sdpa(q, k, v, mask, operands.scale, False),
        (q, *(reference.pad(t, layout).unsqueeze(1) for t in (operands.k, operands.v))),
        grad_out,
        (lambda result: result.squeeze(1)) if exact else None,
    )


def sll(operands: Operands, precision: Precision) -> Candidate:
    """Three operators: logits as a jagged product, their softmax, and the weighted sum."""
    peers.need_cuda("sll", operands.q.device)
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

    return Candidate(attention, operands.qkv, operands.grad_out)


# --- the run


def run(session: Session) -> None:
    for precision in session.precisions(("bf16",), ("fp32",)):
        with precision.setting():
            for case in TARGET_CASES:
                if _is_selected(session, case):
                    if session.out_of_time():
                        session.note(f"target: the time was spent before {case.name}")
                        return
                    session.progress(f"target: {case.name} {precision.name}")
                    _run_case(session, case, precision)


def _is_selected(session: Session, case: Case) -> bool:
    if session.device.type == "cpu" and session.options.cases == ("*",):
        return session.options.quick or case.name in CASES_ON_CPU
    return session.selected(case.name)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    queries, dim = (QUICK_QUERIES, QUICK_DIM) if quick else (case.queries, case.dim)
    layout = shapes.layout(case.draw, quick)
    operands = Operands.draw(layout, queries, dim, session.device, precision.dtype)

    def row(pass_name: str, moved: tuple[int, ...], flops: float, index: int) -> Row:
        new = Row(
            command="target",
            case=case.name,
            pass_name=pass_name,
            precision=precision.name,
            shape=operands.shape(),
            seed=shapes.SEED,
            bytes=moved,
            flops=flops,
        )
        if session.is_reference_machine and precision.name == "bf16":
            new.goal_us = case.goal_us[index]
        return session.add(new)

    forward = row("forward", (operands.forward_bytes,), operands.flops, 0)
    both = (operands.forward_bytes, operands.backward_bytes)
    step = row("forward+backward", both, 3.5 * operands.flops, 1)
    check = Check(operands, precision.limit)
    makers: dict[str, Callable[[], Candidate]] = {
        OURS: functools.partial(ours, operands, False),
        HINTED: functools.partial(ours, operands, True),
        "varlen": functools.partial(varlen, operands),
        "sdpa": functools.partial(sdpa, operands),
        "sll": functools.partial(sll, operands, precision),
        "fa3": functools.partial(fa3, operands),
    }
    for name in (OURS, HINTED, *session.peers(PEERS, DEFAULT_PEERS)):
        with session.guard(name, forward, step) as guard:
            candidate = makers[name]()
            if candidate.rows is not None:
                slack = 1.0 if guard.is_ours else PEER_SLACK
                check.require_out(candidate.rows(candidate.forward()), slack)
            forward.set_measurement(name, session.timer.measure(candidate.forward))
            guard.rows = [step]  # what fails from here on is the backward
            if candidate.grad_out is None:
                raise AbsentError(f"{name} has no backward here")
            if guard.is_ours:
                check.require_gradients(candidate.step()[1:])
            step.set_measurement(name, session.timer.measure(candidate.step))
        session.after_row()
