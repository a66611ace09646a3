# SPDX-License-Identifier: Apache-2.0
"""What the per-iteration log counts, writes and is read back as."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from spexis_kernels import verify
from spexis_kernels.constants import (
    DRAFT,
    INVALID_TOKEN,
    NORMAL,
    PAD,
    PAD_SLOT_ID,
    PREFILL,
)
from spexis_kernels.pool import RequestPool, Rows
from spexis_runtime.iteration_log import (
    DraftOutcomes,
    IterationLog,
    RowCounts,
    acceptance,
    accepted_of_all_drafts,
    read_iterations,
    tokens_per_step,
)

KNOWN_LEN, LAST_TOKEN = 10, 5  # of every slot
RIGHT, WRONG = LAST_TOKEN, LAST_TOKEN + 1
NEWEST = KNOWN_LEN - 1

# (position, token, kind) of a row, and what it counts for
FATES = {
    (NEWEST, RIGHT, NORMAL): {"row_budget", "normal_rows", "valid_rows"},
    (NEWEST, RIGHT, DRAFT): {
        "row_budget",
        "draft_rows",
        "valid_rows",
        "drafts_after_valid",
        "accepted_drafts",
    },
    (NEWEST, WRONG, DRAFT): {"row_budget", "draft_rows", "drafts_after_valid"},
    (NEWEST + 1, RIGHT, DRAFT): {"row_budget", "draft_rows"},  # one before it was wrong
    (NEWEST + 2, WRONG, DRAFT): {"row_budget", "draft_rows"},
    (NEWEST, RIGHT, PREFILL): {"valid_rows"},
    (NEWEST - 3, RIGHT, PREFILL): set(),  # an inner chunk
    (0, RIGHT, PAD): {"row_budget"},
}


def count(rows: list[tuple[int, int, int]]) -> dict[str, int]:
    """The counts of rows that sit in one slot each, after the package's own verify."""
    pool = RequestPool.empty(max(len(rows), 1), 1, "cpu")
    pool.known_len.fill_(KNOWN_LEN)
    pool.last_token.fill_(LAST_TOKEN)
    slots = [PAD_SLOT_ID if k == PAD else i for i, (_, _, k) in enumerate(rows)]
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    positions, tokens, kinds = (torch.tensor(c, dtype=torch.int32) for c in columns)
    slot_column = torch.tensor(slots, dtype=torch.int32)
    step = Rows(slot_column, torch.zeros_like(slot_column), positions, tokens, kinds)
    accepted = verify(pool, step, torch.full_like(slot_column, 7))
    valid = (accepted != INVALID_TOKEN).int()
    is_chunk = kinds == PREFILL
    counted = RowCounts.of_rows(
        Rows(*(column[~is_chunk].numpy() for column in step)),
        pool.known_len.numpy(),
        [*valid[~is_chunk].tolist(), *valid[is_chunk].tolist()],
    )
    return counted._asdict()


@pytest.mark.parametrize("row", FATES)
def test_a_row_counts_for(row: tuple[int, int, int]) -> None:
    expected = {name: int(name in FATES[row]) for name in RowCounts._fields}
    assert count([row]) == expected


def test_counts_add_up() -> None:
    rng = random.Random(0)
    rows = rng.choices(list(FATES), k=200)
    assert count(rows) == {
        name: sum(name in FATES[row] for row in rows) for name in RowCounts._fields
    }
    assert set(count([]).values()) == {0}


def test_drafts_by_confidence() -> None:
    depth = np.ones(4, dtype=np.int32)
    confidence = np.array([0.2, 0.9, 0.5, 0.5], dtype=np.float32)
    right = np.array([False, True, True, False])
    assert DraftOutcomes(depth, confidence, right).by_confidence() == "1100"
    none = DraftOutcomes(depth[:0], confidence[:0], right[:0])
    assert none.by_confidence() == ""


def test_lines_are_complete_as_they_are_written(tmp_path: Path) -> None:
    log = IterationLog(str(tmp_path))
    for i in range(3):
        log.write(running=i, valid_rows=2 * i)
        lines = read_iterations(tmp_path)  # while it is still open
        assert [line["running"] for line in lines] == list(range(i + 1))
    log.close()
    assert read_iterations(str(tmp_path)) == lines
    assert all(
        line.keys() == {"running", "valid_rows", "milliseconds"} for line in lines
    )
    assert all(line["milliseconds"] >= 0 for line in lines)
    (file,) = tmp_path.iterdir()
    assert file.name.endswith(f"-{os.getpid()}.jsonl")
    assert file.read_text().count("\n") == 3


def test_the_newest_log_is_read(tmp_path: Path) -> None:
    assert read_iterations(tmp_path) == []
    for name, age in (("iterations-b", 5), ("iterations-a", 1), ("iterations-c", 9)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"running": age}) + "\n")
        os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "other.jsonl").write_text("no log\n")
    assert read_iterations(tmp_path) == [{"running": 1}]


def test_rates() -> None:
    names = RowCounts._fields
    lines = [
        dict(zip(names, counts, strict=True))
        for counts in ((4, 8, 10, 6, 5, 12), (4, 12, 8, 4, 3, 16), (0, 0, 0, 0, 0, 0))
    ]
    assert acceptance(lines) == 8 / 10
    assert accepted_of_all_drafts(lines) == 8 / 20
    assert tokens_per_step(lines) == 18 / 3
    for rate in (acceptance, accepted_of_all_drafts, tokens_per_step):
        assert rate([]) == 0
        assert rate(lines[2:]) == 0
