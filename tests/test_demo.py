"""The demo: its loader, its batches, and the whole of it on few steps."""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import demo
from histories import (
    IGNORED_LABEL,
    ML20M_ITEMS,
    ML20M_MAX_EVENTS,
    DataError,
    Histories,
    draw_histories,
    make_batches,
    offsets_from_lengths,
    pad,
    read_events,
)
from plain import run_python
from ranker import Ranker, jagged_attention, padded_attention
from report import Result, Side, format_table
from training import Measurement

from jagged_cuda import jagged_flash_attention

HEADER = "user_id,item_id,timestamp\n"
TINY = ["--steps", "3", "--cap", "24", "--batch-size", "8", "--dim", "16", "--negatives", "8"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def write_log(path: Path, num_users: int = 30) -> Path:
    """A gzipped log in which user u has u + 2 events, out of order, beside a column to ignore."""
    lines = [
        f"u{user},i{(7 * user + event) % 50},{1000 - event},x\n"
        for user in range(num_users)
        for event in range(user + 2)
    ]
    path.write_bytes(
        gzip.compress(("user_id,item_id,timestamp,surface\n" + "".join(lines)).encode())
    )
    return path


# The loader


def test_events_are_sorted_by_user_and_time_and_lonely_ones_dropped(tmp_path):
    rows = "b,x,5\na,y,9\nonce,x,1\nb,z,2.5\na,x,9\na,w,-1\n"
    histories = read_events(write(tmp_path / "log.csv", HEADER + rows))
    # x, y, z, w are 1, 2, 3, 4; equal times (a's y and x) keep the file's order.
    assert histories.items.tolist() == [3, 1, 4, 2, 1]
    assert histories.offsets.tolist() == [0, 2, 5]
    assert histories.num_items == 4


@pytest.mark.parametrize("is_gzip", [False, True])
def test_every_form_of_the_file_gives_the_same_histories(tmp_path, is_gzip):
    forms = [
        "user_id,item_id,timestamp\n1,10,5\n1,20,6\n",
        "userId,movieId,rating,timestamp\n1,10,3.5,5\n1,20,4.0,6\n",
        '\ufefftimestamp,extra,item_id,user_id\r\n6,,20,1\r\n\r\n5,"a,b",10,1\r\n',
    ]
    for number, text in enumerate(forms):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(gzip.compress(text.encode()) if is_gzip else text.encode())
        histories = read_events(path)
        assert histories.offsets.tolist() == [0, 2]
        first, second = histories.items.tolist()
        assert {first, second} == {1, 2}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the header must have a column user_id or userId, got none"),
        (
            "user_id,item,timestamp\n",
            "a column item_id or itemId or movieId, got user_id, item",
        ),
        (HEADER, "there must be events after the header, got none"),
        (HEADER + "1,2,3\n1,2,noon\n", "line 3: timestamp must be a number, got 'noon'"),
        (HEADER + "1,2,nan\n", "line 2: timestamp must be a number, got 'nan'"),
        (HEADER + "1,2,3\n\n1,2\n", "line 4 must have 3 fields or more, got 2"),
        (HEADER + "1,,3\n", "line 2: user and item must not be empty"),
        (HEADER + "1,2,3\n2,2,3\n", "a user must have two events or more, got 2 users with one"),
    ],
)
def test_a_wrong_file_gives_one_sentence(tmp_path, text, sentence):
    with pytest.raises(DataError, match=re.escape(sentence)):
        read_events(write(tmp_path / "log.csv", text))


def test_an_unreadable_file_gives_one_sentence(tmp_path):
    with pytest.raises(DataError, match="the file must be readable, got No such file"):
        read_events(tmp_path / "absent.csv")
    damaged = tmp_path / "damaged.csv.gz"
    damaged.write_bytes(gzip.compress((HEADER + "1,2,3\n" * 1000).encode())[:-20])
    with pytest.raises(DataError, match="the gzip file must be whole, got a damaged one"):
        read_events(damaged)
    latin = tmp_path / "latin.csv"
    latin.write_bytes(HEADER.encode() + b"caf\xe9,1,2\n")
    with pytest.raises(DataError, match="the file must be UTF-8 text"):
        read_events(latin)


def test_drawn_histories_follow_the_published_fit():
    histories = draw_histories(4096, seed=0)
    lengths = histories.lengths.double()
    # The fit's median is loc + scale = 62.2; the standard error of 4,096 draws' median is 1.4.
    assert abs(lengths.median() - 62.2) < 6
    assert lengths.max() <= ML20M_MAX_EVENTS
    assert histories.items.min() >= 1 and histories.items.max() <= ML20M_ITEMS
    assert torch.equal(histories.items, draw_histories(4096, seed=0).items)
    assert not torch.equal(histories.lengths, draw_histories(4096, seed=1).lengths)


# Batches


def small_batches(cap: int = 6, num_batches: int = 3):
    items = torch.arange(1, 24)
    histories = Histories(items, torch.tensor([0, 2, 5, 13, 23]), 23, "test")
    return make_batches(
        histories, num_batches=num_batches, batch_size=3, cap=cap, num_negatives=5, seed=0
    )


def test_a_batch_holds_the_latest_events_and_what_follows_each():
    ends = set()
    for batch in small_batches():
        assert batch.offsets.diff().max() <= 6
        assert torch.equal(batch.targets, batch.items + 1)  # as items are numbered in order
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            assert batch.positions[begin:end].tolist() == list(range(end - begin))
            ends.add(batch.targets[end - 1].item())
    assert ends == {2, 5, 13, 23}


def test_bucketed_batches_hold_every_user_once_and_like_lengths_together():
    lengths = torch.randint(2, 40, (60,))
    items = torch.ones(int(lengths.sum()), dtype=torch.long)
    histories = Histories(items, offsets_from_lengths(lengths), 1, "test")
    batches = make_batches(
        histories, num_batches=6, batch_size=10, cap=100, num_negatives=1, bucketed=True, seed=0
    )
    seen = [batch.offsets.diff().sort().values + 1 for batch in batches]
    assert torch.equal(torch.cat(sorted(seen, key=lambda x: x.tolist())), lengths.sort().values)


def test_padding_keeps_the_rows_and_marks_the_rest():
    for batch in small_batches():
        padded = pad(batch)
        is_event = padded.labels != IGNORED_LABEL
        assert torch.equal(is_event.sum(1), batch.offsets.diff())
        for name in ("items", "positions", "targets", "labels"):
            assert torch.equal(getattr(padded, name)[is_event], getattr(batch, name))


def test_the_two_models_agree_in_loss_and_gradient():
    batch = small_batches()[0]
    gradients, losses = [], []
    for attention, prepared in ((padded_attention, pad(batch)), (jagged_attention, batch)):
        torch.manual_seed(0)
        model = Ranker(
            num_items=23, max_positions=6, dim=8, num_heads=2, num_blocks=2, attention=attention
        ).double()
        loss = model.loss(prepared)
        loss.backward()
        losses.append(loss)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


# The whole demo


@pytest.mark.parametrize("with_events", [False, True])
def test_demo_trains_both_and_shows_the_cost(tmp_path, with_events):
    out = tmp_path / "figure.png"
    events = ["--events", str(write_log(tmp_path / "log.csv.gz"))] if with_events else []
    ran = run_python(demo.__file__, *events, *TINY, "--device", "cpu", "--out", str(out))
    for row in ("time per step", "histories per second", "peak memory", "rows per step", "fill"):
        assert re.search(rf"^{row}.* \d", ran.stdout, re.MULTILINE), ran.stdout
    assert "losses    equal within rounding at 3 of 3 steps" in ran.stdout
    assert "padded  [" in ran.stderr and "jagged  [" in ran.stderr and "100%" in ran.stderr
    assert "rofiler" not in ran.stderr
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    assert out.read_bytes().startswith(PNG_SIGNATURE)


def test_a_gpu_gets_as_many_histories_as_fit(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert demo.default_batch_size(cpu, 512, 64) == 32
    for gib, expected in ((80, 1024), (24, 512), (8, 128), (0.001, 1)):
        properties = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert demo.default_batch_size(gpu, 512, 256) == expected


def test_on_a_gpu_the_table_says_when_python_had_queued_a_step():
    sides = [Side(Measurement([4.0], [seconds], 1, [0.004]), 1.0, 1.0) for seconds in (0.2, 0.02)]
    table = format_table(Result(*sides, 1, 1e-5, "test", "GPU", [2], 2))
    assert re.search(r"^time per step +200.0 ms +20.0 ms +10.0x$", table, re.MULTILINE)
    assert re.search(r"^queued by Python after +4.0 ms +4.0 ms", table, re.MULTILINE)


def test_heads_must_divide_the_features(capsys):
    assert demo.main(["--dim", "65", "--heads", "2", "--device", "cpu", "--steps", "1"]) == 2
    sentence = "demo.py: --dim must be a multiple of --heads 2, got 65\n"
    assert capsys.readouterr().err.endswith(sentence)


def test_demo_names_the_file_and_the_line_of_a_bad_value(tmp_path):
    path = write(tmp_path / "bad.csv", HEADER + "1,2,x\n")
    ran = run_python(demo.__file__, "--events", str(path), *TINY, status=2)
    assert ran.stderr.splitlines()[-1] == (
        f"demo.py: {path}: line 2: timestamp must be a number, got 'x'"
    )
    assert "Traceback" not in ran.stderr


def test_demo_fails_if_the_losses_differ(tmp_path, monkeypatch, capsys):
    def attention_that_sees_the_future(q, k, v, batch):
        return jagged_flash_attention(q, k, v, batch.offsets)

    events = ["--events", str(write_log(tmp_path / "log.csv.gz"))]
    wrong = jagged_attention._replace(causal=attention_that_sees_the_future)
    monkeypatch.setattr(demo, "jagged_attention", wrong)
    arguments = [*events, *TINY, "--device", "cpu", "--out", str(tmp_path / "figure.png")]
    assert demo.main(arguments) == 1
    assert "losses    NOT EQUAL" in capsys.readouterr().out


def test_a_loss_that_is_not_a_number_is_not_equal():
    def result(padded: list[float], jagged: list[float]) -> Result:
        sides = (Side(Measurement(losses, [1.0], 1), 1.0, 1.0) for losses in (padded, jagged))
        return Result(*sides, 1, 1e-5, "test", "cpu", [2], 2)

    assert result([4.0], [4.0]).losses_are_equal
    assert not result([4.0], [4.001]).losses_are_equal
    assert not result([float("nan")], [float("nan")]).losses_are_equal


def test_demo_without_matplotlib_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    side = Side(Measurement([4.0], [1.0], 1), 1.0, 1.0)
    result = Result(side, side, 1, 1e-5, "test", "cpu", [2], 2)
    assert "matplotlib is not installed" in demo.write_figure(result, tmp_path / "figure.png")
