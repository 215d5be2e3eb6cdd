"""The one rule by which a result is right."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

# Rounding an operand to TF32 leaves 10 bits behind the point.
TF32_EPS = 2.0**-10


class MismatchError(AssertionError):
    """A result is outside the rule's limit."""


def accumulator_eps(dtype: torch.dtype) -> float:
    """eps of the dtype in which sums run: float32, or float64 for float64."""
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps


def operand_eps(dtype: torch.dtype, device: torch.device | str) -> float:
    """What a product may lose by rounding its operands: TF32's share where that is allowed."""
    if dtype is not torch.float32:
        return 0.0
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    if tf32 and torch.device(device).type == "cuda":
        return TF32_EPS
    return 16 * torch.finfo(torch.float32).eps


def compare(
    actual: Tensor,
    reference: Tensor,
    *,
    same_precision: Sequence[Tensor],
    terms: Tensor,
    seq_of_row: Tensor,
    num_seqs: int,
    label: str,
    seed: int | str,
    command: Callable[[], str] | None = None,
    rounding: float = 0.0,
    accumulator: float | None = None,
    slack: float = 1.0,
) -> None:
    """Raise MismatchError unless, for every sequence, with eps the machine epsilon of a dtype::

        err(actual, reference) <= 2 * err(same_precision, reference)
                                  + 2 * eps(dtype) * max |reference|
                                  + (64 * eps(accumulator) + rounding) * max terms

    and inf and nan are in the same places. err is the largest absolute difference within the
    sequence.

    Args:
        actual: `[rows, ...]`, the result in its own dtype.
        reference: `[rows, ...]` float64.
        same_precision: `[rows, ...]`, the result of padded PyTorch in the same precision, in each
            way in which it can be written; the largest error counts.
        terms: `[rows, ...]` float64, the size of the terms that each element sums.
        seq_of_row: `[rows]`, the sequence of each row; num_seqs for rows outside every sequence,
            which must be exact.
        num_seqs: B.
        label: operator and tensor, for the message.
        seed: what the inputs were drawn from, for the message.
        command: says what reproduces the failure; by default the test that runs.
        rounding: operand_eps of a product.
        accumulator: eps of the dtype in which sums run; by default that of actual's dtype.
        slack: the factor by which the limit is widened; 1 for our own results.
    """

    def fail(text: str) -> NoReturn:
        how = _running_test() if command is None else command()
        raise MismatchError(f"{label}, seed {seed}: {text}\n  reproduce: {how}")

    if actual.shape != reference.shape:
        fail(f"got shape {list(actual.shape)}, expected {list(reference.shape)}")
    if actual.dtype != same_precision[0].dtype:
        fail(f"got dtype {actual.dtype}, expected {same_precision[0].dtype}")
    if actual.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    accumulator = accumulator_eps(actual.dtype) if accumulator is None else accumulator
    rows = actual.shape[0]
    # What overflows the dtype is rightly infinite.
    expected = reference.detach().to(actual.dtype).double().reshape(rows, -1)
    exact, got, scale, *peers = (
        tensor.detach().double().reshape(rows, -1)
        for tensor in (reference, actual, terms, *same_precision)
    )
    same_kind = (got == expected) | (got.isfinite() & expected.isfinite())
    misplaced = ~(same_kind | (got.isnan() & expected.isnan()))
    comparable = got.isfinite() & expected.isfinite()
    error = (got - exact).abs().where(comparable, 0.0)

    def per_seq(values: Tensor) -> Tensor:
        """The largest finite value of each sequence, `[B + 1]`."""
        row_max = values.where(values.isfinite(), 0.0).amax(1)
        return row_max.new_zeros(num_seqs + 1).scatter_reduce(0, seq_of_row, row_max, "amax")

    peer_error = torch.stack([per_seq((peer - exact).abs()) for peer in peers]).amax(0)
    magnitude = per_seq(exact.abs())
    limit = 2 * peer_error + 2 * eps * magnitude
    limit = slack * (limit + (64 * accumulator + rounding) * per_seq(scale))
    limit[num_seqs] = 0.0
    excess = (error - limit[seq_of_row][:, None]).masked_fill(misplaced, torch.inf)
    if not bool((excess > 0).any()):
        return

    global_row, column = divmod(int(excess.argmax()), got.shape[1])
    seq = int(seq_of_row[global_row])
    failing = seq_of_row[(excess > 0).any(1)].unique().numel()
    where = f"row {global_row} outside every sequence"
    if seq < num_seqs:
        row = global_row - int((seq_of_row == seq).nonzero()[0])
        where = f"sequence {seq}, row {row} (of the tensor {global_row})"
    shape = actual.shape[1:]
    position = torch.unravel_index(torch.tensor(column), shape) if shape else ()
    fail(
        f"{where}, column {tuple(int(i) for i in position)}:"
        f" got {float(got[global_row, column])!r}, expected {float(exact[global_row, column])!r}\n"
        f"  error {float(error[global_row, column]):.3g}, limit {float(limit[seq]):.3g}"
        f" (PyTorch's own error {float(peer_error[seq]):.3g}, largest value"
        f" {float(magnitude[seq]):.3g}); {failing} of {num_seqs} sequences fail"
    )


def surely_right(
    actual: Tensor,
    reference: Tensor,
    *,
    seq_of_row: Tensor,
    num_seqs: int,
    terms: Tensor | None = None,
    accuracy: float = 0.0,
) -> bool:
    """Whether ``2 * eps(dtype) * max |reference| + accuracy * max terms`` is enough of a limit.

    It is compare's limit without PyTorch's own error: if this returns True, compare passes, and the
    rest need not be computed. False means nothing.
    """
    if actual.shape != reference.shape:
        return False
    if actual.numel() == 0:
        return True
    rows = actual.shape[0]
    exact, got = reference.detach().reshape(rows, -1), actual.detach().reshape(rows, -1)
    expected = exact.to(actual.dtype)
    error = (got.double() - exact).abs().masked_fill_(got == expected, 0.0)
    error.masked_fill_(got.isfinite() != expected.isfinite(), torch.inf)
    row_limit = 2 * torch.finfo(actual.dtype).eps * _finite_row_max(exact)
    if terms is not None:
        row_limit += accuracy * _finite_row_max(terms.detach().reshape(rows, -1))
    limit = row_limit.new_zeros(num_seqs + 1).scatter_reduce_(0, seq_of_row, row_limit, "amax")
    limit[num_seqs] = 0.0
    # Infinite and NaN errors are above any limit.
    return bool((error.amax(1) <= limit[seq_of_row]).all())


def _finite_row_max(values: Tensor) -> Tensor:
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(1)


def _running_test() -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    return with_environment(f"python -m pytest {shlex.quote(test)}" if test else "(no test runs)")


def with_environment(command: str) -> str:
    """The command with those settings before it that choose another kernel path."""
    names = sorted(name for name in os.environ if name.startswith("JAGGED_CUDA_"))
    kept = [f"{name}={shlex.quote(os.environ[name])}" for name in names if "CACHE" not in name]
    return " ".join((*kept, command))
