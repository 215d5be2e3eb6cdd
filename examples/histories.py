"""Histories for the demo: read from a log or drawn from a distribution, and cut into batches."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Accepted names of each column: this project's own, then those of MovieLens' ratings.csv.
COLUMNS = {
    "user_id": ("user_id", "userId"),
    "item_id": ("item_id", "itemId", "movieId"),
    "timestamp": ("timestamp",),
}

# Events per user in MovieLens-20M, as a lognormal fit (scipy's s, loc, scale) by the LensKit Codex.
# Its tail is heavier than the data's, so draws are clipped at the real maximum; the item count is
# the number of rated films.
ML20M_SIGMA, ML20M_LOC, ML20M_SCALE = 1.608, 19.074, 43.156
ML20M_MAX_EVENTS = 9254
ML20M_ITEMS = 26744
NUM_GENRES = 20

PADDING_ITEM = 0
IGNORED_LABEL = -100


class DataError(Exception):
    """A file that cannot be used; the text is one sentence that says why."""


class Histories(NamedTuple):
    """Events of all users, one after another, each user's in the order of time."""

    items: Tensor  # [T] int64, 1 to num_items (0 is padding)
    offsets: Tensor  # [B + 1] int64
    num_items: int
    source: str
    times: Tensor | None = None  # [T] float64, of each event, in the log's unit

    @property
    def lengths(self) -> Tensor:  # [B]
        return self.offsets.diff()


class Batch(NamedTuple):
    """Histories as inputs of a model; rows are [T] jagged, or [B, M] padded behind their ends."""

    items: Tensor  # the events
    positions: Tensor  # of each event in its history
    targets: Tensor  # the event that follows
    labels: Tensor  # 0, the target's place among the candidates, or IGNORED_LABEL where padded
    negatives: Tensor  # [N] items, candidates beside every target
    offsets: Tensor | None  # [B + 1] if jagged, None if padded


def read_events(path: Path, progress: Callable[[float], None] = lambda fraction: None) -> Histories:
    """Read an interaction log: CSV, plain or gzipped, in any order, with a header.

    Columns are user_id, item_id and timestamp (or MovieLens' userId, movieId, timestamp), others
    are ignored. Identifiers are any text, timestamps are numbers; equal ones keep the file's order.
    Users with fewer than two events are dropped.

    Args:
        path: the file.
        progress: called now and then with the part that is read, 0 to 1.

    Returns:
        The histories, items numbered from 1 in the order of their first appearance.

    Raises:
        DataError: the file is missing, is no such CSV, or holds a bad value (with its line).
    """
    user_index: dict[str, int] = {}
    item_index: dict[str, int] = {}
    users, items, times = array("q"), array("q"), array("d")
    try:
        for user, item, time in _read_rows(path, progress):
            users.append(user_index.setdefault(user, len(user_index)))
            items.append(item_index.setdefault(item, len(item_index) + 1))
            times.append(time)
    except UnicodeDecodeError:
        raise DataError("the file must be UTF-8 text, plain or gzipped") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise DataError("the gzip file must be whole, got a damaged one") from None
    except OSError as error:
        raise DataError(f"the file must be readable, got {error.strerror or error}") from None
    if not users:
        raise DataError("there must be events after the header, got none")

    # Sort by time, then by user, both stable.
    user = torch.tensor(users)
    order = torch.tensor(times, dtype=torch.float64).argsort(stable=True)
    order = order[user[order].argsort(stable=True)]
    counts = user.bincount()
    kept = counts >= 2
    if not kept.any():
        raise DataError(f"a user must have two events or more, got {len(counts)} users with one")
    return Histories(
        items=torch.tensor(items)[order][kept[user[order]]],
        offsets=offsets_from_lengths(counts[kept]),
        num_items=len(item_index),
        source=path.name,
        times=torch.tensor(times, dtype=torch.float64)[order][kept[user[order]]],
    )


def _read_rows(path: Path, progress: Callable[[float], None]) -> Iterator[tuple[str, str, float]]:
    """Yield (user, item, time) of each event."""
    size_bytes = max(path.stat().st_size, 1)
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        plain = gzip.GzipFile(fileobj=file) if is_gzip else file
        reader = csv.reader(io.TextIOWrapper(plain, encoding="utf-8-sig", newline=""))
        try:
            header = [name.strip() for name in next(reader, [])]
            places = [_find_column(header, column) for column in COLUMNS]
            for row in reader:
                if row:
                    yield _parse_row(row, places, reader.line_num)
                if reader.line_num % 50_000 == 0:
                    progress(file.tell() / size_bytes)
        except csv.Error as error:
            raise DataError(f"line {reader.line_num} must be CSV, got {error}") from None
    progress(1.0)


def _find_column(header: list[str], column: str) -> int:
    for name in COLUMNS[column]:
        if name in header:
            return header.index(name)
    expected = " or ".join(COLUMNS[column])
    raise DataError(f"the header must have a column {expected}, got {', '.join(header) or 'none'}")


def _parse_row(row: list[str], places: list[int], line: int) -> tuple[str, str, float]:
    if len(row) <= max(places):
        raise DataError(f"line {line} must have {max(places) + 1} fields or more, got {len(row)}")
    user, item, timestamp = (row[place].strip() for place in places)
    if not user or not item:
        raise DataError(f"line {line}: user and item must not be empty")
    try:
        time = float(timestamp)
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise DataError(f"line {line}: timestamp must be a number, got {timestamp!r}")
    return user, item, time


def draw_histories(num_users: int, seed: int) -> Histories:
    """Draw histories as long as those of MovieLens-20M, so that the demo needs no file.

    Lengths follow the lognormal fit, clipped at the real maximum. Each user has one genre, where
    four of five events come from; within a genre an item's popularity falls with its rank as 1 /
    rank (Zipf).

    Source: LensKit Codex, ML-20M (the fit); Harper and Konstan, "The MovieLens Datasets", 2015 (the
    data set).
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(num_users, generator=generator, dtype=torch.float64)
    lengths = (ML20M_LOC + ML20M_SCALE * torch.exp(ML20M_SIGMA * normal)).round().long()
    lengths = lengths.clamp(2, ML20M_MAX_EVENTS)
    total = int(lengths.sum())

    own_genre = torch.randint(NUM_GENRES, (num_users,), generator=generator)
    any_genre = torch.randint(NUM_GENRES, (total,), generator=generator)
    is_stray = torch.rand(total, generator=generator) < 0.2
    genre = torch.where(is_stray, any_genre, own_genre.repeat_interleave(lengths))
    ranks = ML20M_ITEMS // NUM_GENRES
    uniform = torch.rand(total, generator=generator, dtype=torch.float64)
    rank = torch.exp(uniform * math.log(ranks)).long() - 1
    return Histories(
        items=rank * NUM_GENRES + genre + 1,
        offsets=offsets_from_lengths(lengths),
        num_items=ML20M_ITEMS,
        source=f"{num_users:,} histories as long as MovieLens-20M's, seed {seed}",
        times=3600.0 * torch.arange(total, dtype=torch.float64),
    )


def make_batches(
    histories: Histories,
    *,
    num_batches: int,
    batch_size: int,
    cap: int,
    num_negatives: int,
    bucketed: bool = False,
    seed: int,
) -> list[Batch]:
    """Cut histories into jagged batches for predicting the next event.

    Users come in a random order, reshuffled when all have been seen; bucketed, users of like length
    come together, in batches in random order. Of each, the latest ``cap + 1`` events serve: all but
    the last are inputs, all but the first are targets. Negatives are drawn from all events, so
    items come as often as they are popular.
    """
    generator = torch.Generator().manual_seed(seed)
    all_lengths = (histories.lengths - 1).clamp(max=cap)
    groups: list[Tensor] = []
    batches: list[Batch] = []
    for _ in range(num_batches):
        groups = groups or _shuffle_into_groups(all_lengths, batch_size, bucketed, generator)
        users = groups.pop()
        draws = torch.randint(len(histories.items), (num_negatives,), generator=generator)
        batches.append(cut_batch(histories, users, cap, histories.items[draws]))
    return batches


def cut_batch(histories: Histories, users: Tensor, cap: int, negatives: Tensor) -> Batch:
    """The latest ``cap + 1`` events of these users: all but the last are inputs of the model."""
    lengths = (histories.lengths[users] - 1).clamp(max=cap)
    offsets = offsets_from_lengths(lengths)
    positions = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    begin = histories.offsets[users + 1] - 1 - lengths
    rows = begin.repeat_interleave(lengths) + positions
    return Batch(
        items=histories.items[rows],
        positions=positions,
        targets=histories.items[rows + 1],
        labels=torch.zeros_like(rows),
        negatives=negatives,
        offsets=offsets,
    )


def without_last_events(histories: Histories) -> Histories:
    """The histories without the last event of each user; who has too few left is left out."""
    return _first_events(histories, histories.lengths - 1)


def split_by_time(histories: Histories, share: float) -> tuple[Histories, Histories, float]:
    """Cut a log in two at one time, the same for all users.

    Args:
        histories: with times.
        share: of all events, those that are held out; from 0 to 1.

    Returns:
        What is trained on: the events before that time, of users with two or more of them. What is
        evaluated: of each user with events before and after, those before and the first one from
        that time on, which is the one to be found. And the time.

    Raises:
        DataError: the log has no user for one of the two.
    """
    assert histories.times is not None, "histories without times"
    # As many events as the share says, and those at the same time as the first of them.
    count = len(histories.times)
    rank = min(count, count - round(share * count) + 1)
    time = histories.times.kthvalue(rank).values
    is_before = histories.times < time
    ends = offsets_from_lengths(is_before.long())[histories.offsets]
    before = ends.diff()
    trained = _first_events(histories, before)
    has_both = (before > 0) & (before < histories.lengths)
    evaluated = _first_events(histories, (before + 1).where(has_both, 0))
    for part, what in ((trained, "two events before"), (evaluated, "events before and after")):
        if len(part.lengths) == 0:
            raise DataError(f"a user must have {what} time {time:.15g}, got none")
    return trained, evaluated, float(time)


def _first_events(histories: Histories, lengths: Tensor) -> Histories:
    """So many events [B] of each user; who has fewer than two is left out."""
    lengths = lengths.where(lengths >= 2, 0)
    all_lengths = histories.lengths
    begins = histories.offsets[:-1].repeat_interleave(all_lengths)
    is_kept = torch.arange(len(histories.items)) - begins < lengths.repeat_interleave(all_lengths)
    times = histories.times
    return histories._replace(
        items=histories.items[is_kept],
        offsets=offsets_from_lengths(lengths[lengths > 0]),
        times=None if times is None else times[is_kept],
    )


def _shuffle_into_groups(
    lengths: Tensor, batch_size: int, bucketed: bool, generator: torch.Generator
) -> list[Tensor]:
    """Deal all users out into groups of batch_size; those left over sit this round out."""
    batch_size = min(batch_size, len(lengths))
    users = torch.randperm(len(lengths), generator=generator)
    users = users[: len(users) - len(users) % batch_size]
    if bucketed:
        users = users[lengths[users].argsort(stable=True)]
    groups = users.split(batch_size)
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def pad(batch: Batch) -> Batch:
    """The same batch, padded behind each history to the longest one of the batch."""
    assert batch.offsets is not None, "the batch is padded already"
    lengths = batch.offsets.diff()
    seq = torch.arange(len(lengths)).repeat_interleave(lengths)  # [T]
    shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)

    def scatter(rows: Tensor, fill: int) -> Tensor:
        return rows.new_full(shape, fill).index_put((seq, batch.positions), rows)

    return Batch(
        items=scatter(batch.items, PADDING_ITEM),
        positions=torch.arange(shape[1]).repeat(shape[0], 1),  # no view: it may be pinned
        targets=scatter(batch.targets, PADDING_ITEM),
        labels=scatter(batch.labels, IGNORED_LABEL),
        negatives=batch.negatives,
        offsets=None,
    )


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
