"""hstu_key_ranges: HSTU's masks as ranges of keys, and the promises of an operator of indices."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from plain import run_python, sentence

import jagged_cuda
from jagged_cuda import hstu_key_ranges
from jagged_cuda.testing.lengths import Layout
from jagged_cuda.testing.ops import hstu_key_ranges as room


@pytest.mark.parametrize("part", range(4))
def test_agrees_with_the_definition(part: int, device: torch.device) -> None:
    """Thousands of random settings; the module's command judges as many as asked for."""
    for seed in range(800 * part, 800 * (part + 1)):
        room.judge(room.draw(seed), device)


def test_triton_agrees_with_the_definition() -> None:
    import triton_ref

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for seed in range(40):
        room.judge(room.draw(seed), device, triton_ref)


def test_the_command_judges() -> None:
    done = run_python("-m", room.__name__, "--settings", "20", "--first", "5000")
    assert done.stdout == "hstu_key_ranges: right for 20 settings on cpu\n"


CAUSAL = room.Setting(Layout((9,)))


def test_the_judge_finds_a_key_too_many() -> None:
    class Wrong:
        @staticmethod
        def hstu_key_ranges(*args: Any, **options: Any) -> torch.Tensor:
            return hstu_key_ranges(*args, **options | {"max_attn_len": 4})

    setting = dataclasses.replace(CAUSAL, max_attn_len=3)
    room.judge(setting)
    with pytest.raises(AssertionError, match=r"sequence 0, row and key \[4, 0\]"):
        room.judge(setting, ops=Wrong)


def test_the_judge_finds_ranges_in_the_wrong_order() -> None:
    class Wrong:
        @staticmethod
        def hstu_key_ranges(*args: Any, **options: Any) -> torch.Tensor:
            return hstu_key_ranges(*args, **options).flip(1)

    for length, targets, contextual, text in (
        (9, None, 0, "a second range"),
        (2, None, 2, "a second range"),
        (2, (2,), 0, "ranges of targets"),
        (2, (2,), 2, "ranges of targets"),
    ):
        setting = dataclasses.replace(
            CAUSAL, layout=Layout((length,)), targets=targets, contextual=(contextual,)
        )
        room.judge(setting)
        with pytest.raises(AssertionError, match=f"sequence 0, {text}"):
            room.judge(setting, ops=Wrong)


def test_a_mask_that_can_be_read() -> None:
    """Two contextual keys, a history of three, four targets in groups of two; two steps back."""
    ranges = hstu_key_ranges(
        torch.tensor([0, 9]),
        num_targets=torch.tensor([4]),
        contextual_len=2,
        max_attn_len=2,
        target_group=2,
    )
    assert ranges.flatten(1).tolist() == [
        [0, 5, 0, 0],
        [0, 5, 0, 0],
        [0, 3, 0, 0],
        [0, 4, 0, 0],
        [2, 5, 0, 0],
        [3, 5, 5, 6],
        [3, 5, 5, 7],
        [3, 5, 7, 8],
        [3, 5, 7, 9],
    ]


def arguments(device: torch.device | str, lengths: tuple[int, ...], tail: int = 0) -> Any:
    """The registered operator's, with all tensors."""
    layout = Layout(lengths, base=1, tail=tail)
    offsets = layout.offsets(device)
    counts = torch.arange(len(lengths), device=device) % 3
    return (offsets, offsets, counts, counts.int(), 0, 3, 1, 2, False, layout.total)


def test_opcheck(device: torch.device) -> None:
    given = arguments(device, (3, 0, 9))
    operator = torch.ops.jagged_cuda.hstu_key_ranges.default
    torch.library.opcheck(operator, given)
    torch.library.opcheck(operator, (given[0], None, None, None, *given[4:]))


def function(offsets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    counts = offsets.diff() % 3
    return hstu_key_ranges(
        offsets, num_targets=counts, contextual_len=counts, causal=False, total=x.shape[0]
    )


@pytest.mark.parametrize("exported", [False, True], ids=["compile", "export"])
def test_compiles_for_any_batch(exported: bool, device: torch.device) -> None:
    batches = [
        (a[0], torch.zeros(a[-1], device=device))
        for a in (arguments(device, (3, 0, 9)), arguments(device, (4, 1, 7, 0, 30), 2))
    ]
    if exported:

        class Model(torch.nn.Module):
            def forward(self, offsets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
                return function(offsets, x)

        batch, rows = torch.export.Dim("batch", min=2), torch.export.Dim("rows", min=2)
        shapes = {"offsets": {0: batch + 1}, "x": {0: rows}}
        run = torch.export.export(Model(), batches[0], dynamic_shapes=shapes).module()
    else:
        run = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch_arguments in batches:
        assert torch.equal(run(*batch_arguments), function(*batch_arguments))


def test_the_size_is_read_where_it_is_not_given(device: torch.device) -> None:
    offsets = torch.tensor([1, 3, 8], device=device)
    expected = hstu_key_ranges(offsets, total=8)
    assert torch.equal(hstu_key_ranges(offsets), expected)
    assert torch.equal(hstu_key_ranges(offsets, total=20)[:8], expected)


def test_counts_of_any_stride_and_dtype(device: torch.device) -> None:
    offsets = torch.tensor([0, 3, 8], device=device)
    counts = torch.tensor([1, 9, 2, 9], device=device)[::2]
    given = {"num_targets": counts, "contextual_len": counts}
    expected = hstu_key_ranges(offsets, **given)
    for cast in (torch.int32, torch.int64):
        found = hstu_key_ranges(offsets.int(), **{n: c.to(cast) for n, c in given.items()})
        assert torch.equal(found, expected)


def test_200_000_sequences(device: torch.device) -> None:
    few = (3, 0, 1, 5, 2)
    layout = Layout(few * 40_000)
    found = hstu_key_ranges(layout.offsets(device), max_attn_len=2, total=layout.total)
    expected = hstu_key_ranges(Layout(few).offsets(device), max_attn_len=2)
    assert torch.equal(found, expected.repeat(40_000, 1, 1))


@pytest.mark.parametrize("argument", ["offsets", "kv_offsets"])
def test_wrong_offsets_are_named(argument: str) -> None:
    right, wrong = torch.tensor([0, 2, 6]), torch.tensor([0, 4, 2])
    given = {"kv_offsets": wrong} if argument == "kv_offsets" else {}
    text = sentence(hstu_key_ranges, right if given else wrong, total=6, **given)
    assert text == f"hstu_key_ranges: {argument}[2] must be >= {argument}[1] = 4, got 2"


def test_wrong_counts_are_named() -> None:
    offsets, counts = torch.tensor([0, 2, 6]), torch.tensor([1, -2])
    for argument, name in (("num_targets", "num_targets"), ("contextual_len", "contextual_lens")):
        text = sentence(hstu_key_ranges, offsets, total=6, **{argument: counts})
        assert text == f"hstu_key_ranges: {name}[1] must be >= 0, got -2"


def test_misuse_gets_a_sentence(device: torch.device) -> None:
    offsets = torch.tensor([0, 2, 6], device=device)
    for options, text in (
        ({"contextual_len": [1, 2]}, "contextual_len must be an int or a tensor, got a list"),
        ({"contextual_len": 1.5}, "contextual_len must be an int or a tensor, got a float"),
        ({"contextual_len": -1}, "contextual_len must be >= 0, got -1"),
        ({"contextual_len": offsets}, "contextual_lens must be [2], got [3]"),
        ({"num_targets": 3}, "num_targets must be a tensor or None, got a int"),
        ({"target_group": 0}, "target_group must be >= 1, got 0"),
    ):
        found = sentence(hstu_key_ranges, offsets, total=6, **options)  # type: ignore[arg-type]
        assert found.startswith(f"hstu_key_ranges: {text}"), found


def test_torch_fx_keeps_it_whole() -> None:
    class Model(torch.nn.Module):
        def forward(self, offsets, x):
            return hstu_key_ranges(offsets, max_attn_len=2, total=x.shape[0])

    traced = torch.fx.symbolic_trace(Model())
    assert hstu_key_ranges in [node.target for node in traced.graph.nodes]
    offsets = torch.tensor([0, 2, 6])
    assert torch.equal(traced(offsets, torch.zeros(6)), Model()(offsets, torch.zeros(6)))


@pytest.mark.cuda
def test_a_graph_replays_with_other_lengths() -> None:
    """Captured without a synchronisation."""
    counts = torch.tensor([1, 0, 2], device="cuda")
    offsets = torch.tensor([1, 4, 4, 9], device="cuda")

    def call() -> torch.Tensor:
        return hstu_key_ranges(
            offsets, num_targets=counts, contextual_len=counts, max_attn_len=3, total=300
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for values in ((0, 0, 0, 300), (2, 2, 170, 290), (0, 100, 200, 300)):
        offsets.copy_(torch.tensor(values))
        graph.replay()
        assert torch.equal(found, call())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_wrong_offsets_stay_in_bounds() -> None:
    """Offsets that decrease, are negative or extreme: values are unspecified."""
    extremes = (-(2**63), -5, 0, 7, 2**63 - 1)
    for values in itertools.product(extremes, repeat=3):
        offsets = torch.tensor(values, device="cuda")
        hstu_key_ranges(offsets, kv_offsets=offsets.flip(0), num_targets=offsets[:2], total=9)
    torch.cuda.synchronize()
    assert jagged_cuda.hstu_key_ranges(torch.tensor([0, 1], device="cuda")).tolist() == [
        [[0, 1], [0, 0]]
    ]
