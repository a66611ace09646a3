# SPDX-License-Identifier: Apache-2.0
"""The exit adapter in plain torch: `state_dict` names are those of the file format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spexis_runtime.adapter import (
    LM_HEAD,
    AdapterConfig,
    load_adapter_config,
)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary embedding, as in Llama, Qwen2 and Qwen3."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_rows = config.num_attention_heads * config.head_dim
        kv_rows = config.num_key_value_heads * config.head_dim
        bias = config.model_type == "qwen2"
        self.q_proj = nn.Linear(config.hidden_size, q_rows, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_rows, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_rows, bias=bias)
        self.o_proj = nn.Linear(q_rows, config.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.model_type == "qwen3":
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            _rotate(q, cos, sin),
            _rotate(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # x [batch, heads, length, head_dim], cos and sin [1, length, head_dim]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return self.post_attention_layernorm(x)


class ExitAdapter(nn.Module):
    """Draft hidden states from those that leave the target's first layers.

    `own_lm_head` adds the optional LM head; without it `logits` uses the target's.
    """

    def __init__(self, config: AdapterConfig, *, own_lm_head: bool = False) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.initial_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = nn.Linear(hidden, hidden, bias=config.mlp_bias)
        self.layers = nn.ModuleDict({str(config.exit_layer): Layer(config)})
        self.lm_head = (
            nn.Linear(hidden, config.vocab_size, bias=False) if own_lm_head else None
        )

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Normed states [batch, length, hidden_size], ready for the LM head.

        `hidden` [batch, length, hidden_size]: hidden + residual after `exit_layer`
        layers, of positions 0 .. length-1; `cos`, `sin` [1, length, head_dim] of the
        target's rotary embedding there.
        """
        x = self.mlp(self.initial_layernorm(hidden))
        return self.layers[str(self.config.exit_layer)](x, cos, sin)

    def logits(self, x: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., vocab_size]; `target_head` [vocab_size, hidden_size]."""
        head = target_head if self.lm_head is None else self.lm_head.weight
        return (x.to(head.dtype) @ head.T).float()

    @classmethod
    def from_target(cls, config: AdapterConfig, model: Any) -> ExitAdapter:
        """A float32 adapter to start training from, on the model's device.

        `mlp` is the identity; attention and norms are those of the last layer, but
        attention adds nothing at first: its output suits the last layer's residual,
        which is far larger than a normed state, and would drown it.
        """
        adapter = cls(config)
        nn.init.eye_(adapter.mlp.weight)
        if config.mlp_bias:
            nn.init.zeros_(adapter.mlp.bias)
        layer = adapter.layers[str(config.exit_layer)]
        last = model.model.layers[-1]
        layer.self_attn.load_state_dict(last.self_attn.state_dict())
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        layer.input_layernorm.load_state_dict(last.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(model.model.norm.state_dict())
        return adapter.to(model.device)

    @classmethod
    def load(cls, path: str | Path) -> ExitAdapter:
        """The adapter in directory `path`, in the element type that it is stored in.

        Raises AdapterError where `load_adapter_config` does.
        """
        from safetensors.torch import load_file

        config = load_adapter_config(path)
        tensors = load_file(Path(path) / "model.safetensors")
        adapter = cls(config, own_lm_head=LM_HEAD in tensors)
        adapter.load_state_dict(tensors, assign=True)
        return adapter.requires_grad_(False).eval()
