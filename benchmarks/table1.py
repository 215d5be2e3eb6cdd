"""The operators of the paper's Table 1 at its shape: B 1024, lengths U[1, 200], D 256, N 8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import jagged_cuda
from benchmarks import checking, peers, shapes
from benchmarks.candidate import Candidate
from benchmarks.session import OURS, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing import cases as testing
from jagged_cuda.testing import padding
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec

PEERS = ("padded", "sll")
DEFAULT_PEERS = PEERS
NUM_SEQS, MAX_LEN, DIM, COLUMNS = 1024, 200, 256, 8
QUICK_DIM = 32


@dataclass(frozen=True)
class Batch:
    """The operands of the operators, drawn from a seed."""

    layout: Layout
    dim: int
    columns: int
    offsets: Tensor
    x: Tensor  # [T, D]
    y_dense: Tensor  # [B, D, N]
    y_jagged: Tensor  # [T, N]
    y_wide: Tensor  # [T, D]
    a: Tensor  # [sum L*L]
    matrix_offsets: Tensor

    def shape(self) -> dict[str, int]:
        sizes = {"B": self.layout.num_seqs, "T": self.layout.total, "max_len": self.layout.max_len}
        return sizes | {"D": self.dim, "N": self.columns}


def draw_batch(layout: Layout, device: torch.device, dtype: torch.dtype, quick: bool) -> Batch:
    dim, columns = (QUICK_DIM if quick else DIM), COLUMNS
    torch.manual_seed(shapes.SEED)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    offsets = layout.offsets(device)
    return Batch(
        layout,
        dim,
        columns,
        offsets,
        draw(layout.total, dim),
        draw(layout.num_seqs, dim, columns),
        draw(layout.total, columns),
        draw(layout.total, dim),
        draw(sum(length**2 for length in layout.lengths)),
        jagged_cuda.matrix_offsets(offsets),
    )


@dataclass(frozen=True)
class Operator:
    """One operator on a batch.

    Args:
        inputs: what it is differentiated by.
        ours, padded, sll: take a batch, return the function of the inputs.
        backward_elems: the elements that each kernel of the backward must move.
        goal_us: of the forward by precision, on one H100.
        recorded_us: by precision and peer, where the goals come from.
        dim: of jagged2_softmax.
    """

    name: str
    inputs: Callable[[Batch], tuple[Tensor, ...]]
    ours: Callable[[Batch], Callable[..., Tensor]]
    padded: Callable[[Batch], Callable[..., Tensor]]
    sll: Callable[[Batch, bool], Callable[..., Tensor]]
    forward_elems: Callable[[Batch], int]
    backward_elems: Callable[[Batch], tuple[int, ...]]
    flops: Callable[[Batch], float] | None
    goal_us: dict[str, float]
    recorded_us: dict[str, dict[str, float]]
    dim: int = -1

    @property
    def case(self) -> testing.Case:
        return testing.CASES[self.name.removesuffix("_rows")]

    @property
    def jagged_inputs(self) -> tuple[bool, ...]:
        """Which are jagged, or matrices in one vector: the padded form takes those padded."""
        return tuple(self.case.rows[name] != "seq" for name in self.case.inputs)

    @property
    def jagged_result(self) -> bool:
        """The padded form's result is padded then."""
        return self.case.rows["out"] != "seq"

    def check(self, batch: Batch) -> checking.Batch:
        """What judges it on a batch, with the gradient that its backward is given."""
        choices = {"capacity": "exact", "transpose": False, "scale": 1.0, "dim": self.dim}
        inputs = dict(zip(self.case.inputs, self.inputs(batch), strict=True))
        out = self.case.reference(Spec(0, batch.layout, choices), inputs)["out"]
        grad_out = torch.randn_like(out)
        values = tuple(inputs.values())
        return checking.Batch.of(self.name, self.case, batch.layout, values, grad_out, **choices)


def _product_elems(batch: Batch) -> int:
    sizes = batch.shape()
    total, dim, columns = sizes["T"], sizes["D"], sizes["N"]
    return total * dim + total * columns + sizes["B"] * dim * columns


def _product_flops(batch: Batch) -> float:
    return 2.0 * batch.layout.total * batch.dim * batch.columns


def _matrix_elems(batch: Batch) -> int:
    return 2 * batch.x.numel() + batch.a.numel()


def _matrix_flops(batch: Batch) -> float:
    return 2.0 * batch.a.numel() * batch.dim


def _softmax_elems(batch: Batch, tensors: int) -> int:
    return tensors * batch.layout.total * batch.columns


def _ours_dense(batch: Batch) -> Callable[..., Tensor]:
    return lambda x, y: jagged_cuda.jagged_dense_bmm(x, y, batch.offsets)


def _ours_jagged(batch: Batch) -> Callable[..., Tensor]:
    return lambda x, y: jagged_cuda.jagged_jagged_bmm(x, y, batch.offsets)


def _ours_matrices(batch: Batch) -> Callable[..., Tensor]:
    return lambda x, y: jagged_cuda.jagged_jagged_bmm_jagged_out(
        x, y, batch.offsets, matrix_offsets=batch.matrix_offsets, total_out=batch.a.numel()
    )


def _ours_weighted(batch: Batch) -> Callable[..., Tensor]:
    return lambda a, y: jagged_cuda.array_jagged_bmm_jagged_out(
        a, y, batch.offsets, matrix_offsets=batch.matrix_offsets
    )


def _ours_softmax(batch: Batch) -> Callable[..., Tensor]:
    return lambda x: jagged_cuda.jagged_softmax(x, batch.offsets)


def _padded_softmax(batch: Batch) -> Callable[..., Tensor]:
    outside = ~peers.inside(batch.layout, batch.x.device)[:, :, None]
    return lambda x: x.masked_fill(outside, -torch.inf).softmax(1)


def _ours_jagged2(batch: Batch, dim: int) -> Callable[..., Tensor]:
    return lambda a: jagged_cuda.jagged2_softmax(
        a, batch.offsets, matrix_offsets=batch.matrix_offsets, dim=dim
    )


def _padded_jagged2(batch: Batch, dim: int) -> Callable[..., Tensor]:
    # Columns [B, 1, N] or rows [B, M, 1] that are not there.
    outside = ~peers.inside(batch.layout, batch.x.device).unsqueeze(1 if dim == -1 else 2)
    return lambda a: a.masked_fill(outside, -torch.inf).softmax(dim)


def _sll_dense(batch: Batch, allow_tf32: bool) -> Callable[..., Tensor]:
    function = peers.sll("triton_jagged_bmm").jagged_dense_bmm
    max_len = batch.layout.max_len
    return lambda x, y: function(x, y, batch.offsets, max_len, allow_tf32, use_fbgemm_kernel=False)


def _sll_jagged(batch: Batch, allow_tf32: bool) -> Callable[..., Tensor]:
    function = peers.sll("triton_jagged_bmm").jagged_jagged_bmm
    max_len = batch.layout.max_len
    return lambda x, y: function(x, y, batch.offsets, max_len, allow_tf32, use_fbgemm_kernel=False)


def _sll_offsets(batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Lengths and offsets of rows, and of matrices. It sums lengths: on the CPU, without a wait."""
    lengths = torch.tensor(batch.layout.lengths)
    return (lengths, batch.offsets), (lengths**2, batch.matrix_offsets)


def _sll_matrices(batch: Batch, allow_tf32: bool) -> Callable[..., Tensor]:
    function = peers.sll("triton_jagged_bmm_jagged_out").jagged_jagged_bmm_jagged_out
    rows, matrices = _sll_offsets(batch)
    max_len = batch.layout.max_len
    return lambda x, y: function(x, y, *rows, *rows, *matrices, max_len, allow_tf32)


def _sll_weighted(batch: Batch, allow_tf32: bool) -> Callable[..., Tensor]:
    function = peers.sll("triton_jagged_bmm_jagged_out").array_jagged_bmm_jagged_out
    rows, matrices = _sll_offsets(batch)
    max_len = batch.layout.max_len
    return lambda a, y: function(a, y, *matrices, *rows, *rows, max_len, allow_tf32)


def _sll_softmax(batch: Batch, allow_tf32: bool) -> Callable[..., Tensor]:
    function = peers.sll("triton_jagged_softmax").jagged_softmax
    return lambda x: function(x, batch.offsets, batch.layout.max_len, use_fbgemm_kernel=False)


def _sll_jagged2(batch: Batch, allow_tf32: bool, dim: int) -> Callable[..., Tensor]:
    function = peers.sll("triton_jagged_softmax").jagged2_softmax
    options = (batch.offsets, batch.matrix_offsets, batch.layout.max_len, dim == -2)
    return lambda a: function(a, *options)


def _jagged2(name: str, dim: int) -> Operator:
    return Operator(
        name=name,
        inputs=lambda batch: (batch.a,),
        ours=lambda batch: _ours_jagged2(batch, dim),
        dim=dim,
        padded=lambda batch: _padded_jagged2(batch, dim),
        sll=lambda batch, allow_tf32: _sll_jagged2(batch, allow_tf32, dim),
        forward_elems=lambda batch: 2 * batch.a.numel(),
        backward_elems=lambda batch: (3 * batch.a.numel(),),
        flops=None,
        goal_us={"fp32": 44, "bf16": 24},
        recorded_us={"fp32": {"padded": 110, "sll": 152}, "bf16": {"padded": 91, "sll": 144}}
        if dim == -1
        else {},
    )


OPERATORS = (
    Operator(
        name="jagged_dense_bmm",
        inputs=lambda batch: (batch.x, batch.y_dense),
        ours=_ours_dense,
        padded=lambda batch: torch.bmm,
        sll=_sll_dense,
        forward_elems=_product_elems,
        backward_elems=lambda batch: (_product_elems(batch),) * 2,
        flops=_product_flops,
        goal_us={"tf32": 46, "fp32": 1.4 * 46, "bf16": 25},
        recorded_us={"tf32": {"padded": 90, "sll": 53}, "bf16": {"padded": 44, "sll": 33}},
    ),
    Operator(
        name="jagged_jagged_bmm",
        inputs=lambda batch: (batch.x, batch.y_jagged),
        ours=_ours_jagged,
        padded=lambda batch: lambda x, y: torch.bmm(x.transpose(1, 2), y),
        sll=_sll_jagged,
        forward_elems=_product_elems,
        backward_elems=lambda batch: (_product_elems(batch),) * 2,
        flops=_product_flops,
        goal_us={"tf32": 46, "fp32": 1.4 * 46, "bf16": 25},
        recorded_us={"tf32": {"padded": 85, "sll": 111}, "bf16": {"padded": 44, "sll": 28}},
    ),
    Operator(
        name="jagged_jagged_bmm_jagged_out",
        inputs=lambda batch: (batch.x, batch.y_wide),
        ours=_ours_matrices,
        padded=lambda batch: lambda x, y: torch.bmm(x, y.transpose(1, 2)),
        sll=_sll_matrices,
        forward_elems=_matrix_elems,
        backward_elems=lambda batch: (_matrix_elems(batch),) * 2,
        flops=_matrix_flops,
        goal_us={"tf32": 101, "fp32": 1.8 * 101, "bf16": 52},
        recorded_us={"tf32": {"padded": 202, "sll": 227}, "bf16": {"padded": 101, "sll": 154}},
    ),
    Operator(
        name="array_jagged_bmm_jagged_out",
        inputs=lambda batch: (batch.a, batch.y_wide),
        ours=_ours_weighted,
        padded=lambda batch: torch.bmm,
        sll=_sll_weighted,
        forward_elems=_matrix_elems,
        backward_elems=lambda batch: (_matrix_elems(batch),) * 2,
        flops=_matrix_flops,
        goal_us={"tf32": 101, "fp32": 1.8 * 101, "bf16": 52},
        recorded_us={"tf32": {"padded": 226, "sll": 430}, "bf16": {"padded": 99, "sll": 298}},
    ),
    _jagged2("jagged2_softmax", -1),
    _jagged2("jagged2_softmax_rows", -2),
    Operator(
        name="jagged_softmax",
        inputs=lambda batch: (batch.y_jagged,),
        ours=_ours_softmax,
        padded=_padded_softmax,
        sll=_sll_softmax,
        forward_elems=lambda batch: _softmax_elems(batch, 2),
        backward_elems=lambda batch: (_softmax_elems(batch, 3),),
        flops=None,
        goal_us={"fp32": 10, "bf16": 9},
        recorded_us={"fp32": {"padded": 32, "sll": 18}, "bf16": {"padded": 30, "sll": 14}},
    ),
)
CASES = tuple(operator.name for operator in OPERATORS)


def run(session: Session) -> None:
    @functools.cache
    def batch_of(dtype: torch.dtype) -> Batch:
        layout = shapes.layout(shapes.uniform(NUM_SEQS, MAX_LEN), session.options.quick)
        return draw_batch(layout, session.device, dtype, session.options.quick)

    def run_case(session: Session, operator: Operator, precision: Precision) -> None:
        if operator.flops is None and precision.allow_tf32:
            return  # without products, tf32 is fp32
        _run_operator(session, operator, batch_of(precision.dtype), precision)

    session.each_case("table1", OPERATORS, run_case, ("tf32", "fp32", "bf16"))


def _pad(tensor: Tensor, layout: Layout) -> Tensor:
    if tensor.dim() > 1:
        return padding.pad(tensor, layout)
    return padding.pad_matrices(tensor, layout, layout)


def makers(
    operator: Operator, batch: Batch, precision: Precision, grad_out: Tensor
) -> dict[str, Callable[[], Candidate]]:
    """Every implementation by name; nothing is made yet."""
    inputs = operator.inputs(batch)
    return {
        OURS: lambda: Candidate(operator.ours(batch), inputs, grad_out),
        "padded": functools.partial(_padded, operator, batch, inputs, grad_out),
        "sll": functools.partial(_sll, operator, batch, precision, inputs, grad_out),
    }


def row(
    command: str,
    case: str,
    pass_name: str,
    operator: Operator,
    batch: Batch,
    precision: Precision,
) -> Row:
    """Of a pass: forward, backward, or both together."""
    passes = {
        "forward": ((operator.forward_elems(batch),), 1),
        "backward": (operator.backward_elems(batch), 2),
    }
    parts = [passes[name] for name in pass_name.split("+")]
    flops = None if operator.flops is None else operator.flops(batch)
    return Row(
        command=command,
        case=case,
        pass_name=pass_name,
        precision=precision.name,
        shape=dict(batch.shape()),
        seed=shapes.SEED,
        bytes=tuple(count * precision.elem_bytes for elems, _ in parts for count in elems),
        flops=flops and flops * sum(times for _, times in parts),
    )


def measure(
    session: Session,
    rows: Sequence[Row],
    operator: Operator,
    batch: Batch,
    precision: Precision,
    names: Sequence[str],
) -> None:
    """Check and time these implementations."""
    check = operator.check(batch)
    found = makers(operator, batch, precision, check.grad_out)
    session.run(rows, {name: found[name] for name in names}, check)


def _run_operator(session: Session, operator: Operator, batch: Batch, precision: Precision) -> None:
    rows = [
        row("table1", operator.name, pass_name, operator, batch, precision)
        for pass_name in ("forward", "backward")
    ]
    if session.is_reference_machine:
        rows[0].goal_us = operator.goal_us.get(precision.name)
        rows[0].recorded_us = operator.recorded_us.get(precision.name, {})
    for added in rows:
        session.add(added)
    names = (OURS, *session.peers(PEERS, DEFAULT_PEERS))
    measure(session, rows, operator, batch, precision, names)


def _padded(
    operator: Operator, batch: Batch, inputs: tuple[Tensor, ...], grad_out: Tensor
) -> Candidate:
    layout = batch.layout
    padded = tuple(
        _pad(tensor, layout) if jagged else tensor
        for tensor, jagged in zip(inputs, operator.jagged_inputs, strict=True)
    )
    function = operator.padded(batch)
    if not operator.jagged_result:
        return Candidate(function, padded, grad_out)
    if grad_out.dim() > 1:
        unpad = functools.partial(padding.unpad, layout=layout)
    else:
        elems = grad_out.shape[0]
        unpad = functools.partial(
            padding.unpad_matrices, layout=layout, kv_layout=layout, capacity=elems
        )
    return Candidate(function, padded, _pad(grad_out, layout), unpad)


def _sll(
    operator: Operator,
    batch: Batch,
    precision: Precision,
    inputs: tuple[Tensor, ...],
    grad_out: Tensor,
) -> Candidate:
    peers.need_cuda("sll", batch.x.device)
    return Candidate(operator.sll(batch, precision.allow_tf32), inputs, grad_out)
