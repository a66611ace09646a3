# SPDX-License-Identifier: Apache-2.0
"""How often an adapter's first choice is the token that the target generates.

    spexis eval adapter --model DIR --adapter DIR
        --prompts FILE|demo [--limit 64] [--max-new-tokens 128] [--out FILE]

The target answers each prompt greedily; the adapter drafts each token of the answer,
the end token included, from the target's states before it. Prints JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spexis_runtime.adapter import AdapterError, check_adapter_matches
from spexis_runtime.train.batches import make_batches, target_states
from spexis_runtime.train.generate import Target, Text, encode, generate, load_target
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.prompts import TrainError, read_prompts

MAX_PROMPT_TOKENS = 2048
BATCH_TOKENS = 8192


def evaluate_prompts(
    target: Target,
    adapter: ExitAdapter,
    prompts: str,
    *,
    limit: int | None = None,
    max_new_tokens: int = 128,
) -> dict[str, Any]:
    """`agreement` over the first `limit` prompts of a set, beside what it covers."""
    read = read_prompts(prompts, limit)
    texts = encode(target, read, MAX_PROMPT_TOKENS)
    texts = generate(target, texts, max_new_tokens)
    return {
        "prompts": prompts if prompts == "demo" else Path(prompts).name,
        "num_prompts": len(texts),
        "num_too_long": len(read) - len(texts),
        "max_new_tokens": max_new_tokens,
        **agreement(target, adapter, texts),
    }


@torch.no_grad()
def agreement(
    target: Target, adapter: ExitAdapter, texts: Sequence[Text]
) -> dict[str, Any]:
    """Share of response tokens that are the adapter's first choice, and parts of it.

    `top1`: all tokens; `top1_confident_half`: the half of the tokens that the adapter
    gives the higher probability; `top1_no_adapter`: the target's last norm and LM head
    put straight on the exit layer's states; `by_category`: `top1` by prompt category.
    """
    adapter = copy.deepcopy(adapter).to(target.device, target.model.dtype)
    head = target.model.lm_head.weight
    hits: dict[str, list[torch.Tensor]] = defaultdict(list)
    bare_hits: list[torch.Tensor] = []
    confidences: list[torch.Tensor] = []
    for category in sorted({text.category for text in texts}):
        of_category = [text for text in texts if text.category == category]
        for batch in make_batches(of_category, BATCH_TOKENS):
            ids, drafts = (tensor.to(target.device) for tensor in batch)
            states = target_states(target, ids, adapter.config.exit_layer)
            truth = ids.roll(-1, dims=1)[drafts]
            x = adapter(states.hidden, states.cos, states.sin)[drafts]
            confidence, choice = adapter.logits(x, head).softmax(-1).max(-1)
            bare = target.model.model.norm(states.hidden[drafts]) @ head.T
            hits[category].append((choice == truth).float().cpu())
            bare_hits.append((bare.argmax(-1) == truth).float().cpu())
            confidences.append(confidence.cpu())
    by_category = {name: torch.cat(parts) for name, parts in hits.items()}
    every = torch.cat(list(by_category.values()))
    order = torch.cat(confidences).argsort(descending=True)
    return {
        "num_tokens": len(every),
        "top1": _mean(every),
        "top1_confident_half": _mean(every[order[: (len(every) + 1) // 2]]),
        "top1_no_adapter": _mean(torch.cat(bare_hits)),
        "by_category": {name: _mean(part) for name, part in by_category.items()},
    }


def _mean(values: torch.Tensor) -> float:
    return round(values.mean().item(), 4)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis eval adapter",
        description="Measure an exit adapter against its model's greedy text.",
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--adapter", required=True, help="adapter directory")
    parser.add_argument(
        "--prompts", required=True, help='.jsonl or .json file, or "demo"'
    )
    parser.add_argument("--limit", type=int, default=64, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args(argv)
    try:
        adapter = ExitAdapter.load(args.adapter)
        read_prompts(args.prompts, args.limit)
        target = load_target(args.model)
        check_adapter_matches(adapter.config, target.model.config)
        result = evaluate_prompts(
            target,
            adapter,
            args.prompts,
            limit=args.limit,
            max_new_tokens=args.max_new_tokens,
        )
    except (AdapterError, TrainError) as error:
        sys.exit(f"error: {error}")
    text = json.dumps(result, indent=2) + "\n"
    if args.out:
        write_text(args.out, text)
    print(text, end="")


if __name__ == "__main__":
    main()
