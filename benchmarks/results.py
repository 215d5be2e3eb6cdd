"""Reads a results file; names and colours of implementations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.session import HINTED, OURS, UNFUSED

# One colour per implementation in every figure; colour-blind people can tell them apart too.
STYLES = {
    OURS: ("jagged_cuda", "#d1441b"),
    UNFUSED: ("jagged_cuda, unfused", "#eb9b72"),
    "dense": ("padded, unfused", "#3c3c3c"),
    "padded": ("padded PyTorch", "#3c3c3c"),
    "sdpa": ("padded FlashAttention-2", "#8c8c8c"),
    "varlen": ("FlashAttention-2", "#1668b4"),
    "fa3": ("FlashAttention-3", "#0f9fd6"),
    "cudnn_frontend": ("cuDNN", "#7d4fa8"),
    "flex": ("FlexAttention", "#a8832b"),
    "indexing": ("PyTorch indexing", "#3c3c3c"),
    "sll": ("FBGEMM sll", "#2f8f5b"),
}

Row = dict[str, Any]


def load(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or "rows" not in found:
        raise ValueError(f"{path} is no results file: it has no rows")
    return found


def digest(content: dict[str, Any]) -> str:
    """A hash that a figure carries: it tells which results the figure was made from."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def rows_of(content: dict[str, Any], command: str, precision: str | None = None) -> list[Row]:
    return [
        row
        for row in content["rows"]
        if row["command"] == command and precision in (None, row["precision"])
    ]


def label(content: dict[str, Any], name: str) -> str:
    """An implementation's name in figures and tables."""
    if name == "sdpa" and content["environment"]["device"] == "cpu":
        return "padded SDPA"  # without a GPU it is no FlashAttention
    return STYLES[name][0]


def value(row: Row, name: str, key: str = "median_us") -> float | None:
    """The value measured for an implementation; None where there is none."""
    return row["results"].get(name, {}).get(key)


def others(row: Row, padded: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Implementations that are neither ours nor padded, and their times."""
    for name in row["results"]:
        time = value(row, name)
        if time is not None and name not in (OURS, HINTED, UNFUSED, *padded):
            yield name, time


def machine(content: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    where = content["environment"]
    commit = where["commit"]
    parts = [where["gpu"] or where["cpu"], f"torch {where['torch']}"]
    parts.append(f"jagged_cuda {commit[:12] if commit else where['version']}")
    return ", ".join(parts)
