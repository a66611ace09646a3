# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models and adapters, and the requests that the tests send them.

Large initial weights make the outputs chaotic: a wrong token shows at once.
"""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm import SamplingParams

from spexis_runtime.adapter.config import (
    AdapterConfig,
    expected_tensors,
    save_adapter,
)

VOCAB_SIZE = 1024
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, False),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, True),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, True),
}


def make_model(family: str, directory: Path, **options: Any) -> Path:
    """Write a model of `family` (untied llama, tied qwen) and return its directory.

    Args:
        options: of its config, such as `num_hidden_layers`.
    """
    config_class, model_class, tied = FAMILIES[family]
    defaults: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.12,
    )
    if family == "qwen3":
        defaults["head_dim"] = 32
    config = config_class(**(defaults | options))
    torch.manual_seed(1)
    path = directory / family
    model_class(config).to(torch.float32).save_pretrained(path)
    return path


def make_adapter(model: Path, exit_layer: int, directory: Path, **options: Any) -> Path:
    """Write an untrained adapter for `model` and return its directory.

    Args:
        options: of `AdapterConfig.for_model`.
    """
    hf_config = transformers.AutoConfig.from_pretrained(model)
    config = AdapterConfig.for_model(hf_config, exit_layer, **options)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if "norm" in name
        else torch.randn(shape, generator=generator) * 0.05
        for name, shape in expected_tensors(config).items()
    }
    path = directory / f"{model.name}-exit{exit_layer}"
    save_adapter(path, config, tensors)
    return path


def make_requests(count: int = 16, seed: int = 7) -> list[tuple[list[int], Any]]:
    """Prompts of 3 to 50 tokens, some sharing a prefix; 1 to 34 tokens of output.

    A quarter samples with a seed, a quarter has penalties, the rest is greedy. Half
    want logprobs of their output, one of its prompt.
    """
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]

    shared = tokens(37)
    requests = []
    for i in range(count):
        prompt = tokens(rng.randint(3, 45))
        options: dict[str, Any] = {"temperature": 0.0}
        if i % 4 == 1:
            options = {"temperature": 0.9, "seed": 1000 + i}
        elif i % 4 == 2:
            options |= {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
        elif i % 4 == 3:
            prompt = shared[: rng.choice([16, 32, 37])] + prompt[:20]
        if i % 8 < 4:
            options["logprobs"] = 2
        if i == 4:
            options["prompt_logprobs"] = 1
        max_tokens = 1 if i == 5 else rng.randint(8, 34)
        params = SamplingParams(
            max_tokens=max_tokens, detokenize=False, ignore_eos=True, **options
        )
        requests.append((prompt, params))
    return requests
