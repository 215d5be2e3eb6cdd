"""The same bits again, a hundred times; and what looks for races and runs the sanitizer itself."""

from __future__ import annotations

import dataclasses
import multiprocessing.pool
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import run_python

import jagged_cuda
from jagged_cuda.testing import kernel_paths
from jagged_cuda.testing.cases import EVERY
from jagged_cuda.testing.draws import DTYPES, Draw, Wanted, draw, judge_draw, run_draw
from jagged_cuda.testing.lengths import Layout
from tests.tools import races, sanitize
from tests.tools.covering import covering_draws, rare_draws
from tests.tools.races import hunt
from tests.tools.sanitize import FOUND, Check, find_sanitizer, run_check


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hundred_runs_give_the_same_bits(name: str, dtype: str, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    wanted = Wanted(ops=(name,), dtypes=(dtype,), size="edge" if on_gpu else "small")
    for index in range(3 if on_gpu else 1):
        given = draw(wanted, 1, device.type, str(device), index).draw
        assert hunt(given, 100 if on_gpu else 20) is None, given.command()


def test_a_result_that_changes_is_found() -> None:
    turns = iter(range(100))

    def changing(*args: Any, **options: Any) -> torch.Tensor:
        out = jagged_cuda.jagged_softmax(*args, **options)
        return out * (1 + 2**-20) if next(turns) == 40 else out

    ops = SimpleNamespace(jagged_softmax=changing)
    wanted = Wanted(ops=("jagged_softmax",), dtypes=("float32",), size="edge")
    given = draw(wanted, 1, "cpu", "cpu", 0).draw
    assert hunt(given, 80, ops) == "out"
    assert hunt(given, 80) is None


RACES = ["races", "--device", "cpu", "--dtype", "float32", "--search", "1", "--jobs", "2"]


def test_processes_share_the_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*RACES, "--runs", "2"])
    assert races.main() == 0
    assert "draws, 2 runs each, 0 that differed" in capsys.readouterr().out


def test_the_hunt_names_what_differed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def softmax_differs(given: Draw, runs: int) -> str | None:
        return "grad_x" if given.op == "jagged_softmax" else None

    # Threads, which see the patched function.
    threads = SimpleNamespace(Pool=multiprocessing.pool.ThreadPool)
    monkeypatch.setattr(races.multiprocessing, "get_context", lambda _: threads)
    monkeypatch.setattr(races, "hunt", softmax_differs)
    monkeypatch.setattr(sys, "argv", RACES)
    assert races.main() == 1
    printed = capsys.readouterr().out
    assert "races: grad_x of jagged_softmax differs\n  reproduce: python -m" in printed
    assert "runs each, 0 that" not in printed


def test_covering_draws_take_every_path_that_is_found() -> None:
    draws, missed = covering_draws(Wanted(ops=("jagged_softmax",)), "cpu", "cpu", seconds=2.0)
    assert 1 <= len(draws) <= len(kernel_paths("cpu"))
    assert missed < kernel_paths("cpu")


@pytest.mark.parametrize("number", range(len(rare_draws("cuda", "cuda"))))
def test_a_rare_draw_is_right(number: int, device: torch.device) -> None:
    """Which kernels they take on a GPU is for `make sanitize` to say: it names those not taken."""
    given = rare_draws(device.type, str(device))[number]
    judge_draw(given)


# --- sanitize


def test_without_a_gpu_it_says_so() -> None:
    root = Path(__file__).resolve().parent.parent
    done = run_python("-m", "tests.tools.sanitize", cwd=root, CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "sanitize: there is no NVIDIA GPU here, so nothing was checked\n"


@pytest.mark.parametrize("status", [0, FOUND])
def test_what_a_tool_says_is_reported(
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "compute-sanitizer"
    text = f"========= Invalid read\n========= ERROR SUMMARY: {status} errors"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tool))
    assert find_sanitizer() == str(tool)
    check = Check("memcheck", "3 draws", ("tests.tools.sanitize", "--run", "draws.txt"))
    verdict = run_check(str(tool), check, 60.0)
    assert (verdict.status, verdict.summary) == (status, f"ERROR SUMMARY: {status} errors")
    assert sanitize.print_table([check], [verdict], ["cuda.a_path"]) == (status != 0)
    printed = capsys.readouterr().out
    assert f"{'clean' if status == 0 else 'FAILED (77)'}: ERROR SUMMARY" in printed
    assert "no draw took: cuda.a_path" in printed
    assert ("Invalid read" in printed) == (status != 0)
    tool.write_text("#!/bin/sh\n")
    assert run_check(str(tool), check, 60.0).status == 1  # a silent one has watched nothing


@pytest.mark.parametrize(
    ("kernel", "offset", "size", "total", "status"),
    [
        ("forward_wgmma<Config, true>(Params)", 0xD0, 4, 1, 0),
        ("forward_wgmma<Config, true>(Params)", 0xD0, 4, 2, FOUND),  # one is not of this form
        ("forward_wgmma<Config, true>(Params)", 0xD0, 8, 1, FOUND),
        ("forward_wgmma<Config, true>(Params)", 0x1D0, 4, 1, FOUND),
        ("forward_short<Config>(Params)", 0xD0, 4, 1, FOUND),
    ],
)
def test_initcheck_may_name_the_one_read_that_is_meant(
    kernel: str, offset: int, size: int, total: int, status: int
) -> None:
    report = (
        f"========= Uninitialized __global__ memory read of size {size} bytes\n"
        f"=========     at void jagged_cuda::attention::{kernel}+{offset:#x}\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n"
    )
    verdict = sanitize.judge_initcheck(report, f"ERROR SUMMARY: {total} errors", 1.0)
    assert verdict.status == status
    named = f"1 reads of {size} bytes at void jagged_cuda::attention::{kernel}+{offset:#x}"
    assert (named in verdict.output) == (status != 0 and total == 1)


@pytest.mark.parametrize("heads", [None, (2, 2)])  # None: [T, D], without a dim of heads
@pytest.mark.parametrize(("dim", "is_seen"), [(64, True), (52, False)])
def test_what_leaves_by_bulk_stores_is_written_again(
    dim: int,
    is_seen: bool,
    heads: tuple[int, int] | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = rare_draws(device.type, str(device))[0]
    choices = found.spec.choices | {"dims": (dim, dim), "heads": heads}
    layout = Layout((300, 40), base=5, tail=7)
    spec = dataclasses.replace(found.spec, choices=choices, layout=layout)
    given = dataclasses.replace(found, spec=spec)
    plain, copies = run_draw(given), []
    path = "cuda.attention.forward.long.d64"
    monkeypatch.setattr(sanitize, "last_kernel", lambda _: path)
    xor = torch.bitwise_xor
    monkeypatch.setattr(torch, "bitwise_xor", lambda *a, **b: copies.append(xor(*a, **b)))
    rewritten = run_draw(given, sanitize._Rewriting())
    assert len(copies) == 1
    assert all(torch.equal(plain.found[n], rewritten.found[n]) for n in plain.found)
    assert sanitize.initcheck_sees(given) == is_seen
    path = "cuda.attention.forward.long.d64.general"  # whose output leaves by plain stores
    run_draw(given, sanitize._Rewriting())
    assert len(copies) == 2


def test_initcheck_sees_all_kernels_but_one() -> None:
    for tool, expected in (("initcheck", "--kernel-name-exclude"), ("memcheck", "--kernel-name")):
        given = sanitize.command("compute-sanitizer", Check(tool, "", ()))
        assert [option for option in given if "kernel-name" in option] == [expected]
