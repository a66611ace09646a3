# SPDX-License-Identifier: Apache-2.0
"""A pipeline of the package's own pool operations and a drafter right at a given rate.

Requests never end and need no memory: what is counted is what a step verifies.
"""

from collections import deque
from typing import NamedTuple

import torch

from spexis_kernels import (
    DRAFT,
    INVALID_TOKEN,
    PAD_SLOT_ID,
    RequestPool,
    Rows,
    absorb,
    select_rows,
    store_drafts,
    verify,
)

RIGHT, WRONG = 1, 2  # the target always says 1


class Steady(NamedTuple):
    """Means over the steps after the pipeline has filled."""

    rows: float  # a step
    valid: float  # a step
    theta: float  # accepted drafts / draft rows whose prefix was right


def run_steady(
    batch: int,
    num_stages: int,
    theta: float,
    num_rows: int,
    *,
    steps: int = 400,
    seed: int = 0,
) -> Steady:
    """Decode `batch` requests with `num_rows` rows a step.

    The confidence of right drafts is uniform in [0.5, 1], of wrong ones in [0, 0.8].
    """
    generator = torch.Generator().manual_seed(seed)
    first = RequestPool.empty(batch, max(1, num_stages), "cpu")
    last = RequestPool.empty(batch, 1, "cpu")
    for pool in (first, last):
        pool.known_len.fill_(1)
        pool.last_token.fill_(RIGHT)
    first.limit.fill_(1 << 30)
    nothing = torch.empty(0, dtype=torch.int32)
    results = deque([(Rows(*[nothing] * len(Rows._fields)), nothing)] * num_stages)
    warm_up = 4 * num_stages
    rows_fed = valid = drafts = accepted_drafts = 0
    for step in range(warm_up + steps):
        absorb(first, *results.popleft())
        rows = select_rows(first, num_rows=num_rows, step=step)
        there, slot = rows.slots != PAD_SLOT_ID, rows.slots.clamp(min=0).long()
        right_so_far = there & (rows.positions == last.known_len[slot] - 1)
        sampled = torch.full((num_rows,), RIGHT, dtype=torch.int32)
        accepted = verify(last, rows, sampled)
        results.append((rows, accepted))
        hit = torch.rand(num_rows, generator=generator) < theta
        spread = torch.rand(num_rows, generator=generator)
        tokens = torch.where(hit, RIGHT, WRONG).int()
        store_drafts(
            first, rows, tokens, torch.where(hit, 0.5 + 0.5 * spread, 0.8 * spread)
        )
        if step >= warm_up:
            good = accepted != INVALID_TOKEN
            rows_fed += int(there.sum())
            valid += int(good.sum())
            drafts += int((right_so_far & (rows.kinds == DRAFT)).sum())
            accepted_drafts += int((good & (rows.kinds == DRAFT)).sum())
    return Steady(rows_fed / steps, valid / steps, accepted_drafts / max(drafts, 1))
