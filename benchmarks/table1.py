"""The operators of the paper's Table 1 at its shape: B 1024, lengths U[1, 200], D 256, N 8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from benchmarks import checking, peers, shapes
from benchmarks.candidate import Candidate
from benchmarks.session import OURS, Command, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing import cases as testing
from jagged_cuda.testing import padding
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.samples import Spec

PEERS = ("padded", "sll")
NUM_SEQS, MAX_LEN, DIM, COLUMNS = 1024, 200, 256, 8
QUICK_DIM = 32

# With "highest" float32 a product is computed in parts: its bar is this many times as high; the
# larger factor is of the products with sum(L^2) elements.
EXACT_PRODUCT, EXACT_MATRIX_PRODUCT = 1.5, 1.9


@dataclass(frozen=True)
class Batch:
    """The operands of the operators, drawn from a seed."""

    layout: Layout
    x: Tensor  # [T, D]
    y_dense: Tensor  # [B, D, N]
    y_jagged: Tensor  # [T, N]
    y_wide: Tensor  # [T, D]
    a: Tensor  # [sum L*L]
    offsets: Tensor
    matrix_offsets: Tensor
    allow_tf32: bool

    @classmethod
    def draw(
        cls,
        layout: Layout,
        device: torch.device,
        precision: Precision,
        dim: int = DIM,
        columns: int = COLUMNS,
        offsets_dtype: torch.dtype = torch.int64,
        has_matrices: bool = True,
    ) -> Batch:
        """has_matrices: without them `a` is empty."""
        torch.manual_seed(shapes.SEED)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(precision.dtype)

        offsets = layout.offsets(device, offsets_dtype)
        return cls(
            layout,
            draw(layout.total, dim),
            draw(layout.num_seqs, dim, columns),
            draw(layout.total, columns),
            draw(layout.total, dim),
            draw(sum(length**2 for length in layout.lengths) if has_matrices else 0),
            offsets,
            jagged_cuda.matrix_offsets(offsets),
            precision.allow_tf32,
        )

    @functools.cached_property
    def outside(self) -> Tensor:
        """`[B, M]`, True at padding."""
        return ~padding.inside(self.layout, self.x.device)

    def shape(self) -> dict[str, int]:
        sizes = {"B": self.layout.num_seqs, "T": self.layout.total, "max_len": self.layout.max_len}
        return sizes | {"D": self.x.shape[1], "N": self.y_jagged.shape[1]}

    @property
    def product_elems(self) -> int:
        return self.x.numel() + self.y_jagged.numel() + self.y_dense.numel()

    @property
    def matrix_elems(self) -> int:
        return 2 * self.x.numel() + self.a.numel()

    @functools.cached_property
    def sll_sizes(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Lengths and offsets of rows, and of matrices, as FBGEMM takes them.

        It sums the lengths: they lie on the CPU, so that nothing waits for the GPU.
        """
        lengths = torch.tensor(self.layout.lengths)
        return (lengths, self.offsets), (lengths**2, self.matrix_offsets)


@dataclass(frozen=True)
class Operator:
    """One operator on a batch.

    Args:
        inputs: what it is differentiated by.
        ours, padded, sll: take a batch and the inputs, return the result.
        forward_elems, backward_elems: the elements that each kernel of a pass must move.
        flops: of the forward.
        exact_factor: of the bar with "highest" float32.
        recorded_us: by precision and peer, on one H100.
        has_dim, has_columns: whether its operands have rows of D, of N.
        dim: of jagged2_softmax.
    """

    name: str
    inputs: Callable[[Batch], tuple[Tensor, ...]]
    ours: Callable[..., Tensor]
    padded: Callable[..., Tensor]
    sll: Callable[..., Tensor]
    forward_elems: Callable[[Batch], int]
    backward_elems: Callable[[Batch], tuple[int, ...]]
    flops: Callable[[Batch], float] | None
    exact_factor: float
    recorded_us: dict[str, dict[str, float]]
    has_dim: bool
    has_columns: bool
    dim: int = -1

    @property
    def case(self) -> testing.Case:
        return testing.CASES[self.name.removesuffix("_rows")]

    @property
    def has_matrices(self) -> bool:
        return "matrix" in self.case.rows.values()

    @property
    def choices(self) -> dict[str, Any]:
        return {"capacity": "exact", "transpose": False, "scale": 1.0, "dim": self.dim}

    def check(self, batch: Batch) -> checking.Batch:
        """The check of its results on a batch, with the gradient that its backward is given."""
        choices = self.choices
        inputs = dict(zip(self.case.inputs, self.inputs(batch), strict=True))
        out = self.case.reference(Spec(0, batch.layout, choices), inputs)["out"]
        grad_out = torch.randn_like(out)
        values = tuple(inputs.values())
        return checking.Batch.of(self.name, self.case, batch.layout, values, grad_out, **choices)


# Shared by operators: x with y, few columns wide; one matrix per sequence, as the result or the
# first input; softmaxes, of a tensor or of the matrices.
PRODUCT: dict[str, Any] = {
    "forward_elems": lambda b: b.product_elems,
    "backward_elems": lambda b: (b.product_elems,) * 2,
    "flops": lambda b: 2.0 * b.x.numel() * b.y_jagged.shape[1],
    "exact_factor": EXACT_PRODUCT,
    "has_dim": True,
    "has_columns": True,
}
MATRIX_PRODUCT: dict[str, Any] = {
    "forward_elems": lambda b: b.matrix_elems,
    "backward_elems": lambda b: (b.matrix_elems,) * 2,
    "flops": lambda b: 2.0 * b.a.numel() * b.x.shape[1],
    "exact_factor": EXACT_MATRIX_PRODUCT,
    "has_dim": True,
    "has_columns": False,
}


def _softmax(name: str, x: Callable[[Batch], Tensor], **forms: Any) -> Operator:
    return Operator(
        name=name,
        inputs=lambda b: (x(b),),
        forward_elems=lambda b: 2 * x(b).numel(),
        backward_elems=lambda b: (3 * x(b).numel(),),
        flops=None,
        exact_factor=1.0,
        has_dim=False,
        **forms,
    )


def _softmax_of_matrices(name: str, dim: int, recorded_us: dict[str, dict[str, float]]) -> Operator:
    return _softmax(
        name,
        lambda b: b.a,
        recorded_us=recorded_us,
        has_columns=False,
        dim=dim,
        ours=lambda b, a: jagged_cuda.jagged2_softmax(
            a, b.offsets, matrix_offsets=b.matrix_offsets, dim=dim
        ),
        # Columns [B, 1, N] or rows [B, M, 1] that are padding.
        padded=lambda b, a: a.masked_fill(
            b.outside.unsqueeze(1 if dim == -1 else 2), -torch.inf
        ).softmax(dim),
        sll=lambda b, a: peers.sll("triton_jagged_softmax").jagged2_softmax(
            a, b.offsets, b.matrix_offsets, b.layout.max_len, dim == -2
        ),
    )


OPERATORS = (
    Operator(
        **PRODUCT,
        name="jagged_dense_bmm",
        inputs=lambda b: (b.x, b.y_dense),
        recorded_us={"tf32": {"padded": 90, "sll": 53}, "bf16": {"padded": 44, "sll": 33}},
        ours=lambda b, x, y: jagged_cuda.jagged_dense_bmm(x, y, b.offsets),
        padded=lambda b, x, y: torch.bmm(x, y),
        sll=lambda b, x, y: peers.sll("triton_jagged_bmm").jagged_dense_bmm(
            x, y, b.offsets, b.layout.max_len, b.allow_tf32, use_fbgemm_kernel=False
        ),
    ),
    Operator(
        **PRODUCT,
        name="jagged_jagged_bmm",
        inputs=lambda b: (b.x, b.y_jagged),
        recorded_us={"tf32": {"padded": 85, "sll": 111}, "bf16": {"padded": 44, "sll": 28}},
        ours=lambda b, x, y: jagged_cuda.jagged_jagged_bmm(x, y, b.offsets),
        padded=lambda b, x, y: torch.bmm(x.transpose(1, 2), y),
        sll=lambda b, x, y: peers.sll("triton_jagged_bmm").jagged_jagged_bmm(
            x, y, b.offsets, b.layout.max_len, b.allow_tf32, use_fbgemm_kernel=False
        ),
    ),
    Operator(
        **MATRIX_PRODUCT,
        name="jagged_jagged_bmm_jagged_out",
        inputs=lambda b: (b.x, b.y_wide),
        recorded_us={"tf32": {"padded": 202, "sll": 227}, "bf16": {"padded": 101, "sll": 154}},
        ours=lambda b, x, y: jagged_cuda.jagged_jagged_bmm_jagged_out(
            x, y, b.offsets, matrix_offsets=b.matrix_offsets, total_out=b.a.numel()
        ),
        padded=lambda b, x, y: torch.bmm(x, y.transpose(1, 2)),
        sll=lambda b, x, y: peers.sll("triton_jagged_bmm_jagged_out").jagged_jagged_bmm_jagged_out(
            x, y, *b.sll_sizes[0] * 2, *b.sll_sizes[1], b.layout.max_len, b.allow_tf32
        ),
    ),
    Operator(
        **MATRIX_PRODUCT,
        name="array_jagged_bmm_jagged_out",
        inputs=lambda b: (b.a, b.y_wide),
        recorded_us={"tf32": {"padded": 226, "sll": 430}, "bf16": {"padded": 99, "sll": 298}},
        ours=lambda b, a, y: jagged_cuda.array_jagged_bmm_jagged_out(
            a, y, b.offsets, matrix_offsets=b.matrix_offsets
        ),
        padded=lambda b, a, y: torch.bmm(a, y),
        sll=lambda b, a, y: peers.sll("triton_jagged_bmm_jagged_out").array_jagged_bmm_jagged_out(
            a, y, *b.sll_sizes[1], *b.sll_sizes[0] * 2, b.layout.max_len, b.allow_tf32
        ),
    ),
    # The record's padded softmaxes take scores that are masked already, and are not recorded here.
    _softmax_of_matrices("jagged2_softmax", -1, {"fp32": {"sll": 152}, "bf16": {"sll": 144}}),
    _softmax_of_matrices("jagged2_softmax_rows", -2, {}),
    _softmax(
        "jagged_softmax",
        lambda b: b.y_jagged,
        recorded_us={"fp32": {"sll": 18}, "bf16": {"sll": 14}},
        has_columns=True,
        ours=lambda b, x: jagged_cuda.jagged_softmax(x, b.offsets),
        padded=lambda b, x: x.masked_fill(b.outside[:, :, None], -torch.inf).softmax(1),
        sll=lambda b, x: peers.sll("triton_jagged_softmax").jagged_softmax(
            x, b.offsets, b.layout.max_len, use_fbgemm_kernel=False
        ),
    ),
)


def _pad(tensor: Tensor, layout: Layout) -> Tensor:
    if tensor.dim() > 1:
        return padding.pad(tensor, layout)
    return padding.pad_matrices(tensor, layout, layout)


def _unpad(padded: Tensor, like: Tensor, layout: Layout) -> Tensor:
    if like.dim() > 1:
        return padding.unpad(padded, layout)
    return padding.unpad_matrices(padded, layout, layout, like.shape[0])


def candidate(name: str, operator: Operator, batch: Batch, grad_out: Tensor) -> Candidate:
    """One implementation of an operator, ready to run."""
    inputs, layout = operator.inputs(batch), batch.layout
    if name == "sll":
        peers.need_cuda(name, batch.x.device)
    if name != "padded":
        function = operator.ours if name == OURS else operator.sll
        return Candidate(functools.partial(function, batch), inputs, grad_out)
    # What has no row of its own for each sequence is jagged, or matrices in one vector.
    kinds = operator.case.rows
    padded = tuple(
        tensor if kinds[name] == "seq" else _pad(tensor, layout)
        for name, tensor in zip(operator.case.inputs, inputs, strict=True)
    )
    function = functools.partial(operator.padded, batch)
    if kinds["out"] == "seq":
        return Candidate(function, padded, grad_out)
    unpad = functools.partial(_unpad, like=grad_out, layout=layout)
    return Candidate(function, padded, _pad(grad_out, layout), unpad)


def row(
    command: str,
    case: str,
    pass_name: str,
    operator: Operator,
    batch: Batch,
    precision: Precision,
) -> Row:
    """The row of a pass: forward, backward, or both together."""
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
        bytes=tuple(count * precision.dtype.itemsize for elems, _ in parts for count in elems),
        flops=flops and flops * sum(times for _, times in parts),
        bar_scale=operator.exact_factor if precision.name == "fp32" else 1.0,
    )


def measure(
    session: Session,
    rows: Sequence[Row],
    operator: Operator,
    batch: Batch,
    precision: Precision,
    names: Sequence[str],
    check: checking.Check | None = None,
) -> None:
    """Check and time these implementations.

    check: None is that of all sequences. It has the incoming gradient, `grad_out`.
    """
    check = operator.check(batch) if check is None else check
    make = functools.partial(candidate, operator=operator, batch=batch, grad_out=check.grad_out)
    session.run(rows, {name: functools.partial(make, name) for name in names}, check)


def dim_of(session: Session) -> int:
    """D of Table 1, or of a quick run."""
    return QUICK_DIM if session.options.quick else DIM


def _run_operator(session: Session, operator: Operator, batch: Batch, precision: Precision) -> None:
    rows = [
        row("table1", operator.name, pass_name, operator, batch, precision)
        for pass_name in ("forward", "backward")
    ]
    for added in rows:
        session.add(added)
    if session.is_reference_machine:
        rows[0].recorded_us = operator.recorded_us.get(precision.name, {})
    names = (OURS, *session.peers(COMMAND))
    measure(session, rows, operator, batch, precision, names)


def _run(session: Session) -> None:
    layout = shapes.layout(shapes.uniform(NUM_SEQS, MAX_LEN), session.options.quick)

    @functools.cache
    def batch_of(precision: str) -> Batch:
        wanted = shapes.PRECISIONS[precision]
        return Batch.draw(layout, session.device, wanted, dim_of(session))

    def run_case(session: Session, operator: Operator, precision: Precision) -> None:
        if operator.flops is None and precision.allow_tf32:
            return  # without products, tf32 is fp32
        _run_operator(session, operator, batch_of(precision.name), precision)

    session.each_case("table1", OPERATORS, run_case, ("tf32", "fp32", "bf16"))


COMMAND = Command(tuple(operator.name for operator in OPERATORS), _run, PEERS, PEERS)
