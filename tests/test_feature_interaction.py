"""The example of feature interaction: its three forms, and the whole of it on a small batch."""

from __future__ import annotations

import re

import pytest
import torch
from plain import run_python
from test_demo import small_batches, write_log  # puts the examples on the path

# isort: split
import feature_interaction
from feature_interaction import (
    FORMS,
    FeatureInteraction,
    make_inputs,
    run_only,
    scores_and_gradients,
)
from histories import pad

from jagged_cuda.nn import JaggedFeatureInteraction
from jagged_cuda.unfused import jagged_attention

TINY = ["--cap", "24", "--batch-size", "8", "--dim", "16", "--candidates", "5", "--device", "cpu"]
JAGGED_FORMS = pytest.mark.parametrize("name", ["jagged", "flash"])


def inputs_of(batch, device="cpu"):
    num_scores = int(batch.offsets.diff().square().sum())
    return tuple(make_inputs(b, num_scores, torch.device(device)) for b in (pad(batch), batch))


@JAGGED_FORMS
def test_the_forms_agree_in_scores_and_gradients(name, device):
    torch.manual_seed(0)
    block = FeatureInteraction(num_items=23, max_positions=6, dim=8).to(device).double()
    for batch in small_batches():
        padded, jagged = inputs_of(batch, device)
        assert padded.items.numel() > jagged.items.numel()
        expected = scores_and_gradients(block, padded, FORMS["padded"])
        found = scores_and_gradients(block, jagged, FORMS[name])
        assert found[0].shape == (3, 6)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_events_meet_by_the_library_s_unfused_attention(device):
    _, inputs = inputs_of(small_batches()[0], device)
    q, k, v = torch.randn(3, inputs.items.numel(), 8, device=device).unbind()
    found = FORMS["jagged"].meet(q, k, v, inputs, run_only)
    expected = jagged_attention(q, k, v, inputs.offsets, total_scores=inputs.num_scores)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_candidates_meet_events_by_the_library_s_module(device):
    """Its result is what the block's last layer ranks."""
    block = FeatureInteraction(num_items=23, max_positions=6, dim=8).to(device)
    module = JaggedFeatureInteraction(8, device=device)
    module.load_state_dict({"query.weight": block.query.weight})
    _, inputs = inputs_of(small_batches()[0], device)
    rows = torch.randn(inputs.items.numel(), 8, device=device)
    candidates = block.embedding.item(inputs.candidates)
    found = module(candidates, rows, inputs.offsets)
    flash = FORMS["flash"]
    pooled = flash.pool(block.query(candidates), rows, inputs, run_only)
    mean = flash.mean(rows, inputs).unsqueeze(1).expand_as(pooled)
    assert torch.equal(found, torch.cat([candidates, pooled, mean], dim=-1))


@pytest.mark.parametrize("with_events", [False, True])
def test_it_measures_every_stage_in_every_form(tmp_path, with_events):
    events = ["--events", str(write_log(tmp_path / "log.csv.gz"))] if with_events else []
    ran = run_python(feature_interaction.__file__, *events, *TINY)
    cost = r"[\d,.]+ ms +[\d,.]+ MiB"
    for stage in ("embed the events", "events meet events", "candidates meet events", "all of it"):
        assert re.search(rf"^{stage}( +{cost}){{3}}$", ran.stdout, re.MULTILINE), ran.stdout
    for operator in ("jagged2_softmax", "jagged_dense_bmm", "jagged_softmax", "jagged_jagged_bmm"):
        row = rf"^  {operator}( +{cost}){{2}} +in one$"
        assert re.search(row, ran.stdout, re.MULTILINE), ran.stdout
    for name in ("jagged", "flash"):
        assert re.search(rf"^{name} +equals padded within rounding", ran.stdout, re.MULTILINE)
        assert re.search(rf"^all of it +{name} .* time, .* memory", ran.stdout, re.MULTILINE)
    for name in FORMS:
        assert re.search(rf"^{name} *\[#+\] 100%", ran.stderr, re.MULTILINE), ran.stderr


@JAGGED_FORMS
@pytest.mark.parametrize("part", ["meet", "pool", "mean"])
def test_it_fails_if_a_form_is_wrong(tmp_path, monkeypatch, capsys, name, part):
    right = getattr(FORMS[name], part)
    wrong = FORMS[name]._replace(**{part: lambda *args, **kwargs: 1.001 * right(*args, **kwargs)})
    monkeypatch.setitem(FORMS, name, wrong)
    events = ["--events", str(write_log(tmp_path / "log.csv.gz"))]
    assert feature_interaction.main([*events, *TINY]) == 1
    assert re.search(rf"^{name} +IS NOT EQUAL to padded", capsys.readouterr().out, re.MULTILINE)


def test_a_missing_log_gives_one_sentence(tmp_path):
    path = tmp_path / "absent.csv"
    ran = run_python(feature_interaction.__file__, "--events", str(path), *TINY, status=2)
    sentence = "the file must be readable, got No such file or directory"
    assert ran.stderr == f"feature_interaction.py: {path}: {sentence}\n"
