"""Position and time embeddings of packed rows, with a gradient of the same bits at every run.

    python examples/embeddings.py                        drawn histories
    python examples/embeddings.py --events ratings.csv   an interaction log

Models of long histories add to each event what its place and its age mean: how many events came
after it, and how long ago it was. Here is a layer that does so on packed rows, of three tables:

    recency   by the place counted from the end of the history (jagged_positions), where all
              candidates behind a history share place 0
    age       by the logarithm of the time that has passed since
    context   by the place counted from the begin, for the first few rows, which in such models are
              features of the user (jagged_dense_add, with one table expanded to all histories)

The gradient of a table sums over all rows that share an entry: PyTorch's adds them on a GPU in any
order. Here rows are sorted by entry, which makes each entry a sequence, and jagged_sum adds them in
an order of its own (Lookup). The program compares both: values, bits of repeated runs, time. The
exit status is 1 if they disagree.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import demo  # before torch is loaded: it sets up the process
import torch
from histories import DataError, Histories
from torch import Tensor, nn

from jagged_cuda import jagged_broadcast, jagged_dense_add, jagged_positions, jagged_sum

# Of the largest value: float32 rounds at 6e-8, and the sums run in different orders.
TOLERANCE = 1e-5
REPEATS = 5
CONTEXT_ROWS = 4


class Lookup(torch.autograd.Function):
    """Entries of a table `[R, D]` by number `[T]`; the gradient adds rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(number)
        ctx.num_entries = table.shape[0]
        return table.index_select(0, number)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None]:
        (number,) = ctx.saved_tensors
        order = number.argsort(stable=True)
        entries = torch.arange(ctx.num_entries + 1, dtype=number.dtype, device=number.device)
        offsets = torch.searchsorted(number[order], entries)  # the rows of each entry
        return jagged_sum(grad_rows[order], offsets), None


def lookup(table: Tensor, number: Tensor) -> Tensor:
    """`[T, D]`"""
    return Lookup.apply(table, number)


def lookup_by_torch(table: Tensor, number: Tensor) -> Tensor:
    """The same, with PyTorch's gradient."""
    return table[number.long()]


class RowEmbedding(nn.Module):
    """Add to each row what its place and its age in its history mean.

    Args:
        num_places: entries of the table of places; older rows share the last.
        num_ages: entries of the table of ages; entry j holds ages from unit * 2^(j - 1) on.
        unit: the smallest age that is told from none, in the unit of time.
        dim: D.
    """

    def __init__(self, *, num_places: int, num_ages: int, unit: float, dim: int) -> None:
        super().__init__()
        self.recency = nn.Parameter(0.02 * torch.randn(num_places, dim))
        self.age = nn.Parameter(0.02 * torch.randn(num_ages, dim))
        self.context = nn.Parameter(0.02 * torch.randn(CONTEXT_ROWS, dim))
        self.register_buffer("boundaries", unit * 2.0 ** torch.arange(num_ages - 1).double())

    def numbers(
        self, time: Tensor, offsets: Tensor, targets: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The entries of each row: its place `[T]` int32, and its age `[T]` int64."""
        total = time.shape[0]
        place = jagged_positions(offsets, total=total, from_end=True, targets=targets)
        newest = time.index_select(0, (offsets[1:] - 1).clamp(min=0))  # [B]
        age = jagged_broadcast(newest, offsets, total=total) - time
        return (
            place.clamp(max=self.recency.shape[0] - 1),
            torch.bucketize(age, self.boundaries, right=True),
        )

    def embed(
        self,
        place: Tensor,
        age: Tensor,
        look_up: Callable[[Tensor, Tensor], Tensor] = lookup,
    ) -> Tensor:
        """`[T, D]`, of rows in any order."""
        return look_up(self.recency, place) + look_up(self.age, age)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        offsets: Tensor,
        targets: int | Tensor | None = None,
        look_up: Callable[[Tensor, Tensor], Tensor] = lookup,
    ) -> Tensor:
        """x `[T, D]`, time `[T]`, offsets `[B + 1]` -> like x"""
        rows = x + self.embed(*self.numbers(time, offsets, targets), look_up)
        num_seqs = offsets.shape[0] - 1
        return jagged_dense_add(rows, self.context.expand(num_seqs, -1, -1), offsets)


def times_of(histories: Histories) -> Tensor:
    """`[T]` float64; the number of the event where the log is said to have no times."""
    if histories.times is None:
        return torch.arange(len(histories.items), dtype=torch.float64)
    return histories.times


def gradients(
    layer: RowEmbedding,
    rows: tuple[Tensor, Tensor, Tensor],
    look_up: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """The result, and the gradients of the three tables."""
    out = layer(*rows, look_up=look_up)
    weight = torch.linspace(-1.0, 1.0, out.shape[1], device=out.device)
    tables = (layer.recency, layer.age, layer.context)
    return out.detach(), *torch.autograd.grad((out.sin() * weight).sum(), tables)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of REPEATS runs, after one that warms up."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds[1:])


def main(argv: list[str] | None = None) -> int:
    args = demo.data_parser(__doc__).parse_args(argv)
    try:
        device = demo.choose_device(args.device)
        histories = demo.load_histories(args.events, args.seed)
    except (DataError, RuntimeError) as error:
        print(f"embeddings.py: {error}", file=sys.stderr)
        return 2
    demo.print_data(histories)
    print(f"device    {demo.describe_device(device)}, torch {torch.__version__}\n", flush=True)

    torch.manual_seed(args.seed)
    num_seqs = min(args.batch_size or 4 * demo.BATCH_SIZE, len(histories.lengths))
    offsets = histories.offsets[: num_seqs + 1]
    total, dim = int(offsets[-1]), args.dim or demo.DIM
    x = torch.randn(total, dim, device=device)
    rows = (x, times_of(histories)[:total].to(device), offsets.to(device))
    layer = RowEmbedding(num_places=args.cap, num_ages=32, unit=60.0, dim=dim).to(device)

    forms = {"PyTorch": lookup_by_torch, "sorted": lookup}
    found = {name: gradients(layer, rows, look_up) for name, look_up in forms.items()}
    again = gradients(layer, rows, lookup)
    same_bits = all(torch.equal(a, b) for a, b in zip(found["sorted"], again, strict=True))
    difference = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
        for a, b in zip(found["PyTorch"], found["sorted"], strict=True)
    )
    print(f"{num_seqs} histories, {total:,} rows of {dim} features, forward and backward:")
    for name, look_up in forms.items():

        def run(look_up: Callable[[Tensor, Tensor], Tensor] = look_up) -> object:
            return gradients(layer, rows, look_up)

        print(f"{name:<9} {milliseconds(run, device):8.2f} ms")
    agrees = difference <= TOLERANCE
    print(f"values    {'equal within rounding' if agrees else 'NOT EQUAL'}: {difference:.1e} apart")
    print(f"bits      {'the same' if same_bits else 'NOT THE SAME'} in a second run")
    return 0 if agrees and same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
