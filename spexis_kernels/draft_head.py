# SPDX-License-Identifier: Apache-2.0
"""Draft a token from each row's hidden state, without its logits ever in memory.

    z          = hidden_states @ weight.T / T          (T = 1 where temperature is 0)
    token      = argmax(z + noise)     lowest id on ties; no noise where T is 0
    confidence = exp(z[token] - log_sum_exp(z))         softmax probability of token

with the noise of `gumbel.py`. Each program reads a tile of the vocabulary once, for up
to 128 rows, and writes the `DraftHead` of that tile; a second, small launch combines
the tiles. Shards of a tensor-parallel vocabulary combine by the same rule:

    winner      = the part with the greatest score, among equals the lowest token
    confidence  = confidence[winner] * exp(log_sum_exp[winner] - log_sum_exp)
    log_sum_exp = log(sum over parts of exp(log_sum_exp[part]))

The order of the parts does not change a bit: exponentials are summed as integers.

Logits that are not finite count as minus infinity, so that `token` is always one of the
vocabulary, also for a row of NaN; its confidence is then 0.

Not handled: penalties, top-k, top-p and other logits processors. A draft made without
them is still verified with them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from spexis_kernels._arguments import check_vector
from spexis_kernels.dispatch import use_kernel
from spexis_kernels.gumbel import gumbel_noise, gumbel_noise_reference

_NO_TOKEN = tl.constexpr(2**31 - 1)  # above every id, so it loses every tie
_UNIT = tl.constexpr(2.0**40)


class DraftHead(NamedTuple):
    """Of a vocabulary, or of a part of one; [rows] each, [num_parts, rows] stacked."""

    token: torch.Tensor  # int32
    confidence: torch.Tensor  # float32, softmax probability of token, in [0, 1]
    log_sum_exp: torch.Tensor  # float32, of logits / T
    score: torch.Tensor  # float32, logit / T + noise of token: the maximum


class Settings(NamedTuple):
    """Tile sizes in vocabulary entries, rows and hidden elements; launch settings."""

    block_v: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def _settings(rows: int, dtype: torch.dtype) -> Settings:
    """Tiles so that up to 128 rows share one pass over the weight, and so that what a
    tile reads of the hidden states is small beside its part of the weight: both come
    through the second-level cache, whose bandwidth is hardly more than the memory's."""
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:  # no tensor cores, twice the bytes
        return Settings(128, block_m, block_k=32, num_warps=8, num_stages=3)
    if block_m <= 64:
        return Settings(128, block_m, block_k=64, num_warps=4, num_stages=4)
    return Settings(256, block_m, block_k=64, num_warps=8, num_stages=4)


@triton.jit(do_not_specialize=["rows", "vocab_start"])
def _draft_tile_kernel(
    # [rows, hidden_size] bf16, fp16 or fp32
    hidden_ptr,
    hidden_stride,
    # [vocab_size, hidden_size], same dtype
    weight_ptr,
    weight_stride,
    # [rows] float32, int64, int32 or int64; read if SAMPLE
    temperature_ptr,
    seed_ptr,
    position_ptr,
    # [num_tiles, rows] int32, float32, float32, float32; out
    token_ptr,
    confidence_ptr,
    log_sum_exp_ptr,
    score_ptr,
    rows,
    vocab_size,
    vocab_start,
    hidden_size,
    SAMPLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # row tiles vary fastest: those beyond the first find the weight tile in L2
    num_row_tiles = tl.cdiv(rows, BLOCK_M)
    tile = (tl.program_id(0) // num_row_tiles).to(tl.int64)
    row = (tl.program_id(0) % num_row_tiles).to(tl.int64) * BLOCK_M
    row += tl.arange(0, BLOCK_M)
    entry = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    row_there = row < rows
    entry_there = entry < vocab_size

    # the vocabulary is the first dimension of the product, so that few rows make a
    # narrow tile rather than an empty one
    logits = tl.zeros((BLOCK_V, BLOCK_M), dtype=tl.float32)
    weight_ptrs = weight_ptr + entry[:, None] * weight_stride + k[None, :]
    hidden_ptrs = hidden_ptr + row[None, :] * hidden_stride + k[:, None]
    for start in range(0, hidden_size, BLOCK_K):
        k_there = start + k < hidden_size
        weight = tl.load(
            weight_ptrs, mask=entry_there[:, None] & k_there[None, :], other=0.0
        )
        hidden = tl.load(
            hidden_ptrs, mask=k_there[:, None] & row_there[None, :], other=0.0
        )
        logits = tl.dot(weight, hidden, logits, input_precision=PRECISION)
        weight_ptrs += BLOCK_K
        hidden_ptrs += BLOCK_K

    token = (vocab_start + entry).to(tl.int32)[:, None]
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row, mask=row_there, other=0.0)
        sampled = temperature > 0.0
        logits = logits / tl.where(sampled, temperature, 1.0)[None, :]
    finite = entry_there[:, None] & (tl.abs(logits) < float("inf"))
    logits = tl.where(finite, logits, float("-inf"))
    score = logits
    if SAMPLE:  # noqa: SIM102, decided when compiling
        if tl.max(sampled.to(tl.int32), axis=0) > 0:
            seed = tl.load(seed_ptr + row, mask=row_there, other=0)
            position = tl.load(position_ptr + row, mask=row_there, other=0)
            noise = gumbel_noise(seed[None, :], position[None, :], token)
            score = tl.where(sampled[None, :], logits + noise, logits)

    best = tl.max(score, axis=0)
    # a row without a finite logit: every entry ties, the first is one of the vocabulary
    best_token = tl.min(tl.where(score == best[None, :], token, _NO_TOKEN), axis=0)
    is_best = token == best_token[None, :]
    best_logit = tl.max(tl.where(is_best, logits, float("-inf")), axis=0)
    top = tl.max(logits, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logits - top[None, :]), axis=0)
    confidence = tl.exp(best_logit - top) / tl.maximum(total, 1.0)

    out = tile * rows + row
    tl.store(token_ptr + out, best_token, mask=row_there)
    tl.store(confidence_ptr + out, confidence, mask=row_there)
    tl.store(log_sum_exp_ptr + out, top + tl.log(total), mask=row_there)
    tl.store(score_ptr + out, best, mask=row_there)


@triton.jit(do_not_specialize=["num_parts", "rows"])
def _combine_kernel(
    # [num_parts, rows] int32, float32, float32, float32
    token_ptr,
    confidence_ptr,
    log_sum_exp_ptr,
    score_ptr,
    # [rows] likewise; out
    out_token_ptr,
    out_confidence_ptr,
    out_log_sum_exp_ptr,
    out_score_ptr,
    num_parts,
    rows,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < rows
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    best_token = tl.full((BLOCK_M,), _NO_TOKEN, dtype=tl.int32)
    best_part = tl.zeros((BLOCK_M,), dtype=tl.int64)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        part = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        at = part * rows + row[None, :]
        mask = (part < num_parts) & there[None, :]
        score = tl.load(score_ptr + at, mask=mask, other=float("-inf"))
        token = tl.load(token_ptr + at, mask=mask, other=_NO_TOKEN)
        log_sum_exp = tl.load(log_sum_exp_ptr + at, mask=mask, other=float("-inf"))
        top = tl.maximum(top, tl.max(log_sum_exp, axis=0))
        new = tl.max(score, axis=0)
        ties = score == new[None, :]
        new_token = tl.min(tl.where(ties, token, _NO_TOKEN), axis=0)
        new_part = tl.max(tl.where(token == new_token[None, :], part, 0), axis=0)
        wins = (new > best) | ((new == best) & (new_token < best_token))
        best = tl.where(wins, new, best)
        best_token = tl.where(wins, new_token, best_token)
        best_part = tl.where(wins, new_part, best_part)

    top = tl.where(top == float("-inf"), 0.0, top)
    units = tl.zeros((BLOCK_M,), dtype=tl.int64)
    for start in range(0, num_parts, BLOCK_P):
        part = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        at = part * rows + row[None, :]
        mask = (part < num_parts) & there[None, :]
        log_sum_exp = tl.load(log_sum_exp_ptr + at, mask=mask, other=float("-inf"))
        exp = tl.exp(log_sum_exp - top[None, :])
        units += tl.sum((exp * _UNIT).to(tl.int64), axis=0)
    log_sum_exp = top + tl.log(units.to(tl.float32) / _UNIT)

    at = best_part * rows + row
    confidence = tl.load(confidence_ptr + at, mask=there, other=0.0)
    of_part = tl.load(log_sum_exp_ptr + at, mask=there, other=float("-inf"))
    # where no logit is finite both are -inf, and the confidence is 0 already
    share = tl.where(of_part == float("-inf"), 0.0, tl.exp(of_part - log_sum_exp))
    confidence = tl.minimum(confidence * share, 1.0)
    tl.store(out_token_ptr + row, best_token, mask=there)
    tl.store(out_confidence_ptr + row, confidence, mask=there)
    tl.store(out_log_sum_exp_ptr + row, log_sum_exp, mask=there)
    tl.store(out_score_ptr + row, best, mask=there)


def draft_head(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    vocab_start: int = 0,
    workspace: DraftHead | None = None,
    out: DraftHead | None = None,
) -> DraftHead:
    """Draft the token that follows each row (design section 3, points 2 and 7).

    Args:
        hidden_states: [rows, hidden_size] bf16, fp16 or fp32; a row is contiguous.
        weight: [vocab_size, hidden_size], same dtype; a row is contiguous. The LM head,
            or one shard of it, whose results `combine_draft_heads` combines.
        temperature: [rows] float32; 0: greedy. None: all rows greedy.
        seed: [rows] int64, of the row's request; needed with `temperature`.
        position: [rows] int32 or int64, of the row's own token; needed with
            `temperature`.
        vocab_start: id of the token of weight[0].
        workspace: scratch, see `draft_head_workspace`. Allocated if None.
        out: [rows] each; written and returned. Allocated if None.
    """
    rows, hidden_size = _check(hidden_states, weight)
    vocab_size = weight.shape[0]
    if temperature is not None:
        if seed is None or position is None:
            raise ValueError("temperature needs seed and position, got None for them")
        check_vector("temperature", temperature, rows, torch.float32)
        check_vector("seed", seed, rows, torch.int64)
        check_vector("position", position, rows, torch.int32, torch.int64)
    if out is None:
        out = _empty(hidden_states, rows)
    _check_heads("out", out, (rows,))
    if rows == 0:
        return out
    if not use_kernel(hidden_states):
        head = draft_head_reference(
            hidden_states,
            weight,
            temperature=temperature,
            seed=seed,
            position=position,
            vocab_start=vocab_start,
        )
        return DraftHead(*(old.copy_(new) for old, new in zip(out, head, strict=True)))
    if workspace is None:
        workspace = draft_head_workspace(hidden_states, weight)
    settings = _settings(rows, hidden_states.dtype)
    num_tiles = triton.cdiv(vocab_size, settings.block_v)
    _check_heads("workspace", workspace, (num_tiles, rows))
    _draft_tile_kernel[(num_tiles * triton.cdiv(rows, settings.block_m),)](
        hidden_states,
        hidden_states.stride(0),
        weight,
        weight.stride(0),
        temperature,
        seed,
        position,
        *workspace,
        rows,
        vocab_size,
        vocab_start,
        hidden_size,
        SAMPLE=temperature is not None,
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        BLOCK_V=settings.block_v,
        BLOCK_M=settings.block_m,
        BLOCK_K=settings.block_k,
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
    )
    return _combine(workspace, out)


def draft_head_reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    vocab_start: int = 0,
) -> DraftHead:
    """`draft_head` in plain torch, logits and all."""
    logits = hidden_states.float() @ weight.float().T
    noise = torch.zeros((), device=logits.device)
    if temperature is not None:
        assert seed is not None and position is not None
        sampled = (temperature > 0)[:, None]
        logits = logits / temperature[:, None].where(sampled, 1.0)
        token = vocab_start + torch.arange(weight.shape[0], device=weight.device)
        noise = gumbel_noise_reference(seed[:, None], position[:, None].long(), token)
        noise = noise.where(sampled, 0.0)
    logits = logits.where(logits.isfinite(), float("-inf"))
    score = logits + noise
    best, entry = score.max(dim=1)
    log_sum_exp = logits.logsumexp(dim=1)
    logit = logits.gather(1, entry[:, None])[:, 0]
    return DraftHead(
        token=(vocab_start + entry).int(),
        confidence=(logit - log_sum_exp).exp().nan_to_num(0.0).clamp(max=1.0),
        log_sum_exp=log_sum_exp,
        score=best,
    )


def combine_draft_heads(heads: DraftHead, *, out: DraftHead | None = None) -> DraftHead:
    """The `DraftHead` of a vocabulary from those of its parts, in any order.

    Args:
        heads: [num_parts, rows] each, contiguous; num_parts >= 1.
        out: [rows] each; written and returned. Allocated if None.
    """
    if heads.token.dim() != 2 or heads.token.shape[0] == 0:
        raise ValueError(
            "heads must be [num_parts, rows] each with num_parts >= 1, got token "
            f"{tuple(heads.token.shape)}"
        )
    num_parts, rows = heads.token.shape
    _check_heads("heads", heads, (num_parts, rows))
    if out is None:
        out = _empty(heads.token, rows)
    _check_heads("out", out, (rows,))
    if rows == 0:
        return out
    if not use_kernel(heads.token):
        head = combine_draft_heads_reference(heads)
        return DraftHead(*(old.copy_(new) for old, new in zip(out, head, strict=True)))
    return _combine(heads, out)


def combine_draft_heads_reference(heads: DraftHead) -> DraftHead:
    """`combine_draft_heads` in plain torch."""
    best = heads.score.max(dim=0).values
    token = heads.token.where(heads.score == best, _NO_TOKEN.value).min(dim=0).values
    part = (heads.token == token).int().argmax(dim=0, keepdim=True)
    confidence, of_part = (
        tensor.gather(0, part)[0] for tensor in (heads.confidence, heads.log_sum_exp)
    )
    # sorted: the sum must not depend on the order of the parts
    log_sum_exp = heads.log_sum_exp.sort(dim=0).values.logsumexp(dim=0)
    share = (of_part - log_sum_exp).exp().nan_to_num(0.0)
    return DraftHead(token, (confidence * share).clamp(max=1.0), log_sum_exp, best)


def draft_head_workspace(
    hidden_states: torch.Tensor, weight: torch.Tensor
) -> DraftHead:
    """Scratch for `draft_head` on tensors of these shapes and this dtype, on their
    device: the heads of the vocabulary's tiles, [num_tiles, rows] each."""
    rows, _ = _check(hidden_states, weight)
    block_v = _settings(rows, hidden_states.dtype).block_v
    return _empty(hidden_states, triton.cdiv(weight.shape[0], block_v), rows)


def draft_head_io_bytes(
    rows: int, vocab_size: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """Bytes that `draft_head` must move: weight and hidden states in, the head out."""
    return (vocab_size + rows) * hidden_size * dtype.itemsize + rows * 4 * 4


def _combine(heads: DraftHead, out: DraftHead) -> DraftHead:
    num_parts, rows = heads.token.shape
    block_m = 8  # one 32-byte sector of each part
    _combine_kernel[(triton.cdiv(rows, block_m),)](
        *heads,
        *out,
        num_parts,
        rows,
        BLOCK_P=min(512, triton.next_power_of_2(num_parts)),
        BLOCK_M=block_m,
        num_warps=8,
    )
    return out


def _empty(like: torch.Tensor, *shape: int) -> DraftHead:
    floats = (
        torch.empty(shape, dtype=torch.float32, device=like.device) for _ in range(3)
    )
    return DraftHead(torch.empty(shape, dtype=torch.int32, device=like.device), *floats)


def _check(hidden_states: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.stride(1) != 1:
        raise ValueError(
            "weight must be [vocab_size >= 1, hidden_size] with contiguous rows, got "
            f"{tuple(weight.shape)} with strides {weight.stride()}"
        )
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"weight must be bf16, fp16 or fp32, got {weight.dtype}")
    if (
        hidden_states.dim() != 2
        or hidden_states.shape[1] != weight.shape[1]
        or hidden_states.dtype != weight.dtype
        or hidden_states.stride(1) != 1
    ):
        raise ValueError(
            f"hidden_states must be [rows, {weight.shape[1]}] {weight.dtype} with "
            f"contiguous rows, got {tuple(hidden_states.shape)} {hidden_states.dtype} "
            f"with strides {hidden_states.stride()}"
        )
    return hidden_states.shape[0], hidden_states.shape[1]


def _check_heads(name: str, heads: DraftHead, shape: tuple[int, ...]) -> None:
    for field, tensor in heads._asdict().items():
        dtype = torch.int32 if field == "token" else torch.float32
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name}.{field} must be contiguous {shape} {dtype}, got "
                f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
            )
