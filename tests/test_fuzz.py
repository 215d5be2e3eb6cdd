"""The fuzzer finds planted faults, makes them small, repeats draws, and says what it missed."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import run_python
from torch import Tensor

import jagged_cuda
from jagged_cuda import fuzz
from jagged_cuda.testing import draws, kernel_paths
from jagged_cuda.testing.case import HEAD_DIMS, _any_dims
from jagged_cuda.testing.cases import CASES, DTYPES, EVERY, Case
from jagged_cuda.testing.coverage import Coverage, expected, report
from jagged_cuda.testing.draws import SIZES, Draw, Wanted, draw
from jagged_cuda.testing.lengths import DISTRIBUTIONS

ROOT = Path(__file__).resolve().parent.parent
CPU = (("cpu", "cpu"),)
SMALL = Wanted(size="small")


def plan(**changed: Any) -> fuzz.Plan:
    given: dict[str, Any] = {"wanted": SMALL, "places": CPU, "seed": 3, "seconds": 60.0}
    return fuzz.Plan(**(given | changed))


def ignore(place: int, index: int) -> None:
    pass


def broken(change: Callable[[Tensor, Tensor], None]) -> Any:
    """jagged_cuda, whose results go wrong."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            out, *rest = result if isinstance(result, tuple) else (result,)
            out = out.clone()
            tensors = (a for a in args if isinstance(a, Tensor))
            change(out, next(a for a in tensors if not a.is_floating_point()))
            return (out, *rest) if rest else out

        return wrapped

    wrapped = {name: wrap(getattr(jagged_cuda, name)) for name in CASES}
    return SimpleNamespace(**(vars(jagged_cuda) | wrapped))


def lose_the_tail(out: Tensor, offsets: Tensor) -> None:
    """Drop the last row of sequences of at least ten rows."""
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        if end - begin >= 10 and end == out.shape[0]:
            out[end - 1] = 0


# --- draws


@pytest.mark.parametrize("size", SIZES["cuda"])
def test_draws_repeat_and_survive_their_line(size: str) -> None:
    wanted = Wanted(size=size)
    for index in range(30):
        drawn = draw(wanted, 5, "cuda", "cuda", index)
        assert draw(wanted, 5, "cuda", "cuda", index) == drawn
        assert Draw.from_json(drawn.draw.to_json()) == drawn.draw
        assert draw(wanted, 6, "cuda", "cuda", index) != drawn


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_kinds_fit_their_case(case: Case) -> None:
    for kind in case.kinds:
        assert kind.choices.keys() <= case.choices.keys()
        assert set(kind.distributions) <= DISTRIBUTIONS.keys()
        assert set(kind.dtypes) <= DTYPES.keys()
        assert 1 <= kind.num_seqs[0] <= kind.num_seqs[1] and 1 <= kind.max_len[0] <= kind.max_len[1]


def test_every_kind_is_drawn() -> None:
    """Of its numbers of sequences, its lengths and its dtypes; no sequence is longer."""
    op = "jagged_flash_attention"
    left = list(EVERY[op].kinds)
    for index in range(500):
        drawn = draw(Wanted(ops=(op,), size="kinds"), 1, "cuda", "cuda", index).draw
        layout = drawn.spec.layout
        fitting = [
            kind
            for kind in EVERY[op].kinds
            if layout.max_len <= kind.max_len[1]
            and drawn.dtype in kind.dtypes
            and (kind.num_seqs[0] <= layout.num_seqs <= kind.num_seqs[1] or not layout.num_seqs)
        ]
        assert fitting
        if layout.max_len >= fitting[0].max_len[0]:
            left = [
                kind
                for kind in left
                if kind not in fitting or drawn.spec.choices["dims"] not in kind.choices["dims"]
            ]
    assert not left


@pytest.mark.parametrize("largest", [1, 32, 50, 128, 250, 256])
def test_head_dims_are_drawn_of_every_size(largest: int) -> None:
    rng = random.Random(1)
    drawn = {_any_dims(rng, largest) for _ in range(4000)}
    assert max(map(max, drawn)) == largest and min(map(min, drawn)) == 1
    sizes = [dim for dim in HEAD_DIMS if dim < largest]
    for low, high in zip((0, *sizes), (*sizes, largest), strict=True):
        assert any(low < max(dims) <= high for dims in drawn)


def test_the_line_runs() -> None:
    words = shlex.split(draw(SMALL, 1, "cpu", "cpu", 4).draw.command())
    assert "right; kernels cpu." in run_python(*words[1:], cwd=ROOT).stdout


@pytest.mark.parametrize("text", ["{}", "[", '{"op": "x", "spec": {"length": 3}}'])
def test_a_line_that_is_none(text: str) -> None:
    with pytest.raises(SystemExit, match="--case must be what a finding printed"):
        fuzz.main(["--case", text])


# --- findings


def test_a_planted_fault_is_found_and_made_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ops = broken(lose_the_tail)
    finding = fuzz.Fuzzer(plan()).run(ignore, ops)
    assert finding is not None
    assert finding.kind == "MismatchError"
    small = fuzz.shrunk(finding, 30.0, ops).draw
    # One sequence that is long enough, and the smallest of everything else.
    assert small.spec.layout.lengths == (10,)
    assert (small.spec.layout.base, small.spec.layout.tail) == (0, 0)
    assert not small.spec.storage and not small.backward and not small.environment
    # The line that is printed fails as long as the fault is there.
    monkeypatch.setattr(draws, "operators", lambda _: ops)
    assert fuzz.main(shlex.split(small.command())[3:]) == 1
    assert f"{small.case.name}, out" in capsys.readouterr().out
    monkeypatch.undo()
    assert fuzz.main(shlex.split(small.command())[3:]) == 0


def test_an_exception_is_a_finding() -> None:
    def refuse(out: Tensor, offsets: Tensor) -> None:
        if offsets.dtype is torch.int32 and offsets.shape[0] > 3:
            raise RuntimeError("no")

    ops = broken(refuse)
    finding = fuzz.Fuzzer(plan()).run(ignore, ops)
    assert finding is not None
    assert (finding.kind, finding.text) == ("RuntimeError", "no")
    small = fuzz.shrunk(finding, 30.0, ops).draw
    assert small.spec.layout.lengths == (0, 0, 0)
    assert small.spec.offsets_dtype is torch.int32


def dying_worker(given: fuzz.Plan, worker: int, messages: Any, current: Any) -> None:
    current[0], current[1] = 0, 17
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "_work", dying_worker)
    monkeypatch.setattr(fuzz, "SHRINK_SECONDS", 0.0)
    assert fuzz.fuzz(plan()) == 1
    printed = capsys.readouterr().out
    assert "crash: the process ended with signal 9" in printed
    assert draw(SMALL, 3, "cpu", "cpu", 17).draw.command() in printed


# --- a whole run


def test_a_run_finds_nothing(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"--device {device} --seed 2 --cases 120 --seconds 300 --jobs 2 --size small"
    assert fuzz.main(given.split()) == 0
    printed = capsys.readouterr().out
    assert re.search(r"fuzz: 120 cases in \d+ s .* seed 2: nothing found", printed)
    assert "never reached" in printed
    for name in CASES:
        assert f"{device.type}: {name}" in printed


def test_lengths_of_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user_id,item_id,timestamp\n" + "7,1,1\n" * 5 + "8,1,1\n" * 2)
    assert sorted(fuzz.read_lengths(log)) == [2, 5]
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3 0\n12\n")
    assert fuzz.read_lengths(lengths) == (3, 0, 12)
    wanted = Wanted(lengths=(3, 0, 12))
    for index in range(20):
        drawn = draw(wanted, 1, "cpu", "cpu", index)
        assert set(drawn.draw.spec.layout.lengths) <= {3, 0, 12}
        assert drawn.distribution == "file"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--op softmax", "jagged_target_attention_biased, got softmax"),
        ("--device cpu --backends cuda", "needs --device cuda"),
        ("--device cpu --dtype int8", "--dtype must be of float32"),
        ("--device cpu --size large", "--size must be of small, edge, many, giant for cpu"),
        ("--device cpu --shape-from nowhere.csv", "--shape-from nowhere.csv: "),
    ],
)
def test_wrong_options(arguments: str, text: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(text)):
        fuzz.main(arguments.split())


def test_without_a_checkout_there_are_no_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton_ref", None)
    with pytest.raises(SystemExit, match="the backend triton needs triton and triton_ref, which"):
        fuzz.main(["--device", "cpu", "--backends", "triton"])


# --- coverage


def recorded(place: str) -> set[str]:
    """The names of kernel paths that the sources hold, or their beginnings."""
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    code = [re.sub(r"//.*", "", text) for text in texts]
    return {name for text in code for name in re.findall(rf'"({place}\.[a-z0-9_.]+)"', text)}


def test_every_path_of_the_cpu_is_known() -> None:
    assert kernel_paths("cpu") == recorded("cpu")


@pytest.mark.cuda
def test_every_path_of_the_gpu_is_known() -> None:
    """Most names are put together at compile time: the sources hold how they begin."""
    paths, beginnings = kernel_paths("cuda"), tuple(recorded("cuda"))
    assert all(path.startswith(beginnings) for path in paths)
    assert all(any(path.startswith(name) for path in paths) for name in beginnings)


def test_the_report_names_what_was_never_reached() -> None:
    coverage = Coverage()
    for index in range(40):
        drawn = draw(Wanted(ops=("jagged_softmax",), size="small"), 1, "cpu", "cpu", index)
        coverage.add(drawn, ["cpu.baseline"])
    items = expected(Wanted(ops=("jagged_softmax", "jagged_dense_bmm")), CPU)
    text = report(coverage, items)
    missed = text.partition("never reached")[2]
    assert "cpu: jagged_dense_bmm" in missed and "cpu: jagged_softmax" not in missed
    assert "cpu.avx2" in missed and "cpu.baseline" not in missed
    assert "129" in missed
    everything = Coverage()
    everything.counts.update(items)
    assert "never reached       nothing" in report(everything, items)
