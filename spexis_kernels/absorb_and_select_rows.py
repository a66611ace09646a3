# SPDX-License-Identifier: Apache-2.0
"""`absorb`, then `select_rows`, in one launch: all that a step on stage 0 begins with.

One program does both, with a barrier of its threads in between: the rows of an older
step change slots that the choice then reads.
"""

import torch
import triton
import triton.language as tl

from spexis_kernels._arguments import check_rows, check_vector, write_back
from spexis_kernels.dispatch import use_kernel
from spexis_kernels.pool import RequestPool, Rows
from spexis_kernels.rollback import absorb_reference, absorb_rows
from spexis_kernels.select_rows import (
    check_selection,
    choose_rows,
    num_warps_of,
    select_rows_reference,
)


@triton.jit(do_not_specialize=["step", "num_slots", "num_rows", "num_absorbed"])
def _absorb_and_select_rows_kernel(
    # [num_absorbed] int32
    absorbed_slots_ptr,
    absorbed_generations_ptr,
    accepted_ptr,
    num_absorbed,
    # [num_slots] int32
    known_len_ptr,
    last_token_ptr,
    generation_ptr,
    head_ptr,
    limit_ptr,
    last_fed_ptr,
    draft_ptr,
    # [num_slots] float32
    draft_confidence_ptr,
    # [num_slots, DEPTH] int32
    fed_ptr,
    # [num_slots, DEPTH] float32
    fed_confidence_ptr,
    # [num_rows] int32, out
    slots_ptr,
    generations_ptr,
    positions_ptr,
    tokens_ptr,
    kinds_ptr,
    step,  # int32, or a pointer to one
    num_slots,
    num_rows,
    STEP_ON_DEVICE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, BLOCK).to(tl.int64)
    absorb_rows(
        row,
        num_absorbed,
        known_len_ptr,
        last_token_ptr,
        generation_ptr,
        head_ptr,
        draft_ptr,
        fed_ptr,
        absorbed_slots_ptr,
        absorbed_generations_ptr,
        accepted_ptr,
        DEPTH,
    )
    tl.debug_barrier()  # other threads wrote what a slot's thread reads
    choose_rows(
        known_len_ptr,
        last_token_ptr,
        generation_ptr,
        head_ptr,
        limit_ptr,
        last_fed_ptr,
        draft_ptr,
        draft_confidence_ptr,
        fed_ptr,
        fed_confidence_ptr,
        slots_ptr,
        generations_ptr,
        positions_ptr,
        tokens_ptr,
        kinds_ptr,
        step,
        num_slots,
        num_rows,
        STEP_ON_DEVICE,
        DEPTH,
        BLOCK,
    )


def absorb_and_select_rows(
    pool: RequestPool,
    absorbed: Rows,
    accepted: torch.Tensor,
    *,
    num_rows: int,
    step: int | torch.Tensor,
    out: Rows | None = None,
) -> Rows:
    """`absorb(pool, absorbed, accepted)`, then `select_rows` with the other arguments.

    Args:
        pool: stage 0's slots, updated in place by both.
        absorbed, accepted: of the step whose result has arrived, see `absorb`.
        num_rows, step, out: of the step to feed, see `select_rows`. `out` may not share
            memory with `absorbed`.

    Returns:
        What `select_rows` returns.
    """
    num_absorbed = len(absorbed.slots)
    check_rows("absorbed", absorbed, num_absorbed)
    check_vector("accepted", accepted, num_absorbed, torch.int32)
    out = check_selection(pool, num_rows, step, out)
    if not use_kernel(pool.head):
        rows, changed = absorb_and_select_rows_reference(
            pool, absorbed, accepted, num_rows=num_rows, step=step
        )
        for old, new in zip(out, rows, strict=True):
            old.copy_(new)
        write_back(pool, changed)
        return out
    num_slots, depth = pool.fed.shape
    block = triton.next_power_of_2(max(num_slots, num_rows, num_absorbed, 2))
    _absorb_and_select_rows_kernel[(1,)](
        absorbed.slots,
        absorbed.generations,
        accepted,
        num_absorbed,
        pool.known_len,
        pool.last_token,
        pool.generation,
        pool.head,
        pool.limit,
        pool.last_fed,
        pool.draft,
        pool.draft_confidence,
        pool.fed,
        pool.fed_confidence,
        *out,
        step,
        num_slots,
        num_rows,
        STEP_ON_DEVICE=isinstance(step, torch.Tensor),
        DEPTH=depth,
        BLOCK=block,
        num_warps=num_warps_of(block),
    )
    return out


def absorb_and_select_rows_reference(
    pool: RequestPool,
    absorbed: Rows,
    accepted: torch.Tensor,
    *,
    num_rows: int,
    step: int | torch.Tensor,
) -> tuple[Rows, RequestPool]:
    """In plain torch: returns the rows and the pool as it will be."""
    pool = absorb_reference(pool, absorbed, accepted)
    return select_rows_reference(pool, num_rows=num_rows, step=step)
