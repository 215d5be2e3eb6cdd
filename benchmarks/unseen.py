"""Attention on shapes that nobody tuned for, beside FlashAttention-2 on the same packed rows.

B, the mean length, H and D are drawn log-uniformly from a seed of their own, and with them the
kind of the lengths and whether the mask is causal. What is too large is drawn again.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from benchmarks import implementations, shapes
from benchmarks.operands import Operands
from benchmarks.session import OURS, Command, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing.lengths import Layout

PEER = "varlen"
PASSES = ("forward", "backward")
SEED = 20261121
NUM_SHAPES, QUICK_SHAPES = 60, 2
MAX_SEQS, MEAN_LENS, MAX_HEADS, DIMS = 65_536, (4, 8192), 32, (16, 256)
DIM_STEP = 8  # the peer takes multiples of 8
MAX_ELEMS, MAX_PRODUCTS = 2**28, 2**39  # of T H D, and of sum(L^2) H D
SIGMA = 1.2  # of log-normal lengths
GOAL_MEAN, GOAL_EACH = 2.2, 1.0  # of the peer's time over ours


def _name(number: int) -> str:
    return f"unseen{number:02}"


@dataclass(frozen=True)
class Shape:
    """Self-attention of H heads of D over sequences of these lengths."""

    number: int
    kind: str  # "equal", "uniform" or "log-normal"
    lengths: tuple[int, ...]
    heads: int
    dim: int
    causal: bool

    @property
    def name(self) -> str:
        return _name(self.number)

    def fits(self) -> bool:
        products = sum(n * n for n in self.lengths)
        each = self.heads * self.dim
        return sum(self.lengths) * each <= MAX_ELEMS and products * each <= MAX_PRODUCTS


def _log_uniform(rng: random.Random, low: float, high: float) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _lengths(rng: random.Random, kind: str, num_seqs: int, mean: int) -> tuple[int, ...]:
    if kind == "equal":
        return (mean,) * num_seqs
    if kind == "uniform":
        return tuple(rng.randint(1, 2 * mean - 1) for _ in range(num_seqs))
    location = math.log(mean) - SIGMA**2 / 2
    return tuple(max(1, round(rng.lognormvariate(location, SIGMA))) for _ in range(num_seqs))


def draw(count: int = NUM_SHAPES, seed: int = SEED) -> list[Shape]:
    """The first `count` shapes that fit; the same on every machine."""
    rng = random.Random(seed)
    found: list[Shape] = []
    while len(found) < count:
        num_seqs = _log_uniform(rng, 1, MAX_SEQS)
        mean = _log_uniform(rng, *MEAN_LENS)
        heads = _log_uniform(rng, 1, MAX_HEADS)
        dim = DIM_STEP * _log_uniform(rng, DIMS[0] / DIM_STEP, DIMS[1] / DIM_STEP)
        kind = rng.choice(("equal", "uniform", "log-normal"))
        causal = rng.random() < 0.5
        if num_seqs * mean * heads * dim > 2 * MAX_ELEMS:
            continue  # spares its lengths
        lengths = _lengths(rng, kind, num_seqs, mean)
        shape = Shape(len(found), kind, lengths, heads, dim, causal)
        if shape.fits():
            found.append(shape)
    return found


def _run_shape(session: Session, shape: Shape, precision: Precision) -> None:
    heads, dim, lengths = shape.heads, shape.dim, shape.lengths
    if session.options.quick:
        heads, dim = min(heads, 2), min(dim, 32)
        lengths = tuple(min(n, shapes.QUICK_MAX_LEN) for n in lengths[: shapes.QUICK_SEQS])
    operands = Operands.draw(
        Layout(lengths), heads, dim, session.device, precision.dtype, causal=shape.causal
    )
    rows = []
    for pass_name in PASSES:
        row = implementations.row("unseen", shape.name, pass_name, operands, precision)
        row.shape["lengths"] = shape.kind
        rows.append(session.add(row))
    names = (OURS, *session.peers(COMMAND))
    implementations.measure(session, rows, operands, precision, names)


def summary(session: Session) -> dict[str, dict[str, float | int | str]]:
    """Of each pass: the geometric mean of the peer's time over ours, and the lowest."""
    found: dict[str, dict[str, float | int | str]] = {}
    for pass_name in PASSES:
        rows = [r for r in session.rows if r.command == "unseen" and r.pass_name == pass_name]
        ratios = {}
        for row in rows:
            ours, peer = row.median_us(OURS), row.median_us(PEER)
            if ours and peer:
                ratios[row.case] = peer / ours
        if ratios:
            lowest = min(ratios, key=ratios.__getitem__)
            found[pass_name] = {
                "shapes": len(ratios),
                "refused_by_peer": len(rows) - len(ratios),
                "geometric_mean": round(statistics.geometric_mean(ratios.values()), 3),
                "below_1": sum(ratio < GOAL_EACH for ratio in ratios.values()),
                "lowest": round(ratios[lowest], 3),
                "lowest_case": lowest,
            }
    return found


def _run(session: Session) -> None:
    cases = draw(QUICK_SHAPES if session.options.quick else NUM_SHAPES)
    # On a CPU a few of them would take hours: there they must be named.
    session.each_case("unseen", cases, _run_shape, on_cpu=("fp32",), cases_on_cpu=())
    found = summary(session)
    if found:
        session.sections["unseen"] = found
    for pass_name, values in found.items():
        session.note(
            f"unseen {pass_name}: {PEER} takes {values['geometric_mean']} times as long in the"
            f" geometric mean of {values['shapes']} shapes (goal {GOAL_MEAN}), {values['lowest']}"
            f" at least ({values['lowest_case']}); below {GOAL_EACH}: {values['below_1']};"
            f" refused by it: {values['refused_by_peer']}"
        )


CASES = tuple(_name(number) for number in range(NUM_SHAPES))
COMMAND = Command(CASES, _run, (PEER, "fa3", "cudnn_frontend"), (PEER,))
