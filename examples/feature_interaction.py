"""Candidates meet a user's history, padded and jagged: what each operator costs.

    python examples/feature_interaction.py                        drawn histories
    python examples/feature_interaction.py --events ratings.csv   an interaction log

A ranking model has dense features, the same number for every user, and histories, whose length
differs from user to user. In the paper's Figure 1 histories stay jagged while they interact. Here
is such a block, small and complete: the events of a history attend to each other, the candidates
attend to the events, and the results are ranked with the candidates and the mean of the history.
It comes in three forms with the same parameters:

    padded   plain PyTorch on [B, M, D], padded behind each history, under a mask
    jagged   the six operators of the paper's Table 1 on [T, D], with their scores in memory
    flash    each attention as one operator, which keeps no scores

All three must agree, forward and backward, or the exit status is 1; it is 2 if there is no data.
The table says what each stage takes by itself. The parts of a stage have the jagged operators'
names; under "padded" is the same step in PyTorch. (demo.py compares whole trainings, with
PyTorch's own flash attention on the padded side.)

Source: Xu et al., "Enhancing Performance and Scalability of Large-Scale Recommendation Systems with
Jagged Flash Attention", RecSys '24, section 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import demo  # before torch is loaded: it sets up the process
import torch
import torch.nn.functional as F
from histories import IGNORED_LABEL, PADDING_ITEM, Batch, DataError, make_batches, pad
from ranker import of_last_events
from report import ProgressBar, compare
from torch import Tensor, nn
from training import move, peak_allocated_bytes

from benchmarks.timing import CpuTimer, CudaTimer
from jagged_cuda import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_mean,
    jagged_softmax,
    jagged_target_attention,
    matrix_offsets,
)

# Of the largest value: float32 rounds at 6e-8, and the forms sum in different orders.
TOLERANCE = 1e-5
BATCH_SIZE, BATCH_SIZE_ON_GPU, DIM = 32, 256, 64
EVENTS, CANDIDATES, WHOLE = "events meet events", "candidates meet events", "all of it"
EXPLANATION = """
Where events meet events, padded computes M*M scores a history and keeps them for the gradient;
jagged computes and keeps L*L, flash computes them twice and keeps none. Where candidates meet
events it is N*M against N*L. All else costs by the row. So the shares of events above are what is
to be won, squared where rows meet each other, less what any call costs."""


class Inputs(NamedTuple):
    """Inputs of the block; rows are [T] jagged, or [B, M] padded behind their ends."""

    items: Tensor  # the events
    positions: Tensor  # of each event in its history
    candidates: Tensor  # [B, N] items; the one that followed the history is first
    offsets: Tensor | None  # [B + 1] if jagged
    is_event: Tensor | None  # [B, M] if padded
    num_scores: int  # sum L*L, which the host knows from the lengths


def make_inputs(batch: Batch, num_scores: int, device: torch.device) -> Inputs:
    targets = of_last_events(batch.targets, batch).unsqueeze(1)  # [B, 1]
    candidates = torch.cat([targets, batch.negatives.expand(len(targets), -1)], dim=1)
    batch = move(batch, device)
    return Inputs(
        items=batch.items,
        positions=batch.positions,
        candidates=candidates.to(device),
        offsets=batch.offsets,
        is_event=None if batch.offsets is not None else batch.labels != IGNORED_LABEL,
        num_scores=num_scores,
    )


# Runs a function on tensors, and may measure it: (name, function, *tensors) -> result.
Stage = Callable[..., Tensor]


class Form(NamedTuple):
    """The parts of the block where rows of one history meet, padded or jagged.

    Args:
        meet: (q, k, v, inputs, stage) -> rows; each event finds values among its history's.
        pool: (queries [B, N, D], rows, inputs, stage) -> [B, N, D]; each candidate finds rows.
        mean: (rows, inputs) -> [B, D]
    """

    meet: Callable[[Tensor, Tensor, Tensor, Inputs, Stage], Tensor]
    pool: Callable[[Tensor, Tensor, Inputs, Stage], Tensor]
    mean: Callable[[Tensor, Inputs], Tensor]


# --- padded: [B, M, D]


def meet_padded(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, stage: Stage) -> Tensor:
    scale = q.shape[-1] ** -0.5

    def softmax(scores: Tensor) -> Tensor:
        return scores.masked_fill(~inputs.is_event[:, None, :], -torch.inf).softmax(-1)

    scores = stage("jagged_jagged_bmm_jagged_out", lambda q, k: (scale * q) @ k.mT, q, k)
    weights = stage("jagged2_softmax", softmax, scores)  # [B, M, M]
    return stage("array_jagged_bmm_jagged_out", torch.matmul, weights, v)


def pool_padded(queries: Tensor, rows: Tensor, inputs: Inputs, stage: Stage) -> Tensor:
    scale = rows.shape[-1] ** -0.5

    def softmax(scores: Tensor) -> Tensor:
        return scores.masked_fill(~inputs.is_event[:, :, None], -torch.inf).softmax(1)

    scores = stage("jagged_dense_bmm", lambda x, y: x @ (scale * y).mT, rows, queries)
    weights = stage("jagged_softmax", softmax, scores)  # [B, M, N]
    return stage("jagged_jagged_bmm", lambda w, x: w.mT @ x, weights, rows)


def mean_padded(rows: Tensor, inputs: Inputs) -> Tensor:
    is_event = inputs.is_event.unsqueeze(-1)
    return rows.where(is_event, 0.0).sum(1) / is_event.sum(1)


# --- jagged: [T, D], each product and each softmax an operator


def meet_jagged(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, stage: Stage) -> Tensor:
    """What ``jagged_cuda.unfused.jagged_attention`` does in one call."""
    # Where the scores [L, L] of each history begin, once for the three operators.
    place = {"offsets": inputs.offsets, "matrix_offsets": matrix_offsets(inputs.offsets)}
    product = partial(jagged_jagged_bmm_jagged_out, total_out=inputs.num_scores, **place)
    softmax = partial(jagged2_softmax, scale=q.shape[-1] ** -0.5, **place)
    weighted_sum = partial(array_jagged_bmm_jagged_out, **place)
    scores = stage("jagged_jagged_bmm_jagged_out", product, q, k)  # [sum L*L]
    weights = stage("jagged2_softmax", softmax, scores)
    return stage("array_jagged_bmm_jagged_out", weighted_sum, weights, v)


def pool_jagged(queries: Tensor, rows: Tensor, inputs: Inputs, stage: Stage) -> Tensor:
    product = partial(jagged_dense_bmm, offsets=inputs.offsets)
    softmax = partial(jagged_softmax, offsets=inputs.offsets, scale=rows.shape[-1] ** -0.5)
    weighted_sum = partial(jagged_jagged_bmm, offsets=inputs.offsets)
    scores = stage("jagged_dense_bmm", product, rows, queries.mT)  # [T, N]
    weights = stage("jagged_softmax", softmax, scores)
    return stage("jagged_jagged_bmm", weighted_sum, weights, rows)


def mean_jagged(rows: Tensor, inputs: Inputs) -> Tensor:
    return jagged_mean(rows, inputs.offsets)


# --- flash: [T, D], each attention an operator


def meet_flash(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, stage: Stage) -> Tensor:
    return jagged_flash_attention(q, k, v, inputs.offsets)


def pool_flash(queries: Tensor, rows: Tensor, inputs: Inputs, stage: Stage) -> Tensor:
    return jagged_target_attention(queries, rows, rows, inputs.offsets)


FORMS = {
    "padded": Form(meet_padded, pool_padded, mean_padded),
    "jagged": Form(meet_jagged, pool_jagged, mean_jagged),
    "flash": Form(meet_flash, pool_flash, mean_jagged),
}
JAGGED_FORMS = ("jagged", "flash")


# --- the block


class Embedding(nn.Module):
    """Items, and events at their places in a history."""

    def __init__(self, num_items: int, max_positions: int, dim: int) -> None:
        super().__init__()
        self.item = nn.Embedding(num_items + 1, dim, padding_idx=PADDING_ITEM)
        self.position = nn.Embedding(max_positions, dim)

    def forward(self, items: Tensor, positions: Tensor) -> Tensor:
        return self.item(items) + self.position(positions)


class AddAndNormalise(nn.LayerNorm):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + y)


class FeatureInteraction(nn.Module):
    """Ranks candidates by a history, in any of FORMS: the parameters are the same."""

    def __init__(self, num_items: int, max_positions: int, dim: int) -> None:
        super().__init__()
        self.embedding = Embedding(num_items, max_positions, dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.norm = AddAndNormalise(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        # A last bias would add the same to all candidates, and have no gradient but rounding.
        self.rank = nn.Sequential(nn.Linear(3 * dim, dim), nn.ReLU(), nn.Linear(dim, 1, bias=False))

    def forward(self, inputs: Inputs, form: Form, stage: Stage) -> Tensor:
        """A score of each candidate: [B, N]."""
        meet = partial(form.meet, inputs=inputs, stage=stage)
        pool = partial(form.pool, inputs=inputs, stage=stage)
        mean = partial(form.mean, inputs=inputs)

        rows = stage("embed the events", self.embedding, inputs.items, inputs.positions)
        q, k, v = stage("project the events", self.qkv, rows).chunk(3, dim=-1)
        rows = stage("add and normalise", self.norm, rows, stage(EVENTS, meet, q, k, v))

        candidates = self.embedding.item(inputs.candidates)  # [B, N, D]
        pooled = stage(CANDIDATES, pool, self.query(candidates), rows)
        means = stage("mean of each history", mean, rows).unsqueeze(1).expand_as(pooled)
        features = torch.cat([candidates, pooled, means], dim=-1)
        return stage("rank the candidates", self.rank, features).squeeze(-1)


def loss_of(scores: Tensor) -> Tensor:
    """Mean of -log softmax(scores)[0]: the first candidate is the one that followed."""
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long))


def run_only(name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A stage that is not measured."""
    return function(*tensors)


def scores_and_gradients(block: FeatureInteraction, inputs: Inputs, form: Form) -> list[Tensor]:
    scores = block(inputs, form, run_only)
    return [scores.detach(), *torch.autograd.grad(loss_of(scores), list(block.parameters()))]


# --- measuring


class Cost(NamedTuple):
    """Time and memory of one stage, forward and backward."""

    milliseconds: float
    peak_bytes: int  # that it holds at once beyond what it is given


Path = tuple[str, ...]  # a stage's name behind those of the stages that it is a part of


class Meter:
    """Runs stages, and measures each by itself before those that it is made of."""

    def __init__(self, device: torch.device, progress: Callable[[int, str], None]) -> None:
        self.timer = CudaTimer(device) if device.type == "cuda" else CpuTimer()
        self.progress = progress
        self.costs: dict[Path, Cost] = {}
        self.path: Path = ()
        self.is_measuring = False

    def __call__(self, name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        if self.is_measuring:  # a part of what is measured now
            return function(*tensors)
        self.path += (name,)
        parameters = function.parameters() if isinstance(function, nn.Module) else ()
        self.measure(self.path, function, tensors, tuple(parameters))
        result = function(*tensors)  # its parts come here
        self.path = self.path[:-1]
        return result

    def measure(
        self,
        path: Path,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        """Record the cost of the function with the gradients of its tensors and parameters."""
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        leaves = [*(t for t in inputs if t.requires_grad), *parameters]
        self.is_measuring = True
        grad_out = torch.ones_like(function(*inputs))

        def call() -> object:
            out = function(*inputs)
            return out, torch.autograd.grad(out, leaves, grad_out)

        milliseconds = self.timer.measure(call).median_us / 1e3
        peak_bytes = self.timer.peak_bytes(call)
        if peak_bytes is None:  # PyTorch's allocator for the CPU keeps no such figure
            peak_bytes = peak_allocated_bytes(call)
        self.is_measuring = False
        self.costs[path] = Cost(milliseconds, peak_bytes)
        self.progress(len(self.costs), path[-1])


def measure(block: FeatureInteraction, inputs: Inputs, form: Form, label: str) -> dict[Path, Cost]:
    """The cost of each stage, and of the whole block with its loss."""
    names: list[str] = []

    def note(name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        names.append(name)
        return function(*tensors)

    block(inputs, form, note)
    bar = ProgressBar(label, len(names) + 1)
    meter = Meter(inputs.items.device, bar.update)
    with meter.timer.context():
        block(inputs, form, meter)
        meter.measure(
            (WHOLE,), lambda: loss_of(block(inputs, form, run_only)), (), tuple(block.parameters())
        )
    return meter.costs


# --- the program


def main(argv: list[str] | None = None) -> int:
    parser = demo.data_parser(__doc__)
    parser.add_argument("--candidates", type=demo.positive, default=8, help="of each user")
    args = parser.parse_args(argv)
    if args.candidates < 2:
        parser.error(f"--candidates must be 2 or more, got {args.candidates}")
    try:
        device = demo.choose_device(args.device)
        histories = demo.load_histories(args.events, args.seed)
    except (DataError, RuntimeError) as error:
        print(f"feature_interaction.py: {error}", file=sys.stderr)
        return 2

    (batch,) = make_batches(
        histories,
        num_batches=1,
        batch_size=args.batch_size or (BATCH_SIZE_ON_GPU if device.type == "cuda" else BATCH_SIZE),
        cap=args.cap,
        num_negatives=args.candidates - 1,
        seed=args.seed,
    )
    num_scores = int(batch.offsets.diff().square().sum())
    padded = make_inputs(pad(batch), num_scores, device)
    jagged = make_inputs(batch, num_scores, device)
    inputs = {"padded": padded} | dict.fromkeys(JAGGED_FORMS, jagged)
    torch.manual_seed(args.seed)
    block = FeatureInteraction(histories.num_items, args.cap, args.dim or DIM).to(device)

    demo.print_data(histories)
    print_batch(padded, jagged)
    print(
        f"device    {demo.describe_device(device)}, torch {torch.__version__}, float32", flush=True
    )

    results = {name: scores_and_gradients(block, inputs[name], FORMS[name]) for name in FORMS}
    agree = [compare_results(name, results[name], results["padded"]) for name in JAGGED_FORMS]
    print(flush=True)
    if not all(agree):
        return 1
    costs = {name: measure(block, inputs[name], FORMS[name], f"{name:<7}") for name in FORMS}
    print(format_table(costs))
    print()
    print(format_summary(costs))
    print(EXPLANATION)
    return 0


def compare_results(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Say how far a form's scores and gradients are from the padded ones: is it rounding?"""
    scores = largest_difference(found[:1], expected[:1])
    gradients = largest_difference(found[1:], expected[1:])
    # Written so that NaN does not agree.
    agrees = scores <= TOLERANCE and gradients <= TOLERANCE
    verdict = "equals padded within rounding" if agrees else "IS NOT EQUAL to padded"
    print(
        f"{name:<9} {verdict}: scores differ by {scores:.1e}, gradients by {gradients:.1e} at most"
        f" (relative; allowed {TOLERANCE:.0e})"
    )
    return agrees


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative to the largest value of all."""
    errors = torch.stack([(x - y).abs().max() for x, y in zip(found, expected, strict=True)])
    return float(errors.max() / torch.stack([y.abs().max() for y in expected]).max())


def print_batch(padded: Inputs, jagged: Inputs) -> None:
    """How much of what the padded form computes is padding."""
    num_seqs, longest = padded.items.shape
    rows, padded_rows = jagged.items.numel(), num_seqs * longest
    scores, padded_scores = jagged.num_scores, padded_rows * longest
    num_candidates = jagged.candidates.shape[1]
    print(
        f"batch     {num_seqs} histories of up to {longest}, {num_candidates} candidates each;"
        f" {rows:,} of {padded_rows:,} padded rows"
    )
    print(
        f"          are events ({rows / padded_rows:.1%}), {scores:,} of {padded_scores:,} scores"
        f" are of two events ({scores / padded_scores:.1%})"
    )


def format_table(costs: Mapping[str, Mapping[Path, Cost]]) -> str:
    """Time and memory of each stage in each form; an operator's line is under its stage."""
    lines = [f"{'forward and backward':<34}" + "".join(f"{name:>22}" for name in costs)]
    for path in costs["jagged"]:
        label = "  " * (len(path) - 1) + path[-1]
        cells = (_format_cost(of_form.get(path)) for of_form in costs.values())
        lines.append(f"{label:<34}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def _format_cost(cost: Cost | None) -> str:
    if cost is None:
        return "in one"
    return f"{cost.milliseconds:,.2f} ms {cost.peak_bytes / 2**20:>7,.1f} MiB"


def format_summary(costs: Mapping[str, Mapping[Path, Cost]]) -> str:
    """What padding costs where rows meet, and in all."""
    lines = []
    for stage in (EVENTS, CANDIDATES, WHOLE):
        padded = costs["padded"][(stage,)]
        for name in JAGGED_FORMS:
            cost = costs[name][(stage,)]
            lines.append(
                f"{stage:<24}{name:<7} {compare(padded.milliseconds, cost.milliseconds)} time,"
                f" {compare(padded.peak_bytes, cost.peak_bytes)} memory than padded"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
