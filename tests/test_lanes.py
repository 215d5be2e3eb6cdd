"""Kernels on a CPU, lane by lane (tests/lanes): no race, no access outside, and the right result.

tests/lanes/runtime.cpp says what is seen and what is not. Each driver draws batches from their
numbers, and a failure prints the command that runs them again.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from jagged_cuda import _build
from tests.lanes import sources

STRIPS = "cuda/kernels/softmax/strips.cuh"
TARGET = "cuda/kernels/attention/target_backward_wgmma.cuh"
FEW = "cuda/kernels/attention/target_backward.cuh"
RING = "cuda/kernels/softmax/sequence_ring.cuh"
WORKSPACE = "cuda/kernels/attention/long_workspace.cuh"
ITEMS = "cuda/kernels/attention/backward_items.cuh"
SHORT = "cuda/kernels/attention/short_backward_consumer.cuh"
PLAN = "cuda/kernels/attention/long_plan.cuh"

PATHS = {
    "strips": STRIPS,
    "target_backward": TARGET,
    "target_few": FEW,
    "sequence_ring": RING,
    "long_workspace": WORKSPACE,
    "backward_bulk": ITEMS,
    "own_plan": PLAN,
    "short_backward": SHORT,
}
DRIVERS = {
    "strips": range(1, 49),
    "target_backward": range(1, 9),
    "target_few": range(1, 25),
    "sequence_ring": range(1, 121),
    "long_workspace": range(1, 41),
    "backward_bulk": range(1, 13),
    "own_plan": range(1, 201),
    "short_backward": range(1, 17),
}


@dataclass(frozen=True)
class Fault:
    """One change of a kernel's source, the batches that show it, and what is then reported."""

    name: str
    driver: str
    old: str
    new: str
    batches: range
    report: str

    @property
    def path(self) -> str:
        return PATHS[self.driver]


FAULTS = (
    Fault(
        "no barrier before partial results are read",
        "strips",
        "    __syncthreads();  // the numbers of all threads are there\n",
        "",
        range(1, 7),
        "read after write: shared memory",
    ),
    Fault(
        "one buffer for a cluster's partial results",
        "strips",
        "      if (is_shared) buffer ^= 1;\n",
        "",
        range(1, 15),
        "write after read: shared memory",
    ),
    Fault(
        "a CTA ends while others read its partial results",
        "strips",
        "  if (any_shared) ptx::barrier_cluster();",
        "  if (false) ptx::barrier_cluster();",
        range(1, 15),
        "a CTA ends while another may read its shared memory",
    ),
    Fault(
        "one row too many for each thread",
        "strips",
        "(rows - row + lines - 1) / lines",
        "(rows - row + lines) / lines",
        range(1, 7),
        "WRONG out",
    ),
    Fault(
        "the word that the vector's end cuts is taken whole",
        "strips",
        "first + (count - 1) * step + 1 >= capacity;",
        "first + (count - 1) * step + 1 > capacity;",
        range(1, 15),
        "read outside: x",
    ),
    Fault(
        "no barrier before K's rows become those of dS",
        "target_backward",
        "    ptx::bar_sync(kOwn + warpgroup, 128);\n",
        "",
        range(3, 4),
        "write after read: shared memory",
    ),
    Fault(
        "no wait until dS has been read",
        "target_backward",
        "    ptx::mbarrier_wait(shared.scores.empty[warpgroup], "
        "tile / Config::kScorers % 2 ^ 1);\n",
        "",
        range(3, 4),
        "write after read: shared memory",
    ),
    Fault(
        "no fence between dS and the product that reads it",
        "target_backward",
        "    start_grad_v(sum, p);\n    ptx::fence_proxy_async();\n",
        "    start_grad_v(sum, p);\n",
        range(3, 4),
        "no proxy fence",
    ),
    Fault(
        "a row behind a sequence's keys is stored",
        "target_backward",
        "row < keys; row += 32",
        "row <= keys; row += 32",
        range(5, 7),
        "write outside: grad_v",
    ),
    Fault(
        "no barrier before dS of other warps is read",
        "target_few",
        "    __syncthreads();\n\n    if (keys > 0) {",
        "    if (keys > 0) {",
        range(1, 4),
        "read after write: shared memory",
    ),
    Fault(
        "no barrier before a stage is overwritten",
        "target_few",
        "    __syncthreads();\n    load_step(step + 1);",
        "    load_step(step + 1);",
        range(1, 4),
        "write after read: shared memory",
    ),
    Fault(
        "P where dS lies",
        "target_few",
        "kDsColumn = kScoresInV ? kTileM : 0;",
        "kDsColumn = 0;",
        range(1, 4),
        "WRONG grad_v",
    ),
    Fault(
        "no wait for a stage that comes a second time",
        "sequence_ring",
        "      if (stage + kStages < sequence.stages) wait();\n",
        "",
        range(1, 21),
        "WRONG grad_x",
    ),
    Fault(
        "one buffer for the sums of all sequences",
        "sequence_ring",
        "return flipped_ ? 1 : 0;",
        "return 0;",
        range(1, 21),
        "write after read: shared memory",
    ),
    Fault(
        "a next sequence where the last one still lies",
        "sequence_ring",
        "copy(next, kStages - 1 - stage, !flipped_);",
        "copy(next, kStages - 1 - stage, flipped_);",
        range(1, 21),
        "WRONG grad_x",
    ),
    Fault(
        "sums of one stage as those of many",
        "sequence_ring",
        "if (sequence.stages == 1) {",
        "if (sequence.stages == 0) {",
        range(1, 21),
        "WRONG out",
    ),
    Fault(
        "an item's own rows come where the last item's are read",
        "backward_bulk",
        "      ptx::mbarrier_wait(barriers.own_empty, count % 2 ^ 1);\n      copy_pair(tiles.sQ,",
        "      copy_pair(tiles.sQ,",
        range(3, 4),
        "write after write: shared memory",
    ),
    Fault(
        "no barrier before dQ is written where V was",
        "backward_bulk",
        "    ptx::bar_sync(own.barrier, 128);  // no warp's product reads the last V any more\n",
        "",
        range(1, 2),
        "write after read: shared memory",
    ),
    Fault(
        "a place is given back before its copy has left",
        "backward_bulk",
        "    if (own.lane == 0) ptx::cp_async_bulk_wait_read();\n    __syncwarp();\n"
        "    barriers.second_ring.release(values.advance());\n",
        "    barriers.second_ring.release(values.advance());\n",
        range(1, 2),
        "a CTA ends before its bulk stores",
    ),
    Fault(
        "one of 32 tiles alone",
        "long_workspace",
        "    left_ &= left_ - 1;\n",
        "    left_ = 0;\n",
        range(1, 9),
        "WRONG",
    ),
    Fault(
        "rows that see nothing are taken for others",
        "long_workspace",
        "lse == -INFINITY ? INFINITY : lse * kLog2E",
        "lse * kLog2E",
        range(1, 9),
        "WRONG lse",
    ),
    Fault(
        "two sequences at one place",
        "long_workspace",
        "long_unit<Config::kStep>(params, begin, seq)",
        "long_unit<Config::kStep>(params, begin, 0)",
        range(1, 9),
        "WRONG lse",
    ),
    Fault(
        "sums of rows past the end are stored",
        "long_workspace",
        "params.grad_q.row_stride, rows - row - lane / 4,",
        "params.grad_q.row_stride, 16,",
        range(1, 21),
        "write outside: grad_q",
    ),
    Fault(
        "sequences of the same length share their items",
        "own_plan",
        "(its_length == length && other < lane)",
        "(its_length == length && other > 31)",
        range(1, 41),
        "WRONG taken twice, or outside",
    ),
    Fault(
        "a sequence's lane where those before it leave gaps",
        "own_plan",
        "const int from = set_bit(found, lane - count),",
        "const int from = set_bit(found, lane),",
        range(1, 41),
        "WRONG",
    ),
    Fault(
        "one longer sequence is overlooked",
        "own_plan",
        "sequence_rows(params.q_offsets, seq).len) >= 0;",
        "sequence_rows(params.q_offsets, seq).len) >= 600;",
        range(1, 41),
        "WRONG whether any is planned",
    ),
    Fault(
        "no barrier before the other warpgroup's sums are read",
        "short_backward",
        "    ptx::mbarrier_wait(shared.sums, phase);\n",
        "    if (phase != 0) ptx::mbarrier_wait(shared.sums, phase);\n",
        range(1, 5),
        "read after write: shared memory",
    ),
    Fault(
        "sums are written while the other warpgroup reads those before",
        "short_backward",
        "    ptx::mbarrier_wait(shared.sums, phase);\n",
        "    if (phase == 0) ptx::mbarrier_wait(shared.sums, phase);\n",
        range(1, 5),
        "write after read: shared memory",
    ),
)


def _compiler_and_headers() -> tuple[tuple[str, ...], Path]:
    cxx = _build.find_cxx()
    homes = [home for home in _build.cuda_home_candidates() if sources.has_headers(home)]
    if cxx is None or not homes:
        pytest.skip("kernels on a CPU need a C++ compiler and CUDA's headers (nvcc is not needed)")
    if platform.machine() != "x86_64":
        pytest.skip("threads change places in x86-64 code (lanes_switch in runtime.cpp)")
    return cxx, homes[0]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx, cuda = _compiler_and_headers()
    folder = tmp_path_factory.mktemp("lanes")
    sources.write_sources(folder / "csrc")
    target = folder / "runtime.o"
    sources.compile_object(cxx, sources.HERE / "runtime.cpp", folder / "csrc", cuda, target)
    return target


def _build_driver(driver: str, runtime: Path, folder: Path, fault: Fault | None = None) -> Path:
    cxx, cuda = _compiler_and_headers()
    change = None if fault is None else (fault.path, fault.old, fault.new)
    sources.write_sources(folder / "csrc", change)
    target = folder / f"{driver}.o"
    sources.compile_object(cxx, sources.HERE / f"{driver}.cpp", folder / "csrc", cuda, target)
    sources.link(cxx, [runtime, target], folder / driver)
    return folder / driver


def _run(program: Path, batches: range) -> tuple[int, str]:
    command = [str(program), str(batches.start), str(len(batches))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, f"{' '.join(command)}\n{_with_lines(program, done.stdout)}{done.stderr}"


def _with_lines(program: Path, output: str) -> str:
    """Puts source lines behind addresses of code, where addr2line is installed."""
    if shutil.which("addr2line") is None:
        return output

    def line(code: re.Match[str]) -> str:
        # Linked at 0x400000; the address is that behind the call.
        address = hex(0x400000 + int(code[1], 16) - 1)
        command = ["addr2line", "-i", "-e", str(program), address]
        places = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        names = [Path(place).name.split(" ")[0] for place in places if place]
        return f"at {' < '.join(n for n in names if not n.startswith('runtime.h'))}"

    return re.sub(r"at 0x([0-9a-f]+)", line, output)


@pytest.mark.parametrize("driver", DRIVERS)
def test_nothing_is_found(driver: str, runtime: Path, tmp_path: Path) -> None:
    status, output = _run(_build_driver(driver, runtime, tmp_path), DRIVERS[driver])
    assert status == 0, output
    assert output.rstrip().endswith(f"{len(DRIVERS[driver])} batches, 0 findings, 0 wrong"), output


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, runtime: Path, tmp_path: Path) -> None:
    status, output = _run(_build_driver(fault.driver, runtime, tmp_path, fault), fault.batches)
    assert status != 0 and fault.report in output, output


def test_every_instruction_has_a_meaning_on_a_cpu(tmp_path: Path) -> None:
    sources.write_sources(tmp_path)  # asserts that prim/ has nothing that sources.py lacks
    assert not set(sources.BODIES) & set(sources.MISSING)


def test_an_instruction_without_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sources.BODIES, "bar_sync")
    with pytest.raises(AssertionError, match=r"prim/ptx\.cuh: bar_sync"):
        sources.write_sources(tmp_path)
