# SPDX-License-Identifier: Apache-2.0
"""The row budget "auto": the k of a step that verifies most tokens a second.

With k rows for D decoding requests a step verifies D v(k / D) tokens in the long run,
where v depends on the drafts and on N, and a little on D: few requests vary more. So

    tokens a second = D v(k / D) / T_sp(k)      drafts, D / N <= k <= D
                    = (D / N) / T_pp(D / N)     plain PP: k = D / N, the exit head off

and the best is chosen. v comes from running the protocol itself with drafts of the law
that was measured. The best k of one step alone, by its expected valid rows over its
time, is not it: a draft that is not fed costs its request nothing, as the token comes N
steps later anyway, so that the greedy choice feeds too many (docs/lookahead.md).
"""

import math
from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.jit import compiled
from spexis_runtime.lookahead.protocol import (
    NOTHING,
    absorb,
    admit,
    choose,
    empty_slots,
    feed,
    row_kind,
)
from spexis_runtime.lookahead.step_times import StageTimes

HYSTERESIS = 0.005
"""Another k must promise so much more than the present one: graphs are not thrashed."""
POOLS = (8, 16, 32, 64)
"""Numbers of requests for which v is computed; more behave like the last."""
POINTS = 33  # of v, from k = D / N to k = D
ROW_STEPS = 64_000  # requests x steps of each run: v is right to about 0.2 %
FIXED, AUTO = 0, 1
_NO_LIMIT = 1 << 60  # of positions


@compiled
def _valid_rows(slots, num_stages, num_rows, steps, law, seed):
    """Valid rows of `steps` steps of `num_rows` rows over all `slots`."""
    num_slots = len(slots)
    in_flight = np.zeros((num_stages, num_slots), dtype=np.bool_)  # by step modulo N
    candidates: np.ndarray = np.empty(num_slots, dtype=np.int64)
    kinds: np.ndarray = np.empty(num_slots, dtype=np.int64)
    for slot in range(num_slots):
        admit(slots, slot, slot, 1)
    valid_rows = 0
    for step in range(steps):
        now = in_flight[step % num_stages]
        found = 0
        for slot in range(num_slots):
            if now[slot]:
                absorb(slots, slot)
                now[slot] = False
            kinds[slot] = row_kind(slots, slot, _NO_LIMIT)
            if kinds[slot] != NOTHING:
                candidates[found] = slot
                found += 1
        for i in range(choose(slots, candidates, kinds, found, num_rows)):
            chosen = candidates[i]
            _, valid = feed(slots, chosen, kinds[chosen], step, True, law, seed)
            now[chosen] = valid
            valid_rows += valid
    return valid_rows


def valid_share(law: DraftLaw, num_stages: int) -> np.ndarray:
    """v: valid rows of a request and step, [len(POOLS), POINTS] float64.

    Point i is that of k / D = 1 / N + (1 - 1 / N) i / (POINTS - 1). All runs of a pool
    meet the same drafts.
    """
    at = np.linspace(1 / num_stages, 1, POINTS)
    table = []
    for pool in POOLS:
        steps = ROW_STEPS // pool
        ks = range(math.ceil(pool / num_stages), pool + 1)
        valid = [
            _valid_rows(empty_slots(pool), num_stages, k, steps, law, 0) for k in ks
        ]
        share = np.array(valid) / (steps * pool)
        table.append(np.interp(at, np.array(ks) / pool, share))
    return np.array(table)


class RowBudget(NamedTuple):
    """How many decode rows a step has."""

    kind: int
    fixed: np.ndarray  # [max_num_seqs + 1] int64, k by decoding requests
    valid: np.ndarray  # v, see `valid_share`
    sp_ms: np.ndarray  # [>= max_num_seqs + 1] float64, T_sp by rows
    pp_ms: np.ndarray  # [>= max_num_seqs + 1] float64, T_pp
    num_stages: int

    @classmethod
    def of_table(cls, fixed: np.ndarray, sp: StageTimes, pp: StageTimes) -> "RowBudget":
        """k rows for D decoding requests are fixed[D], always with drafts."""
        none, most = np.zeros((1, 1)), len(fixed) - 1
        tables = sp.decode_table(most), pp.decode_table(most)
        return cls(FIXED, fixed, none, *tables, 1)

    @classmethod
    def auto(
        cls,
        law: DraftLaw,
        num_stages: int,
        max_num_seqs: int,
        sp: StageTimes,
        pp: StageTimes,
    ) -> "RowBudget":
        """The best k by step times and the law of the drafts, for N >= 2 stages."""
        tables = sp.decode_table(max_num_seqs), pp.decode_table(max_num_seqs)
        none: np.ndarray = np.zeros(1, dtype=np.int64)
        return cls(AUTO, none, valid_share(law, num_stages), *tables, num_stages)


@compiled
def promise(budget, decodes, k):
    """Tokens a millisecond with k rows for `decodes` requests; k < 0: plain PP."""
    if k < 0:
        return decodes / budget.num_stages / budget.pp_ms[-k]
    pool, points = 0, budget.valid.shape[1]
    while pool + 1 < len(budget.valid) and POOLS[pool + 1] <= decodes:
        pool += 1
    least = 1 / budget.num_stages
    at = (k / decodes - least) / (1 - least) * (points - 1)
    i = max(0, min(int(at), points - 2))
    low, high = budget.valid[pool, i], budget.valid[pool, i + 1]
    return decodes * (low + (at - i) * (high - low)) / budget.sp_ms[k]


@compiled
def choose_rows(budget, decodes, last):
    """Rows of a step with `decodes` requests that could be fed.

    Args:
        last: what this returned for the step before, or 0.

    Returns:
        k; or -k: k rows without drafts, plain PP.
    """
    if budget.kind == FIXED:
        return budget.fixed[decodes]
    if decodes == 0:
        return 0
    least = int(math.ceil(decodes / budget.num_stages))
    best, most = -least, promise(budget, decodes, -least)
    for k in range(least, decodes + 1):
        here = promise(budget, decodes, k)
        if here > most:
            best, most = k, here
    # the present one, as far as it can be kept
    kept = -least if last < 0 else max(least, min(last, decodes))
    if last and promise(budget, decodes, kept) * (1 + HYSTERESIS) >= most:
        return kept
    return best
