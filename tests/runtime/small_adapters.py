# SPDX-License-Identifier: Apache-2.0
"""Random adapters of a few kilobytes, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from spexis_runtime.adapter import AdapterConfig, expected_tensors

LLAMA = AdapterConfig(
    model_type="llama",
    hidden_size=32,
    vocab_size=96,
    num_hidden_layers=4,
    exit_layer=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    mlp_bias=True,
    feature_layers=(2,),
)
CONFIGS = {name: replace(LLAMA, model_type=name) for name in ("llama", "qwen2")}
# As in Qwen3, heads * head_dim need not be the hidden size.
CONFIGS["qwen3"] = replace(LLAMA, model_type="qwen3", head_dim=16, mlp_bias=False)
CONFIGS["full_block"] = replace(
    LLAMA,
    architecture="full_block",
    depth=2,
    intermediate_size=64,
    feature_layers=(0, 1, 2),
    calibration=(0.1, 0.2, 0.9),
)


def random_tensors(
    config: AdapterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Every expected tensor: norms near one, projections that keep the scale."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = (1 + 0.1 * noise).to(dtype)
        elif name.endswith(".bias"):
            tensors[name] = (0.1 * noise).to(dtype)
        else:
            tensors[name] = (noise / shape[-1] ** 0.5).to(dtype)
    return tensors
