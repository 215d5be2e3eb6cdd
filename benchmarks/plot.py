"""Figures of a run: time and memory over the longest length, roofline, speed over the padding."""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, sweep
from benchmarks.results import STYLES
from benchmarks.session import OURS

NEEDS = "a figure needs matplotlib, which is not installed (pip install matplotlib)"
PANELS = ("time", "memory", "fill", "operators", "roofline")
WIDE = ("roofline",)  # these take a line of their own

# A panel: its axes, and the room for labels at their right, in inches.
AXES_WIDTH, AXES_HEIGHT, LABELS_WIDTH = 2.9, 2.6, 2.1
LEFT, TOP, BOTTOM, BETWEEN = 0.72, 0.62, 0.82, 1.2
WIDE_HEIGHT = 3.3
PANEL_WIDTH = LEFT + AXES_WIDTH + LABELS_WIDTH
DPI = 150
SHADES = tuple(part / 18 for part in range(2, 19))  # lines and letters fade at their edges
FONT, SMALL_FONT, TITLE_FONT = 8.0, 7.0, 10.0
GREY, LIGHT = "#666666", "#dddddd"

PADDED = ("dense", "padded", "sdpa")
COMMAND_MARKERS = {"attention": "o", "target": "^", "table1": "s"}
COMMAND_TITLES = {"attention": "self-attention", "target": "target attention", "table1": "Table 1"}


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

    lines = _lines(list(found))
    width = PANEL_WIDTH * max(2 if name in WIDE else len(line) for line in lines for name in line)
    heights = [WIDE_HEIGHT if line[0] in WIDE else AXES_HEIGHT for line in lines]
    height = TOP + BOTTOM + sum(heights) + (len(lines) - 1) * BETWEEN
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    for number, line in enumerate(lines):
        bottom = height - TOP - sum(heights[: number + 1]) - number * BETWEEN
        for column, name in enumerate(line):
            left = LEFT + column * PANEL_WIDTH
            axes_width = AXES_WIDTH + (PANEL_WIDTH if name in WIDE else 0)
            axes = figure.add_axes(
                (left / width, bottom / height, axes_width / width, heights[number] / height)
            )
            _style(axes)
            _DRAW[name](axes, content, found[name])
    figure.text(
        LEFT / width, 0.13 / height, results.machine(content), fontsize=SMALL_FONT, color=GREY
    )
    _save(figure, path, results.digest(content))
    return list(found)


def _lines(names: Sequence[str]) -> list[list[str]]:
    """Two panels a line; a wide one has its line alone."""
    lines: list[list[str]] = []
    for name in names:
        is_full = not lines or len(lines[-1]) == 2 or lines[-1][0] in WIDE
        if is_full or name in WIDE:
            lines.append([])
        lines[-1].append(name)
    return lines


def _save(figure: Any, path: Path, made_of: str) -> None:
    """As a PNG with a palette: a third of the size, and looks the same."""
    from PIL import Image, ImageColor, PngImagePlugin

    colours = {GREY, "#000000", *(colour for _, colour in STYLES.values())}
    mixed = [(ImageColor.getrgb(colour), part) for colour in sorted(colours) for part in SHADES]
    mixed += [(ImageColor.getrgb(LIGHT), 1.0), (ImageColor.getrgb(LIGHT), 0.0)]
    palette = [round(255 - (255 - channel) * part) for colour, part in mixed for channel in colour]
    shades = Image.new("P", (1, 1))
    shades.putpalette(palette)
    whole = io.BytesIO()
    figure.savefig(whole, format="png")
    found = Image.open(whole).convert("RGB").quantize(palette=shades, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngImagePlugin.PngInfo()
    info.add_text("results", made_of)
    found.save(path, format="png", optimize=True, pnginfo=info)


# --- axes and labels


def _style(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
        axes.spines[side].set_linewidth(0.7)
    axes.tick_params(labelsize=FONT, colors=GREY, which="both", width=0.7, length=3)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, which="major", color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)


def _title(axes: Any, title: str, subtitle: str) -> None:
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(title, (0, 1), (0, 20), fontsize=TITLE_FONT, fontweight="bold", **place)
    axes.annotate(subtitle, (0, 1), (0, 8), fontsize=SMALL_FONT, color=GREY, **place)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least `gap` apart, in the same order, as near to those wanted as can be."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Less rank * gap, they only have to rise: neighbours that fall share their mean.
    groups: list[tuple[float, int]] = []  # sum, members
    for rank, index in enumerate(order):
        groups.append((wanted[index] - rank * gap, 1))
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            (total, members), (last, last_members) = groups[-2:]
            groups[-2:] = [(total + last, members + last_members)]
    means = [total / members for total, members in groups for _ in range(members)]
    found = [0.0] * len(wanted)
    for rank, (index, mean) in enumerate(zip(order, means, strict=True)):
        found[index] = mean + rank * gap
    return found


def _label_right(
    axes: Any, ends: Sequence[tuple[float, float, str, str, bool]], font: float = FONT
) -> None:
    """Label points in a column right of the axes: x, y, text, colour, whether it is bold."""
    to_pixels = axes.transData.transform
    pixels = axes.figure.dpi / 72
    heights = [to_pixels((x, y))[1] / pixels for x, y, *_ in ends]
    places = spread(heights, 1.35 * font)
    right = axes.transAxes.transform((1, 0))[0] / pixels
    for (x, y, text, colour, is_bold), height, place in zip(ends, heights, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            (right + 12 - to_pixels((x, y))[0] / pixels, place - height),
            textcoords="offset points",
            fontsize=font,
            color=colour,
            fontweight="bold" if is_bold else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _time_text(us: float, _: object = None) -> str:
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"


def _memory_text(mib: float, _: object = None) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB"


# --- time and memory over the longest length


def _over_length(
    axes: Any,
    content: dict[str, Any],
    rows: Sequence[results.Row],
    key: str,
    text: Callable[..., str],
) -> None:
    names = dict.fromkeys(name for row in rows for name in row["results"] if name in STYLES)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10 if key == "median_us" else 2)
    ends = []
    for name in names:
        points = [
            (int(row["case"]), found, found / ours)
            for row in rows
            if (found := results.value(row, name, key)) and (ours := results.value(row, OURS, key))
        ]
        if not points:
            continue
        label, colour = results.label(content, name), STYLES[name][1]
        is_ours = name == OURS
        axes.plot(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            color=colour,
            marker="o",
            markersize=4.5 if is_ours else 3.5,
            linewidth=2.2 if is_ours else 1.3,
            zorder=3 if is_ours else 2,
        )
        x, y, ratio = points[-1]
        if x != int(rows[-1]["case"]):
            label += f" (fails at {rows[-1]['case']})"
        elif not is_ours:
            label += f"  {ratio:.3g}×"
        ends.append((x, y, label, colour, is_ours))
    lengths = [int(row["case"]) for row in rows]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(text)
    axes.set_xlabel("longest sequence, rows", fontsize=FONT, color=GREY)
    _label_right(axes, ends)


def _shape_text(row: results.Row) -> str:
    shape = row["shape"]
    heads = "one head" if shape["H"] == 1 else f"{shape['H']} heads"
    return (
        f"{shape['B']} sequences of 1 to N rows, {heads} of {shape['D']}, {row['precision']};"
        " × jagged_cuda at the right end"
    )


def _draw_time(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    _over_length(axes, content, rows, "median_us", _time_text)
    _title(axes, "Attention, forward + backward: time", _shape_text(rows[0]))


def _draw_memory(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    _over_length(axes, content, rows, "peak_mib", _memory_text)
    _title(axes, "Peak memory beyond the inputs", _shape_text(rows[0]))


# --- speed over the padding


def _is_attention(row: results.Row) -> bool:
    return row["case"].startswith(sweep.ATTENTION)


def _over_padding(
    axes: Any, lines: Mapping[tuple[str, str, bool], list[tuple[float, float]]]
) -> None:
    """lines: by label, colour and whether it is bold: padding in per cent, times the speed."""
    axes.set_yscale("log")
    ends = []
    for (label, colour, is_bold), points in lines.items():
        points.sort()
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            marker="o",
            markersize=4.5 if is_bold else 3.0,
            linewidth=2.2 if is_bold else 1.2,
            zorder=3 if is_bold else 2,
        )
        ends.append((*points[-1], label, colour, is_bold))
    axes.axhline(1, color=GREY, linewidth=1.0, zorder=1)
    axes.set_xlim(-3, 100)
    axes.set_xticks([0, 25, 50, 75, 90], ["0 %", "25 %", "50 %", "75 %", "90 %"])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}×")
    label = "padding, part of the padded batch's rows"
    axes.set_xlabel(label, fontsize=FONT, color=GREY)
    _label_right(axes, ends)


def _speeds(rows: Sequence[results.Row], padded: str) -> Iterator[tuple[str, str, float, float]]:
    """Of each row the operator, and of each implementation the padding and times the speed."""
    for row in rows:
        base = results.value(row, padded)
        names = (OURS, *(name for name, _ in results.others(row, PADDED)))
        for name in names:
            time = results.value(row, name)
            if base and time:
                padding = 100 * (1 - row["shape"]["fill"])
                yield row["case"].rsplit(" ", 1)[0], name, padding, base / time


def _draw_fill(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    lines: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for _, name, padding, speed in _speeds(rows, "sdpa"):
        key = (results.label(content, name), STYLES[name][1], name == OURS)
        lines.setdefault(key, []).append((padding, speed))
    _over_padding(axes, lines)
    shape = rows[0]["shape"]
    _title(
        axes,
        f"Attention: times as fast as {results.label(content, 'sdpa')}",
        f"forward + backward, {shape['B']:,} sequences of up to {shape['max_len']:,} rows,"
        f" {shape['H']} heads of {shape['D']}, {rows[0]['precision']}",
    )


def _draw_operators(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    lines: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for operator, name, padding, speed in _speeds(rows, "padded"):
        if name == OURS:
            lines.setdefault((operator, STYLES[OURS][1], False), []).append((padding, speed))
    _over_padding(axes, lines)
    shape = rows[0]["shape"]
    _title(
        axes,
        "The paper's Table 1: times as fast as padded PyTorch",
        f"forward + backward, {shape['B']:,} sequences of up to {shape['max_len']:,} rows,"
        f" {shape['D']} features by {shape['N']}, {rows[0]['precision']}",
    )


# --- roofline


def _roofline_rows(content: dict[str, Any]) -> list[results.Row]:
    calibration = content.get("calibration", {})
    if "bf16_matmul_tflops" not in calibration:
        return []
    return [
        row
        for command in COMMAND_MARKERS
        for row in results.rows_of(content, command, "bf16")
        if row["flops"] and row["bytes"] and results.value(row, OURS)
    ]


def _draw_roofline(axes: Any, content: dict[str, Any], rows: Sequence[results.Row]) -> None:
    calibration = content["calibration"]
    bandwidth, peak = calibration["copy_tbytes_per_s"], calibration["bf16_matmul_tflops"]
    knee = peak / bandwidth
    intensities = [row["flops"] / sum(row["bytes"]) for row in rows]
    low, high = min(intensities) / 1.8, max(*intensities, 4 * knee) * 1.3
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([low, knee, high], [low * bandwidth, peak, peak], color=GREY, linewidth=1.2)

    def roof(intensity: float) -> float:
        return min(peak, intensity * bandwidth)

    colour = STYLES[OURS][1]
    points: list[tuple[results.Row, float, float]] = []
    others: dict[str, None] = {}
    for row, x in zip(rows, intensities, strict=True):
        y = row["flops"] / (results.value(row, OURS) or 1) / 1e6
        points.append((row, x, y))
        best = min(results.others(row, PADDED), key=lambda item: item[1], default=None)
        if best is not None:
            others[best[0]] = None
            other, other_colour = row["flops"] / best[1] / 1e6, STYLES[best[0]][1]
            axes.plot([x, x], [y, other], color=other_colour, linewidth=0.8, zorder=2)
            axes.plot([x], [other], ".", color=other_colour, markersize=4.5, zorder=2)
        axes.plot(
            [x],
            [y],
            COMMAND_MARKERS[row["command"]],
            color=colour,
            markerfacecolor=colour if row["pass"] == "forward" else "white",
            markersize=4.5,
            markeredgewidth=0.9,
            zorder=3,
        )
    axes.set_xlim(low, high)
    axes.set_ylim(min(y for _, _, y in points) / 2.5, 45 * peak)
    decades = [10.0**power for power in range(-3, 5)]
    axes.set_yticks([y for y in decades if axes.get_ylim()[0] < y <= 1.3 * peak])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("useful FLOP / byte that must move", fontsize=FONT, color=GREY)
    axes.set_ylabel("TFLOP/s", fontsize=FONT, color=GREY, labelpad=2)
    _label_roofs(axes, low, bandwidth, knee, peak)
    _label_points(axes, points, roof)
    for command, marker in COMMAND_MARKERS.items():
        axes.plot([], [], marker, color=colour, markersize=4.5, label=COMMAND_TITLES[command])
    for name in others:
        label, other_colour = STYLES[name]
        axes.plot([], [], ".-", color=other_colour, markersize=4.5, linewidth=0.8, label=label)
    axes.legend(
        loc="lower right",
        fontsize=SMALL_FONT,
        frameon=False,
        labelcolor=GREY,
        ncols=2,
        columnspacing=1.5,
        borderpad=0,
    )
    _title(
        axes,
        "Roofline, bf16",
        "filled: forward; hollow: backward, of target attention both;"
        " thin lines: to the fastest other",
    )


def _label_roofs(axes: Any, low: float, bandwidth: float, knee: float, peak: float) -> None:
    begin, end = (axes.transData.transform((x, x * bandwidth)) for x in (low, knee))
    angle = math.degrees(math.atan2(end[1] - begin[1], end[0] - begin[0]))
    options = {"textcoords": "offset points", "fontsize": SMALL_FONT, "color": GREY}
    text, along = f"copy, {bandwidth:.2f} TB/s", 4 * low
    tilted = {"rotation": angle, "rotation_mode": "anchor", "va": "top"}
    axes.annotate(text, (along, along * bandwidth), (6, 0), **tilted, **options)
    text = f"8192³ product, {peak:.0f} TFLOP/s"
    place = (axes.get_xlim()[1], peak)
    axes.annotate(text, place, (4, 0), va="center", annotation_clip=False, **options)


def _label_points(
    axes: Any,
    points: Sequence[tuple[results.Row, float, float]],
    roof: Callable[[float], float],
) -> None:
    """Name each case once, above the roof, with a line down to its forward pass."""
    colour = STYLES[OURS][1]
    forward = [point for point in points if point[0]["pass"] == "forward"]
    to_pixels = axes.transData.transform
    pixels = axes.figure.dpi / 72
    wanted = [to_pixels((x, y))[0] / pixels for _, x, y in forward]
    for (row, x, y), at, place in zip(
        forward, wanted, spread(wanted, 1.5 * SMALL_FONT), strict=True
    ):
        above = axes.transData.inverted().transform((place * pixels, 0))[0]
        height = to_pixels((x, roof(above)))[1] / pixels + 12
        axes.annotate(
            row["case"],
            (x, y),
            (place - at, height - to_pixels((x, y))[1] / pixels),
            textcoords="offset points",
            fontsize=SMALL_FONT,
            color=colour,
            rotation=50,
            rotation_mode="anchor",
            va="bottom",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.5,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0),
            },
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
    "time": _draw_time,
    "memory": _draw_memory,
    "fill": _draw_fill,
    "operators": _draw_operators,
    "roofline": _draw_roofline,
}
