# SPDX-License-Identifier: Apache-2.0
"""Measured step times of a machine: milliseconds of one stage's step by decode rows.

The JSON file, one a machine and a model:

    {"machine": "...", "model": "...", "source": "command, date, or where it is from",
     "stages": [{"pipeline_parallel_size": 2, "tensor_parallel_size": 1,
                 "speculative": false,
                 "rows": [8, 16, ...], "milliseconds": [16.9, 17.6, ...],
                 "prefill_tokens": [512], "prefill_milliseconds": [27.0]}]}

An entry is the slowest of the equal stages of a pipeline; with `speculative`, stage 0
drafts. `prefill_milliseconds` is what prefill tokens add to a step; both lists may be
empty, and prefill then costs nothing. Between the points times are linear; below the
first they are the first, as the weights are read whatever the rows; beyond the last the
line goes on.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spexis_runtime.train.prompts import write_text


class StepTimesError(ValueError):
    """A table that cannot be used; the message is one line and says what is wrong."""


@dataclass(frozen=True)
class StageTimes:
    """One stage's step times. Raises StepTimesError if they cannot be."""

    rows: tuple[int, ...]  # increasing, at least one
    milliseconds: tuple[float, ...]  # of a step with so many decode rows
    prefill_tokens: tuple[int, ...] = ()
    prefill_milliseconds: tuple[float, ...] = ()  # added to a step by so many tokens

    def __post_init__(self) -> None:
        for name, at, times in (
            ("rows", self.rows, self.milliseconds),
            ("prefill_tokens", self.prefill_tokens, self.prefill_milliseconds),
        ):
            if len(at) != len(times):
                raise StepTimesError(f"{len(at)} {name} but {len(times)} times")
            if any(b <= a for a, b in zip((0, *at), at, strict=False)):
                raise StepTimesError(f"{name} must increase from 1 on, got {list(at)}")
            if not all(isinstance(t, int | float) and t > 0 for t in times):
                raise StepTimesError(f"times by {name} must be > 0, got {list(times)}")
        if not self.rows:
            raise StepTimesError("no rows: at least one measured step is needed")

    def decode_ms(self, rows: float) -> float:
        """Milliseconds of a step with `rows` decode rows, of any number >= 0."""
        return _interpolate(rows, self.rows, self.milliseconds)

    def prefill_ms(self, tokens: float) -> float:
        """Milliseconds that `tokens` prefill tokens add to a step."""
        return _interpolate(
            tokens, (0, *self.prefill_tokens), (0.0, *self.prefill_milliseconds)
        )

    def decode_table(self, max_rows: int) -> np.ndarray:
        """[max_rows + 1] float64, `decode_ms` of 0, 1, ... `max_rows` rows."""
        return np.array([self.decode_ms(rows) for rows in range(max_rows + 1)])

    def prefill_table(self, max_tokens: int) -> np.ndarray:
        """[max_tokens + 1] float64, `prefill_ms` of 0, 1, ... `max_tokens` tokens."""
        return np.array([self.prefill_ms(tokens) for tokens in range(max_tokens + 1)])


def _interpolate(x: float, at: tuple[int, ...], values: tuple[float, ...]) -> float:
    if x > at[-1] and len(at) > 1:
        slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
        return values[-1] + slope * (x - at[-1])
    return float(np.interp(x, at, values))


Kind = tuple[int, int, bool]
"""pipeline_parallel_size, tensor_parallel_size, speculative"""


@dataclass(frozen=True)
class StepTimes:
    """The step times of a machine and a model, by kind of stage."""

    machine: str
    model: str
    source: str
    stages: dict[Kind, StageTimes]

    def stage(self, pipeline: int, tensor: int = 1, *, speculative: bool) -> StageTimes:
        """The times of a kind of stage; StepTimesError if they were not measured."""
        kind = pipeline, tensor, speculative
        if kind not in self.stages:
            raise StepTimesError(
                f"no step times of {describe(kind)} among those of {self.machine!r}: "
                f"{'; '.join(map(describe, self.stages))}"
            )
        return self.stages[kind]


def describe(kind: Kind) -> str:
    """
    >>> describe((2, 4, True))
    'PP=2 TP=4 with drafts'
    """
    pipeline, tensor, speculative = kind
    return f"PP={pipeline} TP={tensor}{' with drafts' if speculative else ''}"


def read_step_times(path: str | os.PathLike[str]) -> StepTimes:
    """Read the JSON file described above; raises StepTimesError naming the file."""
    try:
        content = json.loads(Path(path).read_text())
        stages: dict[Kind, StageTimes] = {}
        for entry in content["stages"]:
            kind = (
                int(entry["pipeline_parallel_size"]),
                int(entry["tensor_parallel_size"]),
                bool(entry["speculative"]),
            )
            if kind in stages:
                raise StepTimesError(f"{describe(kind)} is there twice")
            stages[kind] = StageTimes(
                tuple(entry["rows"]),
                tuple(entry["milliseconds"]),
                tuple(entry.get("prefill_tokens", ())),
                tuple(entry.get("prefill_milliseconds", ())),
            )
        return StepTimes(
            content["machine"], content["model"], content["source"], stages
        )
    except OSError as error:
        raise StepTimesError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise StepTimesError(f"{path} is not JSON: {error}") from error
    except KeyError as error:
        raise StepTimesError(f"{path} lacks {error}") from error
    except (TypeError, StepTimesError) as error:
        raise StepTimesError(f"{path}: {error}") from error


def write_step_times(times: StepTimes, path: str | os.PathLike[str]) -> None:
    """Write `times`, as a whole, so that `read_step_times` reads the same."""
    stages: list[dict[str, Any]] = [
        dict(
            pipeline_parallel_size=pipeline,
            tensor_parallel_size=tensor,
            speculative=speculative,
            rows=stage.rows,
            milliseconds=stage.milliseconds,
            prefill_tokens=stage.prefill_tokens,
            prefill_milliseconds=stage.prefill_milliseconds,
        )
        for (pipeline, tensor, speculative), stage in times.stages.items()
    ]
    content = dict(
        machine=times.machine, model=times.model, source=times.source, stages=stages
    )
    write_text(Path(path), json.dumps(content, indent=1) + "\n")
