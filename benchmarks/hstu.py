"""Attention as rankers use it: HSTU's masks, SiLU and biases, beside softmax attention and peers.

Each case is SiLU attention over sequences with 20 targets and 8 contextual rows, or a semi-local
one: each row sees the first 32 keys and the last 256. In the same run:
the same with softmax, causal softmax attention without ranges or biases, the same call without its
bias, FlexAttention (which has softmax) with the same mask and bias, its block mask made before the
clock starts or within, cuDNN's attention (softmax, too) with the same mask and kv_bias, and HSTU in
plain PyTorch on padded data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import jagged_cuda
from benchmarks import cudnn_flex, cudnn_frontend, peers, shapes
from benchmarks.candidate import Candidate
from benchmarks.checking import WrongResultError
from benchmarks.session import OURS, Command, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda import PositionBias, TimeBias, jagged_flash_attention, jagged_hstu_attention
from jagged_cuda.testing import padding
from jagged_cuda.testing.lengths import Layout

SOFTMAX = f"{OURS} softmax"  # with the same mask and bias
CAUSAL = f"{OURS} causal"  # softmax, causal and nothing else
UNBIASED = f"{OURS} unbiased"  # without the bias
RANGED = f"{OURS} ranges"  # the making of its ranges with it
BESIDE = (SOFTMAX, CAUSAL, UNBIASED, RANGED)
PEERS = ("flex", "flex_mask", "cudnn_flex", "padded_hstu")
HEADS, DIM, QUICK_DIM = 4, 64, 16
TARGETS, CONTEXT, NEAR = 20, 8, 256
FIRST = 32  # keys that all rows see, in semi-local attention
TIME_BUCKETS, POSITION_BUCKETS = 128, 1024
TIME_DIVISOR = 0.301
YEAR = 365 * 24 * 3600


@dataclass(frozen=True)
class _Case:
    """
    Args:
        near: max_attn_len of the mask; 0 for all.
        bias: kv_bias, time_bias, position_bias or none.
        learns: whether the gradient of the bias is wanted, too; then only the backward is timed.
        first: keys that each row sees beside the `near` last ones, without targets or context; 0
            for a mask of HSTU.
    """

    name: str
    num_seqs: int
    max_len: int
    near: int = 0
    bias: str = ""
    learns: bool = False
    first: int = 0


def _cases() -> tuple[_Case, ...]:
    found = []
    for num_seqs, max_len in ((128, 1024), (32, 4096)):
        size = (num_seqs, max_len)
        found += [_Case(f"hstu_{max_len}", *size), _Case(f"near_{max_len}", *size, near=NEAR)]
        found += [_Case(f"semi_local_{max_len}", *size, near=NEAR, first=FIRST)]
        for bias in ("kv_bias", "position_bias", "time_bias"):
            found += [
                _Case(f"{bias}_{max_len}", *size, bias=bias),
                _Case(f"{bias}_grad_{max_len}", *size, bias=bias, learns=True),
            ]
    return tuple(found)


CASES = _cases()


class _Operands(NamedTuple):
    """
    Args:
        table: of the bias: `[T]`, or `[H, R]`.
        time: `[T]`, ascending within a sequence.
    """

    case: _Case
    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    offsets: Tensor
    targets: Tensor
    ranges: Tensor
    table: Tensor | None
    time: Tensor
    boundaries: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        learned = (self.table,) if self.case.learns and self.table is not None else ()
        return (self.q, self.k, self.v, *learned)

    @property
    def divisor(self) -> float:
        return float(self.layout.max_len)

    def make_ranges(self) -> Tensor:
        if self.case.first > 0:
            end = jagged_cuda.jagged_positions(self.offsets, total=self.layout.total) + 1
            last = (end - self.case.near).clamp(min=self.case.first)
            bounds = (torch.zeros_like(end), end.clamp(max=self.case.first), last, end)
            return torch.stack(bounds, 1).unflatten(1, (2, 2))
        return jagged_cuda.hstu_key_ranges(
            self.offsets,
            num_targets=self.targets,
            contextual_len=CONTEXT,
            max_attn_len=self.case.near,
            total=self.layout.total,
        )

    def options(self, learned: Sequence[Tensor]) -> dict[str, Any]:
        """The bias, as our operators take it."""
        table = learned[0] if learned else self.table
        if self.case.bias == "kv_bias":
            return {"kv_bias": table}
        if self.case.bias == "position_bias":
            return {"position_bias": PositionBias(table)}
        if self.case.bias == "time_bias":
            return {"time_bias": TimeBias(table, self.time, self.time, self.boundaries)}
        return {}


def _draw(case: _Case, quick: bool, device: torch.device, dtype: torch.dtype) -> _Operands:
    layout = shapes.layout(shapes.uniform(case.num_seqs, case.max_len), quick)
    generator = torch.Generator().manual_seed(shapes.SEED)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size = (layout.total, HEADS, QUICK_DIM if quick else DIM)
    q, k, v, grad_out = (draw(*size).to(device, dtype) for _ in range(4))
    of_bias = {
        "": None,
        "kv_bias": draw(layout.total),
        "position_bias": draw(HEADS, POSITION_BUCKETS),
        "time_bias": draw(HEADS, TIME_BUCKETS),
    }[case.bias]
    time = torch.cat(
        [torch.randint(0, YEAR, (n,), generator=generator).sort()[0] for n in layout.lengths]
    )
    lengths = torch.tensor(layout.lengths)
    found = _Operands(
        case,
        layout,
        *(q, k, v, grad_out),
        layout.offsets(device),
        torch.minimum(lengths // 2, torch.tensor(TARGETS)).to(device),
        torch.empty(0),
        None if of_bias is None else of_bias.to(device),
        time.to(device),
        jagged_cuda.log_boundaries(TIME_BUCKETS, TIME_DIVISOR).to(device),
    )
    return found._replace(ranges=found.make_ranges())


# --- ours


def _silu(o: _Operands, ranges: Tensor | None, *leaves: Tensor) -> Tensor:
    return jagged_hstu_attention(
        *leaves[:3],
        o.offsets,
        divisor=o.divisor,
        key_ranges=o.make_ranges() if ranges is None else ranges,
        **o.options(leaves[3:]),
    )


def _softmax(o: _Operands, *leaves: Tensor) -> Tensor:
    return jagged_flash_attention(
        *leaves[:3], o.offsets, key_ranges=o.ranges, **o.options(leaves[3:])
    )


def _causal(o: _Operands, *leaves: Tensor) -> Tensor:
    return jagged_flash_attention(*leaves, o.offsets, causal=True)


# --- peers


def _bucket_of(o: _Operands, away: Tensor) -> Tensor:
    """Without a search, which FlexAttention cannot do: of few distances another one."""
    bucket = away.clamp(min=1).float().log() / TIME_DIVISOR
    return bucket.to(torch.int32).clamp(max=TIME_BUCKETS - 1)


def _flex_functions(o: _Operands) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """The mask, and what makes the function that adds a bias."""
    device = o.q.device
    seq_of_row = o.layout.seq_of_row(device)
    begin = o.offsets[seq_of_row]
    ranges = o.ranges + begin[:, None, None]
    (first, first_end), (second, second_end) = (ranges[:, i].contiguous().T for i in (0, 1))

    def mask(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = ((key >= first[row]) & (key < first_end[row])) | (
            (key >= second[row]) & (key < second_end[row])
        )
        return seen & (seq_of_row[row] == seq_of_row[key])

    def adds(table: Tensor | None) -> Callable[..., Tensor] | None:
        if table is None:
            return None

        def add(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            if o.case.bias == "kv_bias":
                return score + table[key]
            if o.case.bias == "position_bias":
                return score + table[head, (row - key).clamp(0, POSITION_BUCKETS - 1)]
            return score + table[head, _bucket_of(o, (o.time[row] - o.time[key]).abs())]

        return add

    return mask, adds


def _flex(o: _Operands, with_mask: bool) -> Candidate:
    from torch.nn.attention import flex_attention

    peers.need_cuda("flex", o.q.device)
    rows = o.layout.total
    mask, adds = _flex_functions(o)

    def make_mask() -> Any:
        return flex_attention.create_block_mask(
            mask, None, None, rows, rows, o.q.device, _compile=True
        )

    made = make_mask()
    torch.compiler.reset()  # else it would give up after a few shapes, and run unfused
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        add = adds(learned[0] if learned else o.table)
        return compiled(q, k, v, score_mod=add, block_mask=make_mask() if with_mask else made)

    return Candidate(
        attend,
        (*(t.transpose(0, 1)[None].contiguous() for t in (o.q, o.k, o.v)), *o.inputs[3:]),
        o.grad_out.transpose(0, 1)[None].contiguous(),
        None,  # softmax
    )


def _cudnn_flex(o: _Operands) -> Candidate:
    peers.need_cuda("cudnn_flex", o.q.device)
    if o.case.bias not in ("", "kv_bias"):
        raise peers.AbsentError(
            f"cudnn_flex has no {o.case.bias}: a score_mod of cuDNN's cannot look up in a table"
        )
    if o.case.learns:
        raise peers.AbsentError("cudnn_flex has no gradient of kv_bias: cuDNN's leaves its memory")
    scale = o.q.shape[-1] ** -0.5
    ranged = cudnn_flex.RangedAttention(o.q, o.k, o.layout, scale, o.ranges, o.table)
    return Candidate(
        lambda q, k, v: cudnn_frontend.Attention.apply(q, k, v, ranged),
        o.inputs,
        o.grad_out,
        has_our_gradients=True,
    )


def _padded_visible(o: _Operands) -> Tensor:
    """`[B, 1, M, M]`"""
    ranges = padding.pad(o.ranges, o.layout)[:, None]  # [B, 1, M, 2, 2]
    key = torch.arange(o.layout.max_len, device=o.q.device)
    seen = [(key >= ranges[..., i, 0, None]) & (key < ranges[..., i, 1, None]) for i in (0, 1)]
    return seen[0] | seen[1]


def _padded_bias(o: _Operands, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Broadcasts to `[B, H, M, M]`."""
    if o.case.bias == "kv_bias":
        return padding.pad(table.to(dtype), o.layout)[:, None, None]
    if o.case.bias == "position_bias":
        place = torch.arange(o.layout.max_len, device=o.q.device)
        return table.to(dtype)[None, :, (place[:, None] - place).clamp(0, POSITION_BUCKETS - 1)]
    time = padding.pad(o.time, o.layout)
    away = (time[:, :, None] - time[:, None]).abs()
    bucket = torch.searchsorted(o.boundaries, away, right=True)
    return table.to(dtype)[:, bucket].transpose(0, 1)


def _padded(o: _Operands) -> Candidate:
    """HSTU's attention in PyTorch; masks are made beforehand, the bias within, as HSTU does."""

    def pad(tensor: Tensor) -> Tensor:  # -> [B, H, M, D]
        return padding.pad(tensor, o.layout).transpose(1, 2).contiguous()

    visible = _padded_visible(o)

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) * o.q.shape[-1] ** -0.5
        table = learned[0] if learned else o.table
        if table is not None:
            scores = scores + _padded_bias(o, table, scores.dtype)
        return (F.silu(scores) / o.divisor * visible) @ v

    return Candidate(
        attend,
        (*(pad(t) for t in (o.q, o.k, o.v)), *o.inputs[3:]),
        pad(o.grad_out),
        lambda result: padding.unpad(result.transpose(1, 2), o.layout),
    )


# --- the check


class _Check:
    """The definition in float64, of the median and the longest sequence."""

    def __init__(self, o: _Operands, softmax: bool = False) -> None:
        lengths = o.layout.lengths
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.expected = []
        for seq in (order[len(order) // 2], order[-1]):
            begin = int(o.layout.offsets()[seq])
            rows = slice(begin, begin + lengths[seq])
            q, k, v = (t[rows].double().transpose(0, 1).requires_grad_() for t in (o.q, o.k, o.v))
            alone = o._replace(
                layout=Layout((lengths[seq],)),
                ranges=o.ranges[rows],
                time=o.time[rows],
                table=o.table[rows]
                if o.case.bias == "kv_bias" and o.table is not None
                else o.table,
            )
            scores = q @ k.transpose(1, 2) * o.q.shape[-1] ** -0.5
            if alone.table is not None:
                scores = scores + _padded_bias(alone, alone.table, torch.float64)[0]
            visible = _padded_visible(alone)[0]
            weights = (
                scores.masked_fill(~visible, -torch.inf).softmax(2)
                if softmax
                else F.silu(scores) / o.divisor * visible
            )
            out = (weights @ v).transpose(0, 1)
            grads = torch.autograd.grad(out, (q, k, v), o.grad_out[rows].double())
            self.expected.append((rows, out.detach(), [g.transpose(0, 1) for g in grads]))

    @staticmethod
    def _require(what: str, found: Tensor, expected: Tensor, slack: float) -> None:
        limit = 8 * slack * torch.finfo(found.dtype).eps * float(expected.abs().max())
        error = float((found.double() - expected).abs().max())
        if not error <= limit:
            raise WrongResultError(f"wrong {what} of attention: {error:.3g} for {limit:.3g}")

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        for rows, expected, _ in self.expected:
            self._require("result", out[rows], expected, slack)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        for rows, _, expected in self.expected:
            for found, wanted in zip(gradients[:3], expected, strict=True):
                self._require("gradient", found[rows], wanted, 1.0)


def _makers(o: _Operands) -> dict[str, Callable[[], Candidate]]:
    unbiased = o._replace(case=_Case(o.case.name, 0, 0, o.case.near), table=None)

    def ours(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Candidate:
        return Candidate(function, inputs, o.grad_out)

    partial = functools.partial
    found: dict[str, Callable[[], Candidate]] = {
        OURS: partial(ours, partial(_silu, o, o.ranges), o.inputs),
        SOFTMAX: partial(ours, partial(_softmax, o), o.inputs),
        CAUSAL: partial(ours, partial(_causal, o), o.inputs[:3]),
        UNBIASED: partial(ours, partial(_silu, unbiased, o.ranges), o.inputs[:3]),
        RANGED: partial(ours, partial(_silu, o, None), o.inputs),
        "flex": partial(_flex, o, False),
        "flex_mask": partial(_flex, o, True),
        "cudnn_flex": partial(_cudnn_flex, o),
        "padded_hstu": partial(_padded, o),
    }
    if not o.case.bias:
        del found[UNBIASED]
    if o.case.learns:
        del found[RANGED], found["flex_mask"]
    return found


def _run_case(session: Session, case: _Case, precision: Precision) -> None:
    o = _draw(case, session.options.quick, session.device, precision.dtype)
    shape = {"B": o.layout.num_seqs, "T": o.layout.total, "max_len": o.layout.max_len}
    shape |= {"H": HEADS, "D": o.q.shape[-1]}
    shape |= {"first": case.first} if case.first else {"targets": TARGETS, "context": CONTEXT}
    rows = [
        session.add(Row("hstu", case.name, name, precision.name, shape, shapes.SEED))
        for name in (("backward",) if case.learns else ("forward", "backward"))
    ]
    makers = _makers(o)
    checks = {OURS: _Check(o), SOFTMAX: _Check(o, softmax=True)}
    checks |= {RANGED: checks[OURS], "padded_hstu": checks[OURS], "cudnn_flex": checks[SOFTMAX]}
    wanted = (OURS, *BESIDE, *session.peers(COMMAND))
    for name in wanted:
        if name in makers:
            session.run(rows, {name: makers[name]}, checks.get(name, _Unchecked()))


class _Unchecked:
    """For what another case judges."""

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        pass

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        pass


def _run(session: Session) -> None:
    session.each_case("hstu", CASES, _run_case)


COMMAND = Command(tuple(case.name for case in CASES), _run, PEERS, PEERS)
