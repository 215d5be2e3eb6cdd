"""Search a long history for what a candidate asks, instead of keeping its newest events.

    python examples/retrieval.py                        drawn histories
    python examples/retrieval.py --events ratings.csv   an interaction log

Attention over a history of thousands of events is dear when a model serves, so most models see the
newest few only. Search-based models see the k events that matter to each candidate, wherever in the
history they are:

    score     every event against the candidate, by embeddings       jagged_dense_bmm
    choose    the k best of each history                             jagged_topk
    collect   items, places and ages of these events, by one plan    jagged_select
    attend    the candidate to these events                          jagged_target_attention

Nothing is padded, and the host waits for nothing. Three models of the same weights are trained on
the same examples: one sees the newest k events, one the k best, one all of them. Each then ranks
the last event of each user, which no training saw, among events of others. The table says how often
it comes first, and the mean of 1 / rank: of histories of more than k events, where the models
differ in what they see, and of all.

Sources: Qi et al., "Search-based User Interest Modeling with Lifelong Sequential Behavior Data"
(SIM), CIKM '20; Chen et al., "End-to-End User Behavior Retrieval in Click-Through Rate Prediction
Model" (ETA), 2021.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import demo  # before torch is loaded: it sets up the process
import torch
import torch.nn.functional as F
from embeddings import RowEmbedding, times_of
from histories import DataError, Histories, offsets_from_lengths
from report import ProgressBar
from torch import Tensor, nn

from jagged_cuda import (
    jagged_dense_bmm,
    jagged_last,
    jagged_select,
    jagged_target_attention,
    jagged_topk,
)

STEPS, LEARNING_RATE = 200, 4e-3
DIM, CANDIDATES, CANDIDATES_TESTED = 32, 6, 20
SHARPNESS = 8.0  # of scores between unit vectors, at first


class Examples(NamedTuple):
    """Histories, each with candidates for the event that follows."""

    items: Tensor  # [T]
    times: Tensor  # [T]
    offsets: Tensor  # [B + 1]
    candidates: Tensor  # [B, N]; the event that followed is first


class Rows(NamedTuple):
    """What the model reads of events: numbers, so that gradients flow behind the choice."""

    items: Tensor  # [T]
    place: Tensor  # [T]
    age: Tensor  # [T]


# (model, rows, offsets, candidates [B, N, D], k) -> the rows that each candidate sees, and offsets
Choice = Callable[["Scorer", Rows, Tensor, Tensor, int], Sequence[tuple[Rows, Tensor]]]


def choose_newest(
    model: Scorer, rows: Rows, offsets: Tensor, candidates: Tensor, k: int
) -> Sequence[tuple[Rows, Tensor]]:
    total = min(rows.items.shape[0], candidates.shape[0] * k)
    newest, kept = jagged_last(rows, offsets, k, total=total)
    return [(Rows(*newest), kept)] * candidates.shape[1]


def choose_best(
    model: Scorer, rows: Rows, offsets: Tensor, candidates: Tensor, k: int
) -> Sequence[tuple[Rows, Tensor]]:
    total = min(rows.items.shape[0], candidates.shape[0] * k)
    with torch.no_grad():
        scores = jagged_dense_bmm(model.items(rows.items), candidates.mT.contiguous(), offsets)
    chosen = []
    for score in scores.unbind(1):  # [T], of one candidate in each history
        best, kept = jagged_select(rows, offsets, jagged_topk(score, offsets, k), total=total)
        chosen.append((Rows(*best), kept))
    return chosen


def choose_all(
    model: Scorer, rows: Rows, offsets: Tensor, candidates: Tensor, k: int
) -> Sequence[tuple[Rows, Tensor]]:
    return [(rows, offsets)] * candidates.shape[1]


CHOICES: dict[str, Choice] = {"newest": choose_newest, "best": choose_best, "all": choose_all}


class Scorer(nn.Module):
    """Score candidates by what each finds among the events that it sees."""

    def __init__(self, *, num_items: int, choose: Choice, k: int, dim: int) -> None:
        super().__init__()
        self.choose, self.k = choose, k
        self.items = nn.Embedding(num_items + 1, dim)
        self.rows = RowEmbedding(num_places=64, num_ages=24, unit=60.0, dim=dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))
        self.sharpness = nn.Parameter(torch.tensor(SHARPNESS))
        # From the first step on a candidate finds itself among the events, if it is there.
        nn.init.normal_(self.items.weight, std=dim**-0.5)
        for linear in (self.query, self.key, self.value):
            nn.init.eye_(linear.weight)

    def attend(self, queries: Tensor, rows: Rows, offsets: Tensor) -> Tensor:
        """queries `[B, N, D]` -> `[B, N, D]`"""
        x = self.items(rows.items) + self.rows.embed(rows.place, rows.age)
        k, v = self.key(x).unsqueeze(1), self.value(x).unsqueeze(1)  # each [T, 1, D]
        q = (self.sharpness * queries).unsqueeze(2)
        return jagged_target_attention(q, k, v, offsets, scale=1.0).squeeze(2)

    def forward(self, examples: Examples) -> Tensor:
        """`[B, N]`"""
        rows = Rows(examples.items, *self.rows.numbers(examples.times, examples.offsets))
        candidates = self.items(examples.candidates)
        queries = self.query(candidates)
        chosen = self.choose(self, rows, examples.offsets, candidates.detach(), self.k)
        if all(each is chosen[0] for each in chosen):  # all candidates see the same
            found = self.attend(queries, *chosen[0])
        else:
            parts = zip(queries.split(1, dim=1), chosen, strict=True)
            found = torch.cat([self.attend(query, *seen) for query, seen in parts], dim=1)
        products = found * candidates
        scores = self.sharpness * products.sum(-1)
        scores = scores + self.mlp(torch.cat([found, candidates, products], dim=-1)).squeeze(-1)
        # A candidate that happens to be the event itself is none.
        same = examples.candidates == examples.candidates[:, :1]
        return scores.masked_fill(F.pad(same[:, 1:], (1, 0)), -torch.inf)

    def loss(self, examples: Examples) -> Tensor:
        scores = self(examples)
        return F.cross_entropy(scores, torch.zeros_like(examples.candidates[:, 0]))


def make_examples(
    histories: Histories,
    users: Tensor,
    places: Tensor,
    num_candidates: int,
    cap: int,
    generator: torch.Generator,
) -> Examples:
    """Predict the event at a place >= 1 of each user's history from at most `cap` before it."""
    target = histories.offsets[users] + places
    lengths = places.clamp(max=cap)
    offsets = offsets_from_lengths(lengths)
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    rows = (target - lengths).repeat_interleave(lengths) + within
    shape = (len(users), num_candidates - 1)
    others = histories.items[torch.randint(len(histories.items), shape, generator=generator)]
    return Examples(
        items=histories.items[rows],
        times=times_of(histories)[rows],
        offsets=offsets,
        candidates=torch.cat([histories.items[target, None], others], dim=1),
    )


def draw_examples(
    histories: Histories, num_batches: int, batch_size: int, cap: int, seed: int
) -> list[Examples]:
    """Any event may be the one to predict, but the first and the last of a user."""
    generator = torch.Generator().manual_seed(seed)
    user_of = torch.arange(len(histories.lengths)).repeat_interleave(histories.lengths)
    place_of = torch.arange(len(histories.items)) - histories.offsets[user_of]
    events = ((place_of >= 1) & (place_of < histories.lengths[user_of] - 1)).nonzero().squeeze(1)
    batches = []
    for _ in range(num_batches):
        drawn = events[torch.randint(len(events), (batch_size,), generator=generator)]
        users, places = user_of[drawn], place_of[drawn]
        batches.append(make_examples(histories, users, places, CANDIDATES, cap, generator))
    return batches


def last_examples(
    histories: Histories, most_users: int, batch_size: int, cap: int, seed: int
) -> list[Examples]:
    """The last event of users in a random order, none of which is trained on."""
    generator = torch.Generator().manual_seed(seed)
    users = torch.randperm(len(histories.lengths), generator=generator)[:most_users]
    return [
        make_examples(
            histories, part, histories.lengths[part] - 1, CANDIDATES_TESTED, cap, generator
        )
        for part in users.split(batch_size)
    ]


def move(examples: Examples, device: torch.device) -> Examples:
    return Examples(*(tensor.to(device) for tensor in examples))


class Outcome(NamedTuple):
    """Of one model: the rank of each event that was tested, and what a step of training took."""

    ranks: Tensor  # [users], from 1
    lengths: Tensor  # [users], of the histories
    milliseconds: float

    def table_row(self, name: str, k: int) -> str:
        cells = []
        for ranks in (self.ranks[self.lengths > k], self.ranks):
            if len(ranks) == 0:
                cells.append(f"{'-':>9}{'-':>7}")
                continue
            first = (ranks == 1).double().mean()
            cells.append(f"{first:9.1%}{ranks.double().reciprocal().mean():7.3f}")
        return f"{name:<8}{'  '.join(cells)}{self.milliseconds:12.1f}"


def train_and_test(
    model: Scorer,
    training: Sequence[Examples],
    test: Sequence[Examples],
    device: torch.device,
    label: str,
) -> Outcome:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
    bar = ProgressBar(f"{label:<7}", len(training))
    seconds = 0.0
    for step, examples in enumerate(training):
        batch = move(examples, device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        text = f"loss {loss.item():.4f}"  # waits for the device
        seconds += time.perf_counter() - begin
        bar.update(step + 1, text)
    ranks, lengths = [], []
    with torch.no_grad():
        for examples in test:
            scores = model(move(examples, device)).cpu()
            ranks.append(1 + (scores[:, 1:] >= scores[:, :1]).sum(1))
            lengths.append(examples.offsets.diff())
    return Outcome(torch.cat(ranks), torch.cat(lengths), 1e3 * seconds / len(training))


def main(argv: list[str] | None = None) -> int:
    parser = demo.data_parser(__doc__)
    parser.add_argument("--k", type=demo.positive, default=16, help="events that a candidate sees")
    parser.add_argument("--steps", type=demo.positive, default=STEPS, help="of each training")
    parser.add_argument("--users", type=demo.positive, default=2000, help="that are tested")
    parser.set_defaults(cap=2000)
    args = parser.parse_args(argv)
    try:
        device = demo.choose_device(args.device)
        histories = demo.load_histories(args.events, args.seed)
    except (DataError, RuntimeError) as error:
        print(f"retrieval.py: {error}", file=sys.stderr)
        return 2
    if int(histories.lengths.max()) < 3:
        print("retrieval.py: a user must have three events or more, got none", file=sys.stderr)
        return 2
    batch_size = args.batch_size or demo.BATCH_SIZE
    training = draw_examples(histories, args.steps, batch_size, args.cap, args.seed)
    test = last_examples(histories, args.users, batch_size, args.cap, args.seed + 1)
    demo.print_data(histories)
    dim = args.dim or DIM
    print(
        f"training  {args.steps} steps of {batch_size} histories of at most {args.cap} events,"
        f" {dim} features\n"
        f"device    {demo.describe_device(device)}, torch {torch.__version__}\n",
        flush=True,
    )
    outcomes = {}
    for name, choose in CHOICES.items():
        torch.manual_seed(args.seed)
        model = Scorer(num_items=histories.num_items, choose=choose, k=args.k, dim=dim).to(device)
        outcomes[name] = train_and_test(model, training, test, device, name)
    lengths = outcomes["all"].lengths
    print(
        f"The last event of {len(lengths):,} users among {CANDIDATES_TESTED} candidates:"
        f" how often first, and mean 1 / rank\n"
    )
    longer = f"{int((lengths > args.k).sum()):,} of > {args.k} events"
    print(f"{'sees':<8}{longer:>16}  {'all':>16}{'ms a step':>12}")
    for name, outcome in outcomes.items():
        print(outcome.table_row(name, args.k))
    return 0


if __name__ == "__main__":
    sys.exit(main())
