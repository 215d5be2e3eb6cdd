"""Share each batch of histories among processes, so that none waits long for the others.

A step of data-parallel training takes as long as its slowest process. A history of L events costs
some time for each event (linear layers) and some for each pair of events (attention). How much of
which depends on the model and the machine, so both sums are evened out, sum(L) and sum(L^2): then
so is any mixture of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (lengths of a batch's histories [B], number of processes) -> places in the batch, by process.
Deal = Callable[[Tensor, int], list[Tensor]]


def contiguous(lengths: Tensor, num_ranks: int) -> list[Tensor]:
    """As many histories for each process, in the order in which they come."""
    return list(torch.arange(len(lengths)).tensor_split(num_ranks))


def balanced(lengths: Tensor, num_ranks: int) -> list[Tensor]:
    """About the same sum of lengths, and of squared lengths, for each process.

    From the longest to the shortest, each history goes where the larger of the two shares is the
    smallest with it. Deterministic: of equals the first.
    """
    order = lengths.argsort(descending=True, stable=True).tolist()
    rows = lengths.double()
    row_share = (rows / rows.sum().clamp(min=1)).tolist()
    pair_share = (rows**2 / (rows**2).sum().clamp(min=1)).tolist()
    row_sums, pair_sums = [0.0] * num_ranks, [0.0] * num_ranks
    places: list[list[int]] = [[] for _ in range(num_ranks)]
    for place in order:
        share, pairs = row_share[place], pair_share[place]
        shares = [max(r + share, p + pairs) for r, p in zip(row_sums, pair_sums, strict=True)]
        rank = shares.index(min(shares))
        row_sums[rank] += share
        pair_sums[rank] += pairs
        places[rank].append(place)
    return [torch.tensor(sorted(of_rank), dtype=torch.long) for of_rank in places]


class Sampler:
    """Which users each process takes at each step: the same answer in every process.

    Each epoch deals all users out once, in an order of its own; those who do not fill a batch sit
    that epoch out. A step's users depend only on the seed and on its number, so a training can go
    on from any step.

    Args:
        lengths: [U] of all users, as the model will see them.
        batch_size: users of a step, over all processes.
        num_ranks: processes; at most batch_size.
        deal: how a batch is shared among processes.
        seed: of the orders.
    """

    def __init__(
        self, lengths: Tensor, *, batch_size: int, num_ranks: int, deal: Deal, seed: int
    ) -> None:
        self.lengths = lengths
        self.batch_size = min(batch_size, len(lengths))
        self.num_ranks = num_ranks
        self.deal = deal
        self.seed = seed
        self.steps_per_epoch = len(lengths) // self.batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def batch(self, step: int) -> Tensor:
        """The users of all processes."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * epoch)
            self._order = torch.randperm(len(self.lengths), generator=generator)
            self._epoch = epoch
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]

    def users(self, step: int, rank: int) -> Tensor:
        """The users of one process."""
        batch = self.batch(step)
        return batch[self.deal(self.lengths[batch], self.num_ranks)[rank]]


def skew(sampler: Sampler, deal: Deal, num_steps: int) -> tuple[float, float]:
    """How much more than the mean the process with the most has: of rows, and of pairs of rows.

    Means over the first steps; 1.0 is even.
    """
    of_rows, of_pairs = [], []
    for step in range(num_steps):
        lengths = sampler.lengths[sampler.batch(step)].double()
        shares = [lengths[places] for places in deal(lengths, sampler.num_ranks)]
        for found, sums in (
            (of_rows, [share.sum() for share in shares]),
            (of_pairs, [(share**2).sum() for share in shares]),
        ):
            found.append(max(sums) / (sum(sums) / len(sums)))
    return tuple(float(torch.stack(found).mean()) for found in (of_rows, of_pairs))
