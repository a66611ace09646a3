# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of `merged_attention`; see there for what they compute.

An item of work is a tile of a prefill chunk (BLOCK_M rows: tokens of one request times
the heads of one group), or one part of the context of a decode row (the heads of one
group, padded to DECODE_M rows for the tensor cores). Program `item * num_kv_heads + h`
does item `item` for KV head h. Prefill tiles come first, being longest.

A void request (seq_len 0) takes the common path: every mask is false, every loop empty.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spexis_kernels._attention_rows import Strided, load_rows, to_cache_dtype
from spexis_kernels.constants import PAD_SLOT_ID

_PAD_SLOT_ID = tl.constexpr(PAD_SLOT_ID)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # finite: exp2(lowest - lowest) must not be NaN


class Shape(NamedTuple):
    """What a kernel is compiled for: each a tl.constexpr, or None."""

    NUM_KV_HEADS: Any
    GROUP: Any  # query heads a KV head
    HEAD_SIZE: Any
    ROTARY_DIM: Any
    BLOCK_SIZE: Any  # tokens a block of the cache
    WINDOW: Any  # None: no sliding window
    SOFT_CAP: Any  # None: no cap
    NUM_NEW: Any  # tokens of a decode row that come from key and value: 1 or 0
    BLOCK_D: Any  # HEAD_SIZE, padded to a power of two
    BLOCK_M: Any  # rows of a prefill tile
    DECODE_M: Any  # rows of a decode tile
    BLOCK_N: Any  # tokens a step of the loop over the context
    MAX_SPLITS: Any  # parts that the context of a decode row is split into at most
    MIN_CHUNK: Any  # tokens of such a part at least


class Paged(NamedTuple):
    """A [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE] cache; a head's D adjoin."""

    ptr: Any
    block_stride: Any
    offset_stride: Any
    head_stride: Any


class Step(NamedTuple):
    """The tensors of a launch."""

    out: Strided  # [T, num_heads, HEAD_SIZE]
    query: Strided  # [T, num_heads, HEAD_SIZE]
    key: Any  # Strided, [T, num_kv_heads, HEAD_SIZE], or None
    value: Any  # likewise
    key_cache: Paged
    value_cache: Paged
    k_scale: Any  # [1] float32, or None
    v_scale: Any  # [1] float32, or None
    block_table: Any  # [num_reqs, max_blocks] int32
    block_table_stride: Any
    query_start_loc: Any  # [num_reqs + 1] int32
    seq_lens: Any  # [num_reqs] int32
    slot_mapping: Any  # [T] int64, or None
    rotary: Any  # Rotary, or None
    qk_norm: Any  # QKNorm, or None
    partial_sums: Any  # [num_splits, num_reqs, num_heads, HEAD_SIZE] float32, or None
    partial_stats: Any  # [num_splits, num_reqs, num_heads, 2] float32, or None
    scale: Any


@triton.jit
def _softmax_scale(step):
    if step.k_scale is None:
        return step.scale
    else:
        return step.scale * tl.load(step.k_scale)


@triton.jit
def _base2_logits(products, scale, shape):
    if shape.SOFT_CAP is None:
        return products * (scale * _LOG2E)
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is exact where e^2x is 0 or inf
        power = tl.exp2(products * (scale * (2 * _LOG2E / shape.SOFT_CAP)))
        return (1 - 2 / (power + 1)) * (shape.SOFT_CAP * _LOG2E)


@triton.jit
def _attend(q, q_position, k, v, position, there, state, scale, shape):
    """One step of the online softmax, over keys k [N, BLOCK_D] at positions [N].

    The state: maximum [M] of the base-2 logits so far, weight [M] = the sum of
    exp2(logit - maximum), and sums [M, BLOCK_D] = v summed by those weights, float32.
    """
    maximum, weight, sums = state
    k, v = k.to(q.dtype), v.to(q.dtype)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    distance = q_position[:, None] - position[None, :]
    visible = there[None, :] & (distance >= 0)
    if shape.WINDOW is not None:
        visible = visible & (distance < shape.WINDOW)
    logits = tl.where(visible, _base2_logits(products, scale, shape), float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(logits, 1))
    p = tl.exp2(logits - new_maximum[:, None])
    fade = tl.exp2(maximum - new_maximum)
    weight = weight * fade + tl.sum(p, 1)
    sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
    return new_maximum, weight, sums


@triton.jit
def _empty_state(M: tl.constexpr, BLOCK_D: tl.constexpr):
    maximum = tl.full([M], _LOWEST, tl.float32)
    return maximum, tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32)


@triton.jit
def _paged_ptr(cache, block, offset, kv_head, d):
    row = block * cache.block_stride + offset * cache.offset_stride
    return cache.ptr + (row + kv_head * cache.head_stride)[:, None] + d[None, :]


@triton.jit
def _attend_cached(q, q_position, req, kv_head, begin, end, state, step, shape):
    """Positions [begin, end) of a request, from the cache."""
    d = tl.arange(0, shape.BLOCK_D)
    scale = _softmax_scale(step)
    table = step.block_table + req.to(tl.int64) * step.block_table_stride
    for first in range(begin, end, shape.BLOCK_N):
        position = first + tl.arange(0, shape.BLOCK_N)
        there = position < end
        block = tl.load(table + position // shape.BLOCK_SIZE, mask=there, other=0)
        block = block.to(tl.int64)
        offset = (position % shape.BLOCK_SIZE).to(tl.int64)
        mask = there[:, None] & (d < shape.HEAD_SIZE)[None, :]
        k_ptr = _paged_ptr(step.key_cache, block, offset, kv_head, d)
        v_ptr = _paged_ptr(step.value_cache, block, offset, kv_head, d)
        k = tl.load(k_ptr, mask=mask, other=0.0)
        v = tl.load(v_ptr, mask=mask, other=0.0)
        state = _attend(q, q_position, k, v, position, there, state, scale, shape)
    return state


@triton.jit
def _load_query(token, head, there, step, shape):
    if step.qk_norm is None:
        weight, eps = None, 0.0
    else:
        weight, eps = step.qk_norm.q_weight, step.qk_norm.eps
    return load_rows(step.query, token, head, there, weight, eps, step.rotary, shape)


@triton.jit
def _load_new(token, kv_head, there, owned, step, shape):
    """K and V of tokens [N] as the cache holds them; writes there those `owned`."""
    if step.qk_norm is None:
        weight, eps = None, 0.0
    else:
        weight, eps = step.qk_norm.k_weight, step.qk_norm.eps
    k = load_rows(step.key, token, kv_head, there, weight, eps, step.rotary, shape)
    v = load_rows(step.value, token, kv_head, there, None, 0.0, None, shape)
    k = to_cache_dtype(k, step.k_scale, step.key_cache.ptr.dtype.element_ty)
    v = to_cache_dtype(v, step.v_scale, step.value_cache.ptr.dtype.element_ty)

    slot = tl.load(step.slot_mapping + token, mask=owned, other=_PAD_SLOT_ID)
    block, offset = slot // shape.BLOCK_SIZE, slot % shape.BLOCK_SIZE
    d = tl.arange(0, shape.BLOCK_D)
    mask = (slot != _PAD_SLOT_ID)[:, None] & (d < shape.HEAD_SIZE)[None, :]
    tl.store(_paged_ptr(step.key_cache, block, offset, kv_head, d), k, mask=mask)
    tl.store(_paged_ptr(step.value_cache, block, offset, kv_head, d), v, mask=mask)
    return k, v


@triton.jit
def _store_out(token, head, there, state, step, shape):
    """Normalise and store; rows of a void request have weight 0, and become 0."""
    _, weight, sums = state
    rows = sums / tl.where(weight > 0, weight, 1.0)[:, None]
    if step.v_scale is not None:
        rows = rows * tl.load(step.v_scale)
    d = tl.arange(0, shape.BLOCK_D)
    out = step.out.ptr + token * step.out.token_stride + head * step.out.head_stride
    mask = there[:, None] & (d < shape.HEAD_SIZE)[None, :]
    tl.store(
        out[:, None] + d[None, :], rows.to(step.out.ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _partial_row(req, split, head, num_reqs, shape):
    num_heads: tl.constexpr = shape.NUM_KV_HEADS * shape.GROUP
    return (split.to(tl.int64) * num_reqs + req) * num_heads + head


@triton.jit
def _split_context(seq_len, shape):
    """Cached positions [oldest, context) of a decode row, tokens a part, parts."""
    context = tl.maximum(seq_len - shape.NUM_NEW, 0)
    oldest = context * 0
    if shape.WINDOW is not None:
        oldest = tl.minimum(tl.maximum(seq_len - shape.WINDOW, 0), context)
    length = context - oldest
    chunk = tl.cdiv(tl.cdiv(length, shape.MAX_SPLITS), shape.BLOCK_N) * shape.BLOCK_N
    chunk = tl.maximum(chunk, shape.MIN_CHUNK)
    return oldest, context, chunk, tl.maximum(tl.cdiv(length, chunk), 1)


@triton.jit
def _decode_part(req, split, kv_head, num_reqs, step, shape):
    """One part of a decode row's context; the last one adds the row's own token."""
    token = tl.load(step.query_start_loc + req).to(tl.int64)
    query_len = tl.load(step.query_start_loc + req + 1) - token
    seq_len = tl.load(step.seq_lens + req)
    oldest, context, chunk, num_splits = _split_context(seq_len, shape)
    if (query_len == 1) & (split < num_splits):
        row = tl.arange(0, shape.DECODE_M)
        in_group = row < shape.GROUP
        head = kv_head * shape.GROUP + row
        tokens = token + row * 0
        q = _load_query(tokens, head, in_group & (seq_len > 0), step, shape)
        state = _empty_state(shape.DECODE_M, shape.BLOCK_D)
        if shape.NUM_NEW == 1 and (split == num_splits - 1) & (seq_len > 0):
            # the softmax starts from it, which saves a tile for a single key
            one = tl.arange(0, 1)
            k, v = _load_new(token + one, kv_head, one == 0, one == 0, step, shape)
            products = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
            maximum, weight, sums = state
            maximum = _base2_logits(products, _softmax_scale(step), shape)
            state = maximum, weight + 1, sums + v.to(tl.float32)
        begin = oldest + split * chunk
        end = tl.minimum(begin + chunk, context)
        q_position = seq_len - 1 + row * 0
        state = _attend_cached(
            q, q_position, req, kv_head, begin, end, state, step, shape
        )
        if num_splits == 1:
            _store_out(tokens, head, in_group, state, step, shape)
        elif step.partial_sums is not None:
            maximum, weight, sums = state
            part = _partial_row(req, split, head, num_reqs, shape)
            d = tl.arange(0, shape.BLOCK_D)
            sums_ptr = step.partial_sums + part[:, None] * shape.HEAD_SIZE + d[None, :]
            mask = in_group[:, None] & (d < shape.HEAD_SIZE)[None, :]
            tl.store(sums_ptr, sums, mask=mask)
            tl.store(step.partial_stats + part * 2, maximum, mask=in_group)
            tl.store(step.partial_stats + part * 2 + 1, weight, mask=in_group)


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
        q = _load_query(token, head, in_tile & (seq_len > 0), step, shape)
        state = _empty_state(shape.BLOCK_M, shape.BLOCK_D)
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
            scale = _softmax_scale(step)
            # not pipelined: copies of what RoPE loads would crowd out the other loop's
            new = tl.maximum(oldest, context)
            for begin in tl.range(new, end, shape.BLOCK_N, num_stages=1):
                position = begin + tl.arange(0, shape.BLOCK_N)
                there = position < end
                key_token = (start - context + position).to(tl.int64)
                owned = there & (position >= first)
                k, v = _load_new(key_token, kv_head, there, owned, step, shape)
                state = _attend(
                    q, q_position, k, v, position, there, state, scale, shape
                )
        _store_out(token, head, in_tile, state, step, shape)


@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "num_tiles"])
def merged_attention_kernel(
    step, num_tokens, num_reqs, num_tiles, shape, PREFILL: tl.constexpr
):
    kv_head = tl.program_id(0).to(tl.int64) % shape.NUM_KV_HEADS
    item = tl.program_id(0) // shape.NUM_KV_HEADS
    num_items = tl.num_programs(0) // shape.NUM_KV_HEADS

    row = tl.arange(0, shape.DECODE_M)
    head = kv_head * shape.GROUP + row
    nothing = _empty_state(shape.DECODE_M, shape.BLOCK_D)
    end = tl.load(step.query_start_loc + num_reqs)
    for padding in range(end + item, num_tokens, num_items):
        token = row.to(tl.int64) * 0 + padding
        _store_out(token, head, row < shape.GROUP, nothing, step, shape)

    if PREFILL and item < num_tiles:
        _prefill_tile(item, kv_head, num_reqs, step, shape)
    else:
        part = item - num_tiles
        _decode_part(part % num_reqs, part // num_reqs, kv_head, num_reqs, step, shape)


@triton.jit(do_not_specialize=["num_reqs"])
def combine_kernel(step, num_reqs, shape, BLOCK_S: tl.constexpr):
    """Add the parts of one head of a decode row, in order of position."""
    req = tl.program_id(0)
    token = tl.load(step.query_start_loc + req).to(tl.int64)
    query_len = tl.load(step.query_start_loc + req + 1) - token
    _, _, _, num_splits = _split_context(tl.load(step.seq_lens + req), shape)
    if (query_len == 1) & (num_splits > 1):
        head = tl.program_id(1) + tl.arange(0, 1).to(tl.int64)
        split = tl.arange(0, BLOCK_S)
        there = split < num_splits
        part = _partial_row(req, split, head, num_reqs, shape)
        maximum = tl.load(
            step.partial_stats + part * 2, mask=there, other=float("-inf")
        )
        fade = tl.exp2(maximum - tl.max(maximum, 0))
        weight = tl.load(step.partial_stats + part * 2 + 1, mask=there, other=0.0)
        d = tl.arange(0, shape.BLOCK_D)
        mask = there[:, None] & (d < shape.HEAD_SIZE)[None, :]
        sums_ptr = step.partial_sums + part[:, None] * shape.HEAD_SIZE + d[None, :]
        sums = tl.load(sums_ptr, mask=mask, other=0.0)
        sums = tl.sum(sums * fade[:, None], 0)[None, :]
        weight = tl.sum(weight * fade, 0) + tl.zeros([1], tl.float32)
        state = weight, weight, sums
        _store_out(token + head * 0, head, head >= 0, state, step, shape)
