# SPDX-License-Identifier: Apache-2.0
"""The exit head: the adapter on stage 0, and the drafts it makes.

    x = mlp(initial_layernorm(h)),  h = hidden_states + residual of the stage
    x = x + self_attn(input_layernorm(x))
    draft = argmax lm_head(post_attention_layernorm(x)), with the target's noise

The paper's adapter (section 6). Its attention layer has KV of its own, in the same
blocks as the target's, written for every token that passes stage 0.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.sequence import IntermediateTensors

from spexis_kernels import DraftHead, combine_draft_heads, draft_head
from spexis_kernels.pool import Rows
from spexis_runtime.adapter.config import (
    LM_HEAD,
    WEIGHTS_FILE,
    AdapterConfig,
    load_adapter_config,
)


class Drafts(NamedTuple):
    """A draft for the position after each row."""

    tokens: torch.Tensor  # [num_rows] int32
    confidence: torch.Tensor  # [num_rows] float32, in [0, 1]


class ExitHead(nn.Module):
    """Runs as a forward hook of stage 0's model, so that CUDA graphs hold it too."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, exit_model: str):
        super().__init__()
        self.adapter = load_adapter_config(exit_model)
        hf_config = vllm_config.model_config.hf_config
        hidden_size, eps = self.adapter.hidden_size, self.adapter.rms_norm_eps
        self.initial_layernorm = RMSNorm(hidden_size, eps=eps)
        self.mlp = ReplicatedLinear(
            hidden_size, hidden_size, bias=self.adapter.mlp_bias
        )
        self.input_layernorm = RMSNorm(hidden_size, eps=eps)
        self.self_attn = _attention(vllm_config, self.adapter)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)
        own_lm_head = _load_adapter(self, Path(exit_model) / WEIGHTS_FILE)
        if own_lm_head is None and hf_config.tie_word_embeddings:
            self.lm_head = model.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(self.adapter.vocab_size, hidden_size)
            weight = (
                _target_lm_head(vllm_config) if own_lm_head is None else own_lm_head
            )
            self.lm_head.weight_loader(self.lm_head.weight, weight)
        # [max_num_tokens, hidden_size]: what the last forward left for the LM head
        self.hidden_states = torch.empty(
            vllm_config.scheduler_config.max_num_batched_tokens,
            hidden_size,
            dtype=vllm_config.model_config.dtype,
        )
        process_weights_after_loading(
            self, vllm_config.model_config, self.hidden_states.device
        )

    def after_model(
        self, model: nn.Module, args: tuple, kwargs: dict, output: IntermediateTensors
    ) -> None:
        """Forward hook: fill `hidden_states` from the stage's output, write the KV."""
        x = output["hidden_states"] + output["residual"]
        x, _ = self.mlp(self.initial_layernorm(x))
        x = x + self.self_attn(kwargs["positions"], self.input_layernorm(x))
        self.hidden_states[: len(x)].copy_(self.post_attention_layernorm(x))

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
        shard = self.lm_head.shard_indices
        head = draft_head(
            self.hidden_states[logits_indices],
            self.lm_head.weight[: shard.num_org_elements],
            vocab_start=shard.org_vocab_start_index,
            **sampling,
        )
        if get_tp_group().world_size > 1:
            head = combine_draft_heads(_of_all_shards(head))
        return Drafts(head.token, head.confidence)


def _of_all_shards(head: DraftHead) -> DraftHead:
    """`head` of each rank's vocabulary shard, [tensor_parallel_size, rows] each.

    In one collective: four bytes an element, whatever they mean.
    """
    fields = torch.stack([field.view(torch.int32) for field in head])
    shards = get_tp_group().all_gather(fields[None], dim=0)  # [ranks, fields, rows]
    shards = shards.transpose(0, 1).contiguous()
    return DraftHead(
        *(new.view(old.dtype) for new, old in zip(shards, head, strict=True))
    )


def _attention(vllm_config: VllmConfig, adapter: AdapterConfig) -> nn.Module:
    """The target family's attention, as layer number `exit_layer` of stage 0."""
    config = vllm_config.model_config.hf_config
    prefix = f"exit_head.layers.{adapter.exit_layer}.self_attn"
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
    layer = f"layers.{head.adapter.exit_layer}."
    parameters = dict(head.named_parameters())
    own_lm_head = None
    with safe_open(weights, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if name == LM_HEAD:
                own_lm_head = tensor
                continue
            name = name.removeprefix(layer)
            shard: tuple[str, ...] = ()
            for part in "qkv":
                if f".{part}_proj." in name:
                    name, shard = name.replace(f"{part}_proj", "qkv_proj"), (part,)
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *shard)
    return own_lm_head


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
