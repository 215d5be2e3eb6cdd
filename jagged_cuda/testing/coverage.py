"""What a run of the fuzzer has covered, and what it has never reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jagged_cuda.testing._kernels import kernel_paths
from jagged_cuda.testing.cases import DTYPES, EVERY
from jagged_cuda.testing.draws import ENVIRONMENT, Drawn, Wanted, dtypes_of
from jagged_cuda.testing.lengths import DISTRIBUTIONS, TILES
from jagged_cuda.testing.samples import STORAGES

# Names of the sections, in the report's order.
SECTIONS = (
    "operators",
    "dtypes",
    "sizes",
    "lengths",
    "rows of a sequence",
    "features",
    "storage",
    "offsets",
    "settings",
    "kernel paths",
    "options",
)
_EDGES = [n for tile in TILES for n in (tile - 1, tile, tile + 1)]


class Coverage:
    """Counts of what draws contained, by section and item."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, drawn: Drawn, paths: Sequence[str]) -> None:
        draw, spec = drawn.draw, drawn.draw.spec
        found = [
            ("operators", f"{draw.backend}: {draw.op}"),
            ("dtypes", draw.dtype),
            ("sizes", drawn.size),
            ("lengths", drawn.distribution),
            ("offsets", str(spec.offsets_dtype).removeprefix("torch.")),
            *(("kernel paths", path) for path in set(paths)),
            *(("options", _option(draw.op, n, value)) for n, value in spec.choices.items()),
            *(("rows of a sequence", row) for row in _rows(spec.layout.lengths)),
            *(("storage", storage) for storage in set(spec.storage.values())),
            *(("settings", f"{n}={value}") for n, value in draw.environment.items()),
        ]
        places = {"rows before": spec.layout.base, "rows after": spec.layout.tail}
        places |= {"no sequence": not spec.layout.lengths, "NaN outside": spec.poisoned}
        found += [("offsets", name) for name, holds in places.items() if holds]
        settings = {
            "deterministic": draw.deterministic,
            "TF32": draw.tf32,
            "threads": draw.threads > 1,
            "forward only": not draw.backward,
            "gradient of one output": draw.outputs,
            "strided gradient": draw.gradient_storage,
        }
        found += [("settings", name) for name, holds in settings.items() if holds]
        vector = 16 // DTYPES[draw.dtype].itemsize
        for shape in draw.case.shapes(spec).values():
            elems = math.prod(shape[1:])
            found.append(("features", "whole vectors" if elems % vector == 0 else "with a tail"))
        self.counts.update(found)

    def section(self, name: str) -> dict[str, int]:
        return {item: n for (section, item), n in self.counts.items() if section == name}


def expected(wanted: Wanted, backends: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """What could be reached, by section and item, for backends and their devices."""
    places = list(backends)
    served = {dtype for place in places for dtype in dtypes_of(*place)}
    devices = [backend for backend, _ in places if backend != "triton"]
    sizes = ("file",) if wanted.lengths is not None else tuple(DISTRIBUTIONS)
    items = [("operators", f"{backend}: {op}") for backend, _ in places for op in wanted.ops]
    items += [("dtypes", dtype) for dtype in DTYPES if dtype in served and dtype in wanted.dtypes]
    items += [("lengths", name) for name in sizes]
    items += [("rows of a sequence", row) for row in ("0", "1", *map(str, _EDGES), "longer")]
    items += [("features", name) for name in ("whole vectors", "with a tail")]
    items += [("storage", name) for name in STORAGES]
    items += [("offsets", name) for name in ("int32", "int64", "rows before", "rows after")]
    items += [("offsets", name) for name in ("no sequence", "NaN outside")]
    items += [
        ("settings", f"{name}={value}")
        for backend in devices
        for name, values in ENVIRONMENT[backend].items()
        for value in values
    ]
    items += [("kernel paths", path) for name in devices for path in sorted(kernel_paths(name))]
    items += [
        ("options", _option(op, name, value))
        for op in wanted.ops
        for name, candidates in EVERY[op].choices.items()
        for value in dict.fromkeys(candidates)
    ]
    return items


def report(coverage: Coverage, items: Sequence[tuple[str, str]]) -> str:
    """One line per section, and which of `items` were never reached."""
    lines = []
    for section in SECTIONS:
        counts = coverage.section(section)
        known = [item for name, item in items if name == section]
        if section == "options":
            reached = sum(item in counts for item in known)
            lines.append(f"  {section:<18}  {reached} of {len(known)} listed values drawn")
            continue
        order = [item for item in known if item in counts]
        order += sorted(item for item in counts if item not in known)
        text = ", ".join(f"{item} {counts[item]:,}" for item in order) or "none"
        lines.append(f"  {section:<18}  {text}")
    missed = [item for item in items if item not in coverage.counts]
    lines.append("")
    if not missed:
        return "\n".join((*lines, "  never reached       nothing"))
    lines.append(f"  never reached       {len(missed)} of {len(items)}")
    for section in SECTIONS:
        absent = [item for name, item in missed if name == section]
        if absent:
            lines.append(f"    {section}: {', '.join(absent)}")
    return "\n".join(lines)


def _rows(lengths: Sequence[int]) -> set[str]:
    named = {0, 1, *_EDGES}
    rows = {str(n) for n in lengths if n in named}
    return rows | ({"longer"} if lengths and max(lengths) > max(_EDGES) else set())


def _option(op: str, name: str, value: Any) -> str:
    return f"{op} {name}={value}"
