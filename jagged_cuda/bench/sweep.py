"""Speed over padding by how full the padded batch is: forward and backward together.

The longest length stays, the mean moves: lengths M u^(1 / fill - 1) with u uniform are all the same
at a fill (mean / longest) of 100 %, uniform at 50 %, long-tailed below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jagged_cuda.bench import implementations, shapes, table1
from jagged_cuda.bench.candidate import Candidate
from jagged_cuda.bench.checking import AttentionCheck, Check
from jagged_cuda.bench.operands import Operands
from jagged_cuda.bench.session import OURS, Row, Session
from jagged_cuda.bench.shapes import Precision
from jagged_cuda.testing.lengths import Layout

ATTENTION_PEERS = ("sdpa", "varlen", "cudnn_frontend", "sll", "cudnn")
PEERS = ("padded", *ATTENTION_PEERS)
DEFAULT_PEERS = ("padded", "sdpa", "varlen")
ATTENTION = "attention"
PERCENTS = (5, 10, 20, 35, 50, 75, 100)
QUICK_PERCENTS = (10, 100)
NUM_SEQS, NUM_SEQS_ON_CPU = 1024, 32
# Table 1's operators at the paper's shape, which is that of 50 %; attention over longer histories.
ATTENTION_MAX_LEN, ATTENTION_MAX_LEN_ON_CPU = 1024, 256
HEADS, DIM = 4, 64


@dataclass(frozen=True)
class Case:
    """An operator of Table 1, or attention: None."""

    operator: table1.Operator | None

    @property
    def name(self) -> str:
        return self.operator.name if self.operator else ATTENTION


SWEEP_CASES = (
    Case(None),
    # The softmax over rows is no line of Table 1.
    *(Case(op) for op in table1.OPERATORS if op.name != "jagged2_softmax_rows"),
)
CASES = tuple(case.name for case in SWEEP_CASES)


def run(session: Session) -> None:
    def run_case(case: Case, precision: Precision) -> None:
        for percent in QUICK_PERCENTS if session.options.quick else PERCENTS:
            if session.out_of_time():
                session.note(f"sweep: the time was spent before {case.name} {percent}%")
                return
            _run_case(session, case, percent, precision)

    session.each_case("sweep", SWEEP_CASES, run_case)


def _layout(session: Session, percent: int, max_len: int) -> Layout:
    is_small = session.device.type == "cpu"
    num_seqs = NUM_SEQS_ON_CPU if is_small else NUM_SEQS
    return shapes.layout(shapes.filled(num_seqs, max_len, percent / 100), session.options.quick)


def _run_case(session: Session, case: Case, percent: int, precision: Precision) -> None:
    of = _attention if case.operator is None else functools.partial(_operator, case.operator)
    row, candidates, known, check = of(session, percent, precision)
    row.case = f"{case.name} {percent}%"
    row.shape["fill"] = round(row.shape["T"] / (row.shape["B"] * row.shape["max_len"]), 4)
    session.add(row)
    names = (OURS, *session.peers(known, DEFAULT_PEERS))
    session.run((row,), {name: candidates[name] for name in names}, check)


_Prepared = tuple[Row, Mapping[str, Callable[[], Candidate]], tuple[str, ...], Check]


def _attention(session: Session, percent: int, precision: Precision) -> _Prepared:
    is_small = session.device.type == "cpu"
    layout = _layout(session, percent, ATTENTION_MAX_LEN_ON_CPU if is_small else ATTENTION_MAX_LEN)
    operands = Operands.draw(layout, HEADS, DIM, session.device, precision.dtype)
    moved = (operands.forward_bytes, operands.backward_bytes)
    row = _row(precision, operands.shape(), moved, 3.5 * operands.flops)
    makers = implementations.makers(operands, precision)
    return row, makers, ATTENTION_PEERS, AttentionCheck(operands, precision.limit)


def _operator(
    operator: table1.Operator, session: Session, percent: int, precision: Precision
) -> _Prepared:
    layout = _layout(session, percent, table1.MAX_LEN)
    batch = table1.draw_batch(layout, session.device, precision.dtype, session.options.quick)
    elems = (operator.forward_elems(batch), *operator.backward_elems(batch))
    flops = 3 * operator.flops(batch) if operator.flops else None
    moved = tuple(count * precision.elem_bytes for count in elems)
    row = _row(precision, batch.shape(), moved, flops)
    check = table1.OperatorCheck(operator, batch, precision.limit)
    makers = table1.makers(operator, batch, precision, check.grad_out)
    return row, makers, table1.PEERS, check


def _row(
    precision: Precision, shape: Mapping[str, int], moved: tuple[int, ...], flops: float | None
) -> Row:
    return Row(
        command="sweep",
        case="",
        pass_name="forward+backward",
        precision=precision.name,
        shape=dict(shape),
        seed=shapes.SEED,
        bytes=moved,
        flops=flops,
        has_memory=True,
    )
