# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a mixed batch over one paged KV cache, with the KV write fused.

Normal and draft rows (one token each) and prefill chunks go in one launch. For the
token at position p of a request and head h, g = num_heads // num_kv_heads:

    out[h] = sum_j softmax_j(cap(scale * q[h] . k_j[h // g])) v_j[h // g]
    j      = max(0, p - sliding_window + 1) .. p
    cap(x) = soft_cap * tanh(x / soft_cap)

Nothing orders the programs of a launch, so none reads what another writes: the tokens
of this step are taken from `key` and `value`, rounded as the cache holds them, the
older ones from the cache, and a token's K and V are written by one program alone.

    [0, seq_len - query_len) cache · [seq_len - query_len, seq_len) key and value

A decode row's context is cut into units by its own length alone, merged in order by
whichever program; prefill tiles are cut from the start of their request. So the output
of a request, bit for bit, does not depend on the rest of the batch.

Not handled: ALiBi, sinks, non-causal masks, scales of an fp8 cache finer than a tensor.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spexis_kernels._attention_checks import check_attention, check_tensor
from spexis_kernels._attention_kernels import merged_attention_kernel
from spexis_kernels._attention_rows import (
    QKNorm,
    Rotary,
    Strided,
    load_rows_reference,
    to_cache_dtype_reference,
)
from spexis_kernels._attention_settings import (
    MAX_PROGRAMS,
    Settings,
    attention_settings,
    device_of,
)
from spexis_kernels._attention_tiles import Paged, Shape, Step
from spexis_kernels.constants import PAD_SLOT_ID
from spexis_kernels.dispatch import use_kernel

__all__ = [
    "MergedAttentionResult",
    "QKNorm",
    "Rotary",
    "merged_attention",
    "merged_attention_io_bytes",
    "merged_attention_reference",
    "merged_attention_workspace_size",
]


# of q . k and p . v: (dtype of the query, cache is fp8), see `load_query`
_PRODUCT_DTYPES = {
    (torch.float32, False): tl.float32,
    (torch.float32, True): tl.float32,
    (torch.float16, False): tl.float16,
    (torch.float16, True): tl.float16,
    (torch.bfloat16, False): tl.bfloat16,
    (torch.bfloat16, True): tl.float16,
}


class MergedAttentionResult(NamedTuple):
    """What `merged_attention` computes and writes."""

    out: torch.Tensor  # [T, num_heads, head_size], the query's dtype
    key: torch.Tensor | None = None  # [T, num_kv_heads, head_size], the cache's dtype
    value: torch.Tensor | None = None  # likewise; both None: nothing is written
    slots: torch.Tensor | None = None  # [T] int64, where they go, or PAD_SLOT_ID


def merged_attention_workspace_size(
    query: torch.Tensor, key_cache: torch.Tensor
) -> int:
    """Elements of the float32 `workspace` that `merged_attention` needs, whatever the
    batch: of these only dtypes, numbers of heads, head size and device count."""
    num_heads, head_size = query.shape[1:]
    settings = _settings(query, key_cache)
    group = num_heads // key_cache.shape[2]
    states = settings.num_programs * settings.max_units * group
    return MAX_PROGRAMS + states * (head_size + 2)


def _settings(query: torch.Tensor, key_cache: torch.Tensor) -> Settings:
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    return attention_settings(
        num_kv_heads,
        num_heads // num_kv_heads,
        head_size,
        query.dtype,
        key_cache.dtype,
        device_of(query.device),
    )


def merged_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    qk_norm: QKNorm | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the cache and to this step's tokens, and write those to the cache.

    Tensors may have any strides as long as the elements of a head adjoin.

    Args:
        query: [T, num_heads, head_size] float32, float16 or bfloat16, before norm and
            RoPE if those are asked for. Row t belongs to request r with
            query_start_loc[r] <= t < query_start_loc[r + 1]; rows past the end are
            padding.
        key, value: [T, num_kv_heads, head_size], the query's dtype: the tokens of
            `query`. Both None: they are in the cache already, nothing is written.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], the
            query's dtype or float8_e4m3fn. Written in place at `slot_mapping`.
        block_table: [num_reqs, max_blocks] int32, rows contiguous; entries past a
            request's length, and those wholly before its window, are not used.
        query_start_loc: [num_reqs + 1] int32, contiguous, ascending from 0. A request
            without rows is skipped.
        seq_lens: [num_reqs] int32, contiguous: tokens of the request, this step's
            included. 0: a void request, whose rows are not read and write nothing.
        slot_mapping: [T] int64, contiguous: block * block_size + offset of a token,
            distinct, or PAD_SLOT_ID: not written. No other request may read a slot that
            this call writes. None only without key and value.
        max_query_len: at least the rows of the longest request. Up to 1, the program
            for prefill chunks is left out.
        scale: factor of q . k.
        sliding_window: tokens a token sees, itself included; None: all.
        soft_cap: bound of the logits; None: none.
        k_scale, v_scale: [1] or [] float32, of an fp8 cache: a cached element times its
            scale is the value. None: 1.
        rotary: RoPE for q and k; cos_sin_cache contiguous.
        qk_norm: RMSNorm for the heads of q and k, before RoPE.
        out: like query, in memory of its own; written and returned. Rows of void
            requests and padding become 0. Allocated if None.
        workspace: [merged_attention_workspace_size(...) or more] float32, contiguous.
            Its first MAX_PROGRAMS elements must be zero, and are zero again afterwards;
            the rest is scratch. Launches that follow each other on one stream may share
            it, launches that may overlap must not. Allocated if None.

    Returns:
        [T, num_heads, head_size], the query's dtype.

    Raises:
        ValueError: an argument's shape, dtype or layout is not as said.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if max_query_len < 0:
        raise ValueError(f"max_query_len must be >= 0, got {max_query_len}")
    for name, number in (("sliding_window", sliding_window), ("soft_cap", soft_cap)):
        if number is not None and number <= 0:
            raise ValueError(f"{name} must be positive or None, got {number}")
    check_attention(
        query, key, value, key_cache, value_cache, block_table, query_start_loc,
        seq_lens, slot_mapping, k_scale, v_scale, rotary, qk_norm, out,
    )  # fmt: skip
    num_tokens, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_reqs = len(seq_lens)
    if num_tokens == 0:
        return out
    if num_reqs == 0:
        return out.zero_()
    if not use_kernel(query):
        result = merged_attention_reference(
            query, key, value, key_cache, value_cache, block_table, query_start_loc,
            seq_lens, slot_mapping, max_query_len=max_query_len, scale=scale,
            sliding_window=sliding_window, soft_cap=soft_cap, k_scale=k_scale,
            v_scale=v_scale, rotary=rotary, qk_norm=qk_norm,
        )  # fmt: skip
        _write(result, key_cache, value_cache)
        return out.copy_(result.out)

    group = num_heads // num_kv_heads
    settings = _settings(query, key_cache)
    size = merged_attention_workspace_size(query, key_cache)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=query.device)
        workspace[:MAX_PROGRAMS].zero_()
    check_tensor("workspace", workspace, (None,), torch.float32)
    if len(workspace) < size:
        raise ValueError(
            f"workspace must have {size} elements or more, got {len(workspace)}"
        )
    num_sums = (size - MAX_PROGRAMS) // (head_size + 2) * head_size
    arrived, partial_sums, partial_stats = workspace[:size].split(
        [MAX_PROGRAMS, num_sums, size - MAX_PROGRAMS - num_sums]
    )

    step = Step(
        out=Strided(out, *out.stride()[:2]),
        query=Strided(query, *query.stride()[:2]),
        key=None if key is None else Strided(key, *key.stride()[:2]),
        value=None if value is None else Strided(value, *value.stride()[:2]),
        key_cache=Paged(key_cache, *key_cache.stride()[:3]),
        value_cache=Paged(value_cache, *value_cache.stride()[:3]),
        k_scale=k_scale,
        v_scale=v_scale,
        block_table=block_table,
        block_table_stride=block_table.stride(0),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        rotary=rotary,
        qk_norm=qk_norm,
        arrived=arrived.view(torch.int32),
        partial_sums=partial_sums,
        partial_stats=partial_stats,
        scale=scale,
    )
    shape = Shape(
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        ROTARY_DIM=None if rotary is None else rotary.cos_sin_cache.shape[1],
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window,
        SOFT_CAP=soft_cap,
        ONE_LAYOUT=key_cache.stride() == value_cache.stride(),
        NUM_NEW=0 if key is None else 1,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_M=settings.block_m,
        BLOCK_N=settings.block_n,
        DECODE_M=settings.decode_m,
        PARTIAL_M=triton.next_power_of_2(group),
        UNIT_TILES=settings.unit_tiles,
        MAX_UNITS=settings.max_units,
    )
    shape = Shape(*(None if x is None else tl.constexpr(x) for x in shape))
    prefill = max_query_len > 1
    num_decode, num_tiles = settings.num_programs, 0
    if prefill:
        num_decode = settings.mixed_programs
        num_tiles = num_tokens // (settings.block_m // group) + num_reqs
    merged_attention_kernel[(num_decode + num_tiles * num_kv_heads,)](
        step,
        num_tokens,
        num_reqs,
        num_decode,
        shape,
        PREFILL=prefill,
        DTYPE=_PRODUCT_DTYPES[query.dtype, key_cache.dtype == torch.float8_e4m3fn],
        REQS=max(256, triton.next_power_of_2(num_reqs)),
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
    )
    return out


def merged_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    qk_norm: QKNorm | None = None,
) -> MergedAttentionResult:
    """`merged_attention` in plain torch, in fp32, one request at a time."""
    group = query.shape[1] // key_cache.shape[2]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    rows_of = [range(*pair) for pair in itertools.pairwise(starts)]
    live = torch.tensor(
        [row for rows, n in zip(rows_of, lens, strict=True) if n for row in rows],
        dtype=torch.int64,
        device=query.device,
    )
    q_weight, k_weight, eps = qk_norm or (None, None, 0.0)
    q = torch.zeros(query.shape, device=query.device)
    q[live] = load_rows_reference(query, q_weight, eps, rotary, live).float()
    result = MergedAttentionResult(torch.zeros_like(q, dtype=query.dtype))
    if key is not None and value is not None and slot_mapping is not None:
        new_key = torch.zeros(key.shape, dtype=key_cache.dtype, device=key.device)
        new_value = torch.zeros_like(new_key)
        slots = torch.full_like(slot_mapping, PAD_SLOT_ID)
        k = load_rows_reference(key, k_weight, eps, rotary, live)
        new_key[live] = to_cache_dtype_reference(k, k_scale, new_key.dtype)
        new_value[live] = to_cache_dtype_reference(value[live], v_scale, new_key.dtype)
        slots[live] = slot_mapping[live]
        result = result._replace(key=new_key, value=new_value, slots=slots)

    for req, seq_len in enumerate(lens):
        rows = slice(starts[req], starts[req + 1])
        if seq_len == 0 or rows.start == rows.stop:
            continue
        first = seq_len - (rows.stop - rows.start)
        oldest = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        context = seq_len if result.key is None else first
        cached = torch.arange(oldest, context, device=query.device)
        block = block_table[req, cached // key_cache.shape[1]].long()
        k = key_cache[block, cached % key_cache.shape[1]]
        v = value_cache[block, cached % key_cache.shape[1]]
        if result.key is not None and result.value is not None:
            k = torch.cat((k, result.key[rows]))
            v = torch.cat((v, result.value[rows]))
        k = k.float() if k_scale is None else k.float() * k_scale
        v = v.float() if v_scale is None else v.float() * v_scale
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)

        logits = torch.einsum("qhd,khd->hqk", q[rows], k) * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        position = torch.arange(oldest, seq_len, device=query.device)
        distance = torch.arange(first, seq_len, device=query.device)[:, None] - position
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        weights = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        result.out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
    return result


def _write(
    result: MergedAttentionResult, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    """Put the new K and V where they belong."""
    if result.key is None or result.value is None or result.slots is None:
        return
    kept = result.slots != PAD_SLOT_ID
    slots = result.slots[kept]
    block_size = key_cache.shape[1]
    key_cache[slots // block_size, slots % block_size] = result.key[kept]
    value_cache[slots // block_size, slots % block_size] = result.value[kept]


def merged_attention_io_bytes(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    sliding_window: int | None = None,
    writes_cache: bool = True,
) -> int:
    """Bytes that `merged_attention` has to move: each of q, k, v, out and cached K and
    V once; block tables, RoPE tables and partial sums are left out.

    Args:
        query_lens: tokens of each request in this step.
        seq_lens: tokens of each request, this step's included; 0: void.
        writes_cache: K and V of this step are read, and written to the cache.
    """
    row = num_heads * head_size * dtype.itemsize
    new = 2 * num_kv_heads * head_size * (dtype.itemsize + cache_dtype.itemsize)
    cached = 2 * num_kv_heads * head_size * cache_dtype.itemsize
    total = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        total += query_len * row  # out
        if seq_len == 0:
            continue
        first = seq_len - query_len
        oldest = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        total += query_len * row
        if writes_cache:
            total += query_len * new + (first - oldest) * cached
        else:
            total += (seq_len - oldest) * cached
    return total
