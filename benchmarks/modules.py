"""jagged_cuda.nn: each module beside the operators that it is made of, with the same parameters.

What a module may add is on the host: kinds of rows, checks of shapes. Its kernels are those of the
linear layers and of one or two operators. Both are timed on the device and on the host, in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.checking import WrongResultError
from benchmarks.session import OURS, Command, Goal, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda import (
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_hstu_attention,
    jagged_jagged_bmm,
    jagged_mean,
    jagged_target_attention,
    layer_norm_mul_dropout,
)
from jagged_cuda.nn import (
    DINAttention,
    HSTULayer,
    JaggedFeatureInteraction,
    JaggedMultiheadAttention,
    JaggedTransformerLayer,
    TargetAttention,
)

OPERATORS = "operators"
GOAL = 1.05  # times the operators' time
NUM_SEQS, MAX_LEN, DIM, HEADS, TARGETS = 1024, 200, 256, 4, 8
MIN_ROUNDS = 2
HOST_CALLS, QUICK_HOST_CALLS = 500, 5


class Inputs(NamedTuple):
    x: Tensor  # [T, E]
    targets: Tensor  # [B, N, E]
    offsets: Tensor


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1))


def attend(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    q, k, v = map(_heads, F.linear(x, m.in_proj_weight, m.in_proj_bias).chunk(3, dim=-1))
    out = jagged_flash_attention(q, k, v, offsets, causal=True)
    return F.linear(out.flatten(-2), m.out_proj.weight, m.out_proj.bias)


def transform(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    x = x + attend(m.self_attn, m.norm1(x), offsets)
    return x + m.linear2(F.relu(m.linear1(m.norm2(x))))


def gate(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
    rows = F.layer_norm(x, (DIM,), m.input_norm.weight, m.input_norm.bias, m.input_norm.eps)
    projected = F.silu(F.linear(rows, m.uvqk_proj.weight, m.uvqk_proj.bias))
    u, v, q, k = projected.chunk(4, dim=-1)
    read = jagged_hstu_attention(
        *map(_heads, (q, k, v)), offsets, divisor="length", causal=True
    ).flatten(1)
    norm = m.output_norm
    gated = layer_norm_mul_dropout(read, u, norm.weight, norm.bias, eps=norm.eps)
    return x + F.linear(gated, m.out_proj.weight, m.out_proj.bias)


def attend_to(m: Any, targets: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    sizes = [DIM, 2 * DIM]
    q_weight, kv_weight = m.in_proj_weight.split(sizes)
    q_bias, kv_bias = m.in_proj_bias.split(sizes)
    k, v = map(_heads, F.linear(x, kv_weight, kv_bias).chunk(2, dim=-1))
    out = jagged_target_attention(_heads(F.linear(targets, q_weight, q_bias)), k, v, offsets)
    return F.linear(out.flatten(-2), m.out_proj.weight, m.out_proj.bias)


def score(m: Any, targets: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    first, _, second, activation, last = m.scorer
    of_target, of_row, of_difference, of_product = first.weight.chunk(4, dim=1)
    matrices = (of_row - of_difference) + of_product * targets.unsqueeze(2)
    bias = F.linear(targets, of_target + of_difference, first.bias).flatten(1)
    y = matrices.flatten(1, 2).transpose(1, 2)
    hidden = jagged_dense_bmm(x, y, offsets, bias=bias, activation="sigmoid")
    scores = last(activation(second(hidden.unflatten(1, (TARGETS, -1))))).squeeze(2)
    return jagged_jagged_bmm(scores, x, offsets)


def interact(m: Any, targets: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    found = jagged_target_attention(m.query(targets), x, x, offsets)
    mean = jagged_mean(x, offsets).unsqueeze(1).expand_as(targets)
    return torch.cat([targets, found, mean], dim=-1)


class Case(NamedTuple):
    """A module, and the same by operators."""

    name: str
    make: Callable[..., nn.Module]
    call: Callable[[Any, Inputs], Tensor]
    operators: Callable[[Any, Inputs], Tensor]


CASES = (
    Case(
        "JaggedMultiheadAttention",
        lambda **options: JaggedMultiheadAttention(DIM, HEADS, **options),
        lambda m, i: m(i.x, i.offsets, causal=True),
        lambda m, i: attend(m, i.x, i.offsets),
    ),
    Case(
        "JaggedTransformerLayer",
        lambda **options: JaggedTransformerLayer(DIM, HEADS, **options),
        lambda m, i: m(i.x, i.offsets, causal=True),
        lambda m, i: transform(m, i.x, i.offsets),
    ),
    Case(
        "HSTULayer",
        lambda **options: HSTULayer(DIM, HEADS, **options),
        lambda m, i: m(i.x, i.offsets),
        lambda m, i: gate(m, i.x, i.offsets),
    ),
    Case(
        "TargetAttention",
        lambda **options: TargetAttention(DIM, HEADS, **options),
        lambda m, i: m(i.targets, i.x, i.offsets),
        lambda m, i: attend_to(m, i.targets, i.x, i.offsets),
    ),
    Case(
        "DINAttention",
        lambda **options: DINAttention(DIM, **options),
        lambda m, i: m(i.targets, i.x, i.offsets),
        lambda m, i: score(m, i.targets, i.x, i.offsets),
    ),
    Case(
        "JaggedFeatureInteraction",
        lambda **options: JaggedFeatureInteraction(DIM, **options),
        lambda m, i: m(i.targets, i.x, i.offsets),
        lambda m, i: interact(m, i.targets, i.x, i.offsets),
    ),
)


def _run_case(session: Session, case: Case, precision: Precision) -> None:
    quick = session.options.quick
    layout = shapes.layout(shapes.uniform(NUM_SEQS, MAX_LEN), quick)
    torch.manual_seed(shapes.SEED)
    options: dict[str, Any] = {"device": session.device, "dtype": precision.dtype}
    module = case.make(**options)
    inputs = Inputs(
        torch.randn(layout.total, DIM, **options).requires_grad_(),
        torch.randn(layout.num_seqs, TARGETS, DIM, **options).requires_grad_(),
        layout.offsets(session.device),
    )
    calls = {
        OURS: functools.partial(case.call, module, inputs),
        OPERATORS: functools.partial(case.operators, module, inputs),
    }
    shape = {"B": layout.num_seqs, "max_len": layout.max_len, "E": DIM, "T": layout.total}
    rows = {
        name: session.add(Row("modules", case.name, name, precision.name, shape, shapes.SEED))
        for name in ("forward", "forward+backward", "host")
    }
    with session.guard(OURS, *rows.values()):
        _require_equal(calls)
        for row in rows.values():
            row.goal = Goal(GOAL, "best peer") if session.is_reference_machine else None
        leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
        grad_out = torch.randn_like(calls[OURS]())
        for _ in range(max(MIN_ROUNDS, session.options.rounds)):
            for name, call in calls.items():
                _measure(session, rows, name, call, leaves, grad_out)
            _measure_host(session, rows["host"], calls)
    session.after_row()


def _require_equal(calls: Mapping[str, Callable[[], Tensor]]) -> None:
    found, expected = (call() for call in calls.values())
    if not torch.equal(found, expected):
        raise WrongResultError("the module is not equal to its operators")


def _measure(
    session: Session,
    rows: Mapping[str, Row],
    name: str,
    call: Callable[[], Tensor],
    leaves: list[Tensor],
    grad_out: Tensor,
) -> None:
    def step() -> object:
        return torch.autograd.grad(call(), leaves, grad_out, allow_unused=True)

    timer = session.timer
    with torch.no_grad():
        rows["forward"].set_measurement(name, timer.measure(call), timer.max_sm_mhz)
    rows["forward+backward"].set_measurement(name, timer.measure(step), timer.max_sm_mhz)


def _measure_host(session: Session, row: Row, calls: Mapping[str, Callable[[], Tensor]]) -> None:
    """Call by call in turn: what is looked for is less than what a run changes by."""
    host_calls = QUICK_HOST_CALLS if session.options.quick else HOST_CALLS
    found = session.timer.measure_host_in_turn(list(calls.values()), host_calls)
    for name, measurement in zip(calls, found, strict=True):
        row.set_measurement(name, measurement)


def _run(session: Session) -> None:
    session.each_case("modules", CASES, _run_case)


COMMAND = Command(tuple(case.name for case in CASES), _run)
