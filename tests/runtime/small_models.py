# SPDX-License-Identifier: Apache-2.0
"""Random models of a few hundred kilobytes, with a byte-level tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

END = "<end>"
VOCABULARY = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]  # by token id
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}?"


def save_small_model(path: Path, model_type: str = "llama", *, layers: int = 4) -> Path:
    """A model directory: float32, hidden size 32, 4 heads and 2 KV heads, tied."""
    vocab = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE
    ).save_pretrained(path)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if model_type == "qwen3" else 8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.normal_(std=weight.shape[1] ** -0.5)  # layers that matter
            elif "norm" in name or name.endswith(".bias"):
                weight.add_(0.1 * torch.randn_like(weight))
            else:
                weight.normal_(std=0.3)
    model.save_pretrained(path)
    return path
