"""Is a result right: compared in float64, sequence by sequence, before it is timed.

This is a gate, not the test suite: the limits only tell a wrong result from a rounded one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jagged_cuda.testing.lengths import Layout

# The gradients of a shorter sequence may cancel to nearly nothing (of one row: to nothing), so that
# their relative error says nothing; the tests judge those.
MIN_ROWS_OF_GRADIENTS = 16
CHUNK = 1024


class WrongResultError(AssertionError):
    """A result that must not be timed."""


def relative_errors(actual: Tensor, reference: Tensor, owner: Tensor, num_owners: int) -> Tensor:
    """`[num_owners]`: |actual - reference| / |reference| over the rows of each owner."""
    exact = reference.double().reshape(reference.shape[0], -1)
    difference = actual.detach().double().reshape(exact.shape) - exact

    def norm(values: Tensor) -> Tensor:
        return values.new_zeros(num_owners).index_add(0, owner, values.square().sum(1)).sqrt()

    error, size = norm(difference), norm(exact)
    return torch.where((error == 0) & (size == 0), 0.0, error / size)


def require(name: str, errors: Tensor, limit: float) -> None:
    """Raise WrongResultError unless every error is within the limit; NaN is not."""
    if errors.numel() == 0 or bool((errors <= limit).all()):
        return
    worst = int(torch.where(errors.isnan(), math.inf, errors).argmax())
    raise WrongResultError(
        f"wrong {name}: relative error {float(errors[worst]):.3g} in sequence {worst}, limit"
        f" {limit:.3g}, {int((~(errors <= limit)).sum())} of {errors.numel()} fail"
    )


def require_jagged(
    name: str, actual: Tensor, reference: Tensor, layout: Layout, limit: float, min_rows: int = 1
) -> None:
    """Check `[T, ...]`, or `[B, ...]`, in sequences of at least min_rows rows."""
    device = reference.device
    if actual.shape != reference.shape:
        raise WrongResultError(
            f"wrong {name}: shape {list(actual.shape)}, expected {list(reference.shape)}"
        )
    if reference.shape[0] == layout.total:
        owner = layout.seq_of_row(device)
    else:
        owner = torch.arange(layout.num_seqs, device=device)
    errors = relative_errors(actual, reference, owner, layout.num_seqs)
    lengths = torch.tensor(layout.lengths, device=device)
    require(name, errors.where(lengths >= min_rows, 0.0), limit)


def attention_of_one_head(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of one sequence and head and its gradients, in float64, some queries at a time.

    Args:
        q, k, v, grad_out: `[L, D]`.

    Returns:
        out, dq, dk, dv, each `[L, D]`.
    """
    q, k, v, grad_out = (tensor.double() for tensor in (q, k, v, grad_out))
    outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, q.shape[0], CHUNK):
        q_rows, grad_rows = q[begin : begin + CHUNK], grad_out[begin : begin + CHUNK]
        logits = scale * (q_rows @ k.T)  # [CHUNK, L]
        if causal:
            row = torch.arange(begin, begin + q_rows.shape[0], device=q.device)
            hidden = torch.arange(k.shape[0], device=q.device) > row[:, None]
            logits.masked_fill_(hidden, -math.inf)
        weights = logits.softmax(1)
        out = weights @ v
        delta = (grad_rows * out).sum(1, keepdim=True)
        grad_logits = weights * (grad_rows @ v.T - delta)
        outs.append(out)
        dqs.append(scale * (grad_logits @ k))
        dk += scale * (grad_logits.T @ q_rows)
        dv += weights.T @ grad_rows
    return torch.cat(outs), torch.cat(dqs), dk, dv


class AttentionCheck:
    """Judges results of attention on a few sequences and heads, against float64."""

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        scale: float,
        causal: bool,
        limit: float,
    ) -> None:
        """tensors: q, k, v and grad_out, each `[T, H, D]`."""
        self.layout = layout
        self.limit = limit
        order = sorted(range(layout.num_seqs), key=lambda seq: layout.lengths[seq])
        long_enough = [s for s in order if layout.lengths[s] >= MIN_ROWS_OF_GRADIENTS] or order
        # Of those whose gradients can be judged, the shortest, the median and the longest; and the
        # last sequence of the batch.
        seqs = {long_enough[0], long_enough[len(long_enough) // 2], long_enough[-1]}
        seqs.add(layout.num_seqs - 1)
        begins = layout.offsets()
        heads = {0, tensors[0].shape[1] - 1}
        self.samples = []
        for seq in sorted(seqs):
            rows = slice(int(begins[seq]), int(begins[seq + 1]))
            for head in sorted(heads):
                q, k, v, grad_out = (tensor[rows, head] for tensor in tensors)
                found = attention_of_one_head(q, k, v, grad_out, scale, causal)
                self.samples.append((seq, rows, head, found))

    def require_out(self, out: Tensor, slack: float = 1.0) -> None:
        """Check the result, `[T, H, D]`."""
        self._require("out", out, 0, 1, slack * self.limit)

    def require_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Check dq, dk and dv, each `[T, H, D]`."""
        for index, name in enumerate(("dq", "dk", "dv"), 1):
            self._require(name, gradients[index - 1], index, MIN_ROWS_OF_GRADIENTS, self.limit)

    def _require(self, name: str, actual: Tensor, index: int, min_rows: int, limit: float) -> None:
        if actual.shape[0] != self.layout.total:
            raise WrongResultError(
                f"wrong {name}: {actual.shape[0]} rows, expected {self.layout.total}"
            )
        if not bool(actual.isfinite().all()):
            raise WrongResultError(f"wrong {name}: it is not finite")
        for seq, rows, head, found in self.samples:
            if self.layout.lengths[seq] < min_rows:
                continue
            reference = found[index]
            owner = torch.zeros(reference.shape[0], dtype=torch.int64, device=reference.device)
            errors = relative_errors(actual[rows, head], reference, owner, 1)
            length = self.layout.lengths[seq]
            require(f"{name} of sequence {seq} ({length} rows), head {head}", errors, limit)
