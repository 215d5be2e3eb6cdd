"""Building and importing: a cold build, a warm import, the libraries' size.

Each import is a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.session import Command, Session

WARM_IMPORTS = 5
LIMIT_S = 900
GOAL_COLD_BUILD_S, GOAL_ON_FEW_CORES_S, MANY_CORES = 60, 300, 16
GOALS = {"warm_import_s": 0.1, "library_mbytes": 20}

_PROBE = """
import json, time
begin = time.perf_counter()
import torch
torch_s = time.perf_counter() - begin
begin = time.perf_counter()
import jagged_cuda
import_s = time.perf_counter() - begin
from jagged_cuda import _load
libraries = {
    name: {
        "origin": library.origin,
        "bytes": library.path.stat().st_size,
        "archs": [str(arch) for arch in library.archs],
    }
    for name, library in _load.loaded.items()
}
print(json.dumps({"torch_s": torch_s, "import_s": import_s, "libraries": libraries}))
"""


def _import_in_a_process(cache: str | None) -> dict[str, Any]:
    """Import jagged_cuda in a new process, its cache in this folder; progress goes to stderr."""
    environment = os.environ | ({} if cache is None else {"JAGGED_CUDA_CACHE": cache})
    result = subprocess.run(
        [sys.executable, "-c", _PROBE],
        cwd=Path(__file__).resolve().parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"a process that imports jagged_cuda ended with {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


def _run(session: Session) -> None:
    """With `quick` only the warm import, from the cache that this process used."""
    if not session.selected("build"):
        return
    cores = len(os.sched_getaffinity(0))
    cold_build_s = GOAL_COLD_BUILD_S if cores >= MANY_CORES else GOAL_ON_FEW_CORES_S
    found: dict[str, Any] = {"cores": cores, "goals": GOALS | {"cold_build_s": cold_build_s}}
    session.sections["build"] = found
    try:
        _measure(session, found)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        found["error"] = str(error)
        session.note(f"build: {error}")
        session.failed = True
    session.after_row()


def _measure(session: Session, found: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="jagged_cuda_bench_") as folder:
        cache = None
        imports = 1
        if not session.options.quick:
            cache, imports = folder, WARM_IMPORTS
            session.progress("build: a cold build")
            cold = _import_in_a_process(cache)
            compiled = [n for n, lib in cold["libraries"].items() if lib["origin"] != "prebuilt"]
            if compiled:
                found["cold_build_s"] = round(cold["import_s"], 3)
                found["compiled"] = compiled
            else:
                session.note("build: prebuilt libraries fit here, so nothing was compiled")
        session.progress("build: warm imports")
        warm = [_import_in_a_process(cache) for _ in range(imports)]
    found["warm_import_s"] = round(statistics.median(run["import_s"] for run in warm), 4)
    found["torch_import_s"] = round(statistics.median(run["torch_s"] for run in warm), 4)
    found["libraries"] = warm[-1]["libraries"]


COMMAND = Command(("build",), _run)
