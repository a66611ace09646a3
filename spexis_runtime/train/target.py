# SPDX-License-Identifier: Apache-2.0
"""The target model in plain transformers, or the first layers of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from spexis_runtime.train.prompts import TrainError


class Target(NamedTuple):
    """A Hugging Face causal model, frozen, with its tokenizer.

    `ends`: ids that end a response. `norm`: its last norm. With `num_layers` the model
    has only so many of its first layers and its own norm does nothing.
    """

    model: Any
    tokenizer: Any
    ends: frozenset[int] = frozenset()
    norm: Any = None
    num_layers: int | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def lm_head(self) -> torch.Tensor:
        """[vocab_size, hidden_size]"""
        return self.model.lm_head.weight


def load_config(path: str) -> Any:
    """The model's Hugging Face config. Raises TrainError where there is none."""
    if not (Path(path) / "config.json").is_file():
        raise TrainError(f"model {path} has no config.json")
    return AutoConfig.from_pretrained(path)


def load_tokenizer(path: str) -> Any:
    """Raises TrainError where the model brings none."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TrainError(f"model {path} has no usable tokenizer: {reason}") from None


def load_target(path: str, num_layers: int | None = None) -> Target:
    """The model in directory `path`: bfloat16 on the GPU, or else float32 on CPU.

    Only the first `num_layers` decoder layers, the embedding, the last norm and the LM
    head if `num_layers` is given: files of other layers are not read into memory.
    """
    config = load_config(path)
    # A KV cache that grows at each step never fits the blocks that it has just freed,
    # unless those can be joined.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
        # or it would list the tensors of all other layers as unexpected
        transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=torch.bfloat16 if cuda else torch.float32,
        attn_implementation="sdpa",
    )
    model.requires_grad_(False).eval().to("cuda" if cuda else "cpu")
    norm = model.model.norm
    if num_layers is not None:
        model.model.norm = nn.Identity()
    tokenizer = load_tokenizer(path)
    return Target(model, tokenizer, end_tokens(path, tokenizer), norm, num_layers)


def end_tokens(path: str, tokenizer: Any) -> frozenset[int]:
    """Ids that end a response: of the generation config, or else the tokenizer's."""
    ends: Any = None
    if (Path(path) / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])
