"""layer_norm_mul_dropout beside plain PyTorch and torch.compile of it, on 103,366 packed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import jagged_cuda
from benchmarks import peers, shapes
from benchmarks.candidate import Candidate
from benchmarks.checking import WrongResultError
from benchmarks.session import OURS, Command, Row, Session
from benchmarks.shapes import Precision
from jagged_cuda.testing.ops.layer_norm_mul_dropout import EPS, keep_of

PEERS = ("pytorch", "compiled")
ROWS, QUICK_ROWS = 103_366, 300
SEED = 11
JUDGED_ROWS = 200
LAUNCHES = (1, 2)  # of a forward, and of a backward


@dataclass(frozen=True)
class _Case:
    name: str
    columns: int
    p: float


CASES = (
    *(_Case(f"dropout_{columns}", columns, 0.1) for columns in (64, 128, 256, 512, 1024)),
    _Case("no_dropout_256", 256, 0.0),
)


def _plain(p: float, x: Tensor, u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = F.layer_norm(x, (x.shape[1],), weight.to(x.dtype), bias.to(x.dtype), EPS)
    return F.dropout(u * normed, p)


def _ours(p: float, seed: Tensor, *operands: Tensor) -> Tensor:
    return jagged_cuda.layer_norm_mul_dropout(*operands, eps=EPS, p=p, seed=seed)


class _Check:
    """The definition in float64 on the first rows; peers drop other elements."""

    def __init__(self, p: float, operands: Sequence[Tensor], grad_out: Tensor) -> None:
        rows = min(JUDGED_ROWS, len(grad_out))
        x, u, weight, bias = (t.detach().double() for t in operands)
        x, u = x[:rows].requires_grad_(), u[:rows].requires_grad_()
        normed = F.layer_norm(x, (x.shape[1],), weight, bias, EPS)
        out = u * normed * keep_of(x, p, SEED)
        self.expected = (out.detach(), *torch.autograd.grad(out, (x, u), grad_out[:rows].double()))

    def _require(self, found: Tensor, expected: Tensor, slack: float) -> None:
        limit = 8 * slack * torch.finfo(found.dtype).eps * float(expected.abs().max())
        if float((found[: len(expected)].double() - expected).abs().max()) > limit:
            raise WrongResultError("wrong result of layer_norm_mul_dropout")

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        self._require(out, self.expected[0], slack)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        for found, expected in zip(gradients[:2], self.expected[1:], strict=True):
            self._require(found, expected, 1.0)


def _candidate(
    name: str, p: float, operands: tuple[Tensor, ...], grad_out: Tensor, seed: Tensor
) -> Candidate:
    function: Callable[..., Tensor] = functools.partial(_plain, p)
    if name == OURS:
        return Candidate(functools.partial(_ours, p, seed), operands, grad_out)
    if name == "compiled":
        peers.need_cuda(name, grad_out.device)
        torch.compiler.reset()  # else it would give up after a few shapes, and run uncompiled
        function = torch.compile(function, dynamic=False)
    return Candidate(function, operands, grad_out, None)


def _run_case(session: Session, case: _Case, precision: Precision) -> None:
    rows = QUICK_ROWS if session.options.quick else ROWS
    generator = torch.Generator().manual_seed(shapes.SEED)

    def draw(*shape: int, dtype: torch.dtype = precision.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(session.device, dtype)

    x, u, grad_out = (draw(rows, case.columns) for _ in range(3))
    operands = (x, u, *(draw(case.columns, dtype=torch.float32) for _ in range(2)))
    seed = torch.tensor([SEED], device=session.device)
    found = []
    for pass_name, tensors, launches in zip(("forward", "backward"), (3, 5), LAUNCHES, strict=True):
        row = Row(
            command="norm",
            case=case.name,
            pass_name=pass_name,
            precision=precision.name,
            shape={"T": rows, "D": case.columns},
            seed=shapes.SEED,
            bytes=(tensors * x.nbytes,),
            launches=launches,
        )
        found.append(session.add(row))
    names = (OURS, *session.peers(COMMAND))
    session.run(
        found,
        {
            name: functools.partial(_candidate, name, case.p, operands, grad_out, seed)
            for name in names
        },
        _Check(case.p, operands, grad_out),
    )


def _run(session: Session) -> None:
    session.each_case("norm", CASES, _run_case, ("bf16", "fp32"))


COMMAND = Command(tuple(case.name for case in CASES), _run, PEERS, PEERS)
