# SPDX-License-Identifier: Apache-2.0
"""Requests to simulate: when they arrive, and how long they are."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Workload(NamedTuple):
    """Requests in order of arrival; arrays of one length."""

    arrival_ms: np.ndarray  # float64, not decreasing
    prompt_tokens: np.ndarray  # int64, >= 1
    output_tokens: np.ndarray  # int64, >= 1; what the request will generate
    max_tokens: np.ndarray  # int64, >= output_tokens; what the host knows of that

    @classmethod
    def make(
        cls,
        arrival_ms: np.ndarray,
        prompt_tokens: np.ndarray,
        output_tokens: np.ndarray,
        max_tokens: np.ndarray | int | None = None,
    ) -> "Workload":
        """Raises ValueError where the requests cannot be.

        Args:
            max_tokens: of each, or of all; None: all end at their `output_tokens`.
        """
        arrival = np.asarray(arrival_ms, dtype=np.float64)
        prompt, output = (
            np.asarray(x, dtype=np.int64) for x in (prompt_tokens, output_tokens)
        )
        most = output if max_tokens is None else np.asarray(max_tokens, dtype=np.int64)
        most = np.maximum(np.broadcast_to(most, output.shape), output)
        if not len(arrival) == len(prompt) == len(output) > 0:
            raise ValueError(
                f"{len(arrival)} arrivals, {len(prompt)} prompts and {len(output)} "
                "outputs: as many of each are needed, at least one"
            )
        if (np.diff(arrival) < 0).any():
            raise ValueError("arrivals must be in order")
        if prompt.min() < 1 or output.min() < 1:
            raise ValueError("prompts and outputs must have at least one token")
        return cls(arrival, prompt, output, np.ascontiguousarray(most))

    @property
    def num_requests(self) -> int:
        return len(self.arrival_ms)


def poisson_arrivals(rng: np.random.Generator, count: int, rate: float) -> np.ndarray:
    """[count] ms: arrivals of a Poisson process of `rate` requests a second."""
    return rng.exponential(1e3 / rate, count).cumsum()


def burst_arrivals(count: int, size: int, every_ms: float) -> np.ndarray:
    """[count] ms: `size` requests at once, every so many milliseconds."""
    return np.arange(count) // size * every_ms


def lognormal_lengths(
    rng: np.random.Generator, count: int, mean: float, sigma: float, most: int
) -> np.ndarray:
    """[count] int64 in [1, most]: log-normal, of that mean before they are cut.

    Args:
        sigma: of the logarithm; 0: all of the mean's length.
    """
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(lengths), 1, most).astype(np.int64)


def read_trace(path: str | os.PathLike[str]) -> Workload:
    """Read requests from JSON lines; raises ValueError naming a line that is none.

    {"arrival_ms": 12.5, "prompt_tokens": 90, "output_tokens": 200, "max_tokens": 512}

    `max_tokens` may be left out.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            output = int(entry["output_tokens"])
            rows.append(
                (
                    float(entry["arrival_ms"]),
                    int(entry["prompt_tokens"]),
                    output,
                    int(entry.get("max_tokens", output)),
                )
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    rows.sort(key=lambda row: row[0])
    return Workload.make(*(np.array(column) for column in zip(*rows, strict=True)))
