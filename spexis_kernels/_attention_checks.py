# SPDX-License-Identifier: Apache-2.0
"""Argument checks of `merged_attention`."""

from collections.abc import Sequence

import torch

from spexis_kernels._attention_rows import QKNorm, Rotary

_FLOATS = torch.float32, torch.float16, torch.bfloat16


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    *dtypes: torch.dtype,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any) and one of `dtypes`.

    Its last dimension must be contiguous, or with `contiguous` all of it.
    """
    if (
        tensor.ndim != len(shape)
        or any(n not in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        or tensor.dtype not in dtypes
        or (tensor.numel() > 0 and tensor.stride(-1) != 1)
        or (contiguous and not tensor.is_contiguous())
    ):
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be [{sizes}] {wanted}, contiguous in "
            f"{'all dimensions' if contiguous else 'the last dimension'}, got "
            f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def check_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    rotary: Rotary | None,
    qk_norm: QKNorm | None,
    out: torch.Tensor,
) -> None:
    """Raise ValueError unless the tensors are as `merged_attention` says."""
    check_tensor("query", query, (None, None, None), *_FLOATS)
    num_tokens, num_heads, head_size = query.shape
    cache_shape = (None, None, None, head_size)
    check_tensor("key_cache", key_cache, cache_shape, query.dtype, torch.float8_e4m3fn)
    check_tensor("value_cache", value_cache, key_cache.shape, key_cache.dtype)
    num_kv_heads = key_cache.shape[2]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query must have a multiple of the cache's heads, got {num_heads} and "
            f"{num_kv_heads}"
        )
    check_tensor("out", out, query.shape, query.dtype)

    check_tensor("seq_lens", seq_lens, (None,), torch.int32, contiguous=True)
    num_reqs = len(seq_lens)
    check_tensor("block_table", block_table, (num_reqs, None), torch.int32)
    check_tensor(
        "query_start_loc", query_start_loc, (num_reqs + 1,), torch.int32,
        contiguous=True,
    )  # fmt: skip

    new = {"key": key, "value": value}
    for name, tensor in new.items():
        if (tensor is None) != (key is None):
            raise ValueError("key and value must be given together, got one of them")
        if tensor is not None:
            check_tensor(
                name, tensor, (num_tokens, num_kv_heads, head_size), query.dtype
            )
    if slot_mapping is not None:
        check_tensor(
            "slot_mapping", slot_mapping, (num_tokens,), torch.int64, contiguous=True
        )
    elif key is not None:
        raise ValueError("slot_mapping must be given where key is, got None")

    for name, tensor in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if tensor is not None:
            check_tensor(name, tensor.reshape(-1), (1,), torch.float32)
            if key_cache.dtype != torch.float8_e4m3fn:
                raise ValueError(
                    f"{name} is for a float8_e4m3fn cache, got one of {key_cache.dtype}"
                )
    if rotary is not None:
        cos_sin, positions = rotary
        check_tensor(
            "rotary.cos_sin_cache", cos_sin, (None, None), *_FLOATS, contiguous=True
        )
        rotary_dim = cos_sin.shape[1]
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise ValueError(
                f"rotary.cos_sin_cache must have an even number of columns in 2 .. "
                f"{head_size}, got {rotary_dim}"
            )
        check_tensor(
            "rotary.positions", positions, (num_tokens,), torch.int64, contiguous=True
        )
    if qk_norm is not None:
        check_tensor("qk_norm.q_weight", qk_norm.q_weight, (head_size,), *_FLOATS)
        check_tensor("qk_norm.k_weight", qk_norm.k_weight, (head_size,), *_FLOATS)
