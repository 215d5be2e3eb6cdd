"""What is made from a results file: figures, README's table, the stamp of a commit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks import plot, report, results, stamp, sweep, table
from benchmarks.session import HINTED, OURS, UNFUSED

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "benchmarks" / "results" / "h200.json"


def _row(command: str, case: str, times: dict[str, Any], **more: Any) -> dict[str, Any]:
    row = {
        "command": command,
        "case": case,
        "pass": "forward",
        "precision": "bf16",
        "shape": {"B": 4, "T": 30, "max_len": 10, "H": 1, "D": 8, "N": 2, "fill": 0.75},
        "flops": 1e9,
        "bytes": [10**7],
        "results": {
            name: {"median_us": time, "peak_mib": time} if isinstance(time, float) else time
            for name, time in times.items()
        },
    }
    return row | more


def _content(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": {
            "device": "cuda",
            "gpu": "some GPU",
            "torch": "2.11.0",
            "commit": "0123456789abcdef",
            "changed_since_commit": False,
            "version": "0.1.0",
            "sources": "abc",
        },
        "calibration": {"copy_tbytes_per_s": 3.0, "bf16_matmul_tflops": 790.0},
        "rows": list(rows),
    }


def _save(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


# --- figures


@pytest.fixture
def content() -> dict[str, Any]:
    lost = {"error": "out of memory"}
    times = {OURS: 100.0, UNFUSED: 300.0, "sdpa": 500.0, "varlen": 150.0}
    return _content(
        _row("figure2", "512", times | {"dense": 900.0}),
        _row("figure2", "1024", times | {"dense": lost}),
        *(_row("sweep", f"{case} 5%", times | {"padded": 700.0}) for case in sweep.COMMAND.cases),
        _row("attention", "short", times),
        _row("table1", "jagged_dense_bmm", {OURS: 3.0, "padded": 5.0, "sll": 4.0}),
    )


def test_a_figure_has_the_panels_that_the_rows_suffice_for(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    file, figure = _save(tmp_path / "run.json", content), tmp_path / "new" / "figure.png"
    assert command_line.main(["plot", str(file), "--plot", str(figure)]) == 0
    assert f"{figure}: {', '.join(plot.PANELS)}" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size < 200_000
    del content["rows"][2:], content["calibration"]["bf16_matmul_tflops"]
    assert plot.draw(content, figure) == ["time", "memory"]
    for row in content["rows"]:
        row["results"][OURS]["peak_mib"] = None  # as on a CPU
    assert plot.draw(content, figure) == ["time"]
    with pytest.raises(ValueError, match="no rows for memory, fill"):
        plot.draw(content, figure, ["memory", "fill"])


def test_what_a_figure_says(content: dict[str, Any]) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="the figure needs matplotlib")
    axes = figure_module.Figure().add_axes((0, 0, 1, 1))
    plot._DRAW["time"](axes, content, plot._ROWS["time"](content))
    said = [text.get_text() for text in axes.get_legend().texts]
    assert said[-1] == "jagged_cuda" and {
        "jagged_cuda, unfused  3×",
        "FlashAttention-2  1.5×",
    } < set(said)
    assert "padded, unfused (fails at 1024)" in said
    assert axes.lines[0].get_xydata().tolist() == [[512, 100], [1024, 100]]
    axes = figure_module.Figure().add_axes((0, 0, 1, 1))
    plot._DRAW["fill"](axes, content, plot._ROWS["fill"](content))
    assert axes.lines[0].get_xydata().tolist() == [[25, 5]]  # padding, sdpa's time over ours
    axes = figure_module.Figure().add_axes((0, 0, 1, 1))
    plot._DRAW["roofline"](axes, content, plot._ROWS["roofline"](content))
    # The least time is that of 10 MB at 3 TB/s; below ours the fastest other.
    ratios = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
    assert ratios[:2] == pytest.approx([45, 30])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["short", "jagged_dense_bmm"]


def test_without_matplotlib_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plot, "is_possible", lambda: False)
    with pytest.raises(SystemExit):
        command_line.main(["plot", str(COMMITTED), "--plot", str(tmp_path / "figure.png")])
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err


def test_a_file_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    file = _save(tmp_path / "other.json", {})
    with pytest.raises(SystemExit):
        command_line.main(["plot", str(file), "--plot", str(tmp_path / "figure.png")])
    assert "is no results file" in capsys.readouterr().err


# --- README's tables


def _markdown(content: dict[str, Any]) -> str:
    return "\n".join(table.markdown(content).values())


def test_the_table_names_the_fastest_of_each_pass() -> None:
    shape = {"B": 4, "T": 20, "max_len": 10, "H": 2, "D": 8, "causal": True}
    out_of_memory = {"absent": "sdpa: padded, the batch does not fit"}
    forward = {OURS: 50.0, HINTED: 1.0, "sdpa": 60.0, "varlen": 45.0, "fa3": 40.04}
    backward = {OURS: 1500.0, "sdpa": out_of_memory, "varlen": 2000.0, "fa3": {"absent": "no"}}
    content = _content(
        _row("attention", "short", forward, shape=shape),
        _row("attention", "short", backward, shape=shape) | {"pass": "backward"},
        _row("attention", "cut off before its backward", forward, shape=shape),
        _row("attention", "short", forward, shape=shape, precision="fp32"),
    )
    lines = _markdown(content | {"command": "the command"}).splitlines()
    assert (
        "| 4 of 5 on average, 10 at most; 2 heads of 8, causal | 50.0 / **1,500** | 60.0 / - |"
        " **40.0** / 2,000 (FlashAttention-3 / FlashAttention-2) |"
    ) in lines
    assert len([line for line in lines if line.startswith("| 4 of")]) == 1
    assert "| | self-attention |" in lines
    assert "| FlashAttention-2 | 0.90 to 1.33 |" in lines
    assert "| FlashAttention-3 | 0.80 |" in lines and "| padded PyTorch | 1.20 |" in lines
    assert "`-`: padded, the batch does not fit." in lines
    assert "the command" in lines


def test_the_unfused_form_is_told_beside_its_padded_twin(content: dict[str, Any]) -> None:
    text = _markdown(content | {"command": ""})
    assert "is 3.00 times as fast as unfused attention on padded data, in 3.00 times less" in text
    assert "at longest lengths of 512 to 512" in text  # dense fails at 1,024
    content["rows"][0]["results"]["dense"] = {"error": "out of memory"}
    assert "unfused" not in _markdown(content | {"command": ""})


def test_a_document_is_updated_between_its_markers() -> None:
    begin = "<!-- speed: made by `make readme` of benchmarks/results -->"
    end = "<!-- end of speed -->"
    document = f"before\n{begin}\nold\n{end}\nafter"
    new = table.updated(document, "speed", "new")
    assert new == f"before\n{begin}\n\nnew\n\n{end}\nafter"
    assert table.updated(new, "speed", "new") == new
    for wrong in ("", document + document, f"{end}{begin}"):
        with pytest.raises(ValueError, match="must"):
            table.updated(wrong, "speed", "new")


def test_readme_is_what_the_command_makes_of_the_committed_results(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    copy = tmp_path / "README.md"
    copy.write_text(readme)
    assert command_line.main(["table", str(COMMITTED), "--update", str(copy)]) == 0
    assert copy.read_text() == readme, "make readme"
    digest = results.digest(results.load(COMMITTED)).encode()
    for name in ("h200", "h200_roofline", "h200_sweep"):
        assert f"benchmarks/results/{name}.png" in readme
        figure = (COMMITTED.parent / f"{name}.png").read_bytes()
        assert digest in figure and len(figure) < 200_000, "make readme"


# --- the stamp of a commit


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two commits, whose sources differ."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    root = tmp_path / "repository"
    for name in ("csrc/kernel.cu", "jagged_cuda/__init__.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(f"the first {name}")
    _git(root, "init", "--quiet")
    _commit(root)
    (root / "csrc" / "kernel.cu").write_text("another")
    _commit(root)
    return root


def _git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _commit(root: Path) -> None:
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "--message", "a commit")


def test_a_commit_is_stamped_if_its_sources_were_measured(repository: Path) -> None:
    content = _content()
    first, second = _git(repository, "rev-parse", "HEAD~1"), _git(repository, "rev-parse", "HEAD")
    content["environment"] |= {"sources": stamp.hash_of(repository, first), "commit": None}
    with pytest.raises(ValueError, match=f"sources of {second[:12]} are "):
        stamp.stamp(content, repository, "HEAD")
    assert content["environment"]["commit"] is None
    assert stamp.stamp(content, repository, "HEAD~1") == first
    assert content["environment"]["commit"] == first
    (repository / "jagged_cuda" / "__init__.py").write_text("python alone differs")
    _git(repository, "checkout", "--quiet", "-B", "other", first)
    _commit(repository)
    with pytest.raises(ValueError, match="those measured are"):
        stamp.stamp(content, repository, "HEAD")
    with pytest.raises(ValueError, match="nowhere"):
        stamp.stamp(content, repository, "nowhere")


def test_the_hash_is_the_one_that_a_run_writes(repository: Path) -> None:
    """The same files have the same hash, whether they come from the history or lie in a folder."""
    (repository / "jagged_cuda" / "built.so").write_text("not a source")
    assert stamp.hash_of(repository, "HEAD") == report.source_hash(repository)
