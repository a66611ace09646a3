# SPDX-License-Identifier: Apache-2.0
"""The memory forecast: its time for 256 requests, and the errors of Algorithm 1.

python -m bench.lookahead.memory --out bench/results/cpu-2-cores
"""

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path

import numpy as np

from spexis_runtime.lookahead.memory import (
    HORIZON,
    MAX_AGE,
    NUM_BUCKETS,
    THRESHOLDS,
    MemoryTables,
    RemainingLengths,
    algorithm_1,
    forecast,
)

NUM_REQUESTS, LENGTH = 256, 512


def exact_lengths() -> RemainingLengths:
    """A predictor whose thresholds are met to the token, as Algorithm 1 takes them."""
    probability = np.zeros((NUM_BUCKETS, HORIZON + MAX_AGE + 1))
    for bucket, threshold in enumerate(THRESHOLDS):
        probability[bucket, threshold - 1] = 1
    probability[-1, -1] = 1
    return RemainingLengths(probability)


def compare(theta: float, num_stages: int) -> dict[str, float]:
    """Greatest relative errors of Algorithm 1 over the iterations, and times in us."""
    lengths = np.full(NUM_REQUESTS, LENGTH)
    buckets = np.arange(NUM_REQUESTS) % NUM_BUCKETS
    remaining = np.array([*THRESHOLDS, np.inf])[buckets]
    certain = np.ones(NUM_REQUESTS)
    none_ends = np.full(NUM_REQUESTS, np.inf)
    grown = algorithm_1(lengths, none_ends, certain, theta, num_stages) - lengths.sum()
    i = np.arange(1, HORIZON + 1)
    expected = NUM_REQUESTS * i / (num_stages - theta * (num_stages - 1))
    paper = algorithm_1(lengths, remaining, certain, theta, num_stages)
    start = time.perf_counter()
    tables = MemoryTables.make(exact_lengths(), theta, num_stages)
    make_us = 1e6 * (time.perf_counter() - start)
    tokens, running = np.empty(HORIZON), np.empty(HORIZON)
    ages = np.zeros(NUM_REQUESTS, dtype=np.int64)
    times = []
    for _ in range(2001):
        start = time.perf_counter()
        forecast(
            lengths,
            buckets,
            ages,
            NUM_REQUESTS,
            tables.alive,
            tables.generated,
            tokens,
            running,
        )
        times.append(time.perf_counter() - start)
    return dict(
        theta=theta,
        num_stages=num_stages,
        error_of_generated=float(np.abs(grown / expected - 1)[8:].max()),
        error_of_memory=float(np.abs(paper / tokens - 1).max()),
        forecast_us=1e6 * float(np.median(times[1:])),
        make_tables_us=make_us,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for the JSON"
    )
    args = parser.parse_args()
    cases = [(1.0, 2), (0.785, 2), (0.6, 2), (0.8, 4), (0.6, 4)]
    result = dict(
        command="python -m bench.lookahead.memory",
        date=date.today().isoformat(),
        machine=f"{platform.processor() or platform.machine()}, one core",
        cases=[compare(*case) for case in cases],
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "memory_forecast.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
