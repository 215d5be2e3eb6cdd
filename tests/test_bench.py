"""The benchmark command: what it counts, checks, reports and survives; times are not judged."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import jagged_cuda
from benchmarks import __main__ as command_line
from benchmarks import (
    attention,
    build,
    checking,
    grid,
    hstu,
    implementations,
    mixed,
    modules,
    norm,
    peers,
    report,
    rows,
    shapes,
    sweep,
    table1,
    unseen,
)
from benchmarks import session as session_module
from benchmarks.candidate import Candidate
from benchmarks.checking import WrongResultError
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, UNFUSED, Command, Goal, Options, Row, Session
from benchmarks.timing import CpuTimer, CudaTimer, Measurement
from jagged_cuda import unfused
from jagged_cuda.testing.lengths import Layout

MEASURED = {"median_us", "min_us", "q25_us", "q75_us", "repetitions", "method"}
TABLE1 = table1.COMMAND.cases


def run(tmp_path: Path, *arguments: str, status: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Run the command with tiny shapes; return its JSON."""
    out = tmp_path / "results" / "run.json"
    common = ("--device", device, "--quick", "--repetitions", "1", "--out", str(out))
    assert command_line.main([*arguments, *common]) == status
    return json.loads(out.read_text())


def rows_of(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row["results"][name] for row in found["rows"] if name in row["results"]]


# --- what a run leaves behind


def test_table1_reports_each_operator_both_passes_and_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, "table1")
    assert found["schema"] == report.SCHEMA
    assert {"command", "date", "environment", "calibration", "notes", "seconds"} <= set(found)
    where = found["environment"]
    assert where["torch"] == torch.__version__
    assert where["device"] == "cpu" and where["gpu"] is None
    assert found["command"].endswith("--repetitions 1 --out run.json")  # no folder of this machine
    keys = [(row["case"], row["pass"], row["precision"]) for row in found["rows"]]
    assert keys == [
        (operator, pass_name, "fp32")
        for operator in TABLE1
        for pass_name in ("forward", "backward")
    ]
    for row in found["rows"]:
        assert set(row["results"][OURS]) >= MEASURED
        assert set(row["results"]["padded"]) >= MEASURED
        assert row["results"]["sll"] == {"absent": "sll needs a GPU"}
        assert row["floor_us"] > 0 and row["copy_us"] > 0 and row["seed"] == shapes.SEED
    table = capsys.readouterr().out
    assert "Table 1 of the paper" in table and "note: sll needs a GPU" in table
    lines = [line for line in table.splitlines() if line.startswith(TABLE1)]
    assert len(lines) == 2 * len(TABLE1) and all("absent" in line for line in lines)
    # A line for each row, so that two files can be compared.
    lines = (tmp_path / "results" / "run.json").read_text().splitlines()
    found_in_lines = [json.loads(line.rstrip(",")) for line in lines if '"case"' in line]
    assert found_in_lines == found["rows"]


def test_attention_times_both_passes_with_and_without_max_len(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(
        tmp_path, "attention", "--against", "sdpa", "--cases", "short,u4*,full4096_c*,crowd"
    )
    cases = [row["case"] for row in found["rows"] if row["pass"] == "forward"]
    assert cases == ["short", "u4096_causal", "full4096_causal", "crowd"]
    for row in found["rows"]:
        assert set(row["results"]) == {OURS, HINTED, "sdpa"}
        assert all("median_us" in result for result in row["results"].values())
    table = capsys.readouterr().out
    assert "Self-attention" in table and "TFLOP/s" in table


def test_target_beside_padded_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "target", "--against", "sdpa,varlen,sll")
    assert [(row["case"], row["pass"]) for row in found["rows"]] == [
        (case, pass_name)
        for case in attention.COMMANDS["target"].cases
        for pass_name in ("forward", "forward+backward")
    ]
    for row in found["rows"]:
        results = row["results"]
        timed = {name for name, result in results.items() if "median_us" in result}
        assert timed == {OURS, HINTED, "sdpa"}
        assert results["varlen"] == {"absent": "varlen needs a GPU"}
    assert "Target attention" in capsys.readouterr().out


def test_rows_beside_plain_indexing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "rows", "--cases", "*_128")
    assert {row["case"].removesuffix("_128") for row in found["rows"]} == {
        function.name for function in rows.FUNCTIONS
    }
    for row in found["rows"]:
        assert all(row["results"][name]["median_us"] > 0 for name in (OURS, "indexing"))
        assert row["shape"]["row_bytes"] == (4 if "numbers" in row["case"] else 128)
    assert "Moving rows" in capsys.readouterr().out


def test_norm_beside_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "norm")
    assert {row["case"] for row in found["rows"]} == set(norm.COMMAND.cases)
    for row in found["rows"]:
        assert all(row["results"][name]["median_us"] > 0 for name in (OURS, "pytorch"))
        assert row["results"]["compiled"] == {"absent": "compiled needs a GPU"}
        assert row["shape"]["T"] == norm.QUICK_ROWS
    assert "with dropout" in capsys.readouterr().out


def test_hstu_beside_padded_hstu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "hstu")
    assert {row["case"] for row in found["rows"]} == set(hstu.COMMAND.cases)
    for row in found["rows"]:
        results = row["results"]
        names = {OURS, hstu.SOFTMAX, hstu.CAUSAL, "padded_hstu"}
        names |= {hstu.UNBIASED} if "bias" in row["case"] else set()
        assert all(results[name]["median_us"] > 0 for name in names)
        for name in ("flex", "cudnn_flex"):
            assert results[name] == {"absent": f"{name} needs a GPU"}
        assert ("grad" in row["case"]) == (hstu.RANGED not in results)
    assert {row["pass"] for row in found["rows"] if "grad" in row["case"]} == {"backward"}
    assert "masks of HSTU" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["key_ranges", "position_bias"])
def test_hstu_without_its_mask_or_bias_is_not_timed(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = hstu.jagged_hstu_attention

    def wrong(*leaves: Tensor, **options: Any) -> Tensor:
        return right(*leaves, **(options | {lost: None}))

    monkeypatch.setattr(hstu, "jagged_hstu_attention", wrong)
    found = run(tmp_path, "hstu", "--cases", "position_bias_1024", status=1)
    assert "wrong" in found["rows"][0]["results"][OURS]


def test_sweep_goes_over_fills_for_attention_and_each_line_of_table1(tmp_path: Path) -> None:
    found = run(tmp_path, "sweep")
    cases = sweep.COMMAND.cases
    assert len(cases) == 7
    keys = [row["case"] for row in found["rows"]]
    assert keys == [f"{case} {p}%" for case in cases for p in sweep.QUICK_PERCENTS]
    for row in found["rows"]:
        padded = "sdpa" if row["case"].startswith("attention") else "padded"
        assert {OURS, padded} <= {
            n for n, result in row["results"].items() if "median_us" in result
        }
        assert row["pass"] == "forward+backward"
        assert (row["shape"]["fill"] == 1) == row["case"].endswith("100%")


def test_grid_goes_over_widths_columns_and_batch_sizes(tmp_path: Path) -> None:
    found = run(tmp_path, "grid", "--cases", "jagged_*bmm,jagged2_softmax,jagged_softmax")
    names = [row["case"] for row in found["rows"] if row["pass"] == "forward"]
    assert [name for name in names if name.startswith("jagged_dense_bmm")] == [
        f"jagged_dense_bmm {sizes}" for sizes in ("D16 N1 B4", "D16 N8 B4", "D16 N1 B4 int32")
    ]
    assert "jagged2_softmax B4" in names and "jagged_softmax N8 B4" in names
    assert all(row["results"][OURS]["median_us"] > 0 for row in found["rows"])
    shape = found["rows"][2]["shape"]
    assert (shape["D"], shape["N"], shape["B"]) == (16, 8, 4)


def test_the_grid_is_that_of_the_goal() -> None:
    product = next(each for each in table1.OPERATORS if each.name == "jagged_dense_bmm")
    found = list(grid.points(product, quick=False))
    assert {point.dim for point in found} == {64, 128, 512}
    assert {point.columns for point in found} == {1, 8, 64, 256}
    assert min(p.num_seqs for p in found) == 16 and max(p.num_seqs for p in found) == 65_536
    assert {point.offsets_dtype for point in found} == {torch.int32, torch.int64}


@pytest.mark.parametrize("name", ["jagged_softmax", "jagged_jagged_bmm_jagged_out"])
def test_a_wrong_result_of_the_grid_is_not_timed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = next(each for each in table1.OPERATORS if each.name == name)

    def wrong(*operands: Any) -> Tensor:
        out = operator.ours(*operands)
        return out.index_fill(0, torch.tensor(out.shape[0] - 1), 9.0)

    monkeypatch.setattr(table1, "OPERATORS", (dataclasses.replace(operator, ours=wrong),))
    found = run(tmp_path, "grid", "--cases", name, status=1)
    assert all("wrong" in row["results"][OURS] for row in found["rows"][::2])


def test_unseen_shapes_are_the_same_everywhere_and_within_their_limits() -> None:
    found = unseen.draw()
    assert len(found) == unseen.NUM_SHAPES and found[:5] == unseen.draw(5)
    assert len(found[0].lengths) == 33_170 and found[0].dim == 88
    assert all(shape.fits() and 16 <= shape.dim <= 256 for shape in found)
    assert {shape.causal for shape in found} == {False, True}
    assert {shape.kind for shape in found} == {"equal", "uniform", "log-normal"}


def test_unseen_shapes_are_summed_up(tmp_path: Path) -> None:
    found = run(tmp_path, "unseen")
    assert [row["pass"] for row in found["rows"]] == 2 * list(unseen.PASSES)
    assert all(row["results"][OURS]["median_us"] > 0 for row in found["rows"])
    assert "unseen" not in found  # the peer needs a GPU

    session = Session(CpuTimer(1), Options())
    for case, ratio in (("a", 4.0), ("b", 1.0), ("c", None)):
        row = Row("unseen", case, "forward", "bf16", {}, seed=0)
        row.results = {OURS: {"median_us": 2.0}, "varlen": {"error": "refused"}}
        if ratio:
            row.results["varlen"] = {"median_us": 2.0 * ratio}
        session.rows.append(row)
    values = unseen.summary(session)["forward"]
    assert values["geometric_mean"] == 2 and values["shapes"] == 2
    assert (values["lowest"], values["lowest_case"]) == (1, "b")
    assert (values["below_1"], values["refused_by_peer"]) == (0, 1)


def test_a_mixed_batch_is_the_sum_of_its_parts() -> None:
    found = mixed.draw()
    together = sorted(found.pop(mixed.MIXED))
    assert list(found) == list(mixed.PARTS)
    assert together == sorted(n for lengths in found.values() for n in lengths)
    assert found["giant"] == (16384,) and together[0] == 1


def test_mixed_batches_are_compared_with_their_parts(tmp_path: Path) -> None:
    found = run(tmp_path, "mixed", "--cases", "d64")
    assert len(found["rows"]) == len(mixed.PASSES) * (1 + len(mixed.PARTS))
    assert len(found["mixed"]) == len(mixed.PASSES) * 2

    session = Session(CpuTimer(1), Options())
    for part, us in ((mixed.MIXED, 12.0), ("giant", 1.0), ("long", 2.0), ("short", 3.0)):
        session.rows.append(Row("mixed", f"d64.{part}", "forward", "bf16", {}, seed=0))
        session.rows[-1].results = {OURS: {"median_us": us}}
    assert mixed.summary(session.rows) == {}  # a part is missing
    session.rows.append(Row("mixed", "d64.tiny", "forward", "bf16", {}, seed=0))
    session.rows[-1].results = {OURS: {"median_us": 4.0}}
    assert mixed.summary(session.rows) == {f"d64 forward {OURS}": 1.2}


@pytest.mark.parametrize("percent", sweep.PERCENTS)
def test_fill_is_the_mean_over_the_longest(percent: int) -> None:
    layout = shapes.layout(shapes.filled(1024, 200, percent / 100), quick=False)
    assert layout.max_len == 200 and min(layout.lengths) >= 1
    assert layout.total / (1024 * 200) == pytest.approx(percent / 100, rel=0.15)


@pytest.mark.parametrize(
    ("against", "expected"),
    [(None, ["a"]), (("all",), ["a", "b"]), (("none",), []), (("b",), ["b"])],
)
def test_peers_that_were_asked_for(against: tuple[str, ...] | None, expected: list[str]) -> None:
    command = Command((), lambda session: None, ("a", "b"), ("a",))
    assert Session(CpuTimer(1), Options(against=against)).peers(command) == expected


def test_figure2_host_and_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = {"origin": "compiled here", "bytes": 10**6, "archs": ["9.0a"]}
    imported = {"torch_s": 1.0, "import_s": 0.05, "libraries": {"_C_cuda": library}}
    caches = []

    def import_in_a_process(cache: str | None) -> dict[str, Any]:
        caches.append(cache)
        return imported

    monkeypatch.setattr(build, "_import_in_a_process", import_in_a_process)
    monkeypatch.setattr("benchmarks.host.QUICK_CALLS", 3)
    found = run(tmp_path, "all", "--cases", "512,jagged_softmax,torch.add,build")
    commands = {row["command"] for row in found["rows"]}
    assert commands == {"table1", "figure2", "sweep", "host", "grid"}
    for row in found["rows"]:
        assert row["results"][OURS]["median_us"] > 0
        if row["command"] == "figure2":
            default = attention.COMMANDS["figure2"].default_peers
            assert set(row["results"]) == {OURS, HINTED, UNFUSED, *default}
            assert row["results"]["dense"]["peak_mib"] is None  # known only on a GPU
    passes = [row["pass"] for row in found["rows"] if row["command"] == "host"]
    assert passes == ["no gradient", "gradient", "forward+backward"] * 2
    assert found["build"]["warm_import_s"] == 0.05 and caches == [None]

    session = Session(CpuTimer(1), Options())
    build.COMMAND.run(session)
    folder = caches[1]
    assert folder is not None and not Path(folder).exists()  # the cold cache is gone
    assert caches[1:] == [folder] * (1 + build.WARM_IMPORTS)
    assert session.sections["build"]["cold_build_s"] == 0.05
    table = report.tables(session, report.environment(session.timer))
    assert "cold build" in table and "_C_cuda 9.0a (compiled here), MB" in table


def test_modules_beside_their_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.modules.QUICK_HOST_CALLS", 2)
    monkeypatch.setattr("benchmarks.modules.DIM", 32)
    monkeypatch.setattr("benchmarks.timing.HOST_CALLS_IN_A_ROW", 1)
    found = run(tmp_path, "modules")
    assert [row["case"] for row in found["rows"][::3]] == list(modules.COMMAND.cases)
    for row in found["rows"]:
        assert set(row["results"]) == {OURS, modules.OPERATORS}
        assert all(len(entry["medians_us"]) == 2 for entry in row["results"].values())


def test_a_module_that_is_not_its_operators_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = modules.CASES[-1]
    wrong = case._replace(operators=lambda m, inputs: 2 * case.operators(m, inputs))
    monkeypatch.setattr(modules, "CASES", (wrong,))
    monkeypatch.setattr("benchmarks.timing.HOST_CALLS_IN_A_ROW", 1)
    found = run(tmp_path, "modules", status=1)
    assert all("wrong" in row["results"][OURS] for row in found["rows"])


def test_a_failed_build_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cache: str | None) -> dict[str, Any]:
        raise RuntimeError("a process that imports jagged_cuda ended with 1")

    monkeypatch.setattr(build, "_import_in_a_process", fail)
    session = Session(CpuTimer(1), Options())
    build.COMMAND.run(session)
    assert session.failed and "ended with 1" in session.sections["build"]["error"]


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["table1", "--cases", "nothing"], "--cases must be of jagged_dense_bmm, "),
        (["table1", "--against", "flex"], "--against must be of padded, sll, all, none, got flex"),
        (["attention", "--dtype", "fp8"], "--dtype must be of tf32, fp32, bf16, fp16, got fp8"),
        (["attention", "--repetitions", "0"], "--repetitions must be >= 1, got 0"),
        (["attention", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["everything"], "invalid choice: 'everything'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        command_line.main(arguments)
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


def test_cuda_without_a_gpu_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "jagged_cuda._load.cuda_unavailable_reason", "jagged_cuda cannot use CUDA: no GPU."
    )
    with pytest.raises(SystemExit) as raised:
        command_line.main(["table1", "--device", "cuda"])
    assert raised.value.code == 2
    message = "--device cuda needs a GPU: jagged_cuda cannot use CUDA: no GPU."
    assert message in capsys.readouterr().err


def test_a_wrong_result_is_not_timed_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = jagged_cuda.jagged_softmax

    def lose_the_last_sequence(x: Tensor, offsets: Tensor) -> Tensor:
        inside = torch.arange(x.shape[0]) < offsets[-2]
        return right(x, offsets).where(inside[:, None], 0.0)

    monkeypatch.setattr(jagged_cuda, "jagged_softmax", lose_the_last_sequence)
    found = run(tmp_path, "table1", "--cases", "jagged_softmax", status=1)
    assert [list(result) for result in rows_of(found, OURS)] == [["wrong"]] * 2
    assert "wrong result of jagged_softmax: " in found["notes"][0]
    assert "sequence 5, row" in found["notes"][0]
    assert all("median_us" in result for result in rows_of(found, "padded"))


def test_a_wrong_gradient_leaves_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = jagged_cuda.jagged_softmax

    def double_the_gradient(x: Tensor, offsets: Tensor) -> Tensor:
        out = right(x, offsets)
        return 2 * out - out.detach()

    monkeypatch.setattr(jagged_cuda, "jagged_softmax", double_the_gradient)
    found = run(tmp_path, "table1", "--cases", "jagged_softmax", "--against", "none", status=1)
    forward, backward = rows_of(found, OURS)
    assert "median_us" in forward and list(backward) == ["wrong"]


@pytest.mark.parametrize("has_our_gradients", [False, True])
def test_a_peers_gradients_in_our_layout_are_judged(has_our_gradients: bool) -> None:
    x = torch.ones(3)
    peer = Candidate(torch.exp, (x,), x, has_our_gradients=has_our_gradients)
    check = mock.Mock()
    check.require_gradients.side_effect = WrongResultError("wrong gradient")
    session = Session(CpuTimer(1), Options())
    rows = [dataclasses.replace(row_of(), pass_name=name) for name in ("forward", "backward")]
    session.run(rows, {"peer": lambda: peer}, check)
    forward, backward = (row.results["peer"] for row in rows)
    assert "median_us" in forward and not session.failed
    assert ("wrong" in backward) == has_our_gradients == ("median_us" not in backward)


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (ValueError("cannot compile\nand many more lines"), "ValueError: cannot compile"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 33 GiB"), "out of memory"),
    ],
)
def test_a_peer_that_fails_is_one_line_and_does_not_fail_the_run(
    failure: Exception, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: str) -> Any:
        raise failure

    monkeypatch.setattr(peers, "need_cuda", lambda name, device: None)
    monkeypatch.setattr(peers, "sll", fail)
    found = run(tmp_path, "table1", "--cases", "jagged_softmax")
    assert rows_of(found, "sll") == [{"error": text}] * 2
    assert found["notes"] == [f"sll: {text} [jagged_softmax forward fp32]"]


def test_a_lost_gpu_ends_the_run_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> Tensor:
        monkeypatch.setattr(CpuTimer, "synchronize", fail)
        raise RuntimeError("an illegal memory access was encountered")

    def fail(timer: CpuTimer) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(jagged_cuda, "jagged_jagged_bmm", lose)
    found = run(tmp_path, "table1", "--against", "none", status=1)
    assert [row["case"] for row in found["rows"]][::2] == ["jagged_dense_bmm", "jagged_jagged_bmm"]
    assert "median_us" in found["rows"][0]["results"][OURS]
    assert found["notes"][-1].startswith("the GPU was lost after jagged_cuda: ")


def test_the_budget_is_kept(tmp_path: Path) -> None:
    found = run(tmp_path, "all", "--seconds-budget", "0")
    assert found["rows"] == []
    assert found["notes"] == [f"{name}: the time was spent" for name in command_line.COMMANDS]


def test_peers_are_left_out_once_the_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "out_of_time", lambda session: True)
    session = Session(CpuTimer(1), Options())
    row = session.add(row_of())
    x = torch.ones(3)
    makers = dict.fromkeys((OURS, HINTED, "fa3"), lambda: Candidate(torch.exp, (x,), x, None))
    session.run((row,), makers, mock.Mock())
    assert {name for name in row.results if "median_us" in row.results[name]} == {OURS, HINTED}
    assert row.results["fa3"] == {"absent": "the time was spent before some peers"}


def test_peers_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_fbgemm_folder", lambda _: None)
    with pytest.raises(peers.AbsentError, match="fbgemm_gpu is not installed"):
        peers.sll("triton_jagged_bmm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(peers.AbsentError, match="neither flash_attn_interface nor"):
        peers.flash_attention_3()


def test_padding_that_would_fill_the_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "memory_bytes", lambda device: 10**6)
    layout = Layout((500, 1, 1, 1))
    operands = Operands.draw(layout, 2, 16, torch.device("cpu"), torch.float32)
    with pytest.raises(peers.AbsentError, match="4 x 500 rows"):
        implementations.sdpa(operands)


# --- what is counted


def test_lengths_are_those_of_the_record() -> None:
    assert shapes.layout(shapes.uniform(1024, 200), quick=False).total == 103_145
    for case in attention.SELF_CASES:
        lengths = shapes.layout(case.draw, quick=False).lengths
        assert lengths == shapes.layout(case.draw, quick=False).lengths
        assert min(lengths) >= (0 if case.name == "crowd" else 1) and max(lengths) <= 16384
    assert shapes.layout(shapes.giant(1024, 16384, 64), quick=False).lengths[0] == 16384


def test_bytes_and_operations() -> None:
    layout = shapes.layout(shapes.uniform(table1.NUM_SEQS, table1.MAX_LEN), quick=False)
    fp32 = shapes.PRECISIONS["fp32"]
    batch = table1.Batch.draw(layout, torch.device("cpu"), fp32)
    operators = {operator.name: operator for operator in table1.OPERATORS}
    dense, jagged = operators["jagged_dense_bmm"], operators["jagged_jagged_bmm"]
    softmax = operators["jagged_softmax"]
    # The floors of the record in microseconds, at 3.03 TB/s.
    assert 4 * dense.forward_elems(batch) / 3.03e6 == pytest.approx(38.8, abs=0.1)
    assert dense.forward_elems(batch) == jagged.forward_elems(batch)
    assert 4 * softmax.forward_elems(batch) / 3.03e6 == pytest.approx(2.2, abs=0.05)
    for name in ("jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out"):
        assert 4 * operators[name].forward_elems(batch) / 3.03e6 == pytest.approx(88.3, abs=0.5)
    assert sum(softmax.backward_elems(batch)) == 3 * batch.y_jagged.numel()
    # The record's lengths have another sum of squares, and these bytes are proportional to it.
    squares = sum(length**2 for length in batch.layout.lengths)
    assert operators["jagged2_softmax"].forward_elems(batch) == 2 * squares
    assert 8 * squares / 3.03e6 == pytest.approx(36.9, rel=0.02)
    layout = Layout((4096,) * 8)
    with torch.device("meta"):
        q = torch.empty(layout.total, 16, 128, dtype=torch.bfloat16)
    operands = Operands(layout, q, q, q, q, torch.zeros(9), 1.0)
    assert operands.flops / 1680 / 1e6 == pytest.approx(655, abs=1)
    causal = dataclasses.replace(operands, causal=True)
    assert 2 * causal.flops == operands.flops
    assert operands.backward_bytes - operands.forward_bytes == 4 * 2 * q.numel()
    layout = Layout((20, 0, 40))
    target = Operands.draw(layout, 1, 8, torch.device("cpu"), torch.float32, queries=3)
    assert target.forward_bytes == 4 * (2 * 72 + 2 * 480 + 9)
    assert target.backward_bytes - target.forward_bytes == 4 * (2 * 72 + 2 * 480)
    assert target.flops == 4 * 3 * 480


def test_every_case_has_goals_and_every_peer_a_description() -> None:
    for case in attention.SELF_CASES + attention.TARGET_CASES:
        assert len(case.goals) == 2
    for command in command_line.COMMANDS.values():
        assert set(command.peers) <= set(peers.DESCRIPTIONS)
        assert set(command.default_peers) <= set(command.peers)


def row_of(**more: Any) -> Row:
    return Row("attention", "short", "forward", "bf16", {}, 0, **more)


@pytest.mark.parametrize(
    ("row", "flops_per_us", "floor_us", "bar_us"),
    [
        (row_of(bytes=(30_300_000,) * 2), None, 20, 1.15 * 20 + 2 * 4),
        (row_of(bytes=(3_030_000,)), None, 1, 1.15 + 8),  # a short kernel
        (row_of(bytes=(30_300_000,), flops=9e9), 1e9, 10, 1.15 * 10 + 4),
        (row_of(bytes=(30_300_000,), flops=2e10), 1e9, 20, None),  # bound by its operations
        (row_of(bytes=(60_600_000,), bar_scale=1.5), None, 20, 1.5 * (1.15 * 20 + 4)),
        (row_of(bytes=(60_600_000,), launch_us=6.0), None, 20, 1.15 * 20 + 6),
        (row_of(bytes=(60_600_000,), launches=3), None, 20, 1.15 * 20 + 3 * 4),
        (row_of(bytes=(3_030_000,), launches=2), None, 1, 1.15 + 2 * 8),
    ],
)
def test_floor_and_bar(
    row: Row, flops_per_us: float | None, floor_us: float, bar_us: float | None
) -> None:
    row.set_floor(session_module.FLOOR_BYTES_PER_US, flops_per_us)
    assert row.floor_us == pytest.approx(floor_us)
    assert row.bar_us == (None if bar_us is None else pytest.approx(bar_us))


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (None, None),
        (Goal(90, "us"), 90),
        (Goal(1.5, "floor"), 30),
        (Goal(0.95, "best peer"), 38),
    ],
)
def test_goals(goal: Goal | None, expected: float | None) -> None:
    times = {OURS: 10.0, HINTED: 5.0, "varlen": 50.0, "fa3": 40.0}
    results = {name: {"median_us": time} for name, time in times.items()}
    row = row_of(goal=goal, floor_us=20.0, results=results | {"sll": {"absent": "no"}})
    assert row.goal_us() == (None if expected is None else pytest.approx(expected))
    assert row_of(goal=Goal(0.95, "best peer")).goal_us() is None


def test_a_copy_is_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    session, sizes = Session(CpuTimer(1), Options()), []
    copy = Tensor.copy_
    monkeypatch.setattr(
        Tensor, "copy_", lambda to, x: sizes.append(x.nbytes) or copy(to, x), raising=True
    )
    session._copy_us(2 * 4096 + 2)  # reads and writes 4,097 bytes
    assert sizes[0] == 2 * 4096
    assert session._copy_us(4 * 4096) == session._copy_us(2 * 4096 + 2)  # one measurement


# --- what is checked


def test_a_lost_sequence_is_seen() -> None:
    """Under the limit for our results, and under the wider one for peers."""
    layout, fp32 = Layout((500, 3, 500)), shapes.PRECISIONS["fp32"]
    batch = table1.Batch.draw(layout, torch.device("cpu"), fp32, table1.QUICK_DIM)
    operator = next(each for each in table1.OPERATORS if each.name == "jagged_softmax")
    check = operator.check(batch)
    right = operator.ours(batch, *operator.inputs(batch))
    check.require_out(right)
    wrong = right.clone()
    wrong[501] += 5e-5
    check.require_out(wrong, slack=8.0)
    for off, slack in ((wrong, 1.0), (right.where(right != right[501], 0.0), 8.0)):
        with pytest.raises(WrongResultError, match=r"wrong result of jagged_softmax.* 1 of 3"):
            check.require_out(off, slack)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    ("name", "options"),
    [(OURS, {"causal": True}), (UNFUSED, {}), (HINTED, {"queries": 3})],
    ids=["self", "unfused", "target"],
)
def test_attention_is_judged(index: int, name: str, options: dict[str, Any]) -> None:
    layout, heads = Layout((30, 2, 17)), 2 if options.get("causal") else 1
    operands = Operands.draw(layout, heads, 8, torch.device("cpu"), torch.float32, **options)
    check = checking.AttentionCheck(operands, scores_in_memory=name == UNFUSED)
    maker = implementations.makers(operands, shapes.PRECISIONS["fp32"])[name]
    results = [tensor.clone() for tensor in maker().step()]
    check.require_out(results[0])
    check.require_gradients(results[1:])
    results[index][-1, -1] += 0.1
    with pytest.raises(WrongResultError, match="of sequence 2"):
        check.require_out(results[0])
        check.require_gradients(results[1:])


def test_scores_in_memory_are_allowed_their_rounding_and_no_more() -> None:
    layout = Layout((96, 40))
    operands = Operands.draw(layout, 1, 64, torch.device("cpu"), torch.bfloat16)
    # Logits sixteen times as large as usual: rounded to bfloat16 they are off by up to 1 / 8.
    operands = dataclasses.replace(operands, scale=16 * operands.scale)
    plain = checking.AttentionCheck(operands)
    rounded = checking.AttentionCheck(operands, scores_in_memory=True)
    leaves = [tensor.squeeze(1).detach().requires_grad_() for tensor in operands.qkv]
    out = unfused.jagged_attention(*leaves, operands.offsets, scale=operands.scale)
    gradients = torch.autograd.grad(out, leaves, operands.grad_out.squeeze(1))
    results = [tensor.unsqueeze(1) for tensor in (out.detach(), *gradients)]
    rounded.require_out(results[0])
    rounded.require_gradients(results[1:])
    with pytest.raises(WrongResultError, match="wrong result of sequence"):
        plain.require_out(results[0])
        plain.require_gradients(results[1:])
    results[0][100] *= 1.5
    with pytest.raises(WrongResultError, match="wrong result of sequence 1"):
        rounded.require_out(results[0])


# --- how it is timed


def test_rounds_are_in_turn_and_keep_both_medians() -> None:
    x, calls = torch.ones(3), []

    def candidate(name: str) -> Candidate:
        calls.append(name)
        return Candidate(torch.exp, (x,), x)

    check = mock.Mock(require_out=lambda *_: calls.append("check"))
    session = Session(CpuTimer(1), Options(rounds=2))
    row = session.add(row_of())
    candidates = {name: functools.partial(candidate, name) for name in (OURS, "fa3")}
    session.run((row,), candidates, check)
    assert calls == [OURS, "check", "fa3", "check", OURS, "fa3"]
    for entry in row.results.values():
        assert len(entry["medians_us"]) == 2
        assert entry["median_us"] == pytest.approx(sum(entry["medians_us"]) / 2, abs=1e-3)
    first, second = row.results[OURS]["medians_us"]
    assert f"{report._number(first)}/{report._number(second)}" == report._time(row, OURS)


def test_a_row_below_the_highest_clock_is_marked() -> None:
    timer = CpuTimer(1)
    timer.max_sm_mhz = 1980
    session = Session(timer, Options())
    for clocks in ((1980, 1980), (1980, 1755)):
        row = session.add(row_of())
        for name, clock in zip((OURS, "fa3"), clocks, strict=True):
            measurement = Measurement.of([1.0], "graph", clock)
            row.set_measurement(name, measurement, timer.max_sm_mhz)
    marks = [(row.as_json()["sm_mhz"], row.below_max_clock) for row in session.rows]
    assert marks == [(1980, False), (1755, True)]
    note = "the SM clock was below its maximum of 1980 MHz in 1 of 2 rows, 1755 MHz at the lowest"
    assert session.all_notes() == [note]
    table = report.tables(session, report.environment(timer))
    assert "1755*" in table and f"note: {note}" in table


@pytest.mark.cuda
def test_a_gpu_is_timed_with_a_cold_clean_cache_and_tells_its_clock() -> None:
    timer = CudaTimer(torch.device("cuda", torch.cuda.current_device()), 20)
    session = Session(timer, Options())
    session.calibrate()
    found = session.sections["calibration"]
    assert 1 < found["empty_kernel_us"]["median_us"] < 10
    assert timer.max_sm_mhz and 0 < found["empty_kernel_us"]["sm_mhz"] <= timer.max_sm_mhz
    with timer.context():
        x, out = torch.rand(2**22, device="cuda"), torch.empty((), device="cuda")  # 16 MB
        cold = timer.measure(lambda: torch.sum(x, 0, out=out)).median_us
        flush, timer._flush = timer._flush, x  # x itself is in the cache then
        warm = timer.measure(lambda: torch.sum(x, 0, out=out)).median_us
        timer._flush = flush
        least_us = x.nbytes / found["copy_tbytes_per_s"] / 1e6
        assert cold > least_us and cold > 1.1 * warm

        def refuse_to_be_captured() -> None:
            x.add_(1)
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("operation not permitted when stream is capturing")

        assert timer.measure(refuse_to_be_captured).method == "eager"


@pytest.mark.cuda
def test_commands_on_a_gpu_time_graphs_and_measure_memory(tmp_path: Path) -> None:
    cases = "jagged_softmax,short,512,paper,attention"
    found = run(tmp_path, "all", "--against", "padded,sdpa", "--cases", cases, device="cuda")
    ours = {row["command"]: row["results"][OURS] for row in found["rows"]}
    commands = {"table1", "attention", "figure2", "target", "sweep", "host", "grid"}
    assert ours.keys() == commands
    assert all(ours[name]["method"] == ("clock" if name == "host" else "graph") for name in ours)
    assert ours["figure2"]["peak_mib"] > 0 and found["rows"][0]["sm_mhz"] > 0


def test_a_peer_off_the_record_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "is_reference_machine", True)
    session = Session(CpuTimer(1), Options(quick=True, against=("padded",)))
    session.calibrate()
    # A record that no machine comes near, so that the note does not hang on this one's speed.
    records = {precision: {"padded": 1e-3} for precision in ("fp32", "bf16")}
    operator = dataclasses.replace(table1.OPERATORS[-1], recorded_us=records)
    monkeypatch.setattr(table1, "OPERATORS", (operator,))
    table1.COMMAND.run(session)
    assert any(note.startswith("padded took ") and "on record" in note for note in session.notes)
