"""Write into a results file which commit it measured: the one whose sources have its hash.

A machine with a GPU may have the sources without their history.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, results


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks stamp",
        description="Write the commit into a results file if its sources have the file's hash.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--commit", default="HEAD", help="default: %(default)s")
    parsed = parser.parse_args(arguments)
    try:
        content = results.load(parsed.results)
        commit = stamp(content, report.ROOT, parsed.commit)
    except (OSError, ValueError) as error:
        print(f"stamp: {error}", file=sys.stderr)
        return 1
    report.write_json(parsed.results, content)
    print(f"{parsed.results}: {commit}")
    return 0


def stamp(content: dict[str, Any], repository: Path, revision: str) -> str:
    """Set the commit of a results file's environment, and return it.

    Raises:
        ValueError: the commit's sources are others, or there is no such commit.
    """
    commit = (
        report.git(repository, "rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    )
    where, found = content["environment"], hash_of(repository, commit)
    if where.get("sources") != found:
        measured = where.get("sources")
        raise ValueError(f"sources of {commit[:12]} are {found}, those measured are {measured}")
    where["commit"], where["changed_since_commit"] = commit, False
    return commit


def hash_of(repository: Path, commit: str) -> str:
    """The hash that report.environment gives for the sources of a commit."""
    archive = report.git(repository, "archive", commit, *report.SOURCES)
    with tempfile.TemporaryDirectory(prefix="jagged_cuda_stamp_") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            if hasattr(tarfile, "data_filter"):  # not in early releases of Python 3.10 and 3.11
                files.extraction_filter = staticmethod(tarfile.data_filter)
            files.extractall(folder)
        return report.source_hash(Path(folder))
