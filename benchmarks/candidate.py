"""What is timed: a differentiable function and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def _as_it_is(result: Tensor) -> Tensor:
    return result


@dataclass(frozen=True)
class Candidate:
    """An implementation, made ready to run: its operands lie in the layout that it wants.

    Args:
        function: takes `inputs`, returns the result, differentiable if there is a `grad_out`.
        inputs: what function is differentiated by.
        grad_out: of the result; None for an implementation without a backward.
        rows: brings the result into our layout; None if the result is another one, since padding is
            not masked.
        has_our_gradients: a peer's gradients come in our layout, and are judged as ours are.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    grad_out: Tensor | None
    rows: Callable[[Tensor], Tensor] | None = _as_it_is
    has_our_gradients: bool = False

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.inputs)

    def _leaves(self) -> list[Tensor]:
        return [tensor.detach().requires_grad_() for tensor in self.inputs]

    def prepare_backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """Run the forward, and return the call that is the backward alone."""
        leaves, grad_out = self._leaves(), self.grad_out
        out = self.function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    def prepare(self, pass_name: str) -> Callable[[], Any]:
        """The call that is this pass; what has to run before it has run."""
        if pass_name == "forward":
            return self.forward
        return self.prepare_backward() if pass_name == "backward" else self.step

    def step(self) -> tuple[Tensor, ...]:
        """Forward and backward: the result and the gradients."""
        leaves = self._leaves()
        out = self.function(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, self.grad_out))
