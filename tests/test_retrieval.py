"""The examples of row operators: embeddings of places and ages, and search in long histories."""

from __future__ import annotations

import re

import pytest
import torch
from test_demo import write_log  # puts the examples on the path

# isort: split
import embeddings
import retrieval
from embeddings import RowEmbedding, gradients, lookup, lookup_by_torch
from histories import Histories
from retrieval import CHOICES, Rows, Scorer, draw_examples, last_examples

TINY = ["--cap", "24", "--batch-size", "8", "--dim", "16", "--device", "cpu"]


def small_histories() -> Histories:
    offsets = torch.tensor([0, 2, 9, 10, 40])
    items = 1 + torch.arange(40) * 7 % 11
    return Histories(items, offsets, 11, "test", 60.0 * torch.arange(40).double())


# --- embeddings


def test_rows_get_their_place_and_age(device):
    layer = RowEmbedding(num_places=3, num_ages=4, unit=10.0, dim=2).to(device)
    offsets = torch.tensor([1, 5, 5, 7], device=device)
    time = torch.tensor([0, 0, 60, 75, 80, 3, 3, 9], device=device, dtype=torch.float64)
    place, age = layer.numbers(time, offsets, targets=1)
    assert place.tolist() == [0, 2, 2, 1, 0, 1, 0, 0]
    assert age[1:7].tolist() == [3, 2, 0, 0, 0, 0]  # 80, 20, 5, 0; boundaries 10, 20, 40
    out = layer(torch.zeros(8, 2, device=device), time, offsets)
    assert not out[0].any() and not out[7].any()
    expected = layer.recency[2] + layer.age[3] + layer.context[0]
    torch.testing.assert_close(out[1], expected)


def test_the_gradients_of_tables_are_pytorchs(device):
    torch.manual_seed(0)
    layer = RowEmbedding(num_places=9, num_ages=6, unit=60.0, dim=3).to(device).double()
    histories = small_histories()
    x = torch.randn(40, 3, device=device, dtype=torch.float64)
    rows = (x, histories.times.to(device), histories.offsets.to(device))
    found = gradients(layer, rows, lookup)
    torch.testing.assert_close(found, gradients(layer, rows, lookup_by_torch))
    again = gradients(layer, rows, lookup)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_embeddings_run(tmp_path, capsys):
    log = str(write_log(tmp_path / "log.csv.gz"))
    assert embeddings.main(["--events", log, *TINY]) == 0
    found = capsys.readouterr().out
    assert re.search(r"^values +equal within rounding", found, re.MULTILINE), found
    assert re.search(r"^bits +the same", found, re.MULTILINE), found


# --- retrieval


def scorer(name: str, k: int) -> Scorer:
    torch.manual_seed(0)
    return Scorer(num_items=11, choose=CHOICES[name], k=k, dim=8)


def test_the_best_rows_are_those_of_the_candidate(device):
    """An item's own embedding is nearest to it: every event of the candidate is found first."""
    model = scorer("best", 2).to(device)
    torch.nn.init.eye_(model.items.weight)
    items = torch.tensor([3, 5, 3, 7, 8, 5, 3], device=device)
    numbers = torch.zeros_like(items)
    offsets = torch.tensor([0, 4, 7], device=device)
    candidates = model.items(torch.tensor([[3, 7], [5, 3]], device=device)).detach()
    rows = Rows(items, numbers.int(), numbers)
    chosen = CHOICES["best"](model, rows, offsets, candidates, 2)
    assert [seen.items.tolist() for seen, _ in chosen] == [[3, 3, 5, 3], [3, 7, 5, 3]]
    assert [kept.tolist() for _, kept in chosen] == [[0, 2, 4]] * 2


@pytest.mark.parametrize("name", ["newest", "best"])
def test_with_room_for_all_events_every_choice_is_all(name, device):
    histories = small_histories()
    examples = retrieval.move(draw_examples(histories, 1, 4, cap=30, seed=0)[0], device)
    expected = scorer("all", 30).to(device)
    found = scorer(name, 30).to(device)
    torch.testing.assert_close(found(examples), expected(examples))
    gradient_of = [
        torch.autograd.grad(model.loss(examples), model.key.weight)[0]
        for model in (found, expected)
    ]
    torch.testing.assert_close(*gradient_of, rtol=1e-4, atol=1e-6)


def test_examples_predict_from_the_past():
    histories = small_histories()
    for examples in (
        *draw_examples(histories, 3, 4, cap=5, seed=1),
        *last_examples(histories, 4, 2, cap=5, seed=1),
    ):
        assert examples.offsets.diff().max() <= 5
        for seq, target in enumerate(examples.candidates[:, 0]):
            past = examples.items[examples.offsets[seq] : examples.offsets[seq + 1]]
            if len(past) > 0:  # items go up by 7 in turn
                assert target == (past[-1] + 7 - 1) % 11 + 1


@pytest.mark.parametrize("with_events", [False, True])
def test_retrieval_runs(tmp_path, capsys, with_events):
    events = ["--events", str(write_log(tmp_path / "log.csv.gz"))] if with_events else []
    arguments = [*events, *TINY, "--steps", "3", "--users", "24", "--k", "4"]
    assert retrieval.main(arguments) == 0
    found = capsys.readouterr().out
    for name in CHOICES:
        row = rf"^{name} +[\d.]+% +[\d.]+ +[\d.]+% +[\d.]+ +[\d.]+$"
        assert re.search(row, found, re.MULTILINE), found


def test_histories_of_two_events_are_too_short(tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text("user_id,item_id,timestamp\n1,1,1\n1,2,2\n")
    assert retrieval.main(["--events", str(log), *TINY]) == 2
    sentence = "retrieval.py: a user must have three events or more, got none"
    assert sentence in capsys.readouterr().err
