"""Train one model over given batches, and measure time and memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from histories import Batch
from ranker import Ranker
from torch import Tensor, nn

# Adam divides each gradient by its own size: with the usual 1e-8, gradients that are mostly
# rounding become whole steps, and two trainings one rounding apart are 4e-5 apart in loss after 200
# steps. With 1e-6 they are 7e-7 apart, and learn as fast.
ADAM_EPS = 1e-6


class Measurement(NamedTuple):
    """Time and memory of one training."""

    losses: list[float]  # of each step
    step_seconds: list[float]
    peak_memory_bytes: int  # of PyTorch's allocator
    queue_seconds: Sequence[float] = ()  # of each step, until a GPU has all of its work


def train(
    model: Ranker,
    batches: Sequence[Batch],
    *,
    learning_rate: float,
    progress: Callable[[int, float], None],
) -> Measurement:
    """Train with Adam, one step per batch, after one warm-up pass that changes nothing.

    Peak memory is that of PyTorch's allocator, weights, gradients and Adam's state included. On
    CUDA it is the allocator's own figure over all steps. On the CPU, whose allocator keeps none, a
    step on the batch with the most rows is run again behind the measured ones, and the profiler's
    allocations are summed.

    Args:
        model: on the device to train on.
        batches: on the CPU; each is moved to the device before the clock of its step starts.
        learning_rate: Adam's.
        progress: called after each step with the number of steps done and the loss.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, eps=ADAM_EPS)
    model.loss(move(batches[0], device)).backward()
    optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, step_seconds, queue_seconds = [], [], []
    for cpu_batch in batches:
        batch = move(cpu_batch, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        loss = step(batch)
        queue_seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())  # waits for the device
        step_seconds.append(time.perf_counter() - begin)
        progress(len(losses), losses[-1])

    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
        return Measurement(losses, step_seconds, peak_bytes, queue_seconds)
    optimizer.zero_grad()
    largest = max(batches, key=lambda batch: batch.items.numel())
    peak_bytes = held_bytes(model, optimizer) + peak_allocated_bytes(lambda: step(largest))
    return Measurement(losses, step_seconds, peak_bytes)


def move(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(None if tensor is None else tensor.to(device) for tensor in batch))


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights and of the optimizer's state, which live between steps."""
    tensors = list(model.parameters())
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """The most that PyTorch holds on the CPU at once during run(), beyond what it held before."""
    cpu_only = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=cpu_only, profile_memory=True, acc_events=True
    ) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    ]
    allocated_bytes = peak_bytes = 0
    for _, change_bytes in sorted(changes, key=lambda change: change[0]):
        allocated_bytes += change_bytes
        peak_bytes = max(peak_bytes, allocated_bytes)
    return peak_bytes
