# SPDX-License-Identifier: Apache-2.0
"""The exit adapter in plain torch: `state_dict` names are those of the file format."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from spexis_runtime.adapter import (
    LM_HEAD,
    AdapterConfig,
    load_adapter_config,
)


class RMSNorm(nn.Module):
    """Of each of `parts` vectors of `size` elements, one after the other."""

    def __init__(self, size: int, eps: float, parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parts * size))
        self.size, self.eps = size, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float().unflatten(-1, (-1, self.size))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.flatten(-2).to(x.dtype)


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


class MLP(nn.Module):
    """SwiGLU, as in Llama, Qwen2 and Qwen3."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config) if config.intermediate_size else None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        return y if self.mlp is None else x + self.mlp(y)


class ExitAdapter(nn.Module):
    """Draft hidden states from those that leave the target's first layers.

    `own_lm_head` adds the optional LM head; without it `logits` uses the target's.
    """

    def __init__(self, config: AdapterConfig, *, own_lm_head: bool = False) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        inputs = hidden * len(config.feature_layers)
        self.initial_layernorm = RMSNorm(hidden, eps, parts=len(config.feature_layers))
        self.mlp = nn.Linear(inputs, hidden, bias=config.mlp_bias)
        self.layers = nn.ModuleDict(
            {str(config.exit_layer + i): Layer(config) for i in range(config.depth)}
        )
        if config.intermediate_size:  # else the layer's own last norm is the last
            self.norm = RMSNorm(hidden, eps)
        self.lm_head = (
            nn.Linear(hidden, config.vocab_size, bias=False) if own_lm_head else None
        )

    def forward(
        self, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Normed states [batch, length, hidden_size], ready for the LM head.

        `features` [batch, length, len(feature_layers) * hidden_size]: hidden + residual
        after each of `feature_layers`, of positions 0 .. length-1; `cos`, `sin`
        [1, length, head_dim] of the target's rotary embedding there.
        """
        x = self.mlp(self.initial_layernorm(features))
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.norm(x) if self.config.intermediate_size else x

    def logits(self, x: torch.Tensor, target_head: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., vocab_size]; `target_head` [vocab_size, hidden_size]."""
        head = target_head if self.lm_head is None else self.lm_head.weight
        return (x.to(head.dtype) @ head.T).float()

    @classmethod
    def from_target(
        cls, config: AdapterConfig, layer: nn.Module, norm: nn.Module
    ) -> ExitAdapter:
        """A float32 adapter to start training from, on the device of `layer`.

        `mlp` passes the exit layer's states on; attention and norms are those of
        `layer`, a decoder layer of the target, and of `norm`, the target's last.
        Attention and MLPs add nothing at first: a decoder layer's output suits its
        residual, which is far larger than a normed state, and would drown it.
        """
        adapter = cls(config)
        with torch.no_grad():
            adapter.mlp.weight.zero_()
            nn.init.eye_(adapter.mlp.weight[:, -config.hidden_size :])
            if config.mlp_bias:
                adapter.mlp.bias.zero_()
        for own in adapter.layers.values():
            own.self_attn.load_state_dict(layer.self_attn.state_dict())
            nn.init.zeros_(own.self_attn.o_proj.weight)
            own.input_layernorm.load_state_dict(layer.input_layernorm.state_dict())
            if own.mlp is not None:
                nn.init.zeros_(own.mlp.down_proj.weight)
        last = (
            adapter.norm if config.intermediate_size else own.post_attention_layernorm
        )
        last.load_state_dict(norm.state_dict())
        return adapter.to(norm.weight.device)

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
