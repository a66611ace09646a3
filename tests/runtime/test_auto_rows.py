# SPDX-License-Identifier: Apache-2.0
"""`row_budget="auto"`: from step times and from what became of drafts."""

import numpy as np
import pytest

from spexis_runtime.iteration_log import DraftOutcomes
from spexis_runtime.row_budget import (
    ENOUGH,
    KEPT,
    PRIOR_THETA,
    PROBE_EVERY,
    PROBE_STEPS,
    AutoRows,
    DraftStatistics,
    RowChoice,
)
from spexis_runtime.step_profile import StepProfile

NUM_STAGES, MAX_NUM_SEQS = 2, 32
ROWS = (1, 8, 32)


def outcomes(theta: float, count: int, depth: int = 1) -> DraftOutcomes:
    """Right ones are more confident."""
    rng = np.random.default_rng(count)
    right = rng.random(count) < theta
    confidence = np.where(right, 0.5, 0.0) + rng.random(count) / 2
    depths = np.full(count, depth)
    return DraftOutcomes(depths, confidence.astype(np.float32), right)


def auto(plain: tuple[float, ...], drafting: tuple[float, ...]) -> AutoRows:
    return AutoRows(StepProfile(ROWS, plain, drafting), NUM_STAGES, MAX_NUM_SEQS)


def learn(policy: AutoRows, drafts: DraftOutcomes) -> None:
    policy.observe(drafts)
    if policy.refreshing is not None:
        policy.refreshing.join()


def test_the_law_is_that_of_the_newest_drafts():
    statistics = DraftStatistics(num_stages=3)
    assert statistics.law().theta == pytest.approx([PRIOR_THETA] * 2)
    statistics.add(outcomes(0.2, KEPT))
    statistics.add(outcomes(0.9, KEPT + 100))
    statistics.add(outcomes(0.5, ENOUGH - 1, depth=2))  # too few yet
    statistics.add(outcomes(0.5, 99, depth=3))  # not of this pipeline
    law = statistics.law()
    assert law.theta == pytest.approx([0.9, 0.9], abs=0.02)
    assert law.right[0].min() >= 0.5 > law.wrong[0].max() > 0.4
    statistics.add(outcomes(0.5, 1, depth=2))
    assert statistics.law().theta == pytest.approx([0.9, 0.5], abs=0.1)


def test_flat_step_times_feed_every_request():
    policy = auto(plain=(10.0, 10.0, 10.0), drafting=(10.0, 10.0, 10.0))
    assert policy.choose(0).num_rows == 0
    for decodes in (1, 7, 32):
        assert policy.choose(decodes) == RowChoice(decodes, drafting=True)


def test_a_costly_head_turns_drafts_off():
    """One request gains 1 / (2 - theta) tokens a step by drafts, 1/2 without."""
    worth = 2 / (2 - PRIOR_THETA)
    assert auto((10.0,) * 3, (9.8 * worth,) * 3).choose(1).drafting
    assert not auto((10.0,) * 3, (10.2 * worth,) * 3).choose(1).drafting
    choice = auto((1.0, 8.0, 32.0), (2.0, 9.0, 33.0)).choose(32)  # time as rows
    assert choice == RowChoice(16, drafting=False)


def test_what_becomes_of_drafts_changes_the_choice():
    policy = auto((10.0,) * 3, (14.0,) * 3)  # worth it from theta 0.57 on
    assert policy.choose(8).drafting
    learn(policy, outcomes(0.2, ENOUGH))
    assert not policy.choose(8).drafting
    # now and then it looks whether they are better
    steps = [policy.choose(8).drafting for _ in range(2 * PROBE_EVERY)]
    assert sum(steps) == PROBE_STEPS
    learn(policy, outcomes(0.95, KEPT))
    assert policy.choose(8).drafting
