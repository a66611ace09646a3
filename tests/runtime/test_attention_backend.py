# SPDX-License-Identifier: Apache-2.0
"""What the backend CUSTOM tells vLLM that it does, and what it refuses to do."""

from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

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
