# SPDX-License-Identifier: Apache-2.0
"""The target model's own text, which adapters are trained on and measured by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spexis_runtime.train.prompts import Prompt, TrainError

MAX_ROWS = 4096  # bounds the memory for logits
CPU_KV_BYTES = 1 << 30


class Target(NamedTuple):
    """A Hugging Face causal model, frozen, with its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.model.device


class Text(NamedTuple):
    ids: list[int]  # prompt, then response (with its end token, if it came to one)
    prompt_length: int
    category: str


def load_config(path: str) -> Any:
    """The model's Hugging Face config. Raises TrainError where there is none."""
    if not (Path(path) / "config.json").is_file():
        raise TrainError(f"model {path} has no config.json")
    return AutoConfig.from_pretrained(path)


def load_target(path: str) -> Target:
    """The model in directory `path`: bfloat16 on the GPU, or else float32 on CPU."""
    load_config(path)
    # A KV cache that grows at each step never fits the blocks that it has just freed,
    # unless those can be joined.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16 if cuda else torch.float32,
        attn_implementation="sdpa",
    )
    model.requires_grad_(False).eval()
    return Target(
        model.to("cuda" if cuda else "cpu"), AutoTokenizer.from_pretrained(path)
    )


def encode(target: Target, prompts: Sequence[Prompt], max_tokens: int) -> list[Text]:
    """Prompts of at most `max_tokens` tokens, through the chat template if any.

    Longer ones are left out. Raises TrainError when none is left.
    """
    texts = []
    for prompt in prompts:
        if target.tokenizer.chat_template:
            ids = target.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}],
                add_generation_prompt=True,
                return_dict=False,
            )
        else:
            ids = target.tokenizer(prompt.text)["input_ids"]
        if 0 < len(ids) <= max_tokens:
            texts.append(Text(ids, len(ids), prompt.category))
    if not texts:
        raise TrainError(f"every prompt is longer than {max_tokens} tokens, or empty")
    return texts


def generate(
    target: Target,
    prompts: Sequence[Text],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
) -> list[Text]:
    """`prompts` with the target's responses: greedy, or sampled at `temperature`.

    Rows of like length share a batch, so the order differs from that of `prompts`.
    """
    queue = sorted(prompts, key=lambda text: len(text.ids), reverse=True)
    budget = _kv_budget(target)
    texts: list[Text] = []
    with tqdm(total=len(queue), desc="generate", unit="prompt", mininterval=2) as bar:
        while queue:
            longest = len(queue[0].ids) + max_new_tokens
            rows = min(MAX_ROWS, max(1, budget // longest))
            batch, queue = queue[:rows], queue[rows:]
            texts += _generate_batch(target, batch, max_new_tokens, temperature)
            bar.update(len(batch))
    return texts


@torch.inference_mode()
def _generate_batch(
    target: Target, batch: list[Text], max_new_tokens: int, temperature: float
) -> list[Text]:
    width = max(len(text.ids) for text in batch)
    ends = _end_tokens(target)
    pad = min(ends, default=0)
    rows = [[pad] * (width - len(text.ids)) + text.ids for text in batch]
    mask = [[0] * (width - len(text.ids)) + [1] * len(text.ids) for text in batch]
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
        sampling |= {"top_k": 0, "top_p": 1.0}
    output = target.model.generate(
        input_ids=torch.tensor(rows, device=target.device),
        attention_mask=torch.tensor(mask, device=target.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        repetition_penalty=1.0,
        **sampling,
    )
    texts = []
    for text, response in zip(batch, output[:, width:].tolist(), strict=True):
        length = next((i + 1 for i, t in enumerate(response) if t in ends), None)
        texts.append(text._replace(ids=text.ids + response[:length]))
    return texts


def _end_tokens(target: Target) -> set[int]:
    ends = target.model.generation_config.eos_token_id
    if ends is None:
        ends = target.tokenizer.eos_token_id
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, list) else {ends}


def _kv_budget(target: Target) -> int:
    """Tokens whose KV a batch may hold: a quarter of the GPU's free memory."""
    config = target.model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    free = CPU_KV_BYTES
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(target.device)[0] // 4
    return free // (per_token * target.model.dtype.itemsize)
