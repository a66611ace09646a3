# SPDX-License-Identifier: Apache-2.0
"""What the decode and the prefill part of `merged_attention` share.

A *state* is an online softmax over some keys: the maximum [M] of their base-2 logits,
the weight [M] = the sum of exp2(logit - maximum), and sums [M, BLOCK_D] = their values
summed by those weights; float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from spexis_kernels._attention_rows import Strided, load_rows, to_cache_dtype
from spexis_kernels.constants import PAD_SLOT_ID

_PAD_SLOT_ID = tl.constexpr(PAD_SLOT_ID)
_LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: exp2(lowest - lowest) must not be NaN
_FP16_MAX = tl.constexpr(65504.0)


class Shape(NamedTuple):
    """What a kernel is compiled for: each a tl.constexpr, or None."""

    NUM_KV_HEADS: Any
    GROUP: Any  # query heads a KV head
    HEAD_SIZE: Any
    ROTARY_DIM: Any
    BLOCK_SIZE: Any  # tokens a block of the cache
    WINDOW: Any  # None: no sliding window
    SOFT_CAP: Any  # None: no cap
    ONE_LAYOUT: Any  # the value cache has the key cache's strides
    NUM_NEW: Any  # tokens of a decode row that come from key and value: 1 or 0
    BLOCK_D: Any  # HEAD_SIZE, padded to a power of two
    BLOCK_M: Any  # rows of a prefill tile
    BLOCK_N: Any  # tokens a step of the loop over the context
    DECODE_M: Any  # rows of a decode tile
    PARTIAL_M: Any  # GROUP, padded to a power of two
    UNIT_TILES: Any  # tiles of BLOCK_N tokens in a unit of a decode row, at least
    MAX_UNITS: Any  # units of a decode row at most


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
    arrived: Any  # [MAX_PROGRAMS] int32, zero between launches
    partial_sums: Any  # [num_programs, MAX_UNITS, GROUP, HEAD_SIZE] float32
    partial_stats: Any  # [num_programs, MAX_UNITS, GROUP, 2] float32
    scale: Any


@triton.jit
def softmax_scale(step):
    if step.k_scale is None:
        return step.scale
    else:
        return step.scale * tl.load(step.k_scale)


@triton.jit
def base2_logits(products, scale, shape):
    if shape.SOFT_CAP is None:
        return products * (scale * _LOG2E)
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is exact where e^2x is 0 or inf
        power = tl.exp2(products * (scale * (2 * _LOG2E / shape.SOFT_CAP)))
        return (1 - 2 / (power + 1)) * (shape.SOFT_CAP * _LOG2E)


@triton.jit
def empty_state(M: tl.constexpr, BLOCK_D: tl.constexpr):
    maximum = tl.full([M], LOWEST, tl.float32)
    return maximum, tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32)


@triton.jit
def merge_states(a, b):
    """The state over the keys of both; with an empty one, the other to the bit.

    Written with fma so that it rounds the same wherever it is inlined.
    """
    maximum = tl.maximum(a[0], b[0])
    fade_a, fade_b = tl.exp2(a[0] - maximum), tl.exp2(b[0] - maximum)
    weight = tl.fma(a[1], fade_a, b[1] * fade_b)
    rest = b[2] * fade_b[:, None]
    sums = tl.fma(a[2], tl.broadcast_to(fade_a[:, None], rest.shape), rest)
    return maximum, weight, sums


@triton.jit
def paged_ptrs(block, offset, kv_head, step, shape):
    """Pointers to the elements of a KV head, [N, BLOCK_D], in both caches."""
    d = tl.arange(0, shape.BLOCK_D)[None, :]
    k, v = step.key_cache, step.value_cache
    k_row = block * k.block_stride + offset * k.offset_stride + kv_head * k.head_stride
    v_row = k_row
    if not shape.ONE_LAYOUT:
        v_row = block * v.block_stride + offset * v.offset_stride
        v_row += kv_head * v.head_stride
    return k.ptr + (k_row[:, None] + d), v.ptr + (v_row[:, None] + d)


@triton.jit
def load_query(token, head, there, step, shape):
    """Heads of q, [M, BLOCK_D], in the dtype of the products."""
    if step.qk_norm is None:
        weight, eps = None, 0.0
    else:
        weight, eps = step.qk_norm.q_weight, step.qk_norm.eps
    q = load_rows(step.query, token, head, there, weight, eps, step.rotary, shape)
    if tl.float8e4nv == step.key_cache.ptr.dtype.element_ty and q.dtype == tl.bfloat16:
        # e4m3 widens to fp16 in one instruction and exactly, to bf16 in several
        q = tl.clamp(q.to(tl.float32), -_FP16_MAX, _FP16_MAX).to(tl.float16)
    return q


@triton.jit
def load_new(token, kv_head, there, owned, step, shape):
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
    k_ptr, v_ptr = paged_ptrs(block, offset, kv_head, step, shape)
    tl.store(k_ptr, k, mask=mask)
    tl.store(v_ptr, v, mask=mask)
    return k, v


@triton.jit
def store_out(token, head, there, state, step, shape):
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
