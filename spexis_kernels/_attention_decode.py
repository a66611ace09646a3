# SPDX-License-Identifier: Apache-2.0
"""The decode rows of `merged_attention`, shared evenly among programs that stay.

A request has one or more *tiles* of BLOCK_N cached tokens for each KV head (one where
there is nothing to do), consecutive ones make a *unit*, and program p of P does the
units between shares p and p + 1 of all tiles:

    request 0                          | request 1
    head 0          | head 1           | head 0
    unit unit unit u| unit unit unit u | unit ...
    ^ p             .        ^ p + 1   .             ^ p + 2

Each program finds its own share from the lengths. What a row amounts to does not depend
on the shares: a unit starts from nothing (the first from the row's own token), and the
units are merged one by one from the first on. A program that has a row from its first
unit on merges in registers; one that comes in later stores each unit's state. The last
program to arrive at a row that several share merges what they stored, in that order.

K and V of the next tiles are on their way while a tile is computed, also across rows.
"""

import triton
import triton.language as tl

from spexis_kernels._attention_tiles import (
    LOWEST,
    base2_logits,
    empty_state,
    load_new,
    load_query,
    merge_states,
    paged_ptrs,
    softmax_scale,
    store_out,
)


@triton.jit
def _span(seq_len, query_len, shape):
    """Cached positions [oldest, context) that a decode row sees, tiles a head, and
    tiles a unit; nothing for requests that are void or no decode row."""
    context = tl.where(query_len == 1, tl.maximum(seq_len - shape.NUM_NEW, 0), 0)
    oldest = context * 0
    if shape.WINDOW is not None:
        oldest = tl.minimum(tl.maximum(seq_len - shape.WINDOW, 0), context)
    num_tiles = tl.maximum(tl.cdiv(context - oldest, shape.BLOCK_N), 1)
    unit = tl.maximum(tl.cdiv(num_tiles, shape.MAX_UNITS), shape.UNIT_TILES)
    return oldest, context, num_tiles, unit


@triton.jit
def _load_request(req, num_reqs, step):
    """First token, length and tokens of a request of this step; past the end: void."""
    there = req < num_reqs
    token = tl.load(step.query_start_loc + req, mask=there, other=0)
    end = tl.load(step.query_start_loc + req + 1, mask=there, other=0)
    seq_len = tl.load(step.seq_lens + req, mask=there, other=0)
    return token.to(tl.int64), seq_len, end - token


@triton.jit
def _owner(end, share):
    """Program of the unit that ends before tile `end`: the first whose share does."""
    return (end - 1) // share


@triton.jit
def _locate(tile, req, start, num_reqs, step, shape):
    """The unit of a tile of request `req`, whose tiles begin with `start`: its KV head;
    the number of that head's first tile; the unit's first tile, counted from there;
    tiles a head, and a unit."""
    _, seq_len, query_len = _load_request(req, num_reqs, step)
    _, _, num_tiles, unit = _span(seq_len, query_len, shape)
    kv_head = (tile - start) // num_tiles
    start += kv_head * num_tiles
    return kv_head, start, (tile - start) // unit * unit, num_tiles, unit


@triton.jit
def _partial_ptrs(program, unit, step, shape, M: tl.constexpr):
    """Where a program keeps a state of M rows: sums, statistics, and their masks."""
    row = tl.arange(0, M)
    there = row < shape.GROUP
    index = (program * shape.MAX_UNITS + unit).to(tl.int64) * shape.GROUP + row
    d = tl.arange(0, shape.BLOCK_D)
    sums = step.partial_sums + index[:, None] * shape.HEAD_SIZE + d[None, :]
    mask = there[:, None] & (d < shape.HEAD_SIZE)[None, :]
    return sums, step.partial_stats + index * 2, mask, there


@triton.jit
def _store_partial(program, unit, state, step, shape):
    sums, stats, mask, there = _partial_ptrs(program, unit, step, shape, shape.DECODE_M)
    tl.store(sums, state[2], mask=mask)
    tl.store(stats, state[0], mask=there)
    tl.store(stats + 1, state[1], mask=there)


@triton.jit
def _load_partial(program, unit, wanted, step, shape):
    """A state that another program may have stored; empty where not `wanted`."""
    sums, stats, mask, there = _partial_ptrs(
        program, unit, step, shape, shape.PARTIAL_M
    )
    # from L2: the first-level cache may hold what was there before
    there = there & wanted
    maximum = tl.load(stats, mask=there, other=LOWEST, cache_modifier=".cg")
    weight = tl.load(stats + 1, mask=there, other=0.0, cache_modifier=".cg")
    sums = tl.load(sums, mask=mask & wanted, other=0.0, cache_modifier=".cg")
    return maximum, weight, sums


@triton.jit
def _finish_row(req, kv_head, state, num_reqs, step, shape, M: tl.constexpr):
    token, _, query_len = _load_request(req, num_reqs, step)
    row = tl.arange(0, M)
    there = (row < shape.GROUP) & (query_len == 1)
    store_out(token + row * 0, kv_head * shape.GROUP + row, there, state, step, shape)


@triton.jit
def _arrive(num_done, req, kv_head, start, share, num_reqs, step, shape):
    """Add `num_done` units to those done of a shared row; who adds the last, merges."""
    _, seq_len, query_len = _load_request(req, num_reqs, step)
    _, _, num_tiles, unit = _span(seq_len, query_len, shape)
    num_units = tl.cdiv(num_tiles, unit)
    first = _owner(start + unit, share)
    tl.debug_barrier()  # what all threads stored comes before the count
    before = tl.atomic_add(step.arrived + first, num_done, sem="acq_rel", scope="gpu")
    if before + num_done == num_units:
        tl.store(step.arrived + first, 0)
        merged = ((first + 1) * share - start) // unit
        state = _load_partial(first, 0, True, step, shape)
        for some in range(merged, num_units, 4):
            for i in tl.static_range(4):  # so that four loads are under way
                end = start + tl.minimum((some + i + 1) * unit, num_tiles)
                more = _load_partial(
                    _owner(end, share),
                    some + i,
                    some + i < num_units,
                    step,
                    shape,
                )
                state = merge_states(state, more)
        _finish_row(
            req, kv_head.to(tl.int64), state, num_reqs, step, shape, shape.PARTIAL_M
        )


@triton.jit
def _begin_row(req, kv_head, is_first, num_reqs, step, shape):
    """Query heads of a decode row, and the state to start with: of its own token,
    which is written on that occasion, where this is the row's first unit."""
    token, seq_len, query_len = _load_request(req, num_reqs, step)
    live = (query_len == 1) & (seq_len > 0)
    row = tl.arange(0, shape.DECODE_M)
    head = kv_head * shape.GROUP + row
    q = load_query(token + row * 0, head, (row < shape.GROUP) & live, step, shape)
    maximum, weight, sums = empty_state(shape.DECODE_M, shape.BLOCK_D)
    if shape.NUM_NEW == 1:
        one = tl.arange(0, 1)
        mine = (one == 0) & is_first & live
        k, v = load_new(token + one, kv_head, mine, mine, step, shape)
        products = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        logits = base2_logits(products, softmax_scale(step), shape)
        maximum = tl.where(is_first & live, logits, maximum)
        weight += tl.where(is_first & live, 1.0, 0.0)
        sums += v.to(tl.float32)
    return q, maximum, weight, sums


@triton.jit
def _positions(tile, oldest, shape):
    """Of a tile's keys, [BLOCK_N]. Unsigned, so that the compiler sees which of them
    lie in one block, and that offsets in blocks are the same for every tile."""
    first = tile * shape.BLOCK_N
    if shape.WINDOW is not None:
        first += oldest
    return first.to(tl.uint32) + tl.arange(0, shape.BLOCK_N).to(tl.uint32)


@triton.jit
def _block_ids(req, tile, oldest, left, step, shape):
    position = _positions(tile, oldest, shape)
    table = step.block_table + req.to(tl.int64) * step.block_table_stride
    there = tl.arange(0, shape.BLOCK_N) < left
    return tl.load(table + position // shape.BLOCK_SIZE, mask=there, other=0)


@triton.jit
def decode_rows(
    program,
    num_programs,
    num_reqs,
    step,
    shape,
    DTYPE: tl.constexpr,
    REQS: tl.constexpr,
):
    """The share of one program. DTYPE: of the products; REQS: num_reqs or more."""
    index = tl.arange(0, REQS)
    _, seq_len, query_len = _load_request(index, num_reqs, step)
    _, _, num_tiles, _ = _span(seq_len, query_len, shape)
    num_tiles = tl.where(index < num_reqs, num_tiles, 0)
    ends = tl.cumsum(num_tiles, 0) * shape.NUM_KV_HEADS
    total = tl.sum(num_tiles, 0) * shape.NUM_KV_HEADS
    share = tl.cdiv(total, num_programs)
    begin = tl.minimum(program * share, total)
    end = tl.minimum(begin + share, total)

    # the requests of both, and where those start, in one reduction
    tile, next_tile = tl.minimum(begin, total - 1), tl.minimum(end, total - 1)
    before, next_before = ends <= tile, ends <= next_tile
    reqs = tl.join(tl.where(before, index + 1, 0), tl.where(next_before, index + 1, 0))
    starts = tl.join(tl.where(before, ends, 0), tl.where(next_before, ends, 0))
    reqs, starts = tl.split(tl.max(tl.join(reqs, starts), 0))
    first_req, last_req = tl.split(reqs)
    first_start, last_start = tl.split(starts)
    first_head, first_start, first_tile, first_tiles, first_unit = _locate(
        tile, first_req, first_start, num_reqs, step, shape
    )
    last_head, last_start, last_tile, _, last_unit = _locate(
        next_tile, last_req, last_start, num_reqs, step, shape
    )
    # back to the start of a unit
    begin = tl.where(begin == total, total, first_start + first_tile)
    end = tl.where(end == total, total, last_start + last_tile)
    count = end - begin
    # units done of the row that an earlier program began, and of the one that this
    # program began and a later one goes on with
    first_done = tl.minimum(first_tiles - first_tile, count)
    first_done = tl.where(first_tile > 0, tl.cdiv(first_done, first_unit), 0)
    goes_on = (last_start >= begin) & (last_start + last_tile == end)
    last_done = tl.where(goes_on, last_tile // last_unit, 0)

    # where the next loads are: `left` counts the keys from the tile on
    req, kv_head, tile = first_req, first_head, first_tile
    token, seq_len, query_len = _load_request(req, num_reqs, step)
    token, next_seq_len, next_query_len = _load_request(req + 1, num_reqs, step)
    oldest, context, num_tiles, unit = _span(seq_len, query_len, shape)
    left = context - oldest - tile * shape.BLOCK_N
    blocks = _block_ids(req, tile, oldest, left, step, shape)

    column = tl.arange(0, shape.BLOCK_N)
    d = tl.arange(0, shape.BLOCK_D)
    scale = softmax_scale(step)
    q = tl.zeros([shape.DECODE_M, shape.BLOCK_D], DTYPE)
    row = empty_state(shape.DECODE_M, shape.BLOCK_D)
    maximum, weight, sums = empty_state(shape.DECODE_M, shape.BLOCK_D)
    weights = tl.zeros([shape.DECODE_M, shape.BLOCK_N], tl.float32)
    whole = tile == 0
    for i in range(count):
        head, block = kv_head.to(tl.int64), blocks.to(tl.int64)
        offset = (_positions(tile, oldest, shape) % shape.BLOCK_SIZE).to(tl.int64)
        mask = (column < left)[:, None] & (d < shape.HEAD_SIZE)[None, :]
        k_ptr, v_ptr = paged_ptrs(block, offset, head, step, shape)
        k = tl.load(k_ptr, mask=mask, other=0.0)
        v = tl.load(v_ptr, mask=mask, other=0.0)

        if (i == 0) | (tile == 0):
            whole = tile == 0
            q, maximum, weight, sums = _begin_row(
                req, head, whole, num_reqs, step, shape
            )
            weights = tl.where(column == 0, 1.0, 0.0)[None, :] * weight[:, None]
        products = tl.dot(q, tl.trans(k.to(DTYPE)), input_precision="ieee")
        logits = base2_logits(products, scale, shape)
        logits = tl.where((column < left)[None, :], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        p = tl.exp2(logits - new_maximum[:, None])
        fade = tl.exp2(maximum - new_maximum)
        # summed over the columns when the unit ends: one exchange less between warps
        weights = weights * fade[:, None] + p
        v = v.to(DTYPE)
        sums = tl.dot(p.to(DTYPE), v, sums * fade[:, None], input_precision="ieee")
        maximum = new_maximum

        is_last = left <= shape.BLOCK_N
        if is_last | ((tile + 1) % unit == 0):
            row = merge_states(row, (maximum, tl.sum(weights, 1), sums))
            if is_last | (i + 1 == count) | (whole == 0):
                if is_last & whole:
                    _finish_row(req, head, row, num_reqs, step, shape, shape.DECODE_M)
                else:
                    at = tl.where(whole, 0, tile // unit)
                    _store_partial(program, at, row, step, shape)
                row = empty_state(shape.DECODE_M, shape.BLOCK_D)
            maximum, weight, sums = empty_state(shape.DECODE_M, shape.BLOCK_D)
            weights = tl.zeros([shape.DECODE_M, shape.BLOCK_N], tl.float32)

        # the next tile is of this head, of the next one, or of the next request
        kv_head += is_last.to(tl.int32)
        tile = tl.where(is_last, 0, tile + 1)
        moves = kv_head == shape.NUM_KV_HEADS
        kv_head = tl.where(moves, 0, kv_head)
        req += moves.to(tl.int32)
        seq_len = tl.where(moves, next_seq_len, seq_len)
        query_len = tl.where(moves, next_query_len, query_len)
        token, next_seq_len, next_query_len = _load_request(req + 1, num_reqs, step)
        oldest, context, num_tiles, unit = _span(seq_len, query_len, shape)
        left = context - oldest - tile * shape.BLOCK_N
        blocks = _block_ids(req, tile, oldest, left, step, shape)

    for side in range(2):
        num_done = tl.where(side == 0, first_done, last_done)
        if num_done > 0:
            _arrive(
                num_done,
                tl.where(side == 0, first_req, last_req),
                tl.where(side == 0, first_head, last_head),
                tl.where(side == 0, first_start, last_start),
                share,
                num_reqs,
                step,
                shape,
            )
