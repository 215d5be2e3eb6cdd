"""README's tables, made from a results file, in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Row
from benchmarks.session import OURS, UNFUSED

# The parts of README, each between two markers.
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
        help=f"rewrite the text after {_begin(PARTS[0])}",
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
        raise ValueError(f"{end} must come after {begin}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


# --- the lines


@dataclass(frozen=True)
class _Group:
    """Rows of one command: their title, what each is called, and their padded peer."""

    summary: str
    title: str
    name: str
    padded: str
    second_pass: str = "backward"


# Filled in from a row's case and shape.
GROUPS = {
    "attention": _Group(
        "self-attention",
        "self-attention over histories",
        "{histories}; {H} heads of {D}{causal}",
        "sdpa",
    ),
    "target": _Group(
        "target attention",
        "target attention (forward / forward + backward)",
        "{N} item{s} per history, {histories}; {D} features",
        "sdpa",
        "forward+backward",
    ),
    "table1": _Group(
        "Table 1",
        "Table 1 of the paper: {histories}; {D} features, {N} columns",
        "`{operator}`{over_rows}",
        "padded",
    ),
}


def _fill(text: str, row: Row) -> str:
    shape = row["shape"]
    count, total, longest = shape["B"], shape["T"], shape["max_len"]
    histories = f"{count:,} of {total / count:,.0f} on average, {longest:,} at most"
    operator, over_rows, _ = row["case"].partition("_rows")
    words = {
        "histories": f"{count:,} of {longest:,}" if total == count * longest else histories,
        "causal": ", causal" if shape.get("causal") else "",
        "s": "" if shape.get("N") == 1 else "s",
        "operator": operator,
        "over_rows": ", over rows" if over_rows else "",
    }
    return text.format(**shape | words)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _pairs(content: dict[str, Any], command: str) -> list[list[Row]]:
    """The rows of each case's two passes."""
    rows = results.rows_of(content, command, PRECISION)
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["pass"]] = row
    passes = ("forward", GROUPS[command].second_pass)
    return [[of[name] for name in passes] for of in cases.values() if of.keys() >= set(passes)]


def _cells(content: dict[str, Any], pair: Sequence[Row], padded: str) -> list[str]:
    """Ours, padded and best other, for both passes; the fastest of a pass is bold."""
    best = [
        min(results.others(row, (padded,)), key=lambda item: item[1], default=("", None))
        for row in pair
    ]
    columns = [
        [results.value(row, OURS) for row in pair],
        [results.value(row, padded) for row in pair],
        [time for _, time in best],
    ]
    fastest = [min((t for t in times if t), default=None) for times in zip(*columns, strict=True)]
    cells = []
    for times in columns:
        texts = [
            ABSENT if time is None else f"**{_number(time)}**" if time == least else _number(time)
            for time, least in zip(times, fastest, strict=True)
        ]
        cells.append(" / ".join(texts) if any(times) else ABSENT)
    names = dict.fromkeys(results.label(content, name) for name, _ in best if name)
    if names:
        cells[-1] += f" ({' / '.join(names)})"
    return cells


def _table(content: dict[str, Any]) -> Iterator[str]:
    yield "| microseconds, forward / backward | jagged_cuda | padded PyTorch | best other |"
    yield "| --- | --- | --- | --- |"
    reasons: dict[str, None] = {}  # why padded implementations are left out
    for command, group in GROUPS.items():
        pairs = _pairs(content, command)
        if pairs:
            yield f"| *{_fill(group.title, pairs[0][0])}* | | | |"
        for pair in pairs:
            cells = [_fill(group.name, pair[0]), *_cells(content, pair, group.padded)]
            yield f"| {' | '.join(cells)} |"
            for row in pair:
                if reason := row["results"].get(group.padded, {}).get("absent"):
                    reasons[reason.partition(": ")[2] or reason] = None
    yield from (f"\n`{ABSENT}`: {reason}." for reason in reasons)


def _summary(content: dict[str, Any]) -> Iterator[str]:
    """For each implementation and group, the range of its time over ours."""
    columns: list[str] = []
    ranges: dict[str, dict[str, list[float]]] = {}
    for command, group in GROUPS.items():
        rows = [row for pair in _pairs(content, command) for row in pair]
        columns += [group.summary] if rows else []
        for row in rows:
            ours, padded = results.value(row, OURS), results.value(row, group.padded)
            found = list(results.others(row, (group.padded,)))
            for name, time in [*found, ("padded", padded)] if padded else found:
                if ours:
                    by_group = ranges.setdefault(results.label(content, name), {})
                    by_group.setdefault(group.summary, []).append(time / ours)
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


def _unfused(content: dict[str, Any]) -> str | None:
    """How fast the paper's unfused form is, at each longest length of Figure 2."""
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
    """The summary with how it was measured, and the table of every figure."""
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
    slow = [row for row in content["rows"] if row.get("below_max_clock")]
    if slow:
        rows = f"{len(slow)} of {len(content['rows'])} rows"
        summary += ["", f"The SM clock was below its maximum in {rows}."]
    speed = [
        "In bold the fastest of a pass:",
        "",
        *_table(content),
    ]
    return dict(zip(PARTS, ("\n".join(summary), "\n".join(speed)), strict=True))
