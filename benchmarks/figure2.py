"""The paper's Figure 2: time and memory of forward and backward together, by the longest length."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import implementations, shapes
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, UNFUSED, Session
from benchmarks.shapes import Precision

PEERS = ("dense", "sdpa", "varlen", "fa3", "cudnn_frontend", "sll", "cudnn")
DEFAULT_PEERS = ("dense", "sdpa", "varlen", "cudnn_frontend", "sll")
NUM_SEQS, DIM = 256, 128
QUICK_SEQS, QUICK_DIM = 4, 32
QUICK_PART = 16  # quick: the longest lengths are divided by this


@dataclass(frozen=True)
class Case:
    """Lengths U[1, max_len]; goals are of bf16 on one H100."""

    max_len: int
    goal_us: float
    goal_mib: float

    @property
    def name(self) -> str:
        return str(self.max_len)


FIGURE_CASES = (
    Case(512, 180, 100),
    Case(1024, 440, 200),
    Case(2048, 1270, 390),
    Case(4096, 4650, 790),
)
CASES = tuple(case.name for case in FIGURE_CASES)
CASES_ON_CPU = ("512",)  # the others take minutes there


def run(session: Session) -> None:
    session.each_case("figure2", FIGURE_CASES, _run_case, cases_on_cpu=CASES_ON_CPU)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    num_seqs, dim, longest = NUM_SEQS, DIM, case.max_len
    if session.options.quick:
        num_seqs, dim, longest = QUICK_SEQS, QUICK_DIM, longest // QUICK_PART
    layout = shapes.layout(shapes.uniform(num_seqs, longest), quick=False)
    operands = Operands.draw(layout, 1, dim, session.device, precision.dtype)
    row = implementations.row("figure2", case.name, "forward+backward", operands, precision)
    row.has_memory = True
    if session.has_attention_goals(precision):
        row.goal_us, row.goal_mib = case.goal_us, case.goal_mib
    session.add(row)
    names = (OURS, HINTED, UNFUSED, *session.peers(PEERS, DEFAULT_PEERS))
    implementations.measure(session, (row,), operands, precision, names)
