"""Runs of the benchmark command with tiny shapes, and rows of its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import __main__ as command_line
from benchmarks.session import Row


def run(tmp_path: Path, *arguments: str, status: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Run the command with tiny shapes; return its JSON."""
    out = tmp_path / "results" / "run.json"
    common = ("--device", device, "--quick", "--repetitions", "1", "--out", str(out))
    ended = command_line.main([*arguments, *common])
    assert ended == status, f"status {ended}"
    return json.loads(out.read_text())


def rows_of(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row["results"][name] for row in found["rows"] if name in row["results"]]


def row_of(**more: Any) -> Row:
    return Row("attention", "short", "forward", "bf16", {}, 0, **more)
