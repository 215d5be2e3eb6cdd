"""The benchmark command: what each of its commands reports; times are not judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import run

from benchmarks import (
    attention,
    build,
    grid,
    hstu,
    mixed,
    modules,
    norm,
    report,
    rows,
    shapes,
    sweep,
    table1,
    unseen,
)
from benchmarks.session import HINTED, OURS, UNFUSED, Command, Options, Row, Session
from benchmarks.timing import CpuTimer

MEASURED = {"median_us", "min_us", "q25_us", "q75_us", "repetitions", "method"}
TABLE1 = table1.COMMAND.cases


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


@pytest.mark.cuda
def test_commands_on_a_gpu_time_graphs_and_measure_memory(tmp_path: Path) -> None:
    cases = "jagged_softmax,short,512,paper,attention"
    found = run(tmp_path, "all", "--against", "padded,sdpa", "--cases", cases, device="cuda")
    ours = {row["command"]: row["results"][OURS] for row in found["rows"]}
    commands = {"table1", "attention", "figure2", "target", "sweep", "host", "grid"}
    assert ours.keys() == commands
    assert all(ours[name]["method"] == ("clock" if name == "host" else "graph") for name in ours)
    assert ours["figure2"]["peak_mib"] > 0 and found["rows"][0]["sm_mhz"] > 0
