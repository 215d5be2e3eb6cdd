"""The paper's Figure 2: time and memory of forward and backward together, by the longest length."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from jagged_cuda.bench import attention, peers, shapes
from jagged_cuda.bench.candidate import Candidate
from jagged_cuda.bench.checking import AttentionCheck
from jagged_cuda.bench.session import HINTED, OURS, PEER_SLACK, Row, Session
from jagged_cuda.bench.shapes import Precision
from jagged_cuda.testing import reference

PEERS = ("dense", "sdpa", "varlen", "sll")
DEFAULT_PEERS = ("dense", "sdpa", "varlen")
NUM_SEQS = 256
DIM = 128
# max_L: microseconds and MiB on one H100 in bf16.
GOALS = {512: (180, 100), 1024: (440, 200), 2048: (1270, 390), 4096: (4650, 790)}
QUICK_PART = 16  # quick: the longest lengths are divided by this
CASES = tuple(str(max_len) for max_len in GOALS)


def _dense(operands: attention.Operands) -> Candidate:
    layout = operands.layout
    outside = ~peers.inside(layout, operands.q.device)[:, None, :]

    def pad(tensor: Tensor) -> Tensor:  # [T, 1, D] -> [B, M, D]
        return reference.pad(tensor.squeeze(1), layout)

    return Candidate(
        lambda q, k, v: peers.dense_attention(q, k, v, outside, operands.scale),
        tuple(pad(tensor) for tensor in operands.qkv),
        pad(operands.grad_out),
        lambda result: reference.unpad(result, layout).unsqueeze(1),
    )


def run(session: Session) -> None:
    for precision in session.precisions(("bf16",), ("fp32",)):
        with precision.setting():
            for max_len in GOALS:
                if not _is_selected(session, str(max_len)):
                    continue
                if session.out_of_time():
                    session.note(f"figure2: the time was spent before max_L {max_len}")
                    return
                session.progress(f"figure2: max_L {max_len} {precision.name}")
                _run_case(session, max_len, precision)


def _is_selected(session: Session, case: str) -> bool:
    if session.device.type == "cpu" and session.options.cases == ("*",):
        return session.options.quick or case == CASES[0]  # the others take minutes on a CPU
    return session.selected(case)


def _run_case(session: Session, max_len: int, precision: Precision) -> None:
    quick = session.options.quick
    num_seqs, dim, longest = (4, 32, max_len // QUICK_PART) if quick else (NUM_SEQS, DIM, max_len)
    layout = shapes.layout(shapes.uniform(num_seqs, longest), quick=False)
    operands = attention.Operands.draw(layout, 1, dim, False, session.device, precision.dtype)
    row = Row(
        command="figure2",
        case=str(max_len),
        pass_name="forward+backward",
        precision=precision.name,
        shape=operands.shape(),
        seed=shapes.SEED,
        bytes=(operands.forward_bytes, operands.backward_bytes),
        flops=3.5 * operands.flops,
    )
    if session.is_reference_machine and precision.name == "bf16":
        row.goal_us, row.goal_mib = GOALS[max_len]
    session.add(row)
    check = AttentionCheck(
        layout, (*operands.qkv, operands.grad_out), operands.scale, False, precision.limit
    )
    dense = {"dense": functools.partial(_dense, operands)}
    candidates = attention.candidates(session, operands, precision, PEERS, DEFAULT_PEERS, dense)
    for name, build in candidates.items():
        with session.guard(name, row):
            _measure(session, row, name, build, check)
        session.after_row()


def _measure(
    session: Session,
    row: Row,
    name: str,
    build: Callable[[], Candidate],
    check: AttentionCheck,
) -> None:
    candidate = build()
    if name in (OURS, HINTED):
        out, *gradients = candidate.step()
        check.require_out(out)
        check.require_gradients(gradients)
        del out, gradients
    elif candidate.rows is not None:
        check.require_out(candidate.rows(candidate.forward()), PEER_SLACK)
    peak = session.timer.peak_bytes(candidate.step)
    row.set_measurement(name, session.timer.measure(candidate.step))
    row.results[name]["peak_mib"] = None if peak is None else round(peak / 2**20, 1)
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
