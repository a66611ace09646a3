# SPDX-License-Identifier: Apache-2.0
"""What the backend CUSTOM tells vLLM that it does, and what it refuses to do."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tolerances import FP32_REDUCTION
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from spexis_kernels.dispatch import interpreted_kernels
from spexis_runtime.attention import (
    SpexisAttentionBackend,
    SpexisAttentionImpl,
    SpexisAttentionMetadataBuilder,
)

FITS: dict[str, Any] = dict(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16
)


def reasons(**changes: Any) -> list[str]:
    """What vLLM puts into its error where a user has asked for the backend."""
    return SpexisAttentionBackend.validate_configuration(
        device_capability=DeviceCapability(9, 0),
        **AttentionSelectorConfig(**FITS | changes)._asdict(),
    )


def test_the_name_is_ours():
    load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_class() is SpexisAttentionBackend


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"has_sliding_window": True},
        {"use_kv_connector": True},
        {"head_size": 80},
        {"block_size": 64},
    ],
    ids=str,
)
def test_accepted(changes):
    assert reasons(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        (
            {"use_mm_prefix": True},
            "partial multimodal token full attention not supported",
        ),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ],
    ids=str,
)
def test_refused_by_its_configuration(changes, reason):
    assert reasons(**changes) == [reason]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi_slopes": [0.5]}, "does not support alibi_slopes"),
        ({"kv_sharing_target_layer_name": "0"}, "kv_sharing_target_layer_name"),
        ({"sinks": torch.zeros(4)}, "does not support sinks"),
        ({"attn_type": "encoder_only"}, "decoder attention, got encoder_only"),
    ],
    ids=str,
)
def test_refused_layer_by_layer(changes, reason):
    """What vLLM does not ask a backend about before it makes the layers."""
    with set_current_vllm_config(VllmConfig()):
        assert SpexisAttentionImpl(4, 64, 0.125, sinks=None).num_kv_heads == 4
        with pytest.raises(NotImplementedError, match=reason):
            SpexisAttentionImpl(4, 64, 0.125, **changes)


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_decode_steps_run_in_cuda_graphs(mode):
    """vLLM gives graphs up where a backend does not say that it can be recorded."""
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode[mode]
    )
    support = SpexisAttentionMetadataBuilder.get_cudagraph_support(None, None)
    resolved = config.resolve_cudagraph_mode_and_sizes(
        support, "CUSTOM", use_v2_model_runner=True
    )
    assert resolved is CUDAGraphMode[mode]


# (tokens of the step, tokens in all) of each request
BATCHES = {
    "a decode": [(1, 33)],
    "decodes": [(1, 32), (1, 40), (1, 1), (1, 24)],
    "a prompt": [(40, 40)],
    "chunks of prompts": [(8, 8), (16, 48), (7, 23)],
    "decodes among prompts": [(1, 32), (5, 5), (1, 17), (9, 40), (1, 2)],
    "decodes and padding of a CUDA graph": [(1, 32), (1, 20), (0, 0), (0, 0)],
}
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 16, 8
SCALE = HEAD_SIZE**-0.5
BLOCKS_OF_A_REQUEST = 8


def metadata(batch: list[tuple[int, int]]) -> CommonAttentionMetadata:
    """As vLLM's runner gives it to a builder, with blocks in random order."""
    blocks = torch.randperm(len(batch) * BLOCKS_OF_A_REQUEST).int()
    table = blocks.view(len(batch), BLOCKS_OF_A_REQUEST)
    slots = [
        int(table[i, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for i, (new, total) in enumerate(batch)
        for position in range(total - new, total)
    ]
    starts = torch.tensor([0, *(new for new, _ in batch)]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([total for _, total in batch]).int(),
        num_reqs=len(batch),
        num_actual_tokens=len(slots),
        max_query_len=max(new for new, _ in batch),
        max_seq_len=max(total for _, total in batch),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_outputs_are_those_of_torch(batch, prefix_caching, kernel):
    """Builder, write and attention, against each request's own attention in torch."""
    torch.manual_seed(0)
    common = metadata(batch)
    config = VllmConfig(cache_config=CacheConfig(enable_prefix_caching=prefix_caching))
    with set_current_vllm_config(config):
        impl = SpexisAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS)
    builder = SpexisAttentionMetadataBuilder(None, [], config, torch.device("cpu"))
    shape = len(batch) * BLOCKS_OF_A_REQUEST, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE
    cache = torch.full(SpexisAttentionBackend.get_kv_cache_shape(*shape), torch.nan)
    queries, keys, values = [
        torch.randn(sum(total for _, total in batch), heads, HEAD_SIZE)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]
    expected, now, start = [], [], 0
    for i, (new, total) in enumerate(batch):
        rows = slice(start, start + total)
        q, k, v = (x[rows].transpose(0, 1) for x in (queries, keys, values))
        causal = torch.ones(total, total).tril().bool()[total - new :]
        out = scaled_dot_product_attention(
            q[:, total - new :], k, v, attn_mask=causal, scale=SCALE, enable_gqa=True
        )
        expected.append(out.transpose(0, 1))
        now.extend(range(start + total - new, start + total))
        for position in range(total - new):  # of earlier steps
            place = common.block_table_tensor[i, position // BLOCK_SIZE]
            cache[place, 0, position % BLOCK_SIZE] = keys[start + position]
            cache[place, 1, position % BLOCK_SIZE] = values[start + position]
        start += total
    step = [x[now] for x in (queries, keys, values)]
    output = torch.full_like(step[0], torch.nan)
    layer = SimpleNamespace(_k_scale=None, _v_scale=None)
    with interpreted_kernels() if kernel else contextlib.nullcontext():
        impl.forward(layer, *step, cache, builder.build(0, common), output)
    torch.testing.assert_close(output, torch.cat(expected), **FP32_REDUCTION)
    written = cache.transpose(1, 2).flatten(0, 1)[common.slot_mapping]
    assert torch.equal(written, torch.stack(step[1:], dim=1))
