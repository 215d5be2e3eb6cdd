"""Host time of an eager call: how long until it returns, on tensors too small to matter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import jagged_cuda
from benchmarks import shapes
from benchmarks.candidate import Candidate
from benchmarks.session import OURS, Command, Goal, Row, Session
from jagged_cuda.testing.lengths import Layout

CALLS, QUICK_CALLS = 2000, 50
NUM_SEQS, LENGTH, DIM, COLUMNS, HEADS = 8, 16, 32, 8, 2
ADD, ATTENTION = "torch.add", "jagged_flash_attention"
CASES = (ADD, "jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax", ATTENTION)
GOALS_US = {"no gradient": 15.0, "gradient": 20.0}
ATTENTION_GOALS_US = {"no gradient": 20.0, "gradient": 40.0}
GOAL_OF_BOTH = 1.6  # forward and backward together, over torch.add's


def _candidate(name: str, device: torch.device) -> Candidate:
    layout = Layout((LENGTH,) * NUM_SEQS)
    torch.manual_seed(shapes.SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = (layout.total, DIM)
    shapes_of: dict[str, tuple[tuple[int, ...], ...]] = {
        ADD: (rows, rows),
        "jagged_dense_bmm": (rows, (NUM_SEQS, DIM, COLUMNS)),
        "jagged_jagged_bmm": (rows, (layout.total, COLUMNS)),
        "jagged_softmax": ((layout.total, COLUMNS),),
        ATTENTION: ((layout.total, HEADS, DIM),) * 3,
    }
    inputs = tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes_of[name])
    offsets = layout.offsets(device)

    function: Callable[..., Any] = torch.add
    if name != ADD:
        operation = getattr(jagged_cuda, name)
        function = lambda *tensors: operation(*tensors, offsets)  # noqa: E731
    return Candidate(function, inputs, torch.randn_like(function(*inputs)))


def _goal(session: Session, name: str, pass_name: str) -> Goal | None:
    if not session.is_reference_machine or name == ADD:
        return None
    goals = dict(ATTENTION_GOALS_US if name == ATTENTION else GOALS_US)
    for row in session.rows:
        if (row.case, row.pass_name) == (ADD, "forward+backward") and row.median_us(OURS):
            goals["forward+backward"] = GOAL_OF_BOTH * row.median_us(OURS)
    return Goal(goals[pass_name], "us") if pass_name in goals else None


def _run(session: Session) -> None:
    calls = QUICK_CALLS if session.options.quick else CALLS
    for name in filter(session.selected, CASES):
        session.progress(f"host: {name}")
        candidate = _candidate(name, session.device)
        leaves = [tensor.detach().requires_grad_() for tensor in candidate.inputs]
        passes: dict[str, Callable[[], object]] = {
            "no gradient": candidate.forward,
            "gradient": functools.partial(candidate.function, *leaves),
            "forward+backward": candidate.step,
        }
        for pass_name, call in passes.items():
            shape = {"B": NUM_SEQS, "L": LENGTH}
            dtype = str(candidate.inputs[0].dtype).removeprefix("torch.")
            row = Row("host", name, pass_name, dtype, shape, shapes.SEED)
            row.goal = _goal(session, name, pass_name)
            session.add(row)
            with session.guard(OURS, row):
                row.set_measurement(OURS, session.timer.measure_host(call, calls))
        session.after_row()


COMMAND = Command(CASES, _run)
