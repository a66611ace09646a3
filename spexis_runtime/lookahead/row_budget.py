# SPDX-License-Identifier: Apache-2.0
"""The row budget "auto": the k of a step that verifies most tokens a second.

With drafts fed where their path confidence is at least c, a request takes r(c) rows and
gains v(c) tokens a step, in the long run. Both depend on the drafts and on N alone, so
they are one curve; of D requests,

    tokens a second = D v / T_sp(D r)           k = D r
                    = (D / N) / T_pp(D / N)     plain PP: k = D / N, the exit head off

and the best point is chosen. The best k of one step, by expected valid rows over its
time, is not it: a draft that is not fed costs its request nothing, as the token comes
N steps later anyway, so that the greedy choice feeds too many (docs/lookahead.md).
"""

import math
from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.jit import compiled
from spexis_runtime.lookahead.protocol import (
    DRAFT,
    NORMAL,
    absorb,
    admit,
    empty_slots,
    feed,
    path_confidence,
    row_kind,
)
from spexis_runtime.lookahead.step_times import StageTimes

HYSTERESIS = 0.01
"""Another k must promise so much more than the present one: graphs are not thrashed."""
CURVE_STEPS, CURVE_POINTS = 4000, 33
FIXED, AUTO = 0, 1


@compiled
def _lone_request(slots, num_stages, threshold, steps, law, seed):
    """(rows, valid rows) of one request that feeds drafts from `threshold` on."""
    admit(slots, 0, 0, 1)
    in_flight = np.zeros(num_stages, dtype=np.int64)  # valid rows, by step modulo N
    rows, valid_rows = 0, 0
    for step in range(steps):
        if in_flight[step % num_stages]:
            absorb(slots, 0)
        in_flight[step % num_stages] = 0
        kind = row_kind(slots, 0, np.int64(1) << 60)
        if kind == NORMAL or (kind == DRAFT and path_confidence(slots, 0) >= threshold):
            _, valid = feed(slots, 0, kind, step, True, law, seed)
            rows += 1
            valid_rows += valid
            in_flight[step % num_stages] = valid
    return rows, valid_rows


def speculation_curve(
    law: DraftLaw, num_stages: int, *, steps: int = CURVE_STEPS
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and valid rows of a request and step, by threshold: two [CURVE_POINTS].

    From a run of the protocol over one request, with the same drafts for every
    threshold; the thresholds are such that about equally many drafts lie between two.

    Args:
        law: of the drafts, as measured.
        steps: of the run; the curve's standard error is about 0.5 / sqrt(steps).
    """
    confidences = np.sort(np.concatenate((law.right, law.wrong)).ravel())
    depths = np.arange(1, num_stages)
    levels = np.quantile(confidences, np.linspace(0, 1, CURVE_POINTS - 1))
    thresholds = np.concatenate(([0.0], levels ** np.median(depths)))
    thresholds[-1] = np.nextafter(thresholds[-1], 2)  # above any: no draft is fed
    points = []
    for threshold in thresholds:
        slots = empty_slots(1)
        points.append(_lone_request(slots, num_stages, threshold, steps, law, 0))
    rows, valid = (np.array(column) / steps for column in zip(*points, strict=True))
    return rows, valid


class RowBudget(NamedTuple):
    """How many decode rows a step has."""

    kind: int
    fixed: np.ndarray  # [max_num_seqs + 1] int64, k by decoding requests
    rows: np.ndarray  # [points] float64, the curve
    valid: np.ndarray  # [points] float64
    sp_ms: np.ndarray  # [>= max_num_seqs + 1] float64, T_sp by rows
    pp_ms: np.ndarray  # [>= max_num_seqs + 1] float64, T_pp
    num_stages: int

    @classmethod
    def of_table(cls, fixed: np.ndarray, sp: StageTimes, pp: StageTimes) -> "RowBudget":
        """k rows for D decoding requests are fixed[D], always with drafts."""
        none, most = np.zeros(1), len(fixed) - 1
        tables = sp.decode_table(most), pp.decode_table(most)
        return cls(FIXED, fixed, none, none, *tables, 1)

    @classmethod
    def auto(
        cls,
        law: DraftLaw,
        num_stages: int,
        max_num_seqs: int,
        sp: StageTimes,
        pp: StageTimes,
    ) -> "RowBudget":
        """The best k by step times and by the curve of the drafts' law."""
        tables = sp.decode_table(max_num_seqs), pp.decode_table(max_num_seqs)
        curve = speculation_curve(law, num_stages)
        none = np.zeros(1, dtype=np.int64)
        return cls(AUTO, none, *curve, *tables, num_stages)


@compiled
def _promise(budget, decodes, k):
    """Tokens a millisecond with k rows and drafts, by the line between two points."""
    best = 0.0
    share = k / decodes
    for i in range(len(budget.rows) - 1):
        high, low = budget.rows[i], budget.rows[i + 1]
        if low <= share <= high and high > low:
            part = (share - low) / (high - low)
            valid = budget.valid[i + 1] + part * (budget.valid[i] - budget.valid[i + 1])
            best = max(best, valid)
    if share >= budget.rows[0]:
        best = budget.valid[0]
    return decodes * best / budget.sp_ms[k]


@compiled
def choose_rows(budget, decodes, last):
    """Rows of a step with `decodes` requests that could be fed.

    Args:
        last: what this returned for the step before, or 0.

    Returns:
        k; or -k: k rows without drafts, plain PP.
    """
    if budget.kind == FIXED or decodes == 0:
        return budget.fixed[decodes] if budget.kind == FIXED else 0
    plain = int(math.ceil(decodes / budget.num_stages))
    plain_promise = decodes / budget.num_stages / budget.pp_ms[plain]
    best, promise = -plain, plain_promise
    for i in range(len(budget.rows)):
        k = min(decodes, int(math.ceil(decodes * budget.rows[i] - 1e-9)))
        here = decodes * budget.valid[i] / budget.sp_ms[k]
        if here > promise:
            best, promise = k, here
    if last < 0:
        now, last = plain_promise, -plain
    else:
        last = min(last, decodes)
        now = _promise(budget, decodes, last) if last else 0.0
    return best if promise > now * (1 + HYSTERESIS) else last
