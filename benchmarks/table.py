"""README's tables of a results file, in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Row
from benchmarks.session import OURS, UNFUSED

# What README holds, between two markers each.
PARTS = ("summary", "speed")
PRECISION = "bf16"
ABSENT = "-"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks table",
        description="Print a results file as README's table, or put it into README.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE.md",
        help=f"rewrite what stands after {_begin(PARTS[0])}",
    )
    parsed = parser.parse_args(arguments)
    try:
        parts = markdown(results.load(parsed.results))
        if parsed.update is None:
            print("\n\n".join(parts.values()))
        else:
            document = parsed.update.read_text()
            for name, text in parts.items():
                document = updated(document, name, text)
            parsed.update.write_text(document)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _begin(name: str) -> str:
    return f"<!-- {name}: made by `make readme` of benchmarks/results -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"


def updated(document: str, name: str, text: str) -> str:
    """The document with this text between the markers of this part.

    Raises:
        ValueError: it does not have both, in order, once.
    """
    begin, end = _begin(name), _end(name)
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document must have one {begin} and one {end}")
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{end} must stand after {begin}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


# --- the lines


@dataclass(frozen=True)
class _Group:
    """Rows of one command: what they have in common, and what each is called."""

    command: str
    title: Callable[[Row], str]
    padded: str
    passes: tuple[str, str]
    name: Callable[[Row], str]
    summary: str


def _histories(shape: dict[str, Any]) -> str:
    count, total, longest = shape["B"], shape["T"], shape["max_len"]
    if total == count * longest:
        return f"{count:,} of {longest:,}"
    return f"{count:,} of {total / count:,.0f} on average, {longest:,} at most"


def _attention_name(row: Row) -> str:
    shape = row["shape"]
    causal = ", causal" if shape["causal"] else ""
    return f"{_histories(shape)}; {shape['H']} heads of {shape['D']}{causal}"


def _target_name(row: Row) -> str:
    shape = row["shape"]
    items = "1 item" if shape["N"] == 1 else f"{shape['N']} items"
    return f"{items} a history, {_histories(shape)}; {shape['D']} features"


def _table1_title(row: Row) -> str:
    shape = row["shape"]
    return f"Table 1 of the paper: {_histories(shape)}; {shape['D']} features, {shape['N']} columns"


def _table1_name(row: Row) -> str:
    name, over_rows, _ = row["case"].partition("_rows")
    return f"`{name}`{', over rows' if over_rows else ''}"


GROUPS = (
    _Group(
        command="attention",
        title=lambda row: "self-attention over histories",
        padded="sdpa",
        passes=("forward", "backward"),
        name=_attention_name,
        summary="self-attention",
    ),
    _Group(
        command="target",
        title=lambda row: "target attention (forward / forward + backward)",
        padded="sdpa",
        passes=("forward", "forward+backward"),
        name=_target_name,
        summary="target attention",
    ),
    _Group(
        command="table1",
        title=_table1_title,
        padded="padded",
        passes=("forward", "backward"),
        name=_table1_name,
        summary="Table 1",
    ),
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _pairs(content: dict[str, Any], group: _Group) -> Iterator[list[Row]]:
    """The rows of each case's two passes."""
    rows = results.rows_of(content, group.command, PRECISION)
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["pass"]: row for row in rows if row["case"] == case}
        if all(name in found for name in group.passes):
            yield [found[name] for name in group.passes]


def _best_other(row: Row, padded: str) -> tuple[str, float] | None:
    return min(results.others(row, (padded,)), key=lambda item: item[1], default=None)


def _cells(content: dict[str, Any], pair: Sequence[Row], padded: str) -> list[str]:
    """Ours, padded and best other, each of both passes; the fastest of a pass is bold."""
    best = [_best_other(row, padded) for row in pair]
    columns = [
        [results.value(row, OURS) for row in pair],
        [results.value(row, padded) for row in pair],
        [other[1] if other else None for other in best],
    ]
    fastest = [min((t for t in times if t), default=None) for times in zip(*columns, strict=True)]
    cells = []
    for times in columns:
        texts = [
            ABSENT if time is None else f"**{_number(time)}**" if time == least else _number(time)
            for time, least in zip(times, fastest, strict=True)
        ]
        cells.append(" / ".join(texts) if any(times) else ABSENT)
    names = dict.fromkeys(results.label(content, other[0]) for other in best if other)
    if names:
        cells[-1] += f" ({' / '.join(names)})"
    return cells


def _table(content: dict[str, Any]) -> Iterator[str]:
    yield "| microseconds, forward / backward | jagged_cuda | padded PyTorch | best other |"
    yield "| --- | --- | --- | --- |"
    for group in GROUPS:
        pairs = list(_pairs(content, group))
        if pairs:
            yield f"| *{group.title(pairs[0][0])}* | | | |"
        for pair in pairs:
            yield (
                " | ".join(["| " + group.name(pair[0]), *_cells(content, pair, group.padded)])
                + " |"
            )


def _summary(content: dict[str, Any]) -> Iterator[str]:
    """For each implementation and group, the range of its time over ours."""
    pairs = {group: list(_pairs(content, group)) for group in GROUPS}
    groups = [group for group in GROUPS if pairs[group]]
    ranges: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        for row in (row for pair in pairs[group] for row in pair):
            ours = results.value(row, OURS)
            padded = results.value(row, group.padded)
            found = list(results.others(row, (group.padded,)))
            if padded:
                found.append(("padded", padded))
            for name, time in found:
                if ours:
                    label = results.label(content, name)
                    ranges.setdefault(label, {}).setdefault(group.summary, []).append(time / ours)
    columns = [group.summary for group in groups]
    yield f"| | {' | '.join(columns)} |"
    yield "| --- |" + " --- |" * len(columns)
    for label, by_group in sorted(ranges.items(), key=lambda item: len(item[1]), reverse=True):
        cells = [_range(by_group[name]) if name in by_group else ABSENT for name in columns]
        yield f"| {label} | {' | '.join(cells)} |"


def _range(ratios: Sequence[float]) -> str:
    low, high = (
        f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in (min(ratios), max(ratios))
    )
    return low if low == high else f"{low} to {high}"


def _reasons(content: dict[str, Any]) -> list[str]:
    """Why padded implementations are left out."""
    found = [
        row["results"].get(group.padded, {}).get("absent")
        for group in GROUPS
        for pair in _pairs(content, group)
        for row in pair
    ]
    return list(dict.fromkeys(reason.partition(": ")[2] or reason for reason in found if reason))


def _unfused(content: dict[str, Any]) -> str | None:
    """What the paper's unfused form is worth, at each longest length of Figure 2."""
    found: dict[str, list[float]] = {"median_us": [], "peak_mib": []}
    lengths = []
    for row in results.rows_of(content, "figure2", PRECISION):
        for key, ratios in found.items():
            ours, dense = (results.value(row, name, key) for name in (UNFUSED, "dense"))
            if ours and dense:
                ratios.append(dense / ours)
                lengths.append(int(row["case"]))
    if not all(found.values()):
        return None
    times, sizes = (_range(ratios) for ratios in found.values())
    return (
        f"The paper's unfused form, three operators with the scores in memory, is {times} times as"
        f" fast as unfused attention on padded data, in {sizes} times less memory, at longest"
        f" lengths of {min(lengths):,} to {max(lengths):,}."
    )


def markdown(content: dict[str, Any]) -> dict[str, str]:
    """What was won and how it was measured; and every figure."""
    where = content["environment"]
    machine = f"{where['gpu'] or where['cpu']}, torch {where['torch'].partition('+')[0]}"
    unfused = _unfused(content)
    summary = [
        "The others' time over ours, from least to most over all cases; under 1 they are faster:",
        "",
        *_summary(content),
        "",
        *([unfused, ""] if unfused else []),
        f"One {machine}, {PRECISION}, medians with a cold cache, measured by",
        "",
        "```",
        content["command"],
        "```",
    ]
    speed = [
        "In bold the fastest of a pass:",
        "",
        *_table(content),
        *(f"\n`{ABSENT}`: {reason}." for reason in _reasons(content)),
    ]
    return dict(zip(PARTS, ("\n".join(summary), "\n".join(speed)), strict=True))
