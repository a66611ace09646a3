# SPDX-License-Identifier: Apache-2.0
"""The closed forms against the recurrences they are limits of, and the protocol."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_pipeline import run_steady

from spexis_runtime.lookahead.cost_model import (
    Layout,
    effective_batch,
    pp_throughput,
    selective_effective_batch,
    selective_rows,
    sp_throughput,
    tp_throughput,
)
from spexis_runtime.lookahead.step_times import StepTimesError, read_step_times

RESULTS = Path(__file__).parents[2] / "bench" / "results"
HALVES = RESULTS / "h200-halves" / "step_times_qwen3_32b.json"
TWO_GPUS = RESULTS / "h200-x2" / "step_times_qwen3_32b.json"

quick = settings(deadline=None, max_examples=50)
batches = st.floats(1, 512)
stages = st.integers(1, 8)
rates = st.floats(0, 1)


def equation_1(batch: float, num_stages: int, theta: float, steps: int) -> np.ndarray:
    """[steps, 3]: s^a, s^r and n at each iteration, from the appendix's start."""
    s_a, s_r, n = (np.zeros(steps) for _ in range(3))
    n[0] = batch
    for t in range(1, steps):

        def good(back: int, t: int = t) -> float:
            return s_a[t - back] + n[t - back] if t >= back else 0.0

        s_a[t] = good(1) * theta
        s_r[t] = sum(good(i) * (1 - theta) for i in range(1, num_stages))
        n[t] = good(num_stages) * (1 - theta)
    return np.stack((s_a, s_r, n), axis=1)


def equation_3(batch: float, num_stages: int, alpha: float, steps: int) -> np.ndarray:
    rows = [batch * (1 - alpha) ** t for t in range(num_stages)]
    while len(rows) < steps:
        rows.append(alpha * rows[-num_stages] + (1 - alpha) * rows[-1])
    return np.array(rows)


@quick
@given(batches, stages, rates)
def test_equation_2_is_the_mean_of_equation_1(batch, num_stages, theta):
    """At theta = 0 the recurrence turns for ever; its mean has the same limit."""
    flows = equation_1(batch, num_stages, theta, 400)
    np.testing.assert_allclose(flows.sum(axis=1), batch)  # nothing is lost
    window = num_stages * (200 // num_stages)  # whole rounds
    mean = (flows[-window:, 0] + flows[-window:, 2]).mean()
    assert mean == pytest.approx(effective_batch(batch, num_stages, theta), rel=0.01)


@quick
@given(batches, stages, st.floats(0, 0.9))
def test_equation_3_is_the_limit_of_its_recurrence(batch, num_stages, alpha):
    rows = equation_3(batch, num_stages, alpha, 2000)
    window = num_stages * (1000 // num_stages)
    limit = selective_rows(batch, num_stages, alpha)
    assert rows[-window:].mean() == pytest.approx(limit, rel=0.01)


@quick
@given(batches, stages, rates, rates)
def test_obvious_cases(batch, num_stages, theta, alpha):
    assert effective_batch(batch, num_stages, 0) == pytest.approx(batch / num_stages)
    assert effective_batch(batch, num_stages, 1) == pytest.approx(batch)
    assert effective_batch(batch, 1, theta) == pytest.approx(batch)
    assert selective_rows(batch, num_stages, 0) == batch
    assert selective_rows(batch, 1, alpha) == batch
    assert selective_rows(batch, num_stages, 1) == pytest.approx(batch / num_stages)
    at_0 = selective_effective_batch(batch, num_stages, theta, 0)
    assert at_0 == effective_batch(batch, num_stages, theta)
    # all dropped: what is left is plain PP, whatever theta
    at_1 = selective_effective_batch(batch, num_stages, theta, 1)
    assert at_1 == pytest.approx(batch / num_stages)
    rows = selective_rows(batch, num_stages, alpha)
    effective = selective_effective_batch(batch, num_stages, theta, alpha)
    assert batch / num_stages * (1 - 1e-9) <= effective <= rows * (1 + 1e-9)


@quick
@given(batches, rates)
def test_one_stage_is_no_pipeline(batch, theta):
    def step_ms(rows: float) -> float:
        return 5 + rows / 10

    alone = tp_throughput(batch, step_ms)
    assert pp_throughput(batch, 1, step_ms) == pytest.approx(alone)
    assert sp_throughput(batch, 1, step_ms, theta, 0.3) == pytest.approx(alone)


@pytest.mark.parametrize(
    ("num_stages", "theta"), [(1, 0.5), (2, 0.0), (2, 0.6), (3, 0.8), (4, 0.6), (4, 1)]
)
def test_equation_2_is_the_protocol_with_all_rows(num_stages, theta):
    measured = run_steady(32, num_stages, theta, 32, steps=120)
    assert measured.rows == 32
    predicted = effective_batch(32, num_stages, measured.theta)
    assert measured.valid == pytest.approx(predicted, rel=0.02)
    assert abs(measured.theta - theta) < 0.04 or num_stages == 1


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize(("num_stages", "least", "most"), [(2, -2.5, 0), (4, -14, -4)])
def test_equation_4_beside_the_protocol(num_stages, alpha, least, most):
    """Close for two stages; for four it is low, most so between the ends."""
    k = math.ceil(selective_rows(64, num_stages, alpha))
    measured = run_steady(64, num_stages, 0.6, k, steps=120)
    predicted = selective_effective_batch(64, num_stages, measured.theta, alpha)
    assert least < 100 * (predicted / measured.valid - 1) < most


# ---- with the tables measured so far -------------------------------------------------
@pytest.mark.parametrize(
    ("table", "layout", "measured"),
    [
        (HALVES, Layout(2), {16: 473, 32: 908, 64: 1798, 128: 3168}),
        (HALVES, Layout(1, 2), {16: 362, 32: 617, 64: 890, 128: 1071}),
        (TWO_GPUS, Layout(2), {128: 5764, 256: 9989}),
        (TWO_GPUS, Layout(1, 2), {16: 1327, 64: 4799, 128: 8342, 256: 11362}),
    ],
)
def test_measured_throughput(table, layout, measured):
    """Those of 2 x H200 with PP=2 at 128 use the 11.1 ms of two groups, not 10.8."""
    times = read_step_times(table)
    for batch, tokens_per_second in measured.items():
        predicted = layout.throughput(batch, 0.0, times)
        assert predicted == pytest.approx(tokens_per_second, rel=0.03)


def test_throughput_of_speculation_lies_between():
    """theta = 0 gives B/N tokens a step of B rows; theta = 1 gives B."""
    for path in (HALVES, TWO_GPUS):
        times = read_step_times(path)
        stage = times.stage(2, speculative=True)
        rates = [Layout(2, 1, True).throughput(64, t, times) for t in (0, 0.5, 1)]
        assert rates[0] == pytest.approx(1e3 * 32 / stage.decode_ms(64))
        assert rates[2] == pytest.approx(1e3 * 64 / stage.decode_ms(64))
        assert all(a < b for a, b in pairwise(rates))
        dropping = Layout(2, 1, True, alpha=0.5).throughput(64, 0.5, times)
        rows = 64 / 1.5
        assert dropping == pytest.approx(
            1e3 * (rows / 2 + rows / 2 / 1.5) / stage.decode_ms(rows)
        )
        with pytest.raises(StepTimesError, match="no step times of PP=4 TP=1 with"):
            Layout(4, 1, True).throughput(64, 0.5, times)
