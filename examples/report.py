"""The output of the demo: a progress bar, a table and a figure."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from training import Measurement

BAR_WIDTH = 30


class Side(NamedTuple):
    """One of the two trainings."""

    measurement: Measurement
    rows_a_step: float  # mean rows that the model computes
    fill: float  # part of them that are events


class Result(NamedTuple):
    """Both trainings on the same batches."""

    padded: Side
    jagged: Side
    histories_a_step: int
    tolerance: float  # allowed relative difference of the losses
    source: str
    device: str
    lengths: list[int]  # of all histories, uncut
    cap: int

    @property
    def differences(self) -> list[float]:
        """Relative difference of the two losses at each step."""
        pairs = zip(self.padded.measurement.losses, self.jagged.measurement.losses, strict=True)
        return [abs(jagged - padded) / abs(padded) for padded, jagged in pairs]

    @property
    def losses_are_equal(self) -> bool:
        # Written so that NaN is not equal.
        return all(difference <= self.tolerance for difference in self.differences)


class ProgressBar:
    """A line on stderr: redrawn in place on a terminal, printed at each quarter elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.begin = time.perf_counter()
        self.is_terminal = sys.stderr.isatty()
        self.next_print = 0.0 if self.is_terminal else 0.25

    def update(self, done: float, note: str = "") -> None:
        fraction = done / self.total
        if fraction < self.next_print and fraction < 1:
            return
        self.next_print = fraction + (0.0 if self.is_terminal else 0.25)
        elapsed = time.perf_counter() - self.begin
        filled = int(fraction * BAR_WIDTH)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        remaining = elapsed * (1 - fraction) / fraction if fraction > 0 else 0.0
        clock = f"{elapsed:.1f} s" if fraction >= 1 else f"{remaining:.0f} s left"
        line = f"{self.label} [{bar}] {fraction:4.0%}  {note}  {clock}"
        if self.is_terminal:
            end = "\n" if fraction >= 1 else ""
            print(f"\r{line}\033[K", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def format_table(result: Result) -> str:
    """The figures side by side; ratios are padded / jagged."""
    sides = (result.padded, result.jagged)
    seconds = [statistics.fmean(side.measurement.step_seconds) for side in sides]
    peaks = [side.measurement.peak_memory_bytes for side in sides]
    rows = [
        ("", "padded", "jagged", "ratio"),
        ("time per step", *(f"{s * 1e3:.1f} ms" for s in seconds), _ratio(*seconds)),
        *_queue_rows(sides),
        ("histories per second", *(f"{result.histories_a_step / s:,.0f}" for s in seconds), ""),
        ("peak memory", *(f"{peak / 2**20:,.0f} MiB" for peak in peaks), _ratio(*peaks)),
        (
            "rows per step",
            *(f"{side.rows_a_step:,.0f}" for side in sides),
            _ratio(*(side.rows_a_step for side in sides)),
        ),
        ("fill (rows that are events)", *(f"{side.fill:.1%}" for side in sides), ""),
        ("first loss", *(f"{side.measurement.losses[0]:.5f}" for side in sides), ""),
        ("last loss", *(f"{side.measurement.losses[-1]:.5f}" for side in sides), ""),
    ]
    return "\n".join(f"{row[0]:<28}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def _queue_rows(sides: tuple[Side, Side]) -> list[tuple[str, ...]]:
    """On a GPU: when Python has asked for all of a step. The GPU is the limit if that is early."""
    queued = [side.measurement.queue_seconds for side in sides]
    if not all(queued):
        return []
    return [
        ("queued by Python after", *(f"{statistics.fmean(s) * 1e3:.1f} ms" for s in queued), "")
    ]


def _ratio(padded: float, jagged: float) -> str:
    return f"{padded / jagged:.1f}x"


def compare(padded: float, jagged: float) -> str:
    return f"{padded / jagged:.1f}x less" if jagged < padded else f"{jagged / padded:.1f}x more"


def draw_figure(result: Result, path: Path) -> None:
    """Write the figure as PNG.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    padded_color, jagged_color, grey = "#9aa5b1", "#1f6f5c", "#52606d"
    style = {
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": grey,
        "xtick.color": grey,
        "ytick.color": grey,
        "legend.frameon": False,
    }
    padded, jagged = result.padded.measurement, result.jagged.measurement
    steps = range(1, len(padded.losses) + 1)
    with plt.rc_context(style):
        figure = plt.figure(figsize=(10.2, 3.3), layout="constrained")
        grid = figure.add_gridspec(2, 4, height_ratios=(2.4, 1), width_ratios=(2.5, 1, 1, 2.1))

        loss = figure.add_subplot(grid[0, 0], title="(a) Training loss")
        loss.plot(steps, padded.losses, color=padded_color, linewidth=4, label="padded")
        loss.plot(steps, jagged.losses, color=jagged_color, linewidth=1.1, label="jagged")
        loss.set_ylabel("loss")
        loss.tick_params(labelbottom=False)
        loss.legend()

        difference = figure.add_subplot(grid[1, 0], sharex=loss)
        # A difference of zero has no place on a logarithmic axis: it is drawn at the bottom.
        floor = 1e-8
        heights = [max(value, floor) for value in result.differences]
        difference.semilogy(steps, heights, color=jagged_color, linewidth=0.9)
        difference.axhline(result.tolerance, color=grey, linewidth=0.8, linestyle="--")
        difference.set_ylim(floor / 2, result.tolerance * 10)
        difference.annotate(
            "allowed",
            (0, result.tolerance),
            xycoords=("axes fraction", "data"),
            xytext=(3, 1),
            textcoords="offset points",
            va="bottom",
            fontsize=7,
            color=grey,
        )
        difference.set_ylabel("relative\ndifference")
        difference.set_xlabel("step")

        bars = (
            (
                "(b) Time",
                "ms per step",
                [statistics.fmean(side.step_seconds) * 1e3 for side in (padded, jagged)],
            ),
            (
                "(c) Peak memory",
                "MiB",
                [side.peak_memory_bytes / 2**20 for side in (padded, jagged)],
            ),
        )
        for column, (title, unit, heights) in enumerate(bars, start=1):
            axes = figure.add_subplot(grid[:, column], title=title, ylabel=unit)
            drawn = axes.bar(["padded", "jagged"], heights, color=[padded_color, jagged_color])
            labels = [f"{heights[0]:,.0f}", f"{heights[1]:,.0f}\n({compare(*heights)})"]
            axes.bar_label(drawn, labels=labels, padding=2)
            axes.margins(y=0.16)

        lengths = figure.add_subplot(grid[:, 3], title="(d) Events per user")
        longest = max(result.lengths)
        num_bins = 32
        edges = sorted({round(longest ** (i / num_bins)) for i in range(num_bins + 1)})
        edges[-1] += 1
        lengths.hist(result.lengths, bins=edges, color=jagged_color)
        lengths.set_xscale("log")
        lengths.set_ylabel("users")
        lengths.set_xlabel("events")
        mean = statistics.fmean(result.lengths)
        marks = ((mean, f"mean {mean:,.0f}", 1.0), (result.cap, f"cut at {result.cap:,}", 0.92))
        for place, text, height in marks:
            lengths.axvline(place, color=grey, linewidth=0.8, linestyle="--")
            lengths.annotate(
                text,
                (place, height),
                xycoords=("data", "axes fraction"),
                xytext=(2, -2),
                textcoords="offset points",
                va="top",
                color=grey,
            )

        caption = (
            f"{result.source}; {result.histories_a_step} histories per step, {result.device}; "
            f"{result.padded.fill:.1%} of the padded rows are events"
        )
        figure.supxlabel(caption, fontsize=7.5, color=grey)
        figure.savefig(path, dpi=200)
        plt.close(figure)
