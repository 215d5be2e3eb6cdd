"""The site's pages that are made from the package and from the measured results."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jagged_cuda
from benchmarks import results, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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


def benchmarks() -> str:
    """The tables of the committed results, which docs/benchmarks.md includes."""
    summary, speed = table.markdown(results.load(RESULTS / "h100.json")).values()
    return f"## In short\n\n{summary}\n\n## Times\n\n{speed}\n"
