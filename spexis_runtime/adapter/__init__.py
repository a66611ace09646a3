# SPDX-License-Identifier: Apache-2.0
"""The exit adapter's file format: a directory of `config.json`, `model.safetensors`.

The adapter drafts from the residual stream h_i (hidden + residual) that leaves the
first i decoder layers of a target model, for each i of `feature_layers`; h_0 is the
token embedding. The paper's (section 6), "attention_only", with one feature and layer:

    x      = mlp(initial_layernorm(h))
    x      = x + self_attn(input_layernorm(x))
    logits = lm_head(post_attention_layernorm(x))

"full_block", with one feature or several and `depth` layers:

    x      = mlp(concatenation of initial_layernorm_i(h_i))
    x      = x + self_attn(input_layernorm(x))          in each
    x      = x + mlp(post_attention_layernorm(x))       layer
    logits = lm_head(norm(x))

Either may have several features. `calibration` turns the softmax probability of a draft
into the probability that it is right.

`lm_head` is the target's own unless the adapter brings one. The rotary embedding,
too, is the target's.
"""

from spexis_runtime.adapter.config import (
    LM_HEAD,
    MODEL_TYPES,
    AdapterConfig,
    check_adapter_matches,
    expected_tensors,
    load_adapter_config,
    save_adapter,
)
from spexis_runtime.adapter.files import AdapterError, read_tensor_shapes

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
