# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend CUSTOM: `spexis_kernels.merged_attention`."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from spexis_kernels.constants import PAD_SLOT_ID
from spexis_kernels.merged_attention import (
    merged_attention,
    merged_attention_workspace_size,
)
from spexis_runtime.config import KEY


@functools.cache
def _workspace(size: int, device: torch.device) -> torch.Tensor:
    """The one workspace of all layers, whose launches follow each other on one stream.

    Its size depends on no batch, so what a CUDA graph has recorded stays right.
    """
    # zeros that are only recorded would not be there for launches outside the graph
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    return torch.zeros(size, dtype=torch.float32, device=device)


@dataclass
class SpexisAttentionMetadata:
    """What the kernel needs to know of a step; filled once a step by the builder."""

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, 0: void
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64, PAD_SLOT_ID: no write
    num_actual_tokens: int
    max_query_len: int


class SpexisAttentionMetadataBuilder(AttentionMetadataBuilder):
    # a decode step's launch depends on the number of its requests alone; that of a step
    # with prefill chunks on how many tokens they have
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in vLLM
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SpexisAttentionMetadata:
        common = common_attn_metadata
        return SpexisAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
        )


class SpexisAttentionBackend(AttentionBackend):
    """Decode, draft and prefill rows in one launch; the KV write is part of it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["SpexisAttentionImpl"]:
        return SpexisAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SpexisAttentionMetadataBuilder]:
        return SpexisAttentionMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size


class SpexisAttentionImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,  # of single models: sinks, lookback of chunks
    ) -> None:
        others["alibi_slopes"] = alibi_slopes
        others["kv_sharing_target_layer_name"] = kv_sharing_target_layer_name
        for name, value in others.items():
            if value is not None:
                raise NotImplementedError(
                    f"attention backend CUSTOM does not support {name}"
                )
        if attn_type != "decoder":
            raise NotImplementedError(
                f"attention backend CUSTOM supports decoder attention, got {attn_type}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_cache_dtype = kv_cache_dtype
        # vLLM's own scheduler lets a request hit blocks that another one writes in the
        # same step; ours does not, so that writing and reading can share a launch
        vllm_config = get_current_vllm_config()
        speculative = vllm_config.additional_config.get(KEY, {}).get("exit_model")
        self.write_first = (
            not speculative and vllm_config.cache_config.enable_prefix_caching
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SpexisAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of [num_tokens, num_heads, head_size] rows, into `output`."""
        if attn_metadata is None:  # vLLM's profiling run has no KV cache
            return output.fill_(0)
        num_tokens = attn_metadata.num_actual_tokens
        slot_mapping = attn_metadata.slot_mapping[:num_tokens]
        key = key[:num_tokens].view(num_tokens, self.num_kv_heads, self.head_size)
        value = value[:num_tokens].view(num_tokens, self.num_kv_heads, self.head_size)
        if self.write_first:
            self.write(layer, key, value, kv_cache, slot_mapping)
        fp8 = self.kv_cache_dtype.startswith("fp8")
        if fp8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        query = query[:num_tokens].view(num_tokens, self.num_heads, self.head_size)
        merged_attention(
            query,
            None if self.write_first else key,
            None if self.write_first else value,
            kv_cache[:, 0],
            kv_cache[:, 1],
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            None if self.write_first else slot_mapping,
            max_query_len=attn_metadata.max_query_len,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            k_scale=layer._k_scale if fp8 else None,
            v_scale=layer._v_scale if fp8 else None,
            out=output[:num_tokens].view(num_tokens, self.num_heads, self.head_size),
            workspace=_workspace(
                merged_attention_workspace_size(query, kv_cache[:, 0]), query.device
            ),
        )
        return output

    def write(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V, [num_tokens, num_kv_heads, head_size]."""
        if key.is_cuda:
            ops.reshape_and_cache_flash(
                key,
                value,
                kv_cache[:, 0],
                kv_cache[:, 1],
                slot_mapping,
                self.kv_cache_dtype,
                layer._k_scale,
                layer._v_scale,
            )
            return
        written = slot_mapping != PAD_SLOT_ID
        slots, block_size = slot_mapping[written], kv_cache.shape[2]
        for i, rows in enumerate((key, value)):
            kv_cache[slots // block_size, i, slots % block_size] = rows[written]
