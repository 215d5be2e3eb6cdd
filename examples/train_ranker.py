"""Train the demo's ranker for real: on 1 to 8 processes, with checkpoints and evaluation.

    python examples/train_ranker.py                                        one process
    torchrun --nproc-per-node 2 examples/train_ranker.py --events log.csv.gz
    torchrun --nproc-per-node 2 examples/train_ranker.py --resume ranker.pt --checkpoint ranker.pt
    python examples/train_ranker.py --padded                               its padded twin

It runs on the CPU (gloo) or with one GPU per process (nccl). A batch has --batch-size histories
over all processes. Each process computes its share, and the sums of all are divided by the events
of all, so the losses are the same for any number of processes, up to rounding. Shares are dealt out
so that no process waits long for another (balance.py); what that saves is measured and printed
first.

A checkpoint is written to --checkpoint every --save-every steps and at the end. --resume continues
from one, with the same losses as if the training had never stopped: to the last bit with the same
number of processes, on a GPU under --deterministic. Lines of --losses behind the checkpoint's step,
which a training wrote before it was killed, are written anew.

Evaluation holds out the last event of each user, which training never sees, and ranks it among
--eval-items other items, drawn uniformly and the same for all users (0: among all items). The
history is what comes before it. Hit rate at 10 is the share of users whose held-out item is among
the first ten; NDCG at 10 weighs it by 1 / log2(1 + rank). Of equal scores the held-out item counts
as the last. Metrics among drawn items are higher than among all, and order models differently at
times (Krichene and Rendle, "On Sampled Metrics for Item Recommendation", KDD '20): use them to
compare runs of this program only. Events of other users may be later than a held-out one.

--time-split 0.1 holds out the latest tenth of all events instead: training sees no event from that
time on, of any user. Ranked is each user's first event from then on, given the events before; users
without events on both sides do not count. An item that first appears then was never trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

# Deterministic products on a GPU need it, before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import demo  # before torch is loaded: it sets up the process
import torch
import torch.distributed as dist
from balance import Deal, Sampler, balanced, contiguous, skew
from histories import (
    IGNORED_LABEL,
    Batch,
    DataError,
    Histories,
    cut_batch,
    draw_histories,
    pad,
    read_events,
    split_by_time,
    without_last_events,
)
from ranker import Layers, Ranker
from report import ProgressBar
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM_EPS, held_bytes, move, peak_allocated_bytes

from jagged_cuda.nn import JaggedTransformerLayer, TargetAttention

TOP = 10  # ranks that count in evaluation
PROBED_STEPS = 5  # whose shares are timed, balanced and contiguous
# What must be as it was when a training is resumed: all else may differ.
FIXED = ("events", "users", "seed", "cap", "dim", "heads", "blocks", "negatives", "batch_size")
FIXED += ("torchrec", "time_split")


class Processes(NamedTuple):
    """This process among all of a training."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, *values: float | Tensor) -> list[float]:
        """The sums of these numbers over all processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def most(self, *values: float | Tensor) -> list[float]:
        """The largest of each of these numbers among all processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: tuple[float | Tensor, ...], operation: Any) -> list[float]:
        tensor = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.device)
        if self.count > 1:
            dist.all_reduce(tensor, op=operation)
        return tensor.tolist()


def join_processes(device_name: str, always: bool) -> Processes:
    """Meet the other processes, if torchrun started this one.

    Args:
        always: form a process group of one process too.
    """
    device = demo.choose_device(device_name)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if count > 1:
        dist.init_process_group(backend)
    elif always:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Processes(int(os.environ.get("RANK", "0")), count, device)


# --- data


class Shares(torch.utils.data.Dataset[Batch]):
    """What one process computes at each step."""

    def __init__(
        self, histories: Histories, sampler: Sampler, rank: int, args: argparse.Namespace
    ) -> None:
        self.histories = histories
        self.sampler = sampler
        self.rank = rank
        self.args = args

    def __getitem__(self, step: int) -> Batch:
        # The same negatives in every process.
        generator = torch.Generator().manual_seed(self.args.seed + 7_919 * (step + 1))
        draws = torch.randint(
            len(self.histories.items), (self.args.negatives,), generator=generator
        )
        users = self.sampler.users(step, self.rank)
        batch = cut_batch(self.histories, users, self.args.cap, self.histories.items[draws])
        return pad(batch) if self.args.padded else batch

    def from_step(self, first: int, last: int, on_gpu: bool) -> Iterator[Batch]:
        """The shares of these steps, prepared beside the GPU's work."""
        return iter(
            torch.utils.data.DataLoader(
                self,
                batch_size=None,
                sampler=range(first, last),
                num_workers=2 if on_gpu else 0,
                pin_memory=on_gpu,
            )
        )


# --- the model's layers: jagged_cuda.nn's, and torch.nn's with the same parameters


class JaggedBlock(JaggedTransformerLayer):
    """Causal self-attention and a feed-forward network on the rows `[T, dim]` of a batch."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads, activation="gelu")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return super().forward(x, batch.offsets, causal=True)


class JaggedTarget(TargetAttention):
    """Candidates [B, N, dim] attend to the rows `[T, dim]` of a batch."""

    def forward(self, candidates: Tensor, states: Tensor, batch: Batch) -> Tensor:
        return super().forward(candidates, states, batch.offsets)


class PaddedBlock(nn.TransformerEncoderLayer):
    """JaggedBlock on [B, M, dim]. No row sees the padding, which comes after it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(
            dim, num_heads, 4 * dim, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return super().forward(x, src_mask=mask, is_causal=True)


class PaddedTarget(nn.MultiheadAttention):
    """JaggedTarget on [B, M, dim], under a mask of the padding."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads, batch_first=True)

    def forward(self, candidates: Tensor, states: Tensor, batch: Batch) -> Tensor:
        is_padding = batch.labels == IGNORED_LABEL
        attend = super().forward
        return attend(candidates, states, states, is_padding, need_weights=False)[0]


JAGGED = Layers(JaggedBlock, JaggedTarget)
PADDED = Layers(PaddedBlock, PaddedTarget)


# --- the training


class SummedLoss(nn.Module):
    """The model as DistributedDataParallel wants it: forward gives what backward starts from."""

    def __init__(self, model: Ranker, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.bf16 = bf16

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast(batch.items.device.type, torch.bfloat16, enabled=self.bf16):
            return self.model.loss(batch, reduction="sum")


class Trainer:
    """A model, its optimizer and how far they are."""

    def __init__(
        self, args: argparse.Namespace, histories: Histories, processes: Processes
    ) -> None:
        self.args = args
        self.processes = processes
        self.split_time: float | None = None
        # Of each user in evaluated the last event is the one to be found.
        self.evaluated, self.trained = histories, without_last_events(histories)
        if args.time_split is not None:
            self.trained, self.evaluated, self.split_time = split_by_time(
                histories, args.time_split
            )
        if len(self.trained.lengths) == 0:
            raise DataError(
                "a user must have three events or more, the last to be held out, got none"
            )
        lengths = (self.trained.lengths - 1).clamp(max=args.cap)
        self.sampler = Sampler(
            lengths,
            batch_size=args.batch_size,
            num_ranks=processes.count,
            deal=contiguous if args.contiguous else balanced,
            seed=args.seed,
        )
        self.shares = Shares(self.trained, self.sampler, processes.rank, args)
        torch.manual_seed(args.seed)
        self.model = Ranker(
            num_items=histories.num_items,
            max_positions=args.cap,
            dim=args.dim,
            num_heads=args.heads,
            num_blocks=args.blocks,
            attention=PADDED if args.padded else JAGGED,
        )
        self.summed_loss: nn.Module = SummedLoss(self.model, args.bf16)
        self.tables = import_tables() if args.torchrec else None
        if self.tables:
            table = self.tables.ItemTable(histories.num_items, args.dim)
            self.model.item_embedding = table
            rate = args.table_learning_rate
            self.summed_loss = self.tables.spread(self.summed_loss, table, processes.device, rate)
        elif processes.count > 1:
            self.summed_loss = DistributedDataParallel(self.summed_loss.to(processes.device))
        self.model.to(processes.device)
        self.dense = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not (self.tables and name.startswith("item_embedding."))
        }
        self.optimizer = torch.optim.Adam(self.dense.values(), lr=args.learning_rate, eps=ADAM_EPS)
        self.step = 0
        self.peak_before_evaluation = 0  # bytes on a GPU

    def warm_up(self) -> None:
        """One pass that changes nothing.

        Behind its first pass DistributedDataParallel arranges gradients anew, which may sum them in
        another order: so that happens here, before new and resumed trainings alike. A table in
        TorchRec would change: it goes without.
        """
        if self.tables:
            return
        self._backward(move(self.shares[0], self.processes.device), 0)
        self.optimizer.zero_grad()
        if self.processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.processes.device)

    def _backward(self, batch: Batch, step: int) -> Tensor:
        """Add this process's part of the gradient; return its part of the mean loss."""
        users = self.sampler.batch(step)
        terms = int(self.sampler.lengths[users].sum()) + len(users)  # of all processes
        part = self.summed_loss(batch) / terms
        # DistributedDataParallel divides the sum of the gradients by the number of processes.
        (part * self.processes.count).backward()
        return part.detach()

    def run(self, last: int, report: Callable[[Trainer, float, float], None]) -> None:
        """Train up to this step, and report the loss and the seconds of each."""
        device = self.processes.device
        batches = self.shares.from_step(self.step, last, device.type == "cuda")
        while self.step < last:
            begin = time.perf_counter()  # so that a step's time includes that of its data
            loss = self._backward(move(next(batches), device), self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            (total,) = self.processes.total(loss)  # waits for the device, and for all processes
            report(self, total, time.perf_counter() - begin)

    # -- what waiting costs

    def seconds_of_shares(self, deal: Deal) -> list[float]:
        """What this process's share takes without waiting for others, of the first steps."""
        without_waiting = (
            self.summed_loss.no_sync()
            if isinstance(self.summed_loss, DistributedDataParallel)
            else nullcontext()
        )
        shares = Shares(self.trained, self.sampler, self.processes.rank, self.args)
        before, self.sampler.deal = self.sampler.deal, deal
        found = []
        with without_waiting:
            for step in range(PROBED_STEPS):
                batch = move(shares[step], self.processes.device)
                times = []
                for _ in range(3):
                    self.processes.total(0.0)  # all begin together
                    begin = time.perf_counter()
                    self._backward(batch, step).item()
                    times.append(time.perf_counter() - begin)
                found.append(min(times))  # what else runs on the machine only adds
        self.sampler.deal = before
        self.optimizer.zero_grad()
        return found

    def waiting_seconds(self, deal: Deal) -> tuple[float, float]:
        """Of a step: the slowest share's time, and how much longer that is than the mean."""
        seconds = self.seconds_of_shares(deal)
        slowest = statistics.fmean(self.processes.most(*seconds))
        mean = statistics.fmean(self.processes.total(*seconds)) / self.processes.count
        return slowest, slowest - mean

    # -- evaluation

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Hit rate and NDCG of the held-out events, over the users of all processes."""
        self.model.eval()
        count, device = self.processes.count, self.processes.device
        if device.type == "cuda":
            self.peak_before_evaluation = self.peak_memory_bytes()
        num_items = self.evaluated.num_items
        candidates = torch.arange(1, num_items + 1)
        if 0 < self.args.eval_items < num_items:
            generator = torch.Generator().manual_seed(self.args.seed)
            candidates = torch.randperm(num_items, generator=generator)[: self.args.eval_items] + 1
        lengths = (self.evaluated.lengths - 1).clamp(max=self.args.cap)
        users = lengths.argsort(stable=True)[self.processes.rank :: count]  # as many for each
        users_at_once = max(1, self.args.batch_size // count)
        hits, gain = 0.0, 0.0
        # As many parts for each: where rows of a table are spread, all look them up together.
        for some in users.tensor_split(math.ceil(len(lengths) / count / users_at_once)):
            if len(some) == 0 and not self.tables:
                continue
            batch = cut_batch(self.evaluated, some, self.args.cap, candidates)
            batch = move(pad(batch) if self.args.padded else batch, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.args.bf16):
                states = self.model.encode(batch)
                embedded = self.model.item_embedding(batch.negatives)
                scores = self.model.score_histories(states, embedded, batch)
            rank = 1 + (scores[:, 1:] >= scores[:, :1]).sum(1).double()
            hits += (rank <= TOP).sum().item()
            gain += torch.where(rank <= TOP, 1 / torch.log2(1 + rank), 0.0).sum().item()
        self.model.train()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        hits, gain = self.processes.total(hits, gain)
        return hits / len(lengths), gain / len(lengths)

    # -- checkpoints

    def save(self, path: Path) -> None:
        """Write the checkpoint.

        Files get their names at the end, when all are written: a training that is killed leaves
        the checkpoint before.
        """
        files: dict[Path, dict[str, Any]] = {}
        if self.processes.is_first:
            files[path] = {
                "step": self.step,
                "model": {name: parameter.detach() for name, parameter in self.dense.items()},
                "optimizer": self.optimizer.state_dict(),
                "arguments": {name: str(getattr(self.args, name)) for name in FIXED},
            }
        if self.tables:
            rows = {"step": self.step, "rows": self.tables.own_rows(self.summed_loss)}
            files[self._path_of_rows(path)] = rows
        for file, state in files.items():
            torch.save(state, _part_of(file))
        self.processes.total(0.0)  # all wait until all is written
        for file in files:
            _part_of(file).replace(file)
        self.processes.total(0.0)  # and until it is there

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            DataError: the file cannot be read, or is of another training.
        """
        state = read(path, self.processes.device)
        for name, value in state["arguments"].items():
            if value != str(getattr(self.args, name)):
                option = name.replace("_", "-")
                raise DataError(
                    f"{path}: --{option} must be {value}, as in this checkpoint's training,"
                    f" got {getattr(self.args, name)}"
                )
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        pairs = [(parameter, state["model"][name]) for name, parameter in self.dense.items()]
        if self.tables:
            rows = read(self._path_of_rows(path), self.processes.device)
            if rows["step"] != self.step:
                raise DataError(f"{path}: its table must be of step {self.step}")
            own = self.tables.own_rows(self.summed_loss)
            pairs += zip(own, rows["rows"], strict=True)
        with torch.no_grad():
            for tensor, value in pairs:
                tensor.copy_(value)

    def _path_of_rows(self, path: Path) -> Path:
        """Where this process keeps its rows of a table in TorchRec."""
        return path.with_name(f"{path.name}.{self.processes.rank}of{self.processes.count}")

    # -- memory

    def peak_memory_bytes(self) -> int:
        """The most that PyTorch held on this process's device while training, not evaluating.

        On the CPU, whose allocator keeps no count, of one more pass over the largest of the first
        steps' shares.
        """
        if self.processes.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.processes.device)
            return max(peak, self.peak_before_evaluation)
        steps = range(min(self.step, 50))
        largest = max((self.shares[step] for step in steps), key=lambda b: b.items.numel())

        def run() -> None:
            self.model.loss(largest).backward()

        peak = held_bytes(self.model, self.optimizer) + peak_allocated_bytes(run)
        self.optimizer.zero_grad()
        return peak


def import_tables() -> ModuleType:
    try:
        import torchrec_table
    except ImportError:
        raise DataError("--torchrec needs TorchRec (docs/torchrec.md), got none") from None
    return torchrec_table


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError):
        state = None
    if not isinstance(state, dict) or "step" not in state:
        raise DataError(f"{path}: this must be a checkpoint of train_ranker.py")
    return state


# --- the command


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        processes = join_processes(args.device, always=args.torchrec)
    except RuntimeError as error:
        print(f"train_ranker.py: {error}", file=sys.stderr)
        return 2
    try:
        choose_sizes(args, processes)
        return train(args, processes)
    except DataError as error:
        if processes.is_first:
            print(f"train_ranker.py: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(args: argparse.Namespace, processes: Processes) -> int:
    if args.deterministic:
        # PyTorch's memory-efficient attention, which the padded twin may take, only warns.
        torch.use_deterministic_algorithms(True, warn_only=args.padded)
        torch.utils.deterministic.fill_uninitialized_memory = False

    say = print if processes.is_first else (lambda *_, **__: None)
    histories = load(args, processes.is_first)
    trainer = Trainer(args, histories, processes)
    if args.resume is not None:
        trainer.load(args.resume)
    last = args.steps or args.epochs * trainer.sampler.steps_per_epoch
    evaluate_every = args.evaluate_every or trainer.sampler.steps_per_epoch
    if processes.is_first:
        demo.print_data(histories)
    say(describe(trainer, last), flush=True)
    trainer.warm_up()
    if processes.count > 1:
        say(describe_balance(trainer), flush=True)

    log = open_losses(args.losses, trainer.step) if args.losses and processes.is_first else None
    bar = ProgressBar("training", max(1, last - trainer.step)) if processes.is_first else None
    first, seconds = trainer.step, []

    def report(trainer: Trainer, loss: float, took: float) -> None:
        seconds.append(took)
        if not math.isfinite(loss):
            raise DataError(f"the loss of step {trainer.step} is {loss}")
        if log:
            print(json.dumps({"step": trainer.step, "loss": loss}), file=log, flush=True)
        if bar:
            bar.update(trainer.step - first, f"step {trainer.step}  loss {loss:.4f}")
        if args.checkpoint and trainer.step % args.save_every == 0:
            trainer.save(args.checkpoint)
        if trainer.step % evaluate_every == 0 or trainer.step == last:
            hit_rate, ndcg = trainer.evaluate()
            say(
                f"evaluation  step {trainer.step}: hit rate at {TOP} {hit_rate:.4f},"
                f" NDCG at {TOP} {ndcg:.4f}",
                flush=True,
            )

    trainer.run(last, report)
    if args.checkpoint:
        trainer.save(args.checkpoint)
        say(f"checkpoint  {args.checkpoint}, step {trainer.step}")
    if seconds:
        (memory,) = processes.most(trainer.peak_memory_bytes())
        median = statistics.median(seconds)
        say(
            f"time        {median * 1e3:.1f} ms per step (median of {len(seconds)}),"
            f" {trainer.sampler.batch_size / median:,.0f} histories per second"
        )
        say(f"memory      {memory / 2**20:,.0f} MiB at most, in the process with the most")
    if log:
        log.close()
    return 0


def open_losses(path: Path, step: int) -> TextIO:
    """A file of losses to go on with behind this step.

    A training that was killed may have written lines of steps after its checkpoint, and the last
    one in part.
    """
    kept = []
    for line in path.read_text().splitlines() if step and path.exists() else ():
        with suppress(json.JSONDecodeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    log = path.open("w")
    log.writelines(f"{line}\n" for line in kept)
    return log


def load(args: argparse.Namespace, is_first: bool) -> Histories:
    if args.time_split is not None and not 0 < args.time_split < 1:
        raise DataError(f"--time-split must be above 0 and below 1, got {args.time_split}")
    if args.time_split is not None and args.events is None:
        raise DataError("--time-split needs --events: drawn histories have no common time")
    if args.events is None:
        return draw_histories(args.users, args.seed)
    bar = ProgressBar("reading", 1) if is_first else None
    try:
        return read_events(args.events, bar.update if bar else lambda fraction: None)
    except DataError as error:
        raise DataError(f"{args.events}: {error}") from None


def describe(trainer: Trainer, last: int) -> str:
    args, processes = trainer.args, trainer.processes
    candidates = f"{args.eval_items:,} drawn" if args.eval_items else "all"
    resumed = f", from step {trainer.step} on" if trainer.step else ""
    held_out = "the last event"
    if trainer.split_time is not None:
        held_out = f"the first event from time {trainer.split_time:.15g} on"
    return (
        f"training    {'padded' if args.padded else 'jagged'}, {last:,} steps of"
        f" {trainer.sampler.batch_size} histories, {args.dim} features,"
        f" {'bfloat16' if args.bf16 else 'float32'}{resumed}\n"
        f"            {processes.count} process{'es' if processes.count > 1 else ''} on"
        f" {demo.describe_device(processes.device)}, torch {torch.__version__}\n"
        f"evaluation  {held_out} of each of {len(trainer.evaluated.lengths):,} users,"
        f" ranked among {candidates} items"
    )


def describe_balance(trainer: Trainer) -> str:
    """What dealing histories out evenly saves, beside as many histories for each process."""
    sampler = trainer.sampler
    steps = min(sampler.steps_per_epoch, 100)
    (rows, pairs), (plain_rows, plain_pairs) = (
        skew(sampler, deal, steps) for deal in (balanced, contiguous)
    )
    evenness = (
        f"balance     the process with the most has {rows:.2f} times the mean of rows"
        f" (contiguous: {plain_rows:.2f}), {pairs:.2f} of squared lengths"
        f" (contiguous: {plain_pairs:.2f})"
    )
    if trainer.tables:  # its processes meet in each lookup: no share runs by itself
        return evenness
    (_, waited), (slowest, plain_waited) = (
        trainer.waiting_seconds(deal) for deal in (balanced, contiguous)
    )
    return (
        f"{evenness}\n"
        f"            waiting for it takes {waited * 1e3:.1f} ms per step"
        f" (contiguous: {plain_waited * 1e3:.1f} of {slowest * 1e3:.1f} ms):"
        f" {(plain_waited - waited) * 1e3:.1f} ms saved"
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = demo.data_parser(__doc__)
    positive = demo.positive
    parser.add_argument("--users", type=positive, default=4096, help="drawn without --events")
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--steps", type=positive, help="in place of --epochs")
    parser.add_argument("--heads", type=positive, help="2, or more of 64 features each")
    parser.add_argument("--blocks", type=positive, default=2)
    parser.add_argument("--negatives", type=positive, default=128, help="beside each target")
    parser.add_argument("--learning-rate", type=float, help="Adam's")
    parser.add_argument("--torchrec", action="store_true", help="spread the items' table by it")
    parser.add_argument("--table-learning-rate", type=float, default=0.05, help="with --torchrec")
    parser.add_argument("--padded", action="store_true", help="plain PyTorch on padded batches")
    parser.add_argument("--contiguous", action="store_true", help="as many histories per process")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--deterministic", action="store_true", help="exact on a GPU too")
    parser.add_argument("--evaluate-every", type=positive, metavar="STEPS", help="or each epoch")
    parser.add_argument("--eval-items", type=int, default=1000, help="0: all")
    parser.add_argument("--time-split", type=float, metavar="SHARE", help="latest events held out")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="to write")
    parser.add_argument("--save-every", type=positive, default=500, metavar="STEPS")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a checkpoint to go on from")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="to write, one JSON line each")
    return parser.parse_args(argv)


def choose_sizes(args: argparse.Namespace, processes: Processes) -> None:
    """Sizes that were left out, as the demo chooses them."""
    device = processes.device
    args.dim = args.dim or (demo.DIM_ON_GPU if device.type == "cuda" else demo.DIM)
    args.heads = args.heads or max(2, args.dim // 64)
    if args.dim % args.heads != 0:
        raise DataError(f"--dim must be a multiple of --heads {args.heads}, got {args.dim}")
    own = demo.default_batch_size(device, args.cap, args.dim)
    args.batch_size = args.batch_size or own * processes.count
    if args.batch_size < processes.count:
        raise DataError(f"--batch-size must be {processes.count} or more, got {args.batch_size}")
    args.learning_rate = args.learning_rate or (
        demo.LEARNING_RATE * demo.LEARNING_RATE_DIM / args.dim
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of gloo's that are still ending when Python does abort the process.
    os._exit(status)
