# SPDX-License-Identifier: Apache-2.0
"""The exit adapter's file format: a directory of `config.json`, `model.safetensors`.

The adapter drafts from the residual stream h (hidden + residual) that leaves the
first `exit_layer` decoder layers of a target model:

    x      = mlp(initial_layernorm(h))
    x      = x + self_attn(input_layernorm(x))
    logits = lm_head(post_attention_layernorm(x))

`lm_head` is the target's own unless the adapter brings one. The rotary embedding,
too, is the target's.
"""

from spexis_runtime.adapter.config import (
    LM_HEAD,
    MODEL_TYPES,
    AdapterConfig,
    AdapterError,
    check_adapter_matches,
    expected_tensors,
    load_adapter_config,
    read_tensor_shapes,
    save_adapter,
)

__all__ = [
    "LM_HEAD",
    "MODEL_TYPES",
    "AdapterConfig",
    "AdapterError",
    "check_adapter_matches",
    "expected_tensors",
    "load_adapter_config",
    "read_tensor_shapes",
    "save_adapter",
]
