"""The benchmark refuses wrong results, and goes on after failures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bench_runs import row_of, rows_of, run
from torch import Tensor

import jagged_cuda
from benchmarks import __main__ as command_line
from benchmarks import build, checking, hstu, implementations, modules, peers, shapes, table1
from benchmarks.candidate import Candidate
from benchmarks.checking import WrongResultError
from benchmarks.operands import Operands
from benchmarks.session import HINTED, OURS, UNFUSED, Options, Session
from benchmarks.timing import CpuTimer
from jagged_cuda import unfused
from jagged_cuda.testing.lengths import Layout

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
