"""Host time of an eager call: how long it keeps its caller, on tensors too small to matter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jagged_cuda
from benchmarks import shapes
from benchmarks.candidate import Candidate
from benchmarks.session import OURS, Row, Session
from jagged_cuda.testing.lengths import Layout

CALLS, QUICK_CALLS = 2000, 50
NUM_SEQS, LENGTH, DIM, COLUMNS, HEADS = 8, 16, 32, 8, 2
GOAL_US = {"no gradient": 20.0, "gradient": 45.0}
CASES = (
    "torch.add",
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "jagged_softmax",
    "jagged_flash_attention",
)


@dataclass(frozen=True)
class _Tensors:
    offsets: Tensor
    x: Tensor  # [T, D]
    y_dense: Tensor  # [B, D, N]
    y_jagged: Tensor  # [T, N]
    qkv: tuple[Tensor, Tensor, Tensor]  # each [T, H, D]


def _draw(device: torch.device) -> _Tensors:
    layout = Layout((LENGTH,) * NUM_SEQS)
    torch.manual_seed(shapes.SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    q, k, v = (draw(layout.total, HEADS, DIM) for _ in range(3))
    return _Tensors(
        layout.offsets(device),
        draw(layout.total, DIM),
        draw(NUM_SEQS, DIM, COLUMNS),
        draw(layout.total, COLUMNS),
        (q, k, v),
    )


def _candidates(tensors: _Tensors) -> dict[str, Candidate]:
    offsets = tensors.offsets

    def candidate(function: Callable[..., Any], *inputs: Tensor) -> Candidate:
        return Candidate(function, inputs, torch.randn_like(function(*inputs)))

    return {
        "torch.add": candidate(torch.add, tensors.x, tensors.x),
        "jagged_dense_bmm": candidate(
            lambda x, y: jagged_cuda.jagged_dense_bmm(x, y, offsets), tensors.x, tensors.y_dense
        ),
        "jagged_jagged_bmm": candidate(
            lambda x, y: jagged_cuda.jagged_jagged_bmm(x, y, offsets), tensors.x, tensors.y_jagged
        ),
        "jagged_softmax": candidate(
            lambda x: jagged_cuda.jagged_softmax(x, offsets), tensors.y_jagged
        ),
        "jagged_flash_attention": candidate(
            lambda q, k, v: jagged_cuda.jagged_flash_attention(q, k, v, offsets), *tensors.qkv
        ),
    }


def run(session: Session) -> None:
    quick = session.options.quick
    calls = QUICK_CALLS if quick else CALLS
    for name, candidate in _candidates(_draw(session.device)).items():
        if not session.selected(name):
            continue
        session.progress(f"host: {name}")
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
            if session.is_reference_machine and name != "torch.add":
                row.goal_us = GOAL_US.get(pass_name)
            session.add(row)
            with session.guard(OURS, row):
                row.set_measurement(OURS, session.timer.measure_host(call, calls))
        session.after_row()
