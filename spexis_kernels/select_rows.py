# SPDX-License-Identifier: Apache-2.0
"""Choose the rows of a step on stage 0, and keep the drafts its exit head makes.

Design section 3, points 1 and 2. For one slot, with p = known_len and h = head < limit:

    normal   h == p - 1                        feeds last_token at position h
    draft    p <= h < p + depth, with a draft  feeds the draft at position h
    order    normal rows before drafts; normal rows by last_fed, ascending; drafts by
             prod(fed_confidence[p .. h-1]) * draft_confidence, descending;
             ties by slot, ascending

Both orders are one order of unique 64-bit keys, so that the outcome depends on no
sorting algorithm and every tensor-parallel rank chooses alike:

    key = 1 bit: draft | 32 bits: last_fed, or the confidence complemented | 20: slot

Not handled: prefill chunks. The host chooses those; a slot with h < p - 1 is no
candidate here.
"""

import torch
import triton
import triton.language as tl

from spexis_kernels._arguments import check_rows, check_vector, write_back
from spexis_kernels.constants import DRAFT, INVALID_TOKEN, NORMAL, PAD, PAD_SLOT_ID
from spexis_kernels.dispatch import use_kernel
from spexis_kernels.pool import RequestPool, Rows

MAX_SLOTS = 1 << 20
_MAX_SLOTS = tl.constexpr(MAX_SLOTS)
_DRAFT_KEY = tl.constexpr(MAX_SLOTS << 32)
_NO_ROW = tl.constexpr(MAX_SLOTS << 33)  # above every candidate's key

_INVALID_TOKEN = tl.constexpr(INVALID_TOKEN)
_PAD_SLOT_ID = tl.constexpr(PAD_SLOT_ID)
_PAD = tl.constexpr(PAD)
_NORMAL = tl.constexpr(NORMAL)
_DRAFT = tl.constexpr(DRAFT)


@triton.jit
def _row_keys(
    slot,  # [BLOCK] int64
    num_slots,
    known_len_ptr,
    head_ptr,
    limit_ptr,
    last_fed_ptr,
    draft_ptr,
    draft_confidence_ptr,
    fed_confidence_ptr,
    DEPTH: tl.constexpr,
):
    """The key of each slot, [BLOCK] int64; _NO_ROW or more where it is no candidate."""
    there = slot < num_slots
    known_len = tl.load(known_len_ptr + slot, mask=there, other=0)
    head = tl.load(head_ptr + slot, mask=there, other=0)
    limit = tl.load(limit_ptr + slot, mask=there, other=0)
    draft = tl.load(draft_ptr + slot, mask=there, other=_INVALID_TOKEN)
    may_feed = there & (head < limit)
    normal = may_feed & (head == known_len - 1)
    drafted = may_feed & (head >= known_len) & (head - known_len < DEPTH)
    drafted = drafted & (draft != _INVALID_TOKEN)

    path = tl.load(draft_confidence_ptr + slot, mask=drafted, other=0.0)
    for i in tl.static_range(DEPTH - 1):
        position = known_len + i
        in_flight = drafted & (position < head)
        ring = fed_confidence_ptr + slot * DEPTH + position % DEPTH
        path *= tl.load(ring, mask=in_flight, other=1.0)
    # the bits of a float >= 0 order like the float itself
    path_bits = path.to(tl.int32, bitcast=True).to(tl.int64)
    last_fed = tl.load(last_fed_ptr + slot, mask=there, other=0).to(tl.int64)
    normal_key = (last_fed + (1 << 31)) * _MAX_SLOTS
    draft_key = _DRAFT_KEY + ((1 << 31) - 1 - path_bits) * _MAX_SLOTS
    key = tl.where(normal, normal_key, tl.where(drafted, draft_key, _NO_ROW))
    return key + slot


@triton.jit
def choose_rows(
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
    """All of `select_rows`, in one program."""
    row = tl.arange(0, BLOCK).to(tl.int64)
    # every key depends on loads of every slot, so the sort also separates the loads
    # above it from the stores below
    key = tl.sort(
        _row_keys(
            row,
            num_slots,
            known_len_ptr,
            head_ptr,
            limit_ptr,
            last_fed_ptr,
            draft_ptr,
            draft_confidence_ptr,
            fed_confidence_ptr,
            DEPTH,
        )
    )
    written = row < num_rows
    chosen = written & (key < _NO_ROW)
    slot = key % _MAX_SLOTS
    is_draft = chosen & (key >= _DRAFT_KEY)

    generation = tl.load(generation_ptr + slot, mask=chosen, other=0)
    position = tl.load(head_ptr + slot, mask=chosen, other=0)
    last_token = tl.load(last_token_ptr + slot, mask=chosen, other=_INVALID_TOKEN)
    draft = tl.load(draft_ptr + slot, mask=is_draft, other=_INVALID_TOKEN)
    token = tl.where(is_draft, draft, last_token)
    kind = tl.where(is_draft, _DRAFT, tl.where(chosen, _NORMAL, _PAD))
    tl.store(slots_ptr + row, tl.where(chosen, slot, _PAD_SLOT_ID), mask=written)
    tl.store(generations_ptr + row, generation, mask=written)
    tl.store(positions_ptr + row, position, mask=written)
    tl.store(tokens_ptr + row, token, mask=written)
    tl.store(kinds_ptr + row, kind, mask=written)

    confidence = tl.load(draft_confidence_ptr + slot, mask=is_draft, other=0.0)
    ring = slot * DEPTH + position % DEPTH
    tl.store(fed_ptr + ring, token, mask=is_draft)
    tl.store(fed_confidence_ptr + ring, confidence, mask=is_draft)
    if STEP_ON_DEVICE:
        step = tl.load(step)
    tl.store(head_ptr + slot, position + 1, mask=chosen)
    tl.store(last_fed_ptr + slot, step, mask=chosen)
    tl.store(draft_ptr + slot, _INVALID_TOKEN, mask=chosen)


@triton.jit(do_not_specialize=["step", "num_rows", "num_slots"])
def _select_rows_kernel(
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


@triton.jit(do_not_specialize=["num_rows"])
def _store_drafts_kernel(
    # [num_slots] int32
    known_len_ptr,
    generation_ptr,
    head_ptr,
    draft_ptr,
    # [num_slots] float32
    draft_confidence_ptr,
    # [num_rows] int32
    slots_ptr,
    generations_ptr,
    positions_ptr,
    tokens_ptr,
    # [num_rows] float32
    confidence_ptr,
    num_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    slot = tl.load(slots_ptr + row, mask=there, other=_PAD_SLOT_ID).to(tl.int64)
    there = slot != _PAD_SLOT_ID
    generation = tl.load(generations_ptr + row, mask=there, other=0)
    position = tl.load(positions_ptr + row, mask=there, other=0)
    head = tl.load(head_ptr + slot, mask=there, other=0)
    known_len = tl.load(known_len_ptr + slot, mask=there, other=0)
    owner = tl.load(generation_ptr + slot, mask=there, other=0)
    kept = there & (generation == owner) & (head == position + 1) & (head >= known_len)
    token = tl.load(tokens_ptr + row, mask=kept, other=_INVALID_TOKEN)
    confidence = tl.load(confidence_ptr + row, mask=kept, other=0.0)
    tl.store(draft_ptr + slot, token, mask=kept)
    tl.store(draft_confidence_ptr + slot, confidence, mask=kept)


def check_selection(
    pool: RequestPool, num_rows: int, step: int | torch.Tensor, out: Rows | None
) -> Rows:
    """Raise ValueError unless these are as `select_rows` says; `out`, or a new one."""
    num_slots = len(pool.head)
    if num_rows < 0:
        raise ValueError(f"num_rows must be >= 0, got {num_rows}")
    if num_slots > MAX_SLOTS:
        raise ValueError(f"pool must have at most {MAX_SLOTS} slots, got {num_slots}")
    if isinstance(step, torch.Tensor):
        check_vector("step", step, 1, torch.int32)
    if out is None:
        out = Rows(
            *(
                torch.empty(num_rows, dtype=torch.int32, device=pool.head.device)
                for _ in Rows._fields
            )
        )
    check_rows("out", out, num_rows)
    return out


def num_warps_of(block: int) -> int:
    """Warps of a program over `block` slots or rows: eight a thread, 16 at most."""
    return max(1, min(16, block // 256))


def select_rows(
    pool: RequestPool,
    *,
    num_rows: int,
    step: int | torch.Tensor,
    out: Rows | None = None,
) -> Rows:
    """Choose and feed the rows of one step (design section 3, point 2).

    Args:
        pool: the stage's request slots, at most 2**20; tensors contiguous. Updated in
            place for the slots chosen: `head` grows by one, `last_fed` becomes `step`,
            `draft` becomes INVALID_TOKEN; a draft row's token and confidence enter the
            rings `fed` and `fed_confidence` at `position % depth`. A slot not chosen
            keeps its draft and is a candidate again.
        num_rows: the row budget; may exceed the number of candidates or of slots.
        step: number of the step, int or [1] int32 on the pool's device.
        out: [num_rows] int32 each, contiguous; written and returned. Allocated if None.

    Returns:
        The rows in order of choice, then padding: slot PAD_SLOT_ID, generation 0,
        position 0, token INVALID_TOKEN, kind PAD.
    """
    out = check_selection(pool, num_rows, step, out)
    if num_rows == 0:
        return out
    if not use_kernel(pool.head):
        rows, changed = select_rows_reference(pool, num_rows=num_rows, step=step)
        for old, new in zip(out, rows, strict=True):
            old.copy_(new)
        write_back(pool, changed)
        return out
    num_slots, depth = pool.fed.shape
    block = triton.next_power_of_2(max(num_slots, num_rows, 2))
    _select_rows_kernel[(1,)](
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


def select_rows_reference(
    pool: RequestPool, *, num_rows: int, step: int | torch.Tensor
) -> tuple[Rows, RequestPool]:
    """`select_rows` in plain torch: returns the rows and the pool as it will be."""
    num_slots, depth = pool.fed.shape
    all_slots = torch.arange(num_slots, device=pool.head.device)
    may_feed = pool.head < pool.limit
    normal = may_feed & (pool.head == pool.known_len - 1)
    in_flight = pool.head - pool.known_len
    drafted = may_feed & (in_flight >= 0) & (in_flight < depth)
    drafted &= pool.draft != INVALID_TOKEN

    path = pool.draft_confidence
    for i in range(depth - 1):
        ring = ((pool.known_len + i) % depth).long()
        path = torch.where(
            i < in_flight, path * pool.fed_confidence[all_slots, ring], path
        )
    path_bits = path.view(torch.int32).long()
    key = torch.full_like(all_slots, _NO_ROW.value)
    key[normal] = (pool.last_fed.long()[normal] + (1 << 31)) * MAX_SLOTS
    key[drafted] = _DRAFT_KEY.value + ((1 << 31) - 1 - path_bits[drafted]) * MAX_SLOTS
    key, slot = (key + all_slots).sort()
    slot = slot[key < _NO_ROW.value][:num_rows]
    is_draft = drafted[slot]

    rows = Rows(
        slots=slot,
        generations=pool.generation[slot],
        positions=pool.head[slot],
        tokens=torch.where(is_draft, pool.draft[slot], pool.last_token[slot]),
        kinds=torch.where(is_draft, DRAFT, NORMAL),
    )
    fed_slot, ring = slot[is_draft], (rows.positions[is_draft] % depth).long()
    changed = pool._replace(
        head=pool.head.index_add(0, slot, torch.ones_like(rows.positions)),
        last_fed=pool.last_fed.clone(),
        draft=pool.draft.index_fill(0, slot, INVALID_TOKEN),
        fed=pool.fed.clone(),
        fed_confidence=pool.fed_confidence.clone(),
    )
    changed.last_fed[slot] = step
    changed.fed[fed_slot, ring] = rows.tokens[is_draft]
    changed.fed_confidence[fed_slot, ring] = pool.draft_confidence[fed_slot]

    padding = Rows(PAD_SLOT_ID, 0, 0, INVALID_TOKEN, PAD)
    padded = (
        torch.nn.functional.pad(tensor.int(), (0, num_rows - len(slot)), value=value)
        for tensor, value in zip(rows, padding, strict=True)
    )
    return Rows(*padded), changed


def store_drafts(
    pool: RequestPool, rows: Rows, tokens: torch.Tensor, confidence: torch.Tensor
) -> None:
    """Keep what the exit head drafted for `rows`, the rows of the step just fed.

    A draft is kept for each row that is not padding, whose slot still has the row's
    generation, and with head == position + 1 >= known_len: a prefill chunk that stops
    short of the newest verified token makes no draft.

    Args:
        pool: `draft` and `draft_confidence` are updated in place.
        rows: [num_rows] int32 each; at most one row a slot.
        tokens: [num_rows] int32, for position + 1; INVALID_TOKEN: no draft.
        confidence: [num_rows] float32, its probability, >= 0.
    """
    num_rows = len(rows.slots)
    check_rows("rows", rows, num_rows)
    check_vector("tokens", tokens, num_rows, torch.int32)
    check_vector("confidence", confidence, num_rows, torch.float32)
    if num_rows == 0:
        return
    if not use_kernel(pool.head):
        write_back(pool, store_drafts_reference(pool, rows, tokens, confidence))
        return
    block = 128
    _store_drafts_kernel[(triton.cdiv(num_rows, block),)](
        pool.known_len,
        pool.generation,
        pool.head,
        pool.draft,
        pool.draft_confidence,
        rows.slots,
        rows.generations,
        rows.positions,
        tokens,
        confidence,
        num_rows,
        BLOCK=block,
        num_warps=num_warps_of(block),
    )


def store_drafts_reference(
    pool: RequestPool, rows: Rows, tokens: torch.Tensor, confidence: torch.Tensor
) -> RequestPool:
    """`store_drafts` in plain torch: returns the pool as it will be."""
    slot = rows.slots.clamp(min=0).long()
    head = pool.head[slot]
    kept = (rows.slots != PAD_SLOT_ID) & (rows.generations == pool.generation[slot])
    kept &= (head == rows.positions + 1) & (head >= pool.known_len[slot])
    draft, draft_confidence = pool.draft.clone(), pool.draft_confidence.clone()
    draft[slot[kept]] = tokens[kept]
    draft_confidence[slot[kept]] = confidence[kept]
    return pool._replace(draft=draft, draft_confidence=draft_confidence)
