# SPDX-License-Identifier: Apache-2.0
"""The memory forecast against the exact distribution, and the paper's against both."""

import functools
import time

import numpy as np
import pytest

from bench.lookahead.memory import compare
from spexis_runtime.lookahead.memory import (
    HORIZON,
    MAX_AGE,
    NUM_BUCKETS,
    MemoryTables,
    RemainingLengths,
    bucket_of,
    completion,
    forecast,
)

COLUMNS = HORIZON + MAX_AGE + 1


@functools.cache
def distribution(theta: float, num_stages: int) -> np.ndarray:
    """P[i, n]: n tokens after i iterations, by dynamic programming over the protocol.

    The state is the number of iterations until the next valid row, 1 to N; it starts as
    it is in the long run, found by running the protocol for long.
    """
    until = np.zeros(num_stages + 1)
    until[1] = 1.0
    mean = np.zeros_like(until)
    for t in range(4800):  # theta = 0 turns for ever: take the mean of whole rounds
        mean += until if t >= 2400 else 0
        after = np.zeros_like(until)
        after[1:-1] = until[2:]
        after[1] += until[1] * theta
        after[num_stages] += until[1] * (1 - theta)
        until = after
    state = np.zeros((num_stages + 1, HORIZON + 2))
    state[:, 0] = mean / mean.sum()
    rows = [state.sum(axis=0)]
    for _ in range(HORIZON):
        after = np.zeros_like(state)
        after[1:-1] = state[2:]
        after[1, 1:] += state[1, :-1] * theta
        after[num_stages, 1:] += state[1, :-1] * (1 - theta)
        state = after
        rows.append(state.sum(axis=0))
    return np.array(rows)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("theta", [0.0, 0.6, 1.0])
def test_completion_is_the_exact_distribution(theta, num_stages):
    exact = distribution(theta, num_stages)
    at_least = exact[:, ::-1].cumsum(axis=1)[:, ::-1][:, : HORIZON + 1].T
    table = completion(theta, num_stages)
    np.testing.assert_allclose(table, at_least, atol=1e-6)
    # and its mean is that of equation (2)
    i = np.arange(HORIZON + 1)
    rate = 1 / (num_stages - theta * (num_stages - 1))
    np.testing.assert_allclose(table[1:].sum(axis=0), i * rate, rtol=1e-9)


def exact_held(
    probability: np.ndarray, length: int, age: int, theta: float, num_stages: int
) -> np.ndarray:
    """[HORIZON, 2]: tokens held and the chance to run, summed over every end."""
    exact = distribution(theta, num_stages)[1:]
    left = probability[age:] / probability[age:].sum()
    held = np.zeros((HORIZON, 2))
    for n, p in enumerate(left, 1):
        ends = n if n <= HORIZON else HORIZON + 1
        tokens = np.arange(ends)
        held[:, 0] += p * (exact[:, :ends] * (length + tokens)).sum(axis=1)
        held[:, 1] += p * exact[:, :ends].sum(axis=1)
    return held


def random_lengths(seed: int) -> RemainingLengths:
    """A predictor that is right two times in three."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((NUM_BUCKETS, COLUMNS))
    for n in np.minimum(rng.geometric(0.01, 20_000), COLUMNS):
        right = rng.random() < 2 / 3
        bucket = bucket_of(n) if right else rng.integers(NUM_BUCKETS)
        counts[bucket, n - 1] += 1
    return RemainingLengths.from_counts(counts)


@pytest.mark.parametrize(
    ("num_stages", "theta"), [(1, 0.5), (2, 0.0), (2, 0.785), (3, 1.0), (4, 0.6)]
)
def test_forecast_is_exact(num_stages, theta):
    rng = np.random.default_rng(num_stages)
    columns = np.array(
        [
            rng.integers(1, 5000, 12),
            np.arange(12) % NUM_BUCKETS,
            rng.integers(0, 19, 12),
        ]
    )
    lengths = random_lengths(0)
    tables = MemoryTables.make(lengths, theta, num_stages)
    tokens, running = np.empty(HORIZON), np.empty(HORIZON)
    forecast(*columns, 12, tables.alive, tables.generated, tokens, running)
    want = np.zeros((HORIZON, 2))
    for length, bucket, age in columns.T:
        want += exact_held(
            lengths.probability[bucket], length, min(age, MAX_AGE), theta, num_stages
        )
    np.testing.assert_allclose(tokens, want[:, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(running, want[:, 1], rtol=1e-6, atol=1e-6)


def test_calibration():
    lengths = random_lengths(1)
    np.testing.assert_allclose(lengths.probability.sum(axis=1), 1)
    aged = lengths.aged()
    np.testing.assert_allclose(aged.sum(axis=2), 1)
    np.testing.assert_allclose(aged[:, 0, :HORIZON], lengths.probability[:, :HORIZON])
    # nothing seen: each bucket means its own range
    blank = RemainingLengths.from_counts(np.zeros((NUM_BUCKETS, COLUMNS))).probability
    assert blank[0, :3] == pytest.approx(1 / 3)
    assert blank[1, 3:7] == pytest.approx(1 / 4)
    assert blank[5, :63].sum() == 0 < blank[5, 63]
    # predicted to end within 3 tokens, and 3 have come: nothing is known but that
    of_blank = RemainingLengths(blank).aged()
    assert of_blank[0, 3, HORIZON] == 1
    assert of_blank[0, 1, :2] == pytest.approx(0.5)


def test_algorithm_1_is_exact_only_without_rejections():
    for theta, num_stages in ((1.0, 2), (0.5, 1)):
        errors = compare(theta, num_stages)
        assert errors["error_of_generated"] == pytest.approx(0, abs=1e-9)
        assert errors["error_of_memory"] == pytest.approx(0, abs=1e-9)
    # off by more than 5 % where drafts are rejected: the exact forecast runs
    for theta, num_stages in ((0.785, 2), (0.6, 2), (0.6, 4)):
        errors = compare(theta, num_stages)
        assert errors["error_of_generated"] > 0.15
        assert errors["error_of_memory"] > 0.05


def test_forecast_of_256_requests_is_quick():
    """The target is 200 us; a busy machine of CI gets 1 ms."""
    rng = np.random.default_rng(0)
    tables = MemoryTables.make(random_lengths(2), 0.7, 2)
    tokens, running = np.empty(HORIZON), np.empty(HORIZON)
    arguments = (
        rng.integers(100, 4000, 256),
        rng.integers(0, NUM_BUCKETS, 256),
        rng.integers(0, MAX_AGE, 256),
        256,
        tables.alive,
        tables.generated,
        tokens,
        running,
    )
    forecast(*arguments)
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        forecast(*arguments)
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 1e-3
