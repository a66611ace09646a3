# SPDX-License-Identifier: Apache-2.0
"""Read, check and write exit adapters. Imports neither vLLM nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spexis_runtime.adapter.files import (
    AdapterError,
    check_shapes,
    check_types,
    read_config,
    read_tensor_shapes,
    write_directory,
)

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 2
ARCHITECTURES = ("attention_only", "full_block")
MODEL_TYPES = ("llama", "qwen2", "qwen3")
LM_HEAD = "lm_head.weight"  # optional: the target's LM head where absent
INTERMEDIATE_MULTIPLE = 64  # so that tensor-parallel ranks can share it out

# What must be equal in the adapter and in the model it is put on.
_GEOMETRY = (
    "model_type",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """`config.json` of an adapter. Raises AdapterError for values that cannot be.

    Sizes are the target's, in elements; `exit_layer` counts the decoder layers that
    run before the adapter, 1 .. num_hidden_layers - 1. Of the adapter's own:

    - `depth`: its layers. An "attention_only" adapter has one, without an MLP.
    - `intermediate_size`: of the MLP of each layer; 0 where there is none.
    - `feature_layers`: its inputs, as counts of decoder layers in rising order: 0 is
      the token embedding. The last is `exit_layer`.
    - `calibration`: probability that a draft is right at a softmax probability of
      0, 1/n, ..., 1, linear in between; empty: the softmax probability itself.
    """

    format_version: int = FORMAT_VERSION
    architecture: str = ARCHITECTURES[0]
    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    exit_layer: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    mlp_bias: bool
    depth: int = 1
    intermediate_size: int = 0
    feature_layers: tuple[int, ...]
    calibration: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "adapter", zero=("intermediate_size",))
        for name, known in (
            ("format_version", (FORMAT_VERSION,)),
            ("architecture", ARCHITECTURES),
            ("model_type", MODEL_TYPES),
        ):
            if getattr(self, name) not in known:
                raise AdapterError(
                    f"adapter {name} must be one of {', '.join(map(str, known))}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise AdapterError(
                f"adapter num_attention_heads must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads}), "
                f"got {self.num_attention_heads}"
            )
        if self.exit_layer >= self.num_hidden_layers:
            raise AdapterError(
                f"adapter exit_layer must be in 1..{self.num_hidden_layers - 1} for "
                f"a model of {self.num_hidden_layers} layers, got {self.exit_layer}"
            )
        self._check_architecture()
        self._check_lists()

    def _check_architecture(self) -> None:
        if self.architecture == "attention_only":
            for name, only in (("depth", 1), ("intermediate_size", 0)):
                if (value := getattr(self, name)) != only:
                    raise AdapterError(
                        f"adapter {name} must be {only} for attention_only, got {value}"
                    )
        elif self.intermediate_size <= 0 or (
            self.intermediate_size % INTERMEDIATE_MULTIPLE
        ):
            raise AdapterError(
                f"adapter intermediate_size must be a multiple of "
                f"{INTERMEDIATE_MULTIPLE}, got {self.intermediate_size}"
            )

    def _check_lists(self) -> None:
        layers = self.feature_layers
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or layers[0] < 0
            or layers[-1] != self.exit_layer
        ):
            raise AdapterError(
                f"adapter feature_layers must rise from 0 or more to exit_layer "
                f"({self.exit_layer}), got {list(layers)}"
            )
        values = self.calibration
        if values and (
            len(values) < 2
            or list(values) != sorted(values)
            or not 0 <= values[0] <= values[-1] <= 1
        ):
            raise AdapterError(
                f"adapter calibration must be two or more numbers that rise within "
                f"0..1, got {list(values)}"
            )

    @classmethod
    def for_model(
        cls,
        hf_config: Any,
        exit_layer: int,
        *,
        mlp_bias: bool = True,
        depth: int = 1,
        intermediate_size: int = 0,
        feature_layers: Sequence[int] = (),
    ) -> AdapterConfig:
        """The adapter that fits a model, given its Hugging Face config.

        With an `intermediate_size` it is a "full_block". Without `feature_layers` its
        one input are the states after `exit_layer` layers.

        Raises AdapterError for a model type or an exit layer that cannot be.
        """
        return cls(
            architecture=ARCHITECTURES[intermediate_size > 0],
            model_type=hf_config.model_type,
            hidden_size=hf_config.hidden_size,
            vocab_size=hf_config.vocab_size,
            num_hidden_layers=hf_config.num_hidden_layers,
            exit_layer=exit_layer,
            num_attention_heads=hf_config.num_attention_heads,
            num_key_value_heads=hf_config.num_key_value_heads,
            head_dim=_head_dim(hf_config),
            rms_norm_eps=float(hf_config.rms_norm_eps),
            mlp_bias=mlp_bias,
            depth=depth,
            intermediate_size=intermediate_size,
            feature_layers=tuple(feature_layers) or (exit_layer,),
        )


def expected_tensors(config: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the adapter must have.

    Beside these it may have `LM_HEAD`, [vocab_size, hidden_size].
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    inputs = hidden * len(config.feature_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "initial_layernorm.weight": (inputs,),  # one norm after the other
        "mlp.weight": (hidden, inputs),
    }
    if config.mlp_bias:
        shapes["mlp.bias"] = (hidden,)
    for number in range(config.exit_layer, config.exit_layer + config.depth):
        layer = f"layers.{number}."
        attn = layer + "self_attn."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            attn + "q_proj.weight": (q_rows, hidden),
            attn + "k_proj.weight": (kv_rows, hidden),
            attn + "v_proj.weight": (kv_rows, hidden),
            attn + "o_proj.weight": (hidden, q_rows),
        }
        if config.model_type == "qwen2":
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                shapes[f"{attn}{name}_proj.bias"] = (rows,)
        if config.model_type == "qwen3":
            shapes[attn + "q_norm.weight"] = (head_dim,)
            shapes[attn + "k_norm.weight"] = (head_dim,)
        if size := config.intermediate_size:
            shapes[layer + "mlp.gate_proj.weight"] = (size, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (size, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, size)
    if config.intermediate_size:
        shapes["norm.weight"] = (hidden,)
    return shapes


def load_adapter_config(path: str | os.PathLike[str]) -> AdapterConfig:
    """Config of the adapter in directory `path`, its weights file checked.

    Reads the header of the weights only. Raises AdapterError when a file is missing,
    broken, cut short, of another format, or has not exactly the expected tensors.
    """
    directory = Path(path)
    config = read_config(directory, AdapterConfig, "adapter")
    try:
        _check_shapes(config, read_tensor_shapes(directory))
    except AdapterError as error:
        raise AdapterError(f"{directory}: {error}") from None
    return config


def check_adapter_matches(config: AdapterConfig, hf_config: Any) -> None:
    """Raise AdapterError unless the adapter was made for such a model.

    Compares model type, hidden size, vocabulary, number of layers and heads with the
    model's Hugging Face config. (`exit_layer` fits the number of layers by itself.)
    """
    for name in _GEOMETRY:
        ours = getattr(config, name)
        theirs = (
            _head_dim(hf_config) if name == "head_dim" else getattr(hf_config, name)
        )
        if ours != theirs:
            raise AdapterError(
                f"the adapter does not fit this model: {name} is {ours} in the "
                f"adapter, {theirs} in the model"
            )


def save_adapter(
    path: str | os.PathLike[str],
    config: AdapterConfig,
    tensors: Mapping[str, torch.Tensor],
) -> Path:
    """Write an adapter to the new directory `path`, all of it or nothing.

    Raises AdapterError when `path` exists or the tensors are not the expected ones.
    """
    if Path(path).exists():
        raise AdapterError(f"{path} already exists")
    _check_shapes(config, {name: tuple(t.shape) for name, t in tensors.items()})
    return write_directory(Path(path), config, tensors)


def _head_dim(hf_config: Any) -> int:
    # Older Llama and Qwen2 configs leave head_dim out.
    return (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )


def _check_shapes(config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = expected_tensors(config)
    if LM_HEAD in shapes:
        expected[LM_HEAD] = (config.vocab_size, config.hidden_size)
    check_shapes(expected, shapes)
