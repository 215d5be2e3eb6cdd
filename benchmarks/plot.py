"""Figures of a run: time and memory over the longest length, speed over the padding, roofline."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, sweep
from benchmarks.results import STYLES
from benchmarks.session import OURS

NEEDS = "a figure needs matplotlib, which is not installed (pip install matplotlib)"
ROOFLINE = "roofline"  # has a line of the figure to itself, the others share one by two
PANELS = ("time", "memory", "fill", "operators", ROOFLINE)
PANEL_WIDTH, PANEL_HEIGHT, CASE_HEIGHT = 5.6, 3.7, 0.24  # inches
DPI = 100
FONT, SMALL_FONT, TITLE_FONT = 8.0, 7.0, 10.0
GREY, LIGHT = "#666666", "#dddddd"

PADDED = ("dense", "padded", "sdpa")
ROOFLINE_COMMANDS = {"attention": "", "target": "target: ", "table1": ""}


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks plot", description="Draw what a results file holds."
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", required=True)
    parser.add_argument(
        "--panels", default=",".join(PANELS), metavar="NAME,...", help="default: %(default)s"
    )
    parsed = parser.parse_args(arguments)
    panels = [name for name in parsed.panels.split(",") if name]
    for name in panels:
        if name not in PANELS:
            parser.error(f"--panels must be of {', '.join(PANELS)}, got {name}")
    if not is_possible():
        parser.error(NEEDS)
    try:
        drawn = draw(results.load(parsed.results), parsed.plot, panels)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{parsed.plot}: {', '.join(drawn)}")
    return 0


def draw(content: dict[str, Any], path: Path, panels: Sequence[str] | None = None) -> list[str]:
    """Write a PNG of the panels that the rows suffice for, and return their names.

    Raises:
        ValueError: the rows suffice for none of those that were asked for.
    """
    found = {name: rows for name in panels or PANELS if (rows := _ROWS[name](content))}
    if not found:
        raise ValueError(f"nothing to draw: no rows for {', '.join(panels or PANELS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shared = [name for name in found if name != ROOFLINE]
    heights = [PANEL_HEIGHT] * -(-len(shared) // 2)
    if ROOFLINE in found:
        cases = {(row["command"], row["case"]) for row in found[ROOFLINE]}
        heights.append(1.2 + CASE_HEIGHT * len(cases))
    figure = Figure((2 * PANEL_WIDTH, sum(heights)), DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for number, (name, rows) in enumerate(found.items()):
        place = grid[-1, :] if name == ROOFLINE else grid[number // 2, number % 2]
        axes = figure.add_subplot(place)
        _style(axes)
        _DRAW[name](axes, content, rows)
    figure.supxlabel(results.machine(content), fontsize=SMALL_FONT, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"results": results.digest(content)})
    return list(found)


# --- axes and labels


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=FONT, colors=GREY, which="both", width=0.7, length=3)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, which="major", color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)


def _title(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(f"{subtitle}\n", loc="left", fontsize=SMALL_FONT, color=GREY, linespacing=0.3)
    axes.annotate(
        title,
        (0, 1),
        (0, 20),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=TITLE_FONT,
        fontweight="bold",
    )


def _plot(
    axes: Any, points: Sequence[tuple[float, float]], label: str, colour: str, is_bold: bool
) -> None:
    axes.plot(
        *zip(*sorted(points), strict=True),
        color=colour,
        label=label,
        marker="o",
        markersize=4.5 if is_bold else 3.5,
        linewidth=2.2 if is_bold else 1.3,
        zorder=3 if is_bold else 2,
    )


def _legend(axes: Any) -> None:
    """Right of the axes, in the order in which the lines end."""
    lines = sorted(axes.lines, key=lambda line: line.get_ydata()[-1], reverse=True)
    lines = [line for line in lines if not line.get_label().startswith("_")]
    options = {"fontsize": FONT, "labelcolor": "linecolor", "frameon": False, "handlelength": 1.2}
    axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


def _time_text(us: float, _: object = None) -> str:
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"


def _memory_text(mib: float, _: object = None) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB"


# --- time and memory over the longest length


def _over_length(
    axes: Any, content: dict[str, Any], rows: Sequence[results.Row], title: str, key: str
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10 if key == "median_us" else 2)
    for name in dict.fromkeys(name for row in rows for name in row["results"] if name in STYLES):
        points = [
            (int(row["case"]), found, found / ours)
            for row in rows
            if (found := results.value(row, name, key)) and (ours := results.value(row, OURS, key))
        ]
        if not points:
            continue
        label, (last, _, ratio) = results.label(content, name), points[-1]
        if last != int(rows[-1]["case"]):
            label += f" (fails at {rows[-1]['case']})"
        elif name != OURS:
            label += f"  {ratio:.3g}×"
        _plot(axes, [(x, y) for x, y, _ in points], label, STYLES[name][1], name == OURS)
    lengths = [int(row["case"]) for row in rows]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(_time_text if key == "median_us" else _memory_text)
    axes.set_xlabel("longest sequence, rows", fontsize=FONT, color=GREY)
    _legend(axes)
    shape = rows[0]["shape"]
    heads = "one head" if shape["H"] == 1 else f"{shape['H']} heads"
    _title(
        axes,
        title,
        f"{shape['B']} sequences of 1 to N rows, {heads} of {shape['D']}, {rows[0]['precision']};"
        " × jagged_cuda at the right end",
    )


# --- speed over the padding


def _is_attention(row: results.Row) -> bool:
    return row["case"].startswith(sweep.ATTENTION)


def _over_padding(
    axes: Any,
    rows: Sequence[results.Row],
    padded: str,
    line_of: Callable[[results.Row, str], tuple[str, str, bool] | None],
    title: str,
    sizes: str,
) -> None:
    """How many times as fast as padded; line_of: an implementation's label, colour, boldness."""
    lines: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for row in rows:
        base = results.value(row, padded)
        for name in (OURS, *(name for name, _ in results.others(row, PADDED))):
            time, line = results.value(row, name), line_of(row, name)
            if base and time and line:
                padding = 100 * (1 - row["shape"]["fill"])
                lines.setdefault(line, []).append((padding, base / time))
    for (label, colour, is_bold), points in lines.items():
        _plot(axes, points, label, colour, is_bold)
    _legend(axes)
    axes.set_yscale("log")
    axes.axhline(1, color=GREY, linewidth=1.0, zorder=1)
    axes.set_xlim(-3, 100)
    axes.set_xticks([0, 25, 50, 75, 90], ["0 %", "25 %", "50 %", "75 %", "90 %"])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}×")
    axes.set_xlabel("padding, part of the padded batch's rows", fontsize=FONT, color=GREY)
    shape = rows[0]["shape"]
    batch = f"{shape['B']:,} sequences of up to {shape['max_len']:,} rows"
    _title(axes, title, f"forward + backward, {batch}, {sizes}, {rows[0]['precision']}")


def _draw_fill(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    shape = rows[0]["shape"]
    _over_padding(
        axes,
        rows,
        "sdpa",
        lambda row, name: (results.label(content, name), STYLES[name][1], name == OURS),
        f"Attention: times as fast as {results.label(content, 'sdpa')}",
        f"{shape['H']} heads of {shape['D']}",
    )


def _draw_operators(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    names = list(dict.fromkeys(row["case"].rsplit(" ", 1)[0] for row in rows))
    distinct = dict.fromkeys(colour for _, colour in STYLES.values())
    colours = dict(zip(names, distinct, strict=False))

    def line_of(row: results.Row, name: str) -> tuple[str, str, bool] | None:
        operator = row["case"].rsplit(" ", 1)[0]
        return (operator, colours[operator], False) if name == OURS else None

    shape = rows[0]["shape"]
    title = "The paper's Table 1: times as fast as padded PyTorch"
    _over_padding(axes, rows, "padded", line_of, title, f"{shape['D']} features by {shape['N']}")


# --- distance from the roofline


def _roofline_rows(content: dict[str, Any]) -> list[results.Row]:
    if "bf16_matmul_tflops" not in content.get("calibration", {}):
        return []
    return [
        row
        for command in ROOFLINE_COMMANDS
        for row in results.rows_of(content, command, "bf16")
        if row["bytes"] and results.value(row, OURS)
    ]


def _draw_roofline(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    """A line for each case: the times of ours and of the fastest other over the roofline's."""
    calibration = content["calibration"]
    bandwidth, peak = calibration["copy_tbytes_per_s"], calibration["bf16_matmul_tflops"]
    cases = list(dict.fromkeys((row["command"], row["case"]) for row in rows))
    labels: dict[str, str] = {}
    for row in rows:
        is_forward = row["pass"] == "forward"
        height = cases.index((row["command"], row["case"])) + (-0.17 if is_forward else 0.17)
        least_us = max(sum(row["bytes"]) / bandwidth, (row["flops"] or 0) / peak) / 1e6
        best = min(results.others(row, PADDED), key=lambda item: item[1], default=None)
        for name, time in ([best] if best else []) + [(OURS, results.value(row, OURS))]:
            labels.setdefault(STYLES[name][1], results.label(content, name))
            size, fill = (4.5, is_forward) if name == OURS else (3.0, True)
            colour = STYLES[name][1]
            face = colour if fill else "white"
            axes.plot(time / least_us, height, "o", color=colour, markersize=size, mfc=face)
    for colour, label in labels.items():
        axes.plot([], [], "o", color=colour, markersize=4.5, label=label)
    axes.set_xscale("log")
    axes.axvline(1, color=GREY, linewidth=1.0, zorder=1)
    ticks = [ratio for ratio in (1, 1.5, 2, 3, 5, 10, 20, 50) if ratio <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{ratio:g}×" for ratio in ticks])
    axes.minorticks_off()
    names = [f"{ROOFLINE_COMMANDS[command]}{case}" for command, case in cases]
    axes.set_yticks(range(len(cases)), names)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.legend(fontsize=SMALL_FONT, loc="upper right", labelcolor=GREY)
    _title(
        axes,
        "Time over the roofline's, bf16",
        f"the larger of bytes at {bandwidth:.2f} TB/s (a copy) and operations at {peak:.0f} TFLOP/s"
        " (8192³ product); filled: forward; hollow: backward, of target attention both;"
        " small: the fastest other",
    )


_ROWS: dict[str, Callable[[dict[str, Any]], list[results.Row]]] = {
    "time": lambda content: results.rows_of(content, "figure2"),
    "memory": lambda content: [
        row for row in results.rows_of(content, "figure2") if results.value(row, OURS, "peak_mib")
    ],
    "fill": lambda content: list(filter(_is_attention, results.rows_of(content, "sweep"))),
    "operators": lambda content: [
        row for row in results.rows_of(content, "sweep") if not _is_attention(row)
    ],
    "roofline": _roofline_rows,
}
_DRAW = {
    "time": functools.partial(
        _over_length, title="Attention, forward + backward: time", key="median_us"
    ),
    "memory": functools.partial(
        _over_length, title="Peak memory beyond the inputs", key="peak_mib"
    ),
    "fill": _draw_fill,
    "operators": _draw_operators,
    "roofline": _draw_roofline,
}
