"""examples/train_ranker.py: shares, checkpoints, evaluation; two processes train as one does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_ranker
from balance import Sampler, balanced, contiguous, skew
from histories import (
    DataError,
    Histories,
    cut_batch,
    draw_histories,
    split_by_time,
    without_last_events,
)
from train_ranker import Processes, Trainer

TINY = "--device cpu --users 40 --cap 24 --dim 8 --batch-size 10 --negatives 8 --eval-items 20"


def sampler_of(lengths: torch.Tensor, **options) -> Sampler:
    settings = {"batch_size": 32, "num_ranks": 4, "deal": balanced, "seed": 0}
    return Sampler(lengths, **(settings | options))


# --- shares


@pytest.mark.parametrize("deal", [balanced, contiguous])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_every_user_is_dealt_out_once_per_epoch(deal, num_ranks):
    sampler = sampler_of(draw_histories(100, 0).lengths, num_ranks=num_ranks, deal=deal)
    assert sampler.steps_per_epoch == 3
    for epoch in range(2):
        steps = range(3 * epoch, 3 * epoch + 3)
        users = [sampler.users(step, rank) for step in steps for rank in range(num_ranks)]
        assert len(torch.cat(users).unique()) == len(torch.cat(users)) == 96
    again = sampler_of(sampler.lengths, num_ranks=num_ranks, deal=deal)
    assert torch.equal(again.users(5, 0), sampler.users(5, 0))  # from any step, in any order


def test_balanced_shares_are_even():
    sampler = sampler_of(draw_histories(4096, 0).lengths.clamp(max=512), batch_size=256)
    rows, pairs = skew(sampler, balanced, 16)
    plain_rows, plain_pairs = skew(sampler, contiguous, 16)
    assert rows < 1.02 < 1.1 < plain_rows
    assert pairs < 1.05 < 1.2 < plain_pairs


def test_one_giant_gets_a_process_of_its_own():
    lengths = torch.tensor([3, 2, 500, 1, 2, 3, 0])
    assert [share.tolist() for share in balanced(lengths, 2)] == [[2], [0, 1, 3, 4, 5, 6]]


def test_squares_of_lengths_count_as_lengths_do():
    """By lengths alone [10, 1, 1] and [5, 5, 1, 1] are even; squares are 102 to 52 then."""
    lengths = torch.tensor([10, 5, 5, 1, 1, 1, 1])
    assert [share.tolist() for share in balanced(lengths, 2)] == [[0], [1, 2, 3, 4, 5, 6]]


# --- evaluation


def test_the_last_event_is_held_out():
    histories = Histories(torch.arange(1, 11), torch.tensor([0, 2, 5, 10]), 10, "test")
    trained = without_last_events(histories)  # the first user has too few
    assert trained.items.tolist() == [3, 4, 6, 7, 8, 9] and trained.offsets.tolist() == [0, 2, 6]
    batch = cut_batch(histories, torch.arange(3), 3, torch.tensor([1]))
    assert batch.targets[batch.offsets[1:] - 1].tolist() == [2, 5, 10]


def test_the_log_is_cut_at_one_time():
    """Nobody's later events are trained on; each user's first later one is to be found."""
    times = torch.tensor([1, 8, 9, 2, 3, 4, 5, 6, 7, 8, 5, 6]).double()
    histories = Histories(torch.arange(1, 13), torch.tensor([0, 3, 6, 7, 8, 10, 12]), 12, "", times)
    trained, evaluated, time = split_by_time(histories, 0.25)
    assert time == 8 and (histories.times >= time).sum() == 3
    assert trained.items.tolist() == [4, 5, 6, 11, 12] and trained.offsets.tolist() == [0, 3, 5]
    assert evaluated.items.tolist() == [1, 2, 9, 10] and evaluated.offsets.tolist() == [0, 2, 4]
    for part in (trained, evaluated):
        assert part.times.tolist() == times[part.items - 1].tolist()
    last_held_out = without_last_events(histories)
    assert last_held_out.times.tolist() == times[last_held_out.items - 1].tolist()
    with pytest.raises(DataError, match="a user must have two events before time 1, got none"):
        split_by_time(histories, 1.0)


def trainer_of(arguments: str) -> Trainer:
    args = train_ranker.parse_arguments(arguments.split())
    processes = Processes(0, 1, torch.device("cpu"))
    train_ranker.choose_sizes(args, processes)
    histories = draw_histories(args.users, args.seed)
    generator = torch.Generator().manual_seed(1)
    times = torch.rand(len(histories.items), generator=generator, dtype=torch.float64)
    parts = times.split(histories.lengths.tolist())
    times = torch.cat([part.sort().values for part in parts])
    return Trainer(args, histories._replace(times=times), processes)


METRICS = ["", "--padded", "--eval-items 0 --users 12", "--time-split 0.4"]


@pytest.mark.parametrize("options", METRICS)
def test_metrics_agree_with_a_user_at_a_time(options):
    trainer = trainer_of(f"{TINY} {options}")
    histories, num_items = trainer.evaluated, trainer.evaluated.num_items
    candidates = torch.arange(1, num_items + 1)
    if trainer.args.eval_items:
        generator = torch.Generator().manual_seed(0)
        candidates = torch.randperm(num_items, generator=generator)[:20] + 1
    hits, gains = [], []
    for user in range(len(histories.lengths)):
        events = histories.items[histories.offsets[user] : histories.offsets[user + 1]]
        history, held_out = events[:-1][-24:], events[-1]
        others = candidates[candidates != held_out]
        one = Histories(
            torch.cat([history, held_out[None]]), torch.tensor([0, len(history) + 1]), num_items, ""
        )
        batch = cut_batch(one, torch.tensor([0]), 24, others)
        batch = train_ranker.pad(batch) if trainer.args.padded else batch
        with torch.no_grad():
            scores = trainer.model(batch)[1][0]
        rank = 1 + int((scores[1:] >= scores[0]).sum())
        hits.append(rank <= 10)
        gains.append(1 / math.log2(1 + rank) if rank <= 10 else 0.0)
    hit_rate, ndcg = trainer.evaluate()
    assert hit_rate == pytest.approx(sum(hits) / len(hits))
    assert ndcg == pytest.approx(sum(gains) / len(gains))


# --- whole trainings


def losses_of(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def finish(*processes: subprocess.Popen[str]) -> str:
    """What they printed, once they have ended well."""
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "".join(printed)
    return "".join(printed)


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(folder: Path, script: Path, *options: str) -> list[subprocess.Popen[str]]:
    meet = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    command = [str(script), *TINY.split(), *options]
    return [start(folder, *command, **meet, RANK=str(rank)) for rank in (0, 1)]


def free_ports(number: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in free]


def trainings(*arguments: list[str]) -> str:
    """A script of several trainings in turn, which share the import of PyTorch.

    Each meets at a port of its own: at the same one a process could meet the training before.
    """
    examples = str(Path(train_ranker.__file__).parent)
    lines = [f"import os, sys; sys.path.insert(0, {examples!r})", "import train_ranker"]
    for each, port in zip(arguments, free_ports(len(arguments)), strict=True):
        lines.append(f"os.environ['MASTER_PORT'] = '{port}'")
        lines.append(f"train_ranker.main([*sys.argv[1:], *{each!r}])")
    lines.append("sys.stdout.flush(); os._exit(0)  # as train_ranker.py itself ends")
    return "\n".join(lines) + "\n"


def test_trainings_agree(tmp_path, capsys):
    """All in one test, so that one worker has the processes started, and once."""
    script = tmp_path / "trainings.py"
    script.write_text(
        trainings(
            ["--steps", "6", "--losses", "whole.jsonl"],
            ["--steps", "4", "--losses", "parts.jsonl", "--checkpoint", "four.pt"],
        )
    )
    printed = finish(*start_two(tmp_path, script))
    assert_report_is_whole(printed)
    whole = losses_of(tmp_path / "whole.jsonl")
    assert len(set(whole)) == 6

    # Resumed by torchrun, in other processes than those that wrote the checkpoint: the same bits.
    # They were killed after it: another step's loss is there, and a part of the next.
    with (tmp_path / "parts.jsonl").open("a") as parts:
        parts.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    resume = ["--steps", "6", "--resume", "four.pt", "--losses", "parts.jsonl"]
    finish(start(tmp_path, *torchrun, train_ranker.__file__, *TINY.split(), *resume))
    assert losses_of(tmp_path / "parts.jsonl") == whole

    # One process, its padded twin, and plain shares: equal up to rounding.
    for options in ([], ["--padded"], ["--contiguous"]):
        path = tmp_path / "one.jsonl"
        six = ["--steps", "6", "--losses", str(path)]
        assert train_ranker.main([*TINY.split(), *six, *options]) == 0
        assert losses_of(path) == pytest.approx(whole, rel=1e-5), options

    # The checkpoint of another training, or none, is refused in one sentence.
    checkpoint = str(tmp_path / "four.pt")
    capsys.readouterr()
    assert train_ranker.main([*TINY.split(), "--seed", "1", "--resume", checkpoint]) == 2
    sentence = "--seed must be 0, as in this checkpoint's training, got 1\n"
    assert capsys.readouterr().err.endswith(sentence)
    assert train_ranker.main([*TINY.split(), "--resume", str(tmp_path / "absent.pt")]) == 2
    assert capsys.readouterr().err.endswith("absent.pt: No such file or directory\n")
    for content in (b"no checkpoint", b""):
        (tmp_path / "other.pt").write_bytes(content)
        assert train_ranker.main([*TINY.split(), "--resume", str(tmp_path / "other.pt")]) == 2
        sentence = "other.pt: this must be a checkpoint of train_ranker.py\n"
        assert capsys.readouterr().err.endswith(sentence)


def test_a_log_without_anything_to_train_on(tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text("user_id,item_id,timestamp\n1,1,1\n1,2,2\n2,1,1\n2,2,5\n")
    assert train_ranker.main([*TINY.split(), "--events", str(log)]) == 2
    sentence = "a user must have three events or more, the last to be held out, got none\n"
    assert capsys.readouterr().err.endswith(sentence)


@pytest.mark.parametrize("options", ["", "--padded"])
def test_a_process_without_users_to_evaluate(options, monkeypatch):
    """Its part of the sums is 0."""
    trainer = trainer_of(f"{TINY} {options}")
    trainer.evaluated = split_by_time(trainer.evaluated, 1e-9)[1]
    assert len(trainer.evaluated.lengths) == 1
    monkeypatch.setattr(Processes, "total", lambda _, *values: list(values))
    trainer.processes = trainer.processes._replace(rank=1, count=2)
    assert trainer.evaluate() == (0.0, 0.0)


def test_a_training_that_is_killed_while_it_saves_keeps_its_checkpoint(tmp_path, monkeypatch):
    """Whichever process is killed: no file has its name before all are written."""
    trainer, path = trainer_of(TINY), tmp_path / "ranker.pt"
    trainer.save(path)
    before = path.read_bytes()
    trainer.step = 7

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Processes, "total", killed)  # another process never comes
        with pytest.raises(KeyboardInterrupt):
            trainer.save(path)
    assert path.read_bytes() == before
    trainer.save(path)
    resumed = trainer_of(TINY)
    resumed.load(path)
    assert resumed.step == 7


def test_a_time_split_of_a_log(tmp_path, capsys):
    """It needs a log; a checkpoint of another split is refused."""
    histories = draw_histories(30, 0)
    users = torch.arange(30).repeat_interleave(histories.lengths)
    times = torch.randint(1000, users.shape, generator=torch.Generator().manual_seed(0))
    log, checkpoint = tmp_path / "log.csv", str(tmp_path / "two.pt")
    rows = zip(users.tolist(), histories.items.tolist(), times.tolist(), strict=True)
    lines = [f"{user},{item},{time}\n" for user, item, time in rows]
    log.write_text("user_id,item_id,timestamp\n" + "".join(lines))
    options = [*TINY.split(), "--steps", "2", "--time-split", "0.1"]
    assert train_ranker.main([*options, "--events", str(log), "--checkpoint", checkpoint]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"the first event from time \d{3} on of each of \d\d users", printed)
    assert re.search(r"evaluation  step 2: hit rate at 10 \d\.\d{4}", printed)

    assert train_ranker.main([*TINY.split(), "--events", str(log), "--resume", checkpoint]) == 2
    assert "--time-split must be 0.1, as in this" in capsys.readouterr().err
    assert train_ranker.main(options) == 2
    sentence = "--time-split needs --events: drawn histories have no common time\n"
    assert capsys.readouterr().err.endswith(sentence)
    assert train_ranker.main([*options[:-1], "1", "--events", str(log)]) == 2
    assert capsys.readouterr().err.endswith("must be above 0 and below 1, got 1.0\n")


@pytest.mark.cuda
def test_trainings_agree_on_a_gpu(tmp_path, capsys):
    """The padded twin, a resumed training and the CPU give the losses of the jagged training."""

    def train(*options: str, steps: int = 6, name: str = "losses.jsonl") -> list[float]:
        losses = tmp_path / name
        given = ["--steps", str(steps), "--losses", str(losses), *options]
        assert train_ranker.main([*TINY.split(), *given]) == 0
        return losses_of(losses)

    on_gpu = ["--device", "cuda", "--deterministic"]
    try:
        whole = train(*on_gpu)
        assert torch.cuda.get_device_name() in capsys.readouterr().out
        assert train(*on_gpu, "--padded") == pytest.approx(whole, rel=1e-5)
        assert train(*on_gpu, "--bf16") == pytest.approx(whole, rel=1e-2)
        checkpoint = str(tmp_path / "four.pt")
        train(*on_gpu, "--checkpoint", checkpoint, steps=4, name="parts.jsonl")
        assert train(*on_gpu, "--resume", checkpoint, name="parts.jsonl") == whole
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert train("--device", "cpu") == pytest.approx(whole, rel=1e-5)


def assert_report_is_whole(printed: str) -> None:
    assert "2 processes on CPU" in printed
    assert re.search(r"balance +the process with the most has 1\.\d\d times .*contig", printed)
    assert re.search(r"waiting for it takes [\d.]+ ms per step \(contiguous: ", printed)
    assert re.search(r"evaluation  step 6: hit rate at 10 0\.\d{4}, NDCG at 10 0\.\d{4}", printed)
    assert re.search(r"time +[\d.]+ ms per step", printed)
    assert re.search(r"memory +[\d,]+ MiB", printed)


@pytest.mark.torchrec
def test_a_table_spread_by_torchrec(tmp_path):
    """The losses of one process, and of a training that was resumed."""
    whole, parts, one = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "one"))
    six, checkpoint = ["--steps", "6", "--losses"], str(tmp_path / "four.pt")
    script = tmp_path / "trainings.py"
    script.write_text(
        trainings(
            [*six, str(whole)],
            ["--steps", "4", "--losses", str(parts), "--checkpoint", checkpoint],
            [*six, str(parts), "--resume", checkpoint],
        )
    )
    finish(*start_two(tmp_path, script, "--torchrec"))
    assert losses_of(parts) == losses_of(whole)
    assert train_ranker.main([*TINY.split(), "--torchrec", *six, str(one)]) == 0
    assert losses_of(one) == pytest.approx(losses_of(whole), rel=1e-5)


def test_torchrec_is_asked_for(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "torchrec_table", raising=False)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    assert train_ranker.main([*TINY.split(), "--torchrec"]) == 2
    assert "--torchrec needs TorchRec" in capsys.readouterr().err
