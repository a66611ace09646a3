# SPDX-License-Identifier: Apache-2.0
"""The exit head: the adapter on stage 0, and the drafts it makes.

    h      = hidden_states + residual of the stage
    x      = mlp(initial_layernorm(h))
    x      = x + self_attn(input_layernorm(x))
    draft  = argmax lm_head(post_attention_layernorm(x)), with the target's noise

This is the paper's adapter (section 6); `adapter/` says what others may add. Attention
layers have KV of their own, in the same blocks as the target's, written for every token
that passes stage 0.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaAttention, LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.sequence import IntermediateTensors

from spexis_kernels.pool import Rows
from spexis_runtime.adapter.config import LM_HEAD, AdapterConfig, load_adapter_config
from spexis_runtime.adapter.files import WEIGHTS_FILE
from spexis_runtime.vocab_parallel import vocab_parallel_draft_head

# vLLM keeps some projections of a layer in one parameter: name, its name there, place
_SHARDS = (
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
)


class Drafts(NamedTuple):
    """A draft for the position after each row."""

    tokens: torch.Tensor  # [num_rows] int32
    confidence: torch.Tensor  # [num_rows] float32, in [0, 1], calibrated


class ExitLayer(nn.Module):
    """The target family's decoder layer, of "attention_only" adapters without MLP."""

    def __init__(self, vllm_config: VllmConfig, adapter: AdapterConfig, number: int):
        super().__init__()
        hidden_size, eps = adapter.hidden_size, adapter.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps=eps)
        self.self_attn = _attention(vllm_config, adapter, number)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)
        self.mlp = (
            LlamaMLP(hidden_size, adapter.intermediate_size, "silu")
            if adapter.intermediate_size
            else None
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(positions, self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return y if self.mlp is None else x + self.mlp(y)


class ExitHead(nn.Module):
    """Runs in forward hooks of stage 0's model, so that CUDA graphs hold it too."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, exit_model: str):
        super().__init__()
        self.adapter = adapter = load_adapter_config(exit_model)
        hf_config = vllm_config.model_config.hf_config
        hidden_size, eps = adapter.hidden_size, adapter.rms_norm_eps
        *inner, _ = adapter.feature_layers
        self.initial_layernorm = nn.ModuleList(
            RMSNorm(hidden_size, eps=eps) for _ in adapter.feature_layers
        )
        self.mlp = ReplicatedLinear(
            hidden_size * len(adapter.feature_layers),
            hidden_size,
            bias=adapter.mlp_bias,
        )
        self.layers = nn.ModuleList(
            ExitLayer(vllm_config, adapter, adapter.exit_layer + i)
            for i in range(adapter.depth)
        )
        self.norm: nn.Module = nn.Identity()
        if adapter.intermediate_size:
            self.norm = RMSNorm(hidden_size, eps=eps)
        own_lm_head = _load_adapter(self, Path(exit_model) / WEIGHTS_FILE)
        if own_lm_head is None and hf_config.tie_word_embeddings:
            self.lm_head = model.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(adapter.vocab_size, hidden_size)
            weight = (
                _target_lm_head(vllm_config) if own_lm_head is None else own_lm_head
            )
            self.lm_head.weight_loader(self.lm_head.weight, weight)
        self.calibration = torch.tensor(adapter.calibration, dtype=torch.float32)
        size = vllm_config.scheduler_config.max_num_batched_tokens, hidden_size
        dtype = vllm_config.model_config.dtype
        # [max_num_tokens, hidden_size]: what the last forward left for the LM head
        self.hidden_states = torch.empty(size, dtype=dtype)
        # the same of each feature but the last, which is the stage's output
        self.features = [torch.empty(size, dtype=dtype) for _ in inner]
        for number, feature in zip(inner, self.features, strict=True):
            model.model.layers[number].register_forward_pre_hook(
                partial(_keep_stream, feature), with_kwargs=True
            )
        process_weights_after_loading(
            self, vllm_config.model_config, self.hidden_states.device
        )

    def after_model(
        self, model: nn.Module, args: tuple, kwargs: dict, output: IntermediateTensors
    ) -> None:
        """Forward hook: fill `hidden_states` from the stage's output, write the KV."""
        x = output["hidden_states"] + output["residual"]
        features = [*(feature[: len(x)] for feature in self.features), x]
        normed = [
            norm(feature)
            for norm, feature in zip(self.initial_layernorm, features, strict=True)
        ]
        x, _ = self.mlp(normed[0] if len(normed) == 1 else torch.cat(normed, dim=-1))
        for layer in self.layers:
            x = layer(kwargs["positions"], x)
        self.hidden_states[: len(x)].copy_(self.norm(x))

    def propose(
        self,
        logits_indices: torch.Tensor,
        rows: Rows,
        sampling: dict[str, torch.Tensor],
    ) -> Drafts:
        """Draft the token after each row.

        Args:
            logits_indices: [num_rows] int64, the row's index among the step's tokens.
            rows: the step's rows, [num_rows]; a drafter may look at them.
            sampling: temperature, seed and position of each row; empty: greedy.
        """
        head = vocab_parallel_draft_head(
            self.hidden_states[logits_indices], self.lm_head, **sampling
        )
        return Drafts(head.token, calibrated(head.confidence, self.calibration))


def calibrated(confidence: torch.Tensor, calibration: torch.Tensor) -> torch.Tensor:
    """The probability that a draft is right, [num_rows] float32.

    Args:
        confidence: [num_rows] float32, softmax probabilities.
        calibration: [n + 1] float32, their calibrated values at 0, 1/n, ..., 1, linear
            in between; empty: `confidence` itself is returned.
    """
    if not len(calibration):
        return confidence
    place = confidence * (len(calibration) - 1)
    below = place.long().clamp(max=len(calibration) - 2)
    return torch.lerp(calibration[below], calibration[below + 1], place - below)


def _keep_stream(feature: torch.Tensor, layer: nn.Module, args: tuple, kwargs: dict):
    """Pre-hook of a decoder layer: copy the residual stream that enters it."""
    names = ("positions", "hidden_states", "residual")
    inputs = dict(zip(names, args, strict=False)) | kwargs
    x, residual = inputs["hidden_states"], inputs["residual"]
    feature[: len(x)].copy_(x if residual is None else x + residual)


def _attention(
    vllm_config: VllmConfig, adapter: AdapterConfig, number: int
) -> nn.Module:
    """The target family's attention, as layer `number` of stage 0."""
    config = vllm_config.model_config.hf_config
    prefix = f"exit_head.layers.{number}.self_attn"
    common = dict(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        cache_config=vllm_config.cache_config,
        prefix=prefix,
    )
    if adapter.model_type == "llama":
        return LlamaAttention(
            config=config,
            max_position_embeddings=config.max_position_embeddings,
            **common,
        )
    common |= dict(
        max_position=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
    )
    if adapter.model_type == "qwen2":
        return Qwen2Attention(**common)
    return Qwen3Attention(
        head_dim=adapter.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=getattr(config, "attention_bias", False),
        **common,
    )


def _load_adapter(head: ExitHead, weights: Path) -> torch.Tensor | None:
    """Load the adapter's tensors into `head`; return its own LM head if it has one."""
    parameters = dict(head.named_parameters())
    own_lm_head = None
    with safe_open(weights, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if name == LM_HEAD:
                own_lm_head = tensor
            elif name == "initial_layernorm.weight":
                for norm, weight in zip(
                    head.initial_layernorm,
                    tensor.chunk(len(head.initial_layernorm)),
                    strict=True,
                ):
                    default_weight_loader(norm.weight, weight)
            else:
                name, shard = _place(name, head.adapter.exit_layer)
                parameter = parameters[name]
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, tensor, *shard)
    return own_lm_head


def _place(name: str, exit_layer: int) -> tuple[str, tuple[str | int, ...]]:
    """Name of the parameter of `ExitHead` for a tensor of the file, and its shard."""
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        name = f"layers.{int(number) - exit_layer}.{rest}"
    for part, merged, shard in _SHARDS:
        if f".{part}." in name:
            return name.replace(part, merged), (shard,)
    return name, ()


def _target_lm_head(vllm_config: VllmConfig) -> torch.Tensor:
    """The target's LM head, [vocab_size, hidden_size], which no stage 0 of vLLM has."""
    config = vllm_config.model_config
    load = vllm_config.load_config
    if load.load_format == "dummy":
        hf_config = config.hf_config
        weight = torch.empty(hf_config.vocab_size, hf_config.hidden_size)
        return weight.normal_(std=hf_config.hidden_size**-0.5)
    loader = get_model_loader(load)
    _, files, _ = loader._prepare_weights(
        config.model,
        None,
        config.revision,
        fall_back_to_pt=False,
        allow_patterns_overrides=None,
    )
    for path in files:
        with safe_open(path, framework="pt") as file:
            if LM_HEAD in file.keys():  # noqa: SIM118
                return file.get_tensor(LM_HEAD)
    raise ValueError(f"{config.model}: no tensor {LM_HEAD} in its safetensors files")
