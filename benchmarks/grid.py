"""Table 1's operators away from its shape: widths, columns, batch sizes, a long tail of lengths.

Lengths are log-normal, of median 60 and sigma 1.2, up to 4,096. Widths D and columns N go over the
grid, batch sizes from 16 to 65,536, as far as a pass takes at least 10 us at the rate of a copy and
the operands fit; one batch of each operator is measured with int32 offsets too. The bar is Table
1's, with 15 % more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import checking, shapes, table1
from benchmarks.checking import WrongResultError
from benchmarks.session import OURS, Command, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing.lengths import Layout

MEDIAN, SIGMA, MAX_LEN = 60, 1.2, 4096
DIMS, COLUMNS = (64, 128, 512), (1, 8, 64, 256)
NUM_SEQS = (16, 256, 4096, 65_536)
INT32_NUM_SEQS = 4096
QUICK_DIMS, QUICK_COLUMNS, QUICK_NUM_SEQS = (16,), (1, 8), (4,)
SLACK = 1.15  # of the bar, beside that of Table 1's own shape
MIN_FLOOR_US = 10.0  # below it a launch's share of the time says more than the kernel's
MAX_BYTES = 3 * 2**32  # of a forward pass; a backward pass holds three times as much


@dataclass(frozen=True)
class Point:
    """One shape; `dim` and `columns` are None where the operator has none."""

    dim: int | None
    columns: int | None
    num_seqs: int
    offsets_dtype: torch.dtype = torch.int64

    @property
    def name(self) -> str:
        sizes = {"D": self.dim, "N": self.columns, "B": self.num_seqs}
        words = [f"{key}{size}" for key, size in sizes.items() if size is not None]
        return " ".join(words + ["int32"] * (self.offsets_dtype == torch.int32))


def points(operator: table1.Operator, quick: bool) -> Iterator[Point]:
    """The shapes of an operator, from the narrowest to the widest."""
    dims = (QUICK_DIMS if quick else DIMS) if operator.has_dim else (None,)
    columns = (QUICK_COLUMNS if quick else COLUMNS) if operator.has_columns else (None,)
    for dim, column, num_seqs in itertools.product(
        dims, columns, QUICK_NUM_SEQS if quick else NUM_SEQS
    ):
        yield Point(dim, column, num_seqs)
    yield Point(dims[-1], columns[0], QUICK_NUM_SEQS[0] if quick else INT32_NUM_SEQS, torch.int32)


class Picked:
    """Judges the results of some sequences: the shortest, the median, the longest, the last."""

    def __init__(self, operator: table1.Operator, batch: table1.Batch) -> None:
        self.operator, self.batch = operator, batch
        lengths = batch.layout.lengths
        order = sorted(filter(lengths.__getitem__, range(len(lengths))), key=lengths.__getitem__)
        self.seqs = sorted({order[0], order[len(order) // 2], order[-1], len(lengths) - 1})
        self.layout = Layout(tuple(lengths[seq] for seq in self.seqs))
        self.grad_out = torch.randn_like(operator.ours(batch, *operator.inputs(batch)))
        self._judge = checking.Batch.of(
            operator.name,
            operator.case,
            self.layout,
            self._pick_all(operator.case.inputs, operator.inputs(batch)),
            self._pick("out", self.grad_out),
            **operator.choices,
        )

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        self._same_shapes((out,), (self.grad_out,))
        self._judge.require_out(self._pick("out", out), slack)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        self._same_shapes(gradients, self.operator.inputs(self.batch))
        self._judge.require_gradients(self._pick_all(self.operator.case.inputs, gradients))

    def _pick_all(self, names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._pick(name, t) for name, t in zip(names, tensors, strict=True))

    def _pick(self, name: str, tensor: Tensor) -> Tensor:
        kind = self.operator.case.rows[name]
        if kind == "seq":
            return tensor[self.seqs]
        offsets = self.batch.matrix_offsets if kind == "matrix" else self.batch.offsets
        begins = offsets.tolist()
        return torch.cat([tensor[begins[seq] : begins[seq + 1]] for seq in self.seqs])

    def _same_shapes(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for each, like in zip(found, expected, strict=True):
            if each.shape != like.shape:
                shapes = f"shape {list(each.shape)}, expected {list(like.shape)}"
                raise WrongResultError(f"wrong result of {self.operator.name}: {shapes}")


def _run_point(
    session: Session, operator: table1.Operator, point: Point, precision: Precision
) -> None:
    quick = session.options.quick
    draw = shapes.log_normal(point.num_seqs, MEDIAN, SIGMA, MAX_LEN)
    layout = shapes.layout(draw, quick)
    draw_batch = functools.partial(
        table1.Batch.draw,
        layout,
        precision=precision,
        dim=point.dim or 1,
        columns=point.columns or 1,
        offsets_dtype=point.offsets_dtype,
        has_matrices=operator.has_matrices,
    )
    make_row = functools.partial(
        table1.row, "grid", f"{operator.name} {point.name}", operator=operator, precision=precision
    )
    sizes = make_row("forward", batch=draw_batch(device=torch.device("meta")))
    if sum(sizes.bytes) > MAX_BYTES or (not quick and session.floor_us(sizes) < MIN_FLOOR_US):
        return
    batch = draw_batch(device=session.device)
    rows = [make_row(pass_name, batch=batch) for pass_name in ("forward", "backward")]
    for row in rows:
        row.bar_scale *= SLACK
        session.add(row)
    check = Picked(operator, batch)
    table1.measure(session, rows, operator, batch, precision, (OURS,), check)
    session.empty_cache()


def _run_case(session: Session, operator: table1.Operator, precision: Precision) -> None:
    if operator.flops is None and precision.allow_tf32:
        return  # without products, tf32 is fp32
    for point in points(operator, session.options.quick):
        if session.out_of_time():
            session.note(f"grid: the time was spent before {operator.name} {point.name}")
            return
        _run_point(session, operator, point, precision)


def _run(session: Session) -> None:
    # On a CPU it would take hours: there cases must be named.
    session.each_case("grid", table1.OPERATORS, _run_case, cases_on_cpu=())
    _sum_up(session)


def _sum_up(session: Session) -> None:
    """How many rows are within the bar, by operator and pass."""
    rows = [row for row in session.rows if row.command == "grid" and row.bar_us is not None]
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        time_us = row.median_us(OURS)
        if time_us is None or row.bar_us is None:
            continue
        counts = found.setdefault(f"{row.case.split()[0]} {row.pass_name}", {"rows": 0, "met": 0})
        counts["rows"] += 1
        counts["met"] += time_us <= row.bar_us
    if found:
        session.sections["grid"] = found
    for name, counts in found.items():
        session.note(f"grid: {name} is within the bar in {counts['met']} of {counts['rows']} rows")


COMMAND = Command(tuple(operator.name for operator in table1.OPERATORS), _run)
