# SPDX-License-Identifier: Apache-2.0
"""The row budget "auto" against fixed alphas in the simulator, and its choices."""

import numpy as np
import pytest

from bench.lookahead.row_budget import Cell, compare
from spexis_runtime.lookahead.cost_model import effective_batch
from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.row_budget import (
    HYSTERESIS,
    POINTS,
    RowBudget,
    choose_rows,
    promise,
    valid_share,
)
from spexis_runtime.lookahead.step_times import StageTimes

FLAT = StageTimes((1,), (10.0,))  # the rows cost nothing
STEEP = StageTimes((1, 1000), (0.01, 10.0))  # a step of twice the rows takes twice
BENT = StageTimes((1, 96, 256), (10.0, 11.0, 24.0))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_ends_of_the_curve(num_stages):
    """All rows: equation (2). k = D / N: as many as rows, whatever the drafts."""
    law = DraftLaw.uniform(0.6)
    v = valid_share(law, num_stages)
    assert v[:, -1] == pytest.approx(effective_batch(1, num_stages, 0.6), rel=0.02)
    assert v[:, 0] == pytest.approx(1 / num_stages, rel=0.03)
    assert v.shape[1] == POINTS
    assert (np.diff(v[-1]) > -0.002).all()


def auto(sp: StageTimes, pp: StageTimes, theta: float = 0.6) -> RowBudget:
    return RowBudget.auto(DraftLaw.uniform(theta), 2, 256, sp, pp)


def test_the_times_decide():
    assert choose_rows(auto(FLAT, FLAT), 64, 0) >= 54  # drafts that cost nothing
    assert choose_rows(auto(STEEP, STEEP), 64, 0) == -32  # plain PP
    # with a head that costs time, drafts must be worth it
    head = StageTimes((1,), (17.0,))
    assert choose_rows(auto(head, FLAT), 64, 0) == -32
    between = choose_rows(auto(BENT, BENT), 192, 0)
    assert 96 < between < 160
    assert choose_rows(auto(FLAT, FLAT), 0, 5) == 0


def test_useless_drafts_are_not_fed():
    times = StageTimes((1, 256), (10.0, 11.0))
    assert choose_rows(auto(times, times, theta=0.0), 64, 0) in (-32, 32)


def test_hysteresis_keeps_a_k_that_is_as_good():
    budget = auto(BENT, BENT)
    best = choose_rows(budget, 192, 0)
    near = best + 2
    lost = promise(budget, 192, best) / promise(budget, 192, near) - 1
    assert 0 <= lost < HYSTERESIS
    assert choose_rows(budget, 192, near) == near
    assert choose_rows(budget, 192, 192) == best  # far too many
    assert choose_rows(budget, 192, -96) == best  # from plain PP
    # fewer requests than rows: as many as there are, or better
    assert 0 < choose_rows(budget, 20, best) <= 20


@pytest.mark.parametrize(
    "cell",
    [
        Cell("h200-halves", 2, 16, 0.785),
        Cell("h200-halves", 4, 256, 0.3),
        Cell("h200-x2", 4, 64, 0.9),
    ],
    ids=str,
)
def test_auto_is_as_good_as_the_best_alpha(cell):
    """The best of eleven, known only afterwards; all cells: bench/results/simulator."""
    rates = compare(cell, output=200)
    chosen = rates.pop("auto")
    assert len(rates) == 11
    assert chosen > 0.985 * max(rates.values())
    assert chosen > 1.02 * min(rates.values())
