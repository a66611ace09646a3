# SPDX-License-Identifier: Apache-2.0
"""Verify rows on the last stage; absorb the verdict on stage 0. Rollback is a number.

Design section 3, points 1, 3 and 5. With p = known_len of the row's slot and y the
token the target sampled from the row:

    verify   valid iff position == p - 1 and token == last_token:  append y, out = y
             otherwise out = INVALID_TOKEN
    absorb   append y at position p; if head > p and fed[p] == y, the rows in flight
             stay valid; otherwise head = p and there is no draft

Both skip padding and rows whose generation is no longer the slot's. Neither touches KV:
slots of void rows are overwritten by the rows that follow.
"""

import torch
import triton
import triton.language as tl

from spexis_kernels._arguments import check_rows, check_vector, write_back
from spexis_kernels.constants import INVALID_TOKEN, PAD_SLOT_ID
from spexis_kernels.dispatch import use_kernel
from spexis_kernels.pool import RequestPool, Rows

_INVALID_TOKEN = tl.constexpr(INVALID_TOKEN)
_PAD_SLOT_ID = tl.constexpr(PAD_SLOT_ID)
_BLOCK = 128


@triton.jit
def _current_slot(row, num_rows, generation_ptr, slots_ptr, generations_ptr):
    """Slot of each row (int64), and whether the row is there and of its generation."""
    there = row < num_rows
    slot = tl.load(slots_ptr + row, mask=there, other=_PAD_SLOT_ID).to(tl.int64)
    there = slot != _PAD_SLOT_ID
    owner = tl.load(generation_ptr + slot, mask=there, other=0)
    generation = tl.load(generations_ptr + row, mask=there, other=0)
    return slot, there & (generation == owner)


@triton.jit(do_not_specialize=["num_rows"])
def _verify_kernel(
    # [num_slots] int32
    known_len_ptr,
    last_token_ptr,
    generation_ptr,
    # [num_rows] int32
    slots_ptr,
    generations_ptr,
    positions_ptr,
    tokens_ptr,
    # [num_rows] int32 or int64
    sampled_ptr,
    # [num_rows] int32
    out_ptr,
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot, current = _current_slot(
        row, num_rows, generation_ptr, slots_ptr, generations_ptr
    )
    known_len = tl.load(known_len_ptr + slot, mask=current, other=0)
    last_token = tl.load(last_token_ptr + slot, mask=current, other=0)
    position = tl.load(positions_ptr + row, mask=current, other=0)
    token = tl.load(tokens_ptr + row, mask=current, other=0)
    valid = current & (position == known_len - 1) & (token == last_token)
    sampled = tl.load(sampled_ptr + row, mask=valid, other=_INVALID_TOKEN).to(tl.int32)
    tl.store(out_ptr + row, sampled, mask=row < num_rows)
    tl.store(known_len_ptr + slot, known_len + 1, mask=valid)
    tl.store(last_token_ptr + slot, sampled, mask=valid)


@triton.jit
def absorb_rows(
    row,  # [BLOCK] int64
    num_rows,
    known_len_ptr,
    last_token_ptr,
    generation_ptr,
    head_ptr,
    draft_ptr,
    fed_ptr,
    slots_ptr,
    generations_ptr,
    accepted_ptr,
    DEPTH: tl.constexpr,
):
    slot, current = _current_slot(
        row, num_rows, generation_ptr, slots_ptr, generations_ptr
    )
    accepted = tl.load(accepted_ptr + row, mask=current, other=_INVALID_TOKEN)
    current = current & (accepted != _INVALID_TOKEN)
    known_len = tl.load(known_len_ptr + slot, mask=current, other=0)
    head = tl.load(head_ptr + slot, mask=current, other=0)
    was_fed = current & (head > known_len)
    ring = slot * DEPTH + known_len % DEPTH
    fed = tl.load(fed_ptr + ring, mask=was_fed, other=_INVALID_TOKEN)
    rewound = current & (fed != accepted)  # accepted is a token, so also where not fed
    tl.store(known_len_ptr + slot, known_len + 1, mask=current)
    tl.store(last_token_ptr + slot, accepted, mask=current)
    tl.store(head_ptr + slot, known_len, mask=rewound)
    tl.store(draft_ptr + slot, _INVALID_TOKEN, mask=rewound)


@triton.jit(do_not_specialize=["num_rows"])
def _absorb_kernel(
    # [num_slots] int32
    known_len_ptr,
    last_token_ptr,
    generation_ptr,
    head_ptr,
    draft_ptr,
    # [num_slots, DEPTH] int32
    fed_ptr,
    # [num_rows] int32
    slots_ptr,
    generations_ptr,
    accepted_ptr,
    num_rows,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    absorb_rows(
        row,
        num_rows,
        known_len_ptr,
        last_token_ptr,
        generation_ptr,
        head_ptr,
        draft_ptr,
        fed_ptr,
        slots_ptr,
        generations_ptr,
        accepted_ptr,
        DEPTH,
    )


def verify(
    pool: RequestPool,
    rows: Rows,
    sampled_tokens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Say which rows are valid, and what they append (design section 3, point 3).

    Args:
        pool: the last stage's slots; contiguous. `known_len` and `last_token` of slots
            with a valid row are updated in place.
        rows: [num_rows] int32 each, contiguous; at most one row a slot.
        sampled_tokens: [num_rows] int32 or int64, contiguous; what the target sampled
            from each row. Ignored where the row is not valid.
        out: [num_rows] int32, contiguous; written and returned. Allocated if None.

    Returns:
        [num_rows] int32: the token appended, INVALID_TOKEN for rows not valid.
    """
    num_rows = len(rows.slots)
    check_rows("rows", rows, num_rows)
    check_vector("sampled_tokens", sampled_tokens, num_rows, torch.int32, torch.int64)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int32, device=rows.slots.device)
    check_vector("out", out, num_rows, torch.int32)
    if num_rows == 0:
        return out
    if not use_kernel(pool.known_len):
        accepted, changed = verify_reference(pool, rows, sampled_tokens)
        write_back(pool, changed)
        return out.copy_(accepted)
    _verify_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        pool.known_len,
        pool.last_token,
        pool.generation,
        rows.slots,
        rows.generations,
        rows.positions,
        rows.tokens,
        sampled_tokens,
        out,
        num_rows,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return out


def verify_reference(
    pool: RequestPool, rows: Rows, sampled_tokens: torch.Tensor
) -> tuple[torch.Tensor, RequestPool]:
    """`verify` in plain torch: returns its result and the pool as it will be."""
    slot = rows.slots.clamp(min=0).long()
    valid = (rows.slots != PAD_SLOT_ID) & (rows.generations == pool.generation[slot])
    valid &= rows.positions == pool.known_len[slot] - 1
    valid &= rows.tokens == pool.last_token[slot]
    accepted = torch.where(valid, sampled_tokens.int(), INVALID_TOKEN)
    known_len, last_token = pool.known_len.clone(), pool.last_token.clone()
    known_len[slot[valid]] += 1
    last_token[slot[valid]] = accepted[valid]
    return accepted, pool._replace(known_len=known_len, last_token=last_token)


def absorb(pool: RequestPool, rows: Rows, accepted: torch.Tensor) -> None:
    """Take in the result of a step on stage 0 (design section 3, point 1).

    Args:
        pool: stage 0's slots; contiguous. For each slot that gained a token,
            `known_len` and `last_token` are updated in place, and where the token
            differs from what was fed at its position, `head` and `draft` too.
        rows: the rows of that step, [num_rows] int32 each, contiguous; at most one row
            a slot. Only `slots` and `generations` are read.
        accepted: [num_rows] int32, contiguous; what `verify` returned for them.
    """
    num_rows = len(rows.slots)
    check_rows("rows", rows, num_rows)
    check_vector("accepted", accepted, num_rows, torch.int32)
    if num_rows == 0:
        return
    if not use_kernel(pool.known_len):
        write_back(pool, absorb_reference(pool, rows, accepted))
        return
    _absorb_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        pool.known_len,
        pool.last_token,
        pool.generation,
        pool.head,
        pool.draft,
        pool.fed,
        rows.slots,
        rows.generations,
        accepted,
        num_rows,
        DEPTH=pool.fed.shape[1],
        BLOCK=_BLOCK,
        num_warps=1,
    )


def absorb_reference(
    pool: RequestPool, rows: Rows, accepted: torch.Tensor
) -> RequestPool:
    """`absorb` in plain torch: returns the pool as it will be."""
    current = (rows.slots != PAD_SLOT_ID) & (accepted != INVALID_TOKEN)
    current &= rows.generations == pool.generation[rows.slots.clamp(min=0).long()]
    slot, token = rows.slots[current].long(), accepted[current]
    position = pool.known_len[slot]  # of the new token
    ring = (position % pool.fed.shape[1]).long()
    stays = (pool.head[slot] > position) & (pool.fed[slot, ring] == token)
    changed = pool._replace(
        known_len=pool.known_len.clone(),
        last_token=pool.last_token.clone(),
        head=pool.head.clone(),
        draft=pool.draft.clone(),
    )
    changed.known_len[slot] = position + 1
    changed.last_token[slot] = token
    changed.head[slot[~stays]] = position[~stays]
    changed.draft[slot[~stays]] = INVALID_TOKEN
    return changed
