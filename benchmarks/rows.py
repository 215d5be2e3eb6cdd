"""Moving and combining rows: each function beside PyTorch indexing and FBGEMM's Triton kernels.

Rows of 128 bytes and of 512, in histories U[1, 1000]; the result of each function is compared
element by element with that of plain PyTorch before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import jagged_cuda
from benchmarks import peers, shapes
from benchmarks.candidate import Candidate
from benchmarks.checking import WrongResultError
from benchmarks.session import OURS, Command, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing.lengths import Layout

PEERS = ("indexing", "sll")
NUM_SEQS, MAX_LEN = 1024, 1000
WIDTHS = (128, 512)  # bytes of a row
KEPT = 200  # rows of a history that is truncated
DENSE_ROWS = 4  # of each sequence, that are joined to its history


@dataclass(frozen=True)
class Batch:
    """The operands of every function, drawn from a seed."""

    layout: Layout
    x: Tensor  # [T, D]
    dense: Tensor  # [B, DENSE_ROWS, D]
    offsets: Tensor
    seq: Tensor  # [T], the sequence of each row
    keep: Tensor  # [T] bool: about half
    picked: Tensor  # [B]: numbers of sequences, some repeated
    kept_rows: int  # of keep
    truncated_rows: int  # of histories of at most KEPT rows
    picked_rows: int  # of picked
    repeated_rows: int  # of picked, that an earlier number has picked already

    @classmethod
    def draw(cls, layout: Layout, device: torch.device, dtype: torch.dtype, width: int) -> Batch:
        generator = torch.Generator().manual_seed(shapes.SEED)
        dim, num_seqs = width // dtype.itemsize, layout.num_seqs

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        keep = torch.rand(layout.total, generator=generator) < 0.5
        picked = torch.randint(0, max(1, num_seqs), (num_seqs,), generator=generator)
        picked_rows = sum(layout.lengths[seq] for seq in picked.tolist())
        return cls(
            layout,
            draw(layout.total, dim),
            draw(num_seqs, DENSE_ROWS, dim),
            layout.offsets(device),
            layout.seq_of_row(device),
            keep.to(device),
            picked.to(device),
            int(keep.sum()),
            sum(min(KEPT, length) for length in layout.lengths),
            picked_rows,
            picked_rows - sum(layout.lengths[seq] for seq in set(picked.tolist())),
        )

    @functools.cached_property
    def place(self) -> Tensor:
        """`[T]`: the number of each row in its sequence."""
        return torch.arange(len(self.x), device=self.x.device) - self.offsets[self.seq]

    @functools.cached_property
    def padded(self) -> Tensor:
        """`[B, M, D]`: as many rows of each sequence, others than its own."""
        longest = self.layout.max_len
        return jagged_cuda.jagged_to_padded(self.x.flip(0), self.offsets, longest)

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()


@dataclass(frozen=True)
class RowFunction:
    """One function on a batch.

    Args:
        name: the case.
        inputs: what it is differentiated by.
        ours, indexing: take a batch and the inputs, return the result's rows.
        sll: likewise, or None where FBGEMM has no such kernel.
        bytes_beside: that a forward must read beside the rows: numbers, masks, other rows.
        bytes_beside_backward: likewise, beside the gradients.
        repeated_rows: of the result, that need not be read: they were read for an earlier one.
        launches: kernels of a forward and of a backward.
        widths: bytes of a row.
    """

    name: str
    inputs: Callable[[Batch], tuple[Tensor, ...]]
    ours: Callable[..., Tensor]
    indexing: Callable[..., Tensor]
    bytes_beside: Callable[[Batch], int] = field(default=lambda b: 8 * len(b.offsets))
    bytes_beside_backward: Callable[[Batch], int] = field(default=lambda b: 0)
    repeated_rows: Callable[[Batch], int] = field(default=lambda b: 0)
    launches: tuple[int, int] = (3, 3)
    sll: Callable[..., Tensor] | None = None


def _places(mask: Tensor) -> Tensor:
    """Where a mask is True, as indexing by it finds out: it waits for the GPU."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        # In time: what fails inside a capture leaves PyTorch's generator unusable.
        raise RuntimeError("a mask's size cannot be read while a graph is captured")
    return mask.nonzero().squeeze(1)


def _index_by_repeating(b: Batch, x: Tensor) -> Tensor:
    """The rows of whole sequences in plain PyTorch, which reads how many there are."""
    lengths = b.lengths[b.picked]
    ends = lengths.cumsum(0)
    rows = torch.arange(b.picked_rows, device=x.device)
    first = (b.offsets[b.picked] - (ends - lengths)).repeat_interleave(
        lengths, output_size=b.picked_rows
    )
    return x[first + rows]


def _joined_by_sorting(b: Batch, x: Tensor, dense: Tensor) -> Tensor:
    """Rows of both one after another, and then by their sequences."""
    dense_seq = torch.arange(len(dense), device=x.device).repeat_interleave(dense.shape[1])
    order = torch.cat([dense_seq, b.seq]).argsort(stable=True)
    return torch.cat([dense.flatten(0, 1), x])[order]


def _cat_of_fbgemm(b: Batch, x: Tensor, dense: Tensor) -> Tensor:
    """FBGEMM joins one number of each sequence to a history of numbers, and nothing else."""
    cat = peers.sll("triton_dense_jagged_cat_jagged_out").dense_jagged_cat_jagged_out
    return cat(dense.flatten(), x.flatten(), b.offsets, b.layout.max_len)[0][:, None]


def _combined_by_fbgemm(function: str, b: Batch, x: Tensor, y: Tensor) -> Tensor:
    """Its kernel without what sll wraps around it, which has a gradient for a sum alone."""
    found = peers.sll("triton_jagged_tensor_ops", "triton/jagged")
    return found.dense_to_jagged(
        y, [b.offsets], operation_function=function, operation_jagged_values=x
    )[0]


# Other functions over rows are added here.
FUNCTIONS = (
    RowFunction(
        name="select",
        inputs=lambda b: (b.x,),
        ours=lambda b, x: jagged_cuda.jagged_select(x, b.offsets, b.keep, total=b.kept_rows)[0],
        indexing=lambda b, x: x[_places(b.keep)],
        bytes_beside=lambda b: 8 * len(b.offsets) + len(b.x),
    ),
    RowFunction(
        name="first",
        inputs=lambda b: (b.x,),
        ours=lambda b, x: jagged_cuda.jagged_first(x, b.offsets, KEPT, total=b.truncated_rows)[0],
        indexing=lambda b, x: x[_places(b.place < KEPT)],
        launches=(4, 3),
    ),
    RowFunction(
        name="last",
        inputs=lambda b: (b.x,),
        ours=lambda b, x: jagged_cuda.jagged_last(x, b.offsets, KEPT, total=b.truncated_rows)[0],
        indexing=lambda b, x: x[_places(b.place >= b.lengths[b.seq] - KEPT)],
        launches=(4, 3),
    ),
    RowFunction(
        name="index_select",
        inputs=lambda b: (b.x,),
        ours=lambda b, x: jagged_cuda.jagged_index_select(
            x, b.offsets, b.picked, total=b.picked_rows
        )[0],
        indexing=_index_by_repeating,
        launches=(2, 2),
        bytes_beside=lambda b: 8 * len(b.offsets) + 8 * len(b.picked),
        repeated_rows=lambda b: b.repeated_rows,
    ),
    RowFunction(
        name="concat",
        inputs=lambda b: (b.x, b.dense),
        ours=lambda b, x, dense: jagged_cuda.jagged_concat(
            [dense, x], [None, b.offsets], total=len(x) + dense.shape[0] * dense.shape[1]
        )[0],
        indexing=_joined_by_sorting,
        launches=(1, 1),
    ),
    RowFunction(
        name="concat_numbers",
        inputs=lambda b: (b.x[:, :1].contiguous(), b.dense[:, :1, :1].contiguous()),
        ours=lambda b, x, dense: jagged_cuda.jagged_concat(
            [dense, x], [None, b.offsets], total=len(x) + len(dense)
        )[0],
        indexing=_joined_by_sorting,
        launches=(1, 1),
        sll=_cat_of_fbgemm,
    ),
    # Both parts are made; the gradient is that of the first.
    RowFunction(
        name="split",
        inputs=lambda b: (b.x,),
        ours=lambda b, x: jagged_cuda.jagged_split(
            x, b.offsets, n=KEPT, totals=(b.truncated_rows, len(x) - b.truncated_rows)
        )[0][0],
        indexing=lambda b, x: (x[_places(b.place < KEPT)], x[_places(b.place >= KEPT)])[0],
        bytes_beside=lambda b: 8 * len(b.offsets) + 2 * b.x[b.truncated_rows :].nbytes,
        launches=(8, 3),
    ),
    # With a padded row for each row; one kernel writes both gradients.
    RowFunction(
        name="dense_add",
        inputs=lambda b: (b.x, b.padded),
        ours=lambda b, x, y: jagged_cuda.jagged_dense_add(x, y, b.offsets),
        indexing=lambda b, x, y: x + y[b.seq, b.place],
        sll=functools.partial(_combined_by_fbgemm, "add"),
        bytes_beside=lambda b: 8 * len(b.offsets) + b.x.nbytes,
        launches=(1, 1),
    ),
    RowFunction(
        name="dense_mul",
        inputs=lambda b: (b.x, b.padded),
        ours=lambda b, x, y: jagged_cuda.jagged_dense_mul(x, y, b.offsets),
        indexing=lambda b, x, y: x * y[b.seq, b.place],
        sll=functools.partial(_combined_by_fbgemm, "mul"),
        bytes_beside=lambda b: 8 * len(b.offsets) + b.x.nbytes,
        bytes_beside_backward=lambda b: 2 * b.x.nbytes,
        launches=(1, 1),
    ),
)


class Check:
    """The result of plain PyTorch, and its gradients; zeros may follow its rows."""

    def __init__(self, function: RowFunction, batch: Batch) -> None:
        self.name = function.name
        leaves = [t.detach().requires_grad_() for t in function.inputs(batch)]
        out = function.indexing(batch, *leaves)
        self.out = out.detach()
        generator = torch.Generator().manual_seed(shapes.SEED)
        drawn = torch.randn(self.out.shape, generator=generator)
        self.grad_out = drawn.to(self.out.device, self.out.dtype)
        gradients = torch.autograd.grad(out.double(), leaves, self.grad_out.double())
        self.gradients = gradients

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        rows = len(self.out)
        if not torch.equal(out[:rows], self.out) or bool(out[rows:].any()):
            raise WrongResultError(f"wrong result of {self.name}")

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        for found, expected in zip(gradients, self.gradients, strict=True):
            limit = 4 * torch.finfo(found.dtype).eps * float(expected.abs().max())
            if float((found.double() - expected.double()).abs().max()) > limit:
                raise WrongResultError(f"wrong gradient of {self.name}")


@dataclass(frozen=True)
class _Case:
    name: str
    function: RowFunction
    width: int


CASES = tuple(
    _Case(f"{function.name}_{width}", function, width)
    for function in FUNCTIONS
    for width in WIDTHS
    if function.name != "concat_numbers" or width == WIDTHS[0]
)


def _candidate(name: str, function: RowFunction, batch: Batch, check: Check) -> Candidate:
    call = {OURS: function.ours, "indexing": function.indexing, "sll": function.sll}[name]
    if name == "sll":
        peers.need_cuda(name, batch.x.device)
        if call is None:
            raise peers.AbsentError(f"sll has no kernel like {function.name}")
    assert call is not None
    inputs = function.inputs(batch)
    if name == "sll":
        return Candidate(functools.partial(call, batch), inputs, None)
    with torch.no_grad():
        rows = len(call(batch, *inputs))
    grad_out = check.grad_out
    if rows > len(grad_out):
        grad_out = torch.cat(
            [grad_out, grad_out.new_zeros(rows - len(grad_out), *grad_out.shape[1:])]
        )
    return Candidate(functools.partial(call, batch), inputs, grad_out)


def _run_case(session: Session, case: _Case, precision: Precision) -> None:
    quick = session.options.quick
    layout = shapes.layout(shapes.uniform(NUM_SEQS, MAX_LEN), quick)
    batch = Batch.draw(layout, session.device, precision.dtype, case.width)
    check = Check(case.function, batch)
    inputs = case.function.inputs(batch)
    # Rows of the result are read once and written; rows that have no gradient are written too.
    repeated = case.function.repeated_rows(batch) * case.width
    forward = 2 * check.out.nbytes - repeated + case.function.bytes_beside(batch)
    backward = check.out.nbytes + sum(t.nbytes for t in inputs)
    backward += case.function.bytes_beside_backward(batch)
    rows = []
    for pass_name, size, launches in zip(
        ("forward", "backward"), (forward, backward), case.function.launches, strict=True
    ):
        row = Row(
            command="rows",
            case=case.name,
            pass_name=pass_name,
            precision=precision.name,
            shape={"B": layout.num_seqs, "T": layout.total, "rows": len(check.out)}
            | {"row_bytes": inputs[0].nbytes // max(1, len(inputs[0]))},
            seed=shapes.SEED,
            bytes=(size,),
            launches=launches,
        )
        rows.append(session.add(row))
    names = (OURS, *session.peers(COMMAND))
    session.run(
        rows,
        {name: functools.partial(_candidate, name, case.function, batch, check) for name in names},
        check,
    )


def _run(session: Session) -> None:
    session.each_case("rows", CASES, _run_case, ("bf16",))


COMMAND = Command(tuple(case.name for case in CASES), _run, PEERS, PEERS)
