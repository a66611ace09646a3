# SPDX-License-Identifier: Apache-2.0
"""What becomes of a row of q, k or v before attention: norm, RoPE, cache rounding.

For a head x of D elements, in fp32, rounded once at the end to the model's dtype:

    norm   x <- x / sqrt(mean(x^2) + eps) * weight
    RoPE   x[i]     <- x[i] cos_i - x[i + R/2] sin_i       i < R/2 ("neox" pairs)
           x[i+R/2] <- x[i + R/2] cos_i + x[i] sin_i       x[R:] stays
    fp8    x <- e4m3(clamp(x / scale, +-448)), read back as that times scale

Not handled: interleaved ("GPT-J") RoPE pairs, norm over more than one head.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP8_MAX = tl.constexpr(FP8_MAX)


class Rotary(NamedTuple):
    """RoPE to apply to q and k."""

    cos_sin_cache: torch.Tensor  # [max_position, rotary_dim], cosines, then sines
    positions: torch.Tensor  # [T] int64, read for the rows of live requests only


class QKNorm(NamedTuple):
    """RMSNorm over each head of q and of k, before RoPE."""

    q_weight: torch.Tensor  # [head_size]
    k_weight: torch.Tensor  # [head_size]
    eps: float


class Strided(NamedTuple):
    """A [T, heads, head_size] tensor inside a kernel; elements of a head adjoin."""

    ptr: Any
    token_stride: Any
    head_stride: Any


@triton.jit
def load_rows(
    x,  # Strided
    token,  # [N] int64
    head,  # int64, or [N] int64
    there,  # [N] bool
    norm_weight,  # [HEAD_SIZE], or None: no norm
    norm_eps,
    rotary,  # Rotary, or None: no RoPE
    shape,  # HEAD_SIZE, BLOCK_D and ROTARY_DIM
):
    """Heads of x after norm and RoPE: [N, BLOCK_D], the dtype of x, 0 past the end."""
    d = tl.arange(0, shape.BLOCK_D)
    row_ptr = (x.ptr + token * x.token_stride + head * x.head_stride)[:, None]
    mask = there[:, None] & (d < shape.HEAD_SIZE)[None, :]
    rows = tl.load(row_ptr + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm_weight is not None:
        rms = tl.sqrt_rn(tl.sum(rows * rows, 1) / shape.HEAD_SIZE + norm_eps)[:, None]
        weight = tl.load(norm_weight + d, mask=d < shape.HEAD_SIZE, other=0.0)
        rows = rows / rms * weight.to(tl.float32)[None, :]
    if rotary is not None:
        HALF: tl.constexpr = shape.ROTARY_DIM // 2
        # a second load of the same cache lines is simpler than an exchange in registers
        pair = tl.where(d < HALF, d + HALF, d - HALF)
        turned = there[:, None] & (d < shape.ROTARY_DIM)[None, :]
        other = tl.load(row_ptr + pair[None, :], mask=turned, other=0.0).to(tl.float32)
        if norm_weight is not None:
            weight = tl.load(norm_weight + pair, mask=d < shape.ROTARY_DIM, other=0.0)
            other = other / rms * weight.to(tl.float32)[None, :]
        position = tl.load(rotary.positions + token, mask=there, other=0)[:, None]
        angle = rotary.cos_sin_cache + position * shape.ROTARY_DIM + (d % HALF)[None, :]
        cos = tl.load(angle, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(angle + HALF, mask=turned, other=0.0).to(tl.float32)
        rows = rows * cos + tl.where((d < HALF)[None, :], -other, other) * sin
    return rows.to(x.ptr.dtype.element_ty)


@triton.jit
def to_cache_dtype(
    rows,
    scale_ptr,  # [1] float32, or None: 1
    CACHE_DTYPE: tl.constexpr,
):
    """Rows as the cache holds them."""
    if tl.float8e4nv == CACHE_DTYPE:
        rows = rows.to(tl.float32)
        if scale_ptr is not None:
            rows = tl.div_rn(rows, tl.load(scale_ptr))
        rows = tl.clamp(rows, -_FP8_MAX, _FP8_MAX)
    return rows.to(CACHE_DTYPE)


def load_rows_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    rotary: Rotary | None,
    tokens: torch.Tensor,  # [N] int64
) -> torch.Tensor:
    """`load_rows` in plain torch, for all heads of `tokens`."""
    rows = x[tokens].float()
    if norm_weight is not None:
        rows = rows / (rows.square().mean(-1, keepdim=True) + norm_eps).sqrt()
        rows = rows * norm_weight.float()
    if rotary is not None:
        cos_sin = rotary.cos_sin_cache[rotary.positions[tokens]].float()
        cos, sin = cos_sin[:, None].chunk(2, dim=-1)
        half = cos.shape[-1]
        first, second, rest = rows.split([half, half, rows.shape[-1] - 2 * half], -1)
        rows = torch.cat(
            (first * cos - second * sin, second * cos + first * sin, rest), -1
        )
    return rows.to(x.dtype)


def to_cache_dtype_reference(
    rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`to_cache_dtype` in plain torch."""
    if dtype == torch.float8_e4m3fn:
        rows = rows.float() if scale is None else rows.float() / scale
        rows = rows.clamp(-FP8_MAX, FP8_MAX)
    return rows.to(dtype)
