# SPDX-License-Identifier: Apache-2.0
"""The launch of `merged_attention`: decode rows, prefill chunks and padding.

The first `num_decode` programs share the decode rows (`_attention_decode`). Program
`num_decode + tile * num_kv_heads + h` does a tile of a prefill chunk for KV head h:
BLOCK_M rows, tokens of one request times the heads of one group. So a multiprocessor
gets decode rows, bound by memory, beside prefill tiles, bound by arithmetic.

A void request (seq_len 0) takes the common path: every mask is false, every loop empty.
"""

import triton
import triton.language as tl

from spexis_kernels._attention_decode import decode_rows
from spexis_kernels._attention_tiles import (
    base2_logits,
    empty_state,
    load_new,
    load_query,
    paged_ptrs,
    softmax_scale,
    store_out,
)


@triton.jit
def _attend(q, q_position, k, v, position, there, state, scale, shape):
    """One step of the online softmax, over keys k [N, BLOCK_D] at positions [N]."""
    maximum, weight, sums = state
    k, v = k.to(q.dtype), v.to(q.dtype)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    distance = q_position[:, None] - position[None, :]
    visible = there[None, :] & (distance >= 0)
    if shape.WINDOW is not None:
        visible = visible & (distance < shape.WINDOW)
    logits = tl.where(visible, base2_logits(products, scale, shape), float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(logits, 1))
    p = tl.exp2(logits - new_maximum[:, None])
    fade = tl.exp2(maximum - new_maximum)
    weight = weight * fade + tl.sum(p, 1)
    sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
    return new_maximum, weight, sums


@triton.jit
def _attend_cached(q, q_position, req, kv_head, begin, end, state, step, shape):
    """Positions [begin, end) of a request, from the cache."""
    d = tl.arange(0, shape.BLOCK_D)
    scale = softmax_scale(step)
    table = step.block_table + req.to(tl.int64) * step.block_table_stride
    for first in range(begin, end, shape.BLOCK_N):
        position = first + tl.arange(0, shape.BLOCK_N)
        there = position < end
        block = tl.load(table + position // shape.BLOCK_SIZE, mask=there, other=0)
        block = block.to(tl.int64)
        offset = (position % shape.BLOCK_SIZE).to(tl.int64)
        mask = there[:, None] & (d < shape.HEAD_SIZE)[None, :]
        k_ptr, v_ptr = paged_ptrs(block, offset, kv_head, step, shape)
        k = tl.load(k_ptr, mask=mask, other=0.0)
        v = tl.load(v_ptr, mask=mask, other=0.0)
        state = _attend(q, q_position, k, v, position, there, state, scale, shape)
    return state


@triton.jit
def _request_of_tile(tile, num_reqs, step, TOKENS: tl.constexpr):
    """The last request r with query_start_loc[r] // TOKENS + r <= tile.

    Request r has the tiles from that number on; cdiv(query_len, TOKENS) of them always
    fit before those of r + 1.
    """
    low, high = tile * 0, num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(step.query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _prefill_tile(tile, kv_head, num_reqs, step, shape):
    """TOKENS tokens of a chunk, times the heads of a group, over all their context."""
    TOKENS: tl.constexpr = shape.BLOCK_M // shape.GROUP
    req = _request_of_tile(tile, num_reqs, step, TOKENS)
    start = tl.load(step.query_start_loc + req)
    query_len = tl.load(step.query_start_loc + req + 1) - start
    seq_len = tl.load(step.seq_lens + req)
    done = (tile - (start // TOKENS + req)) * TOKENS  # tokens in the tiles before
    if (query_len > 1) & (done < query_len):
        context = tl.maximum(seq_len - query_len, 0)
        first = context + done
        end = tl.minimum(first + TOKENS, seq_len)  # [first, end): positions of the tile
        row = tl.arange(0, shape.BLOCK_M)
        in_tile = (row // shape.GROUP < TOKENS) & (
            done + row // shape.GROUP < query_len
        )
        token = (start + done + row // shape.GROUP).to(tl.int64)
        head = kv_head * shape.GROUP + row % shape.GROUP
        q_position = first + row // shape.GROUP
        q = load_query(token, head, in_tile & (seq_len > 0), step, shape)
        state = empty_state(shape.BLOCK_M, shape.BLOCK_D)
        oldest = first * 0
        if shape.WINDOW is not None:
            oldest = tl.maximum(first - shape.WINDOW + 1, 0)
        if shape.NUM_NEW == 0:
            state = _attend_cached(
                q, q_position, req, kv_head, oldest, end, state, step, shape
            )
        else:
            state = _attend_cached(
                q, q_position, req, kv_head, oldest, context, state, step, shape
            )
            scale = softmax_scale(step)
            # not pipelined: copies of what RoPE loads would crowd out the other loop's
            new = tl.maximum(oldest, context)
            for begin in tl.range(new, end, shape.BLOCK_N, num_stages=1):
                position = begin + tl.arange(0, shape.BLOCK_N)
                there = position < end
                key_token = (start - context + position).to(tl.int64)
                owned = there & (position >= first)
                k, v = load_new(key_token, kv_head, there, owned, step, shape)
                state = _attend(
                    q, q_position, k, v, position, there, state, scale, shape
                )
        store_out(token, head, in_tile, state, step, shape)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "num_decode"])
def merged_attention_kernel(
    step,
    num_tokens,
    num_reqs,
    num_decode,
    shape,
    PREFILL: tl.constexpr,
    DTYPE: tl.constexpr,
    REQS: tl.constexpr,
):
    program = tl.program_id(0)
    padding = tl.load(step.query_start_loc + num_reqs) + program
    if PREFILL and program >= num_decode:
        item = program - num_decode
        kv_head = (item % shape.NUM_KV_HEADS).to(tl.int64)
        _prefill_tile(item // shape.NUM_KV_HEADS, kv_head, num_reqs, step, shape)
    else:
        decode_rows(program, num_decode, num_reqs, step, shape, DTYPE, REQS)

    row = tl.arange(0, shape.DECODE_M)
    nothing = empty_state(shape.DECODE_M, shape.BLOCK_D)
    for token in range(padding, num_tokens, tl.num_programs(0)):
        for kv_head in range(shape.NUM_KV_HEADS):
            head = kv_head * shape.GROUP + row.to(tl.int64)
            store_out(token + head * 0, head, row < shape.GROUP, nothing, step, shape)
