"""The output of a run: where it ran, a JSON file, and tables to read."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import jagged_cuda
from benchmarks import peers
from benchmarks.session import HINTED, MATMUL_SIZE, MATMULS, OURS, Row, Session
from benchmarks.timing import Timer
from jagged_cuda import _load

SCHEMA = 2  # of the JSON file
SOURCES = ("csrc", "jagged_cuda")  # the folders of what is measured
SUFFIXES = (".py", ".cpp", ".cu", ".h", ".cuh", ".inl")
ROOT = Path(__file__).resolve().parents[1]

TITLES = {
    "table1": "Table 1 of the paper",
    "attention": "Self-attention",
    "figure2": "Figure 2 of the paper: forward and backward together",
    "target": "Target attention: items against histories",
    "unseen": "Self-attention on shapes that nobody tuned for",
    "mixed": "Self-attention on a batch of all kinds of sequences, and on its parts",
    "rows": "Moving rows",
    "norm": "A normed row times another one, with dropout",
    "hstu": "Attention of rankers: masks of HSTU, SiLU, biases",
    "sweep": "By the fill of the padded batch: forward and backward together",
    "grid": "Table 1's operators away from its shape: within the bar and 15 %",
    "host": "Host time of an eager call",
    "modules": "Modules beside the operators that they are made of",
}


# --- where it ran


def git(repository: Path, *arguments: str) -> bytes:
    """The output of a git command.

    Raises:
        ValueError: it fails, or there is none.
    """
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        text = f"git {arguments[0]} {arguments[-1]}: {said.decode().strip()}"
        raise ValueError(text) from error


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def source_hash(root: Path) -> str:
    """A hash of the sources in a checkout, wherever it lies."""
    digest = hashlib.sha256()
    files = (path for folder in SOURCES for path in (root / folder).rglob("*"))
    sources = {path.relative_to(root).as_posix(): path for path in files if path.suffix in SUFFIXES}
    for name in sorted(sources):
        content = sources[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:20]


def environment(timer: Timer) -> dict[str, Any]:
    """The machine, the releases and the sources."""
    device = timer.device
    commit, changed = None, None
    if (ROOT / ".git").exists():
        with contextlib.suppress(ValueError):
            commit = git(ROOT, "rev-parse", "HEAD").decode().strip()
            changed = bool(git(ROOT, "status", "--porcelain", "--untracked-files=no"))
    driver = _load.find_driver()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "max_sm_mhz": timer.max_sm_mhz,
        "driver": driver.version if driver else None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "triton": triton_version,
        "peers": peers.versions(),
        "version": jagged_cuda.__version__,
        "commit": commit,
        "changed_since_commit": changed,
        "sources": source_hash(ROOT),
    }


# --- JSON


def as_json(session: Session, arguments: Sequence[str], where: dict[str, Any]) -> dict[str, Any]:
    command = shlex.join(["python", "-m", "benchmarks", *map(_without_folder, arguments)])
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": where,
        "seconds": round(session.seconds, 1),
        **session.sections,
        "notes": session.all_notes(),
        "rows": [row.as_json() for row in session.rows],
    }


def _without_folder(argument: str) -> str:
    """An argument without the absolute folder it names, which says nothing on other machines."""
    return re.sub(r"^(-[^=]*=)?/(?:.*/)?(?=[^/])", r"\1", argument)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole, so that a run that is killed leaves its last state.

    Each row and each note has a line of its own, so that two runs can be compared line by line.
    """
    parts = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
        parts.append(f"{json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    part.replace(path)


# --- tables


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _align(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """The cells in columns, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _goal(value: float | None, goal: float | None) -> str:
    if value is None or goal is None:
        return _number(goal)
    return f"{_number(goal)} {'met' if value <= goal else 'missed'}"


def _time(row: Row, name: str) -> str:
    """A time, or those of several rounds; and for a peer how many times ours it is."""
    entry, ours = row.results.get(name, {}), row.median_us(OURS)
    value = row.median_us(name)
    if value is None:
        return next((word for word in ("absent", "wrong", "error") if word in entry), "-")
    text = "/".join(_number(median) for median in entry.get("medians_us", [value]))
    return f"{text} ({value / ours:.2f}x)" if ours and name not in (OURS, HINTED) else text


def _peak(row: Row, name: str) -> float | None:
    return row.results.get(name, {}).get("peak_mib")


def _ours_over_floor(row: Row) -> str:
    ours = row.median_us(OURS)
    return f"{ours / row.floor_us:.2f}" if ours and row.floor_us else "-"


def _rate(row: Row) -> str:
    ours = row.median_us(OURS)
    return _number(row.flops / ours / 1e6) if ours and row.flops else "-"


def _clock(row: Row) -> str:
    return f"{row.sm_mhz or '-'}{'*' if row.below_max_clock else ''}"


def _rows_table(rows: Sequence[Row]) -> list[str]:
    """Columns that no row has anything for are left out."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("floor", lambda row: _number(row.floor_us)),
        ("bar", lambda row: _goal(row.median_us(OURS), row.bar_us)),
        ("copy", lambda row: _number(row.copy_us)),
    ]
    names = list(dict.fromkeys(name for row in rows for name in row.results))
    for name in names:
        columns.append((name, lambda row, name=name: _time(row, name)))
        if name == OURS:
            columns += [("/ floor", _ours_over_floor), ("TFLOP/s", _rate)]
    columns.append(("goal", lambda row: _goal(row.median_us(OURS), row.goal_us())))
    for name in names:
        columns.append((f"{name} MiB", lambda row, name=name: _number(_peak(row, name))))
    columns.append(("goal MiB", lambda row: _goal(_peak(row, OURS), row.goal_mib)))
    columns.append(("MHz", _clock))
    lines = [["case", "pass", "precision"], *([r.case, r.pass_name, r.precision] for r in rows)]
    for title, cell in columns:
        cells = [cell(row) for row in rows]
        if any(text != "-" for text in cells):
            for line, text in zip(lines, [title, *cells], strict=True):
                line.append(text)
    return _align(lines, 3)


def _build_table(found: dict[str, Any]) -> list[str]:
    goals = found["goals"]
    lines = [["", "measured", "goal"]]
    labels = {
        "cold_build_s": f"cold build on {found['cores']} cores, s",
        "warm_import_s": "warm import beyond torch's, s",
    }
    for name, label in labels.items():
        if name in found:
            lines.append([label, f"{found[name]:.3g}", str(goals[name])])
    for name, library in found.get("libraries", {}).items():
        archs = ";".join(library["archs"])
        label = f"{name} {archs}".strip() + f" ({library['origin']}), MB"
        lines.append([label, f"{library['bytes'] / 1e6:.2f}", str(goals["library_mbytes"])])
    return _align(lines, 1)


def tables(session: Session, where: dict[str, Any]) -> str:
    """Tables of everything that was measured."""
    machine = f"{where['gpu']}, driver {where['driver']}" if where["gpu"] else where["cpu"]
    sources = (where["commit"] or where["version"])[:12]
    if where["changed_since_commit"]:
        sources += " and changes"
    lines = [f"{machine}; torch {where['torch']}, triton {where['triton']}; jagged_cuda {sources}"]
    calibration = session.sections.get("calibration")
    if calibration is not None:
        text = f"copy {calibration['copy_tbytes_per_s']:.3f} TB/s (reads and writes)"
        if "empty_kernel_us" in calibration:
            text += f", empty kernel {calibration['empty_kernel_us']['median_us']:.1f} us"
        for name in MATMULS:
            if f"{name}_matmul_tflops" in calibration:
                rate = calibration[f"{name}_matmul_tflops"]
                text += f", {MATMUL_SIZE}^3 {name} product {rate:.0f} TFLOP/s"
        lines.append(text)
    for command, title in TITLES.items():
        rows = [row for row in session.rows if row.command == command]
        if rows:
            unit = "median microseconds"
            if command != "host":
                unit += "; (x): a peer's time over ours; *: below the GPU's highest clock"
            lines += ["", f"{title}; {unit}", *_rows_table(rows)]
    if "build" in session.sections:
        lines += ["", "Build and import", *_build_table(session.sections["build"])]
    lines += ["", *(f"note: {note}" for note in session.all_notes())]
    return "\n".join(lines)
