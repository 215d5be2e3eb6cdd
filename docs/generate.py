"""The site's pages that are made from the package and from the measured results."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jagged_cuda
from benchmarks import report, results, table
from benchmarks.session import HINTED, OURS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LINK = "../benchmarks/results"  # from docs/benchmarks.md
# What the pictures show, by the end of their names.
PICTURES = {
    "h200": "Time and memory of attention over the longest sequence",
    "h200_roofline": "A roofline: each kernel's rate over its arithmetic intensity",
    "h200_sweep": "Time over the fill of the padded batch: attention, and the operators of the"
    " paper's Table 1",
}
# What judges the operators is described in testing.md; it is no interface to build on.
NOT_LISTED = {"testing"}


def public_modules() -> Iterator[ModuleType]:
    """The package, then each module of it that has public names of its own, in order of name."""
    yield jagged_cuda
    for found in pkgutil.iter_modules(jagged_cuda.__path__):
        if found.name.startswith("_") or found.name in NOT_LISTED:
            continue
        module = importlib.import_module(f"jagged_cuda.{found.name}")
        if set(getattr(module, "__all__", ())) - set(jagged_cuda.__all__):
            yield module


def public_objects(module: ModuleType) -> dict[str, Callable[..., object]]:
    """The functions and classes that a module names in `__all__`, in order of name."""
    found = {name: getattr(module, name) for name in sorted(module.__all__)}
    return {name: value for name, value in found.items() if callable(value)}


def write_pages(folder: Path) -> None:
    """Write all pages into the folder, which git ignores; files that have not changed stay."""
    pages = {f"reference/{m.__name__}.rst": reference(m) for m in public_modules()}
    pages["benchmarks.md"] = benchmarks()
    pages |= {f"figures_{path.stem}.md": every_figure(path) for path in results_files()}
    for path in folder.rglob("*.*"):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# --- reference


def reference(module: ModuleType) -> str:
    """A module's page: a list of its names, then the docstring of each."""
    objects = public_objects(module)
    name = module.__name__
    lines = [name, "=" * len(name), "", (module.__doc__ or "").strip(), ""]
    lines += [f".. currentmodule:: {name}", "", ".. autosummary::", "   :nosignatures:", ""]
    lines += [f"   {name}" for name in objects]
    for name, value in objects.items():
        lines += ["", name, "-" * len(name), ""]
        if isinstance(value, type):
            lines += [f".. autoclass:: {name}", "   :members:"]
        else:
            lines += [f".. autofunction:: {name}"]
    return "\n".join(lines) + "\n"


# --- benchmarks


def results_files() -> list[Path]:
    return sorted(RESULTS.glob("*.json"))


def benchmarks() -> str:
    """Pictures and tables of the committed results, which docs/benchmarks.md includes."""
    lines = []
    for path in results_files():
        content = results.load(path)
        lines += [f"## {results.machine(content)}", ""]
        for picture in sorted(RESULTS.glob(f"{path.stem}*.png")):
            shown = PICTURES.get(picture.stem, picture.stem)
            lines += [f"![{shown}]({LINK}/{picture.name})"]
        if results.rows_of(content, "attention"):
            summary, speed = table.markdown(content).values()
            lines += ["", summary, "", speed]
        every = f"[Every figure](generated/figures_{path.stem}.md) of this run."
        lines += ["", every, ""]
    return "\n".join(lines)


def every_figure(path: Path) -> str:
    """A page with all rows of a results file."""
    content = results.load(path)
    lines = ["---", "orphan: true", "---", "", f"# Every figure: {results.machine(content)}", ""]
    lines += [f"`{content['command']}`, {content['date'][:10]}. Medians in microseconds."]
    for command, title in report.TITLES.items():
        rows = results.rows_of(content, command)
        if not rows:
            continue
        names = list(dict.fromkeys(name for row in rows for name in row["results"]))
        head = ["case", "precision", "pass", "floor", *(_label(content, name) for name in names)]
        lines += ["", f"## {title}", "", _line(head), _line(["---"] * len(head))]
        for row in rows:
            times = [row["floor_us"], *(results.value(row, name) for name in names)]
            cells = ["" if time is None else f"{time:,.1f}" for time in times]
            lines.append(_line([row["case"], row["precision"], row["pass"], *cells]))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _label(content: dict[str, Any], name: str) -> str:
    if name == HINTED:
        return f"{results.label(content, OURS)}, max_len"
    return results.label(content, name) if name in results.STYLES else name
