"""Speed over padding by how full the padded batch is: forward and backward together.

The longest length is fixed, the mean varies: lengths M u^(1 / fill - 1) with u uniform are all the
same at a fill (mean / longest) of 100 %, uniform at 50 %, long-tailed below.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import implementations, shapes, table1
from benchmarks.operands import Operands
from benchmarks.session import OURS, Command, Session
from benchmarks.shapes import Precision

DEFAULT_PEERS = ("padded", "sdpa", "varlen")
PEERS = (*DEFAULT_PEERS, "cudnn_frontend", "sll")
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


# The softmax over rows is no line of Table 1.
OPERATORS = tuple(op for op in table1.OPERATORS if op.name != "jagged2_softmax_rows")
CASES = tuple(Case(operator) for operator in (None, *OPERATORS))


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    for percent in QUICK_PERCENTS if session.options.quick else PERCENTS:
        if session.out_of_time():
            session.note(f"sweep: the time was spent before {case.name} {percent}%")
            return
        _run_fill(session, case, percent, precision)


def _run_fill(session: Session, case: Case, percent: int, precision: Precision) -> None:
    is_small, quick = session.device.type == "cpu", session.options.quick
    operator, peers = case.operator, session.peers(COMMAND)
    max_len = ATTENTION_MAX_LEN_ON_CPU if is_small else ATTENTION_MAX_LEN
    num_seqs = NUM_SEQS_ON_CPU if is_small else NUM_SEQS
    draw = shapes.filled(num_seqs, table1.MAX_LEN if operator else max_len, percent / 100)
    layout = shapes.layout(draw, quick)
    what = ("sweep", f"{case.name} {percent}%", "forward+backward")
    if operator is None:
        operands = Operands.draw(layout, HEADS, DIM, session.device, precision.dtype)
        row = implementations.row(*what, operands, precision)
    else:
        batch = table1.Batch.draw(layout, session.device, precision, table1.dim_of(session))
        row = table1.row(*what, operator, batch, precision)
    row.has_memory = True
    row.shape["fill"] = round(layout.total / (layout.num_seqs * layout.max_len), 4)
    session.add(row)
    if operator is None:
        names = (OURS, *(name for name in peers if name != "padded"))
        implementations.measure(session, (row,), operands, precision, names)
    else:
        names = (OURS, *(name for name in peers if name in table1.PEERS))
        table1.measure(session, (row,), operator, batch, precision, names)


def _run(session: Session) -> None:
    session.each_case("sweep", CASES, _run_case)


COMMAND = Command(tuple(case.name for case in CASES), _run, PEERS, DEFAULT_PEERS)
