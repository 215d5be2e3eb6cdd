"""What a run leaves behind: where it ran, a JSON file, and tables for people."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import jagged_cuda
from benchmarks import peers
from benchmarks.session import HINTED, OURS, Row, Session
from jagged_cuda import _build, _load

SCHEMA = 1  # of the JSON file
ROOT = Path(__file__).resolve().parents[1]

TITLES = {
    "table1": "Table 1 of the paper",
    "attention": "Self-attention",
    "figure2": "Figure 2 of the paper: forward and backward together",
    "target": "Target attention: items against histories",
    "sweep": "By the fill of the padded batch: forward and backward together",
    "host": "Host time of an eager call",
}


# --- where it ran


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def package_hash(package: Path) -> str:
    """Of the Python files of the package, wherever it lies."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda path: path.relative_to(package).parts):
        content = path.read_bytes()
        name = path.relative_to(package).as_posix()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:20]


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, the releases and the sources."""
    commit, changed = None, None
    if (ROOT / ".git").exists():
        commit = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    driver = _load.find_driver()
    csrc = _load.find_csrc()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
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
        "sources": _build.source_hash(csrc) if csrc is not None else None,
        "package": package_hash(Path(jagged_cuda.__file__).parent),
    }


# --- JSON


def as_json(session: Session, arguments: Sequence[str], where: dict[str, Any]) -> dict[str, Any]:
    command = shlex.join(["python", "-m", "benchmarks", *_without_outputs(arguments)])
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": where,
        "seconds": round(session.seconds, 1),
        **session.sections,
        "notes": session.notes,
        "rows": [row.as_json() for row in session.rows],
    }


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """The arguments less where results went, which is no part of what was measured."""
    kept, skip = [], False
    for argument in arguments:
        is_output = argument.split("=", 1)[0] in ("--out", "--plot")
        if not is_output and not skip:
            kept.append(argument)
        skip = is_output and "=" not in argument
    return kept


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole, so that a run that is killed leaves its last state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
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
    if goal is None:
        return "-"
    if value is None:
        return _number(goal)
    return f"{_number(goal)} {'met' if value <= goal else 'missed'}"


def _failure(entry: dict[str, Any]) -> str:
    return next((word for word in ("absent", "wrong", "error") if word in entry), "-")


def _time(row: Row, name: str) -> str:
    """A time, and for a peer how many times ours it is."""
    value, ours = row.median_us(name), row.median_us(OURS)
    if value is None:
        return _failure(row.results.get(name, {}))
    text = _number(value)
    if name not in (OURS, HINTED) and ours:
        text += f" ({value / ours:.2f}x)"
    return text


def _memory(row: Row, name: str) -> str:
    return _number(row.results.get(name, {}).get("peak_mib"))


def _rows_table(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.results))
    has_bytes = any(row.bytes for row in rows)
    has_rates = rows[0].command in ("attention", "figure2", "target")
    results = [result for row in rows for result in row.results.values()]
    has_memory = any(result.get("peak_mib") is not None for result in results)
    header = ["case", "pass", "precision"]
    if has_bytes:
        header += ["floor", "copy"]
    for name in names:
        header.append(name)
        if name == OURS:
            header += ["/ copy"] * has_bytes + ["TFLOP/s"] * has_rates
    header.append("goal")
    if has_memory:
        header += [f"{name} MiB" for name in names] + ["goal MiB"]
    lines = [header]
    for row in rows:
        ours = row.median_us(OURS)
        line = [row.case, row.pass_name, row.precision]
        if has_bytes:
            line += [_number(row.floor_us), _number(row.copy_us)]
        for name in names:
            line.append(_time(row, name))
            if name == OURS:
                if has_bytes:
                    line.append(f"{ours / row.copy_us:.2f}" if ours and row.copy_us else "-")
                if has_rates:
                    line.append(_number(row.results.get(OURS, {}).get("tflops")))
        line.append(_goal(ours, row.goal_us))
        if has_memory:
            line += [_memory(row, name) for name in names]
            line.append(_goal(row.results.get(OURS, {}).get("peak_mib"), row.goal_mib))
        lines.append(line)
    return _align(lines, 3)


def _build_table(found: dict[str, Any]) -> list[str]:
    goals = found["goals"]
    lines = [["", "measured", "goal"]]
    if "cold_build_s" in found:
        label = f"cold build on {found['cores']} cores, s"
        lines.append([label, _number(found["cold_build_s"]), str(goals["cold_build_s"])])
    if "warm_import_s" in found:
        label = "warm import beyond torch's, s"
        lines.append([label, f"{found['warm_import_s']:.3f}", str(goals["warm_import_s"])])
    for name, library in found.get("libraries", {}).items():
        archs = ";".join(library["archs"])
        label = f"{name} {archs}".strip() + f" ({library['origin']}), MB"
        size = library["bytes"] / 1e6
        lines.append([label, f"{size:.2f}", str(goals["library_mbytes"])])
    return _align(lines, 1)


def tables(session: Session, where: dict[str, Any]) -> str:
    """Everything that was measured, for people."""
    machine = f"{where['gpu']}, driver {where['driver']}" if where["gpu"] else where["cpu"]
    sources = (where["commit"] or where["version"])[:12]
    if where["changed_since_commit"]:
        sources += " and changes"
    lines = [f"{machine}; torch {where['torch']}, triton {where['triton']}; jagged_cuda {sources}"]
    calibration = session.sections.get("calibration")
    if calibration is not None:
        text = f"copy {calibration['copy_tbytes_per_s']:.3f} TB/s (reads and writes)"
        text += f", one-element kernel {calibration['one_element_us']['median_us']:.1f} us"
        if "bf16_matmul_tflops" in calibration:
            text += f", 8192^3 bf16 product {calibration['bf16_matmul_tflops']:.0f} TFLOP/s"
        lines.append(text)
    for command, title in TITLES.items():
        rows = [row for row in session.rows if row.command == command]
        if rows:
            unit = "median microseconds"
            if command != "host":
                unit += "; (x): a peer's time over ours"
            lines += ["", f"{title}; {unit}", *_rows_table(rows)]
    if "build" in session.sections:
        lines += ["", "Build and import", *_build_table(session.sections["build"])]
    if session.notes:
        lines += ["", *(f"note: {note}" for note in session.notes)]
    return "\n".join(lines)


def print_tables(session: Session, where: dict[str, Any]) -> None:
    print(tables(session, where), file=sys.stdout, flush=True)
