"""Speed over padding by how full the padded batch is: forward and backward together.

The longest length stays, the mean moves: lengths M u^(1 / fill - 1) with u uniform are all the same
at a fill (mean / longest) of 100 %, uniform at 50 %, long-tailed below.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import implementations, shapes, table1
from benchmarks.operands import Operands
from benchmarks.session import OURS, Row, Session
from benchmarks.shapes import Precision
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
    session.each_case("sweep", SWEEP_CASES, _run_case)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    for percent in QUICK_PERCENTS if session.options.quick else PERCENTS:
        name = f"{case.name} {percent}%"
        if session.out_of_time():
            session.note(f"sweep: the time was spent before {name}")
            return
        if case.operator is None:
            _run_attention(session, name, percent, precision)
        else:
            _run_operator(session, case.operator, name, percent, precision)


def _layout(session: Session, percent: int, max_len: int) -> Layout:
    is_small = session.device.type == "cpu"
    num_seqs = NUM_SEQS_ON_CPU if is_small else NUM_SEQS
    return shapes.layout(shapes.filled(num_seqs, max_len, percent / 100), session.options.quick)


def _add(session: Session, row: Row) -> None:
    row.has_memory = True
    row.shape["fill"] = round(row.shape["T"] / (row.shape["B"] * row.shape["max_len"]), 4)
    session.add(row)


def _run_attention(session: Session, name: str, percent: int, precision: Precision) -> None:
    is_small = session.device.type == "cpu"
    layout = _layout(session, percent, ATTENTION_MAX_LEN_ON_CPU if is_small else ATTENTION_MAX_LEN)
    operands = Operands.draw(layout, HEADS, DIM, session.device, precision.dtype)
    row = implementations.row("sweep", name, "forward+backward", operands, precision)
    _add(session, row)
    names = (OURS, *session.peers(ATTENTION_PEERS, DEFAULT_PEERS))
    implementations.measure(session, (row,), operands, precision, names)


def _run_operator(
    session: Session, operator: table1.Operator, name: str, percent: int, precision: Precision
) -> None:
    layout = _layout(session, percent, table1.MAX_LEN)
    batch = table1.draw_batch(layout, session.device, precision.dtype, session.options.quick)
    row = table1.row("sweep", name, "forward+backward", operator, batch, precision)
    _add(session, row)
    names = (OURS, *session.peers(table1.PEERS, DEFAULT_PEERS))
    table1.measure(session, (row,), operator, batch, precision, names)
