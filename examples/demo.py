"""Train a ranking model twice, padded and jagged: the loss is the same, the cost is not.

    python examples/demo.py                        histories drawn as long as MovieLens-20M's
    python examples/demo.py --events ratings.csv   an interaction log: user_id, item_id, timestamp

Both trainings start from the same weights and see the same batches in the same order. The padded
one is plain PyTorch: every layer on [B, M, D], padded behind each history to the longest of its
batch, with scaled_dot_product_attention. The jagged one is the same layers on [T, D], with
jagged_flash_attention within histories and jagged_target_attention of candidates to them. The exit
status is 1 if their losses differ by more than rounding, 2 if the demo could not run.

The size of the model and of its batches depends on the device, so that the computation is what
takes the time. A step is about 150 calls, which keep Python busy for a few milliseconds. On a CPU
32 histories of 64 features take far longer. A GPU would finish those before Python had asked for
the next step: both trainings would take as long as Python does, whatever the padding. So a GPU
gets 256 features and 1,024 histories in a step, or fewer if the padded training would not fit into
half of its memory. The table's line "queued by Python after" tells whether that suffices: the GPU
is the limit where it is less than the time of a step. Both trainings are float32, since in a
shorter type rounding would hide whether the losses are equal.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

# The profiler, which measures memory on the CPU, would look for a GPU and report on stderr that it
# found none, and when it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# CPU threads that wait go to sleep. On idle cores that costs each step 15 to 50 %, but beside other
# programs spinning ones would slow both trainings down several times.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The package of this checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from histories import Batch, DataError, Histories, draw_histories, make_batches, pad, read_events
from ranker import Attention, Ranker, jagged_attention, padded_attention
from report import ProgressBar, Result, Side, draw_figure, format_table
from training import train

# Relative, for rounding carried along by training: the two sides sum in different orders. They
# agree to about 1e-7 at step 1; trainings of one side from weights one rounding apart stay within
# 1e-6.
TOLERANCE = 1e-5
# Adam's, at 64 features. It falls as features are added: otherwise training is unstable, and two
# trainings one rounding apart do not stay together.
LEARNING_RATE, LEARNING_RATE_DIM = 2e-3, 64
DRAWN_USERS = 4096
DIM, DIM_ON_GPU = 64, 256
BATCH_SIZE, BATCH_SIZE_ON_GPU = 32, 1024
# What the padded training holds of each padded row, in vectors of --dim float32 numbers (measured).
VECTORS_A_ROW = 37


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        device = choose_device(args.device)
        histories = load_histories(args.events, args.seed)
    except (DataError, RuntimeError) as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 2

    dim = args.dim or (DIM_ON_GPU if device.type == "cuda" else DIM)
    heads = args.heads or max(2, dim // 64)
    if dim % heads != 0:
        print(f"demo.py: --dim must be a multiple of --heads {heads}, got {dim}", file=sys.stderr)
        return 2
    batches = make_batches(
        histories,
        num_batches=args.steps,
        batch_size=args.batch_size or default_batch_size(device, args.cap, dim),
        cap=args.cap,
        num_negatives=args.negatives,
        bucketed=args.bucketed,
        seed=args.seed,
    )
    print_plan(histories, batches, dim, device)

    def run(name: str, attention: Attention, prepare: Callable[[Batch], Batch]) -> Side:
        torch.manual_seed(args.seed)
        model = Ranker(
            num_items=histories.num_items,
            max_positions=args.cap,
            dim=dim,
            num_heads=heads,
            num_blocks=args.blocks,
            attention=attention,
        ).to(device)
        prepared = [prepare(batch) for batch in batches]
        bar = ProgressBar(f"{name:<7}", len(batches))
        measurement = train(
            model,
            prepared,
            learning_rate=LEARNING_RATE * LEARNING_RATE_DIM / dim,
            progress=lambda step, loss: bar.update(step, f"loss {loss:.4f}"),
        )
        rows_a_step = statistics.fmean(batch.items.numel() for batch in prepared)
        events_a_step = statistics.fmean(batch.items.numel() for batch in batches)
        return Side(measurement, rows_a_step, events_a_step / rows_a_step)

    result = Result(
        padded=run("padded", padded_attention, pad),
        jagged=run("jagged", jagged_attention, lambda batch: batch),
        histories_a_step=len(batches[0].offsets) - 1,
        tolerance=TOLERANCE,
        source=histories.source,
        device=describe_device(device),
        lengths=histories.lengths.tolist(),
        cap=args.cap,
    )
    print(format_table(result))
    print()
    print(compare_losses(result))
    print(write_figure(result, args.out))
    return 0 if result.losses_are_equal else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = data_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the figure")
    parser.add_argument("--steps", type=positive, default=100, help="of each training")
    parser.add_argument(
        "--bucketed",
        action="store_true",
        help="batch users of like length together, the cheapest remedy against padding",
    )
    parser.add_argument("--heads", type=positive, help="2, or more of 64 features each")
    parser.add_argument("--blocks", type=positive, default=2)
    parser.add_argument("--negatives", type=positive, default=128, help="beside each target")
    return parser.parse_args(argv)


def data_parser(doc: str) -> argparse.ArgumentParser:
    """A parser of what every example takes: its data, its device and its sizes."""
    parser = argparse.ArgumentParser(
        description=doc.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--events", type=Path, metavar="FILE", help="CSV or CSV.gz to read")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=positive, default=512, help="events kept of a history")
    parser.add_argument("--batch-size", type=positive, help="histories; by default more on a GPU")
    parser.add_argument(
        "--dim", type=positive, help="features of a state; by default more on a GPU"
    )
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device cuda must find a GPU that PyTorch can use, got none")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def default_batch_size(device: torch.device, cap: int, dim: int) -> int:
    """On a GPU as many histories as the padded training fits into half of the memory, and a limit.

    That training is the larger one: every history may be padded to the cap.
    """
    if device.type != "cuda":
        return BATCH_SIZE
    fit = torch.cuda.get_device_properties(device).total_memory // 2
    fit //= VECTORS_A_ROW * cap * dim * torch.float32.itemsize
    return min(BATCH_SIZE_ON_GPU, 2 ** max(0, fit.bit_length() - 1))


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'' if threads == 1 else 's'})"


def load_histories(path: Path | None, seed: int) -> Histories:
    if path is None:
        return draw_histories(DRAWN_USERS, seed)
    bar = ProgressBar("reading", 1)
    try:
        return read_events(path, bar.update)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def print_plan(histories: Histories, batches: list[Batch], dim: int, device: torch.device) -> None:
    print_data(histories)
    histories_a_step = len(batches[0].offsets) - 1
    print(
        f"training  {len(batches)} steps of {histories_a_step} histories, {dim} features, float32"
    )
    print(f"device    {describe_device(device)}, torch {torch.__version__}")
    print(flush=True)


def print_data(histories: Histories) -> None:
    lengths = histories.lengths.double()
    print(f"data      {histories.source}")
    print(
        f"          {len(lengths):,} users, {len(histories.items):,} events,"
        f" {histories.num_items:,} items; events per user: mean {lengths.mean():.1f},"
        f" median {lengths.median():.0f}, largest {lengths.max():,.0f}"
    )


def compare_losses(result: Result) -> str:
    equal = sum(difference <= result.tolerance for difference in result.differences)
    verdict = "equal within rounding" if result.losses_are_equal else "NOT EQUAL"
    return (
        f"losses    {verdict} at {equal} of {len(result.differences)} steps: they differ by"
        f" {result.differences[0]:.1e} at step 1 and {max(result.differences):.1e} at most"
        f" (relative; allowed {result.tolerance:.0e})"
    )


def write_figure(result: Result, path: Path) -> str:
    try:
        draw_figure(result, path)
    except ImportError:
        return "figure    not written: matplotlib is not installed (pip install matplotlib)"
    except OSError as error:
        return f"figure    not written: {path}: {error.strerror or error}"
    return f"figure    {path}"


if __name__ == "__main__":
    sys.exit(main())
