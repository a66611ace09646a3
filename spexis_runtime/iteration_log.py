# SPDX-License-Identifier: Apache-2.0
"""The per-iteration log: one JSON object a line and a tick of the pipeline."""

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spexis_kernels.constants import DRAFT, NORMAL
from spexis_kernels.pool import Rows

PATTERN = "iterations-*.jsonl"
LONGEST_LINE = 2000  # bytes; with 256 drafts it has a third of it


class RowCounts(NamedTuple):
    """What became of the decode rows of a step; counted on the last stage."""

    normal_rows: int
    draft_rows: int
    valid_rows: int  # rows that yielded a token, last prefill rows included
    drafts_after_valid: int  # draft rows all of whose predecessors were right
    accepted_drafts: int  # of those, right themselves
    row_budget: int  # decode rows that the step ran, padding included

    @property
    def acceptance(self) -> float | None:
        """theta of the step; None where no draft had a right prefix."""
        if not self.drafts_after_valid:
            return None
        return round(self.accepted_drafts / self.drafts_after_valid, 4)

    @staticmethod
    def of_rows(
        rows: Rows, known_len: np.ndarray, tokens_of_row: list[int]
    ) -> "RowCounts":
        """Count a step's rows by their fate, on the host.

        Args:
            rows: the decode rows, [k] int32 arrays.
            known_len: [num_slots], as `verify` left it, so that for an accepted row it
                is already one more than it was.
            tokens_of_row: 1 for a valid row; decode rows, then prefill rows.
        """
        valid = np.array(tokens_of_row, dtype=np.int32)[: len(rows.slots)]
        drafts = rows.kinds == DRAFT
        # padding rows look at the last slot and are of no kind that counts
        right_so_far = rows.positions == known_len[rows.slots] - valid - 1
        return RowCounts(
            normal_rows=int((rows.kinds == NORMAL).sum()),
            draft_rows=int(drafts.sum()),
            valid_rows=sum(tokens_of_row),
            drafts_after_valid=int((drafts & right_so_far).sum()),
            accepted_drafts=int((drafts & (valid > 0)).sum()),
            row_budget=len(rows.slots),
        )


class DraftOutcomes(NamedTuple):
    """Of a step's draft rows all of whose predecessors were right."""

    depth: np.ndarray  # [num_drafts] int, drafts in flight when it was fed, itself too
    confidence: np.ndarray  # [num_drafts] float32, the draft's own
    right: np.ndarray  # [num_drafts] bool

    @classmethod
    def of_rows(
        cls,
        rows: Rows,
        confidence: np.ndarray,
        known_len: np.ndarray,
        known_len_when_fed: np.ndarray,
        tokens_of_row: list[int],
        max_depth: int,
    ) -> "DraftOutcomes":
        """As `RowCounts.of_rows`.

        Args:
            confidence: [k] float32, of each row's draft.
            known_len_when_fed: [num_slots], of N steps before; for a request that was
                not there yet, anything.
        """
        valid = np.array(tokens_of_row, dtype=np.int32)[: len(rows.slots)]
        counted = (rows.kinds == DRAFT) & (
            rows.positions == known_len[rows.slots] - valid - 1
        )
        depth = rows.positions - known_len_when_fed[rows.slots] + 1
        depth = depth[counted].clip(1, max_depth)
        return cls(depth, confidence[counted], valid[counted] > 0)

    def by_confidence(self) -> str:
        """Which were right, the most confident first: a "1" or "0" a draft."""
        order = np.argsort(-self.confidence, kind="stable")
        return "".join("01"[right] for right in self.right[order].tolist())


class IterationLog:
    """Writes `<log_dir>/iterations-<time>-<pid>.jsonl`; each line is complete."""

    def __init__(self, log_dir: str):
        name = time.strftime("iterations-%Y%m%d-%H%M%S-") + f"{os.getpid()}.jsonl"
        self._file = open(Path(log_dir) / name, "a", buffering=1)  # noqa: SIM115
        self._last = time.perf_counter()

    def write(self, **fields: Any) -> None:
        now = time.perf_counter()
        fields["milliseconds"] = round((now - self._last) * 1e3, 3)
        self._last = now
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._file.close()


def newest_log(log_dir: str | os.PathLike[str]) -> Path | None:
    """The log in `log_dir` that was written to last; None if there is none."""
    logs = Path(log_dir).glob(PATTERN)
    return max(logs, key=lambda path: path.stat().st_mtime_ns, default=None)


def read_iterations(log_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the newest log in `log_dir`, in order; [] if there is none."""
    log = newest_log(log_dir)
    return [json.loads(line) for line in log.open()] if log else []


def last_iterations(
    log_dir: str | os.PathLike[str], count: int
) -> list[dict[str, Any]]:
    """The last `count` lines of it, or fewer; does not read the others."""
    log = newest_log(log_dir)
    if log is None:
        return []
    with log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - count * LONGEST_LINE))
        lines = stream.read().splitlines()
    if size > count * LONGEST_LINE:
        lines = lines[1:]  # cut
    return [json.loads(line) for line in lines[-count:]]


def acceptance(iterations: list[dict[str, Any]]) -> float:
    """theta: accepted drafts / draft rows whose prefix was right; 0 without drafts."""
    right = sum(line["drafts_after_valid"] for line in iterations)
    return sum(line["accepted_drafts"] for line in iterations) / max(right, 1)


def accepted_of_all_drafts(iterations: list[dict[str, Any]]) -> float:
    """Accepted drafts / all draft rows; 0 without drafts."""
    drafts = sum(line["draft_rows"] for line in iterations)
    return sum(line["accepted_drafts"] for line in iterations) / max(drafts, 1)


def tokens_per_step(iterations: list[dict[str, Any]]) -> float:
    """Verified tokens per tick of the pipeline, empty ticks included."""
    return sum(line["valid_rows"] for line in iterations) / max(len(iterations), 1)
