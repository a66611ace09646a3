# SPDX-License-Identifier: Apache-2.0
"""Shapes of real models with weights of noise, for which an adapter is noise too.

Their figures are of the models' published configurations.
"""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from spexis_runtime.adapter.config import AdapterConfig, expected_tensors, save_adapter


class Shape(NamedTuple):
    name: str
    config: PretrainedConfig


SHAPES = {
    "llama-8b": Shape(
        "Llama-3.1-8B shape",
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
        ),
    ),
    "qwen3-32b": Shape(
        "Qwen3-32B shape",
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=151936,
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
            rope_theta=1000000.0,
            rms_norm_eps=1e-6,
        ),
    ),
    "llama-70b": Shape(
        "Llama-3.3-70B shape",
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
        ),
    ),
}


class Files(NamedTuple):
    model: Path
    exit_model: Path


def write_shape(shape: Shape, folder: Path, num_stages: int) -> Files:
    """A config, and an adapter of noise after 1 / num_stages of the layers."""
    import torch

    model = folder / "model"
    shape.config.save_pretrained(model)
    exit_layer = shape.config.num_hidden_layers // num_stages
    adapter = AdapterConfig.for_model(shape.config, exit_layer)
    torch.manual_seed(0)
    tensors = {
        name: (torch.randn(size) * size[-1] ** -0.5).bfloat16()
        for name, size in expected_tensors(adapter).items()
    }
    return Files(model, save_adapter(folder / "adapter", adapter, tensors))


# options of the engine that go with weights of noise
DUMMY_WEIGHTS: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True)
