# SPDX-License-Identifier: Apache-2.0
"""Train an exit adapter on the target model's own text.

    spexis train adapter --model DIR --exit 1/2 --prompts FILE --out DIR
    spexis train adapter --model DIR --exit 1/2 --texts TEXTS --out DIR

The first form lets the target answer the prompts before (as `spexis generate` does,
into OUT.texts); the second reads texts that are there. The adapter learns to say, from
states of the first layers, what the target says at the end. Beside the adapter
directory OUT come OUT.csv, a line a step, OUT.json, the settings and the accuracy, and
while it trains OUT.checkpoint: the same command after a kill goes on from there.

Texts with recorded labels (`spexis generate --top-logits`) need the target's first
layers only: no others are loaded.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from spexis_runtime.adapter import AdapterConfig, AdapterError, save_adapter
from spexis_runtime.train.arguments import (
    count,
    errors_in_one_line,
    natural,
    positive,
    share,
)
from spexis_runtime.train.batches import StateSource, make_batches
from spexis_runtime.train.card import adapter_card
from spexis_runtime.train.distill import AdapterStep
from spexis_runtime.train.drafts import collect_drafts
from spexis_runtime.train.estimate import (
    check_disk,
    check_memory,
    estimate_memory,
    time_batches,
)
from spexis_runtime.train.generate import (
    add_generation_arguments,
    check_tokenizer,
    generate_texts,
)
from spexis_runtime.train.loop import Plan, fit
from spexis_runtime.train.metrics import draft_metrics, fit_calibration
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.prompts import (
    DEMO,
    TrainError,
    read_prompts,
    write_text,
)
from spexis_runtime.train.report import command, origin, training_report
from spexis_runtime.train.target import load_config, load_target
from spexis_runtime.train.texts import Text, TextStore

HELD_OUT = 20  # one prompt of so many is kept for calibration
CHECKPOINT_STEPS = 200


def exit_layer(text: str, num_layers: int) -> int:
    """Layer 15 of 30 from "1/2" or "15". Raises TrainError for what is neither."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise TrainError(f"--exit must be a layer or a fraction, got {text}") from None
    layer = value * num_layers if value < 1 else value
    return math.floor(layer)


def feature_layers(text: str | None, exit_layer: int) -> tuple[int, ...]:
    """(0, 7, 15) from "0,7,15"; without it the exit layer alone."""
    if text is None:
        return (exit_layer,)
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise TrainError(f"--features must be like 0,7,15, got {text}") from None


def open_texts(args: argparse.Namespace) -> TextStore:
    """Those of `--texts`, or made from `--prompts`. Raises TrainError."""
    if args.texts is not None:
        store = TextStore.open(args.texts)
        config = load_config(args.model)
        if store.settings["vocab_size"] != config.vocab_size:
            raise TrainError(
                f"{args.texts} are of a model of {store.settings['vocab_size']} tokens,"
                f" {args.model} has {config.vocab_size}"
            )
        return store
    return generate_texts(
        args.model,
        read_prompts(args.prompts, args.limit),
        args.out.with_name(args.out.name + ".texts"),
        temperatures=args.temperatures,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        num_self_prompts=args.self_prompts,
        top_logits=args.top_logits,
        seed=args.seed,
    )


def split(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and those of every twentieth prompt."""
    learnt = [t for t in texts if t.prompt % HELD_OUT != HELD_OUT - 1]
    held_out = [t for t in texts if t.prompt % HELD_OUT == HELD_OUT - 1]
    return learnt, held_out


def _run(args: argparse.Namespace) -> None:
    out: Path = args.out
    if out.exists():
        raise AdapterError(f"{out} already exists")
    hf_config = load_config(args.model)
    layer = exit_layer(args.exit, hf_config.num_hidden_layers)
    config = AdapterConfig.for_model(
        hf_config,
        layer,
        depth=args.depth,
        intermediate_size=args.intermediate_size,
        feature_layers=feature_layers(args.features, layer),
    )
    store = open_texts(args)
    texts = list(store.texts())
    only_first = store.settings["top_logits"] > 0
    target = load_target(args.model, layer if only_first else None)
    check_tokenizer(target, store)
    learnt, held_out = split(texts)
    batches = make_batches(learnt, args.batch_tokens, args.seed)
    torch.manual_seed(args.seed)
    adapter = ExitAdapter.from_target(
        config, target.model.model.layers[-1], target.norm
    )
    num_features = len(config.feature_layers)
    memory = estimate_memory(target, adapter, batches, num_features, logits=True)
    print(memory.line(), flush=True)
    check_memory(memory, target.device)
    if args.cache is not None:
        num_states = num_features + (not only_first)
        tokens = sum(len(b) * max(len(t.ids) for t in b) for b in batches)
        size = tokens * num_states * config.hidden_size * target.model.dtype.itemsize
        check_disk(args.cache, size, "the cache of hidden states")
    identity = f"{store.identity} {args.batch_tokens} {args.seed}"
    states = StateSource(target, config.feature_layers, args.cache, identity)
    step = AdapterStep(target, adapter, batches, states, args.soft_weight)
    a_pass = time_batches(adapter, step, batches)
    tokens = sum(len(t.ids) for t in learnt)
    print(
        f"{len(learnt)} texts of {tokens} tokens, {len(batches)} batches: about "
        f"{a_pass / 60:.1f} min a pass, {args.epochs * a_pass / 60:.1f} for "
        f"{args.epochs}" + (f", ends after {args.minutes}" if args.minutes else ""),
        flush=True,
    )
    checkpoint = out.with_name(out.name + ".checkpoint")
    history = fit(
        adapter,
        len(batches),
        step,
        Plan(
            args.epochs,
            args.learning_rate,
            args.accumulate,
            args.seed,
            60 * (args.minutes or math.inf),
            CHECKPOINT_STEPS,
        ),
        log=out.with_name(out.name + ".csv"),
        checkpoint=checkpoint,
        settings=_settings(args, config, store),
    )
    adapter.requires_grad_(False).eval()
    drafts = collect_drafts(target, adapter, [t for t in held_out if not t.temperature])
    if len(drafts.hits):
        values = fit_calibration(drafts.confidence, drafts.hits)
        config = replace(config, calibration=values)
    dtype = hf_config.dtype or torch.bfloat16
    tensors = {name: t.to(dtype) for name, t in adapter.state_dict().items()}
    report = {
        "adapter": out.name,
        "model": Path(args.model).name,
        "exit_layer": layer,
        "command": command("spexis train adapter", args),
        **origin(target.device),
        "texts": store.settings,
        "parameters": sum(t.numel() for t in tensors.values()),
        "training": training_report(history, learnt),
        "held_out": draft_metrics(drafts) if len(drafts.hits) else None,
    }
    save_adapter(out, config, tensors)
    write_text(out / "README.md", adapter_card(report))
    write_text(out.with_name(out.name + ".json"), json.dumps(report, indent=2) + "\n")
    checkpoint.unlink()
    print(f"adapter in {out}")


def _settings(
    args: argparse.Namespace, config: AdapterConfig, store: TextStore
) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that goes on from it."""
    names = ("batch_tokens", "accumulate", "seed", "learning_rate", "soft_weight")
    return {
        "architecture": config.architecture,
        "exit_layer": config.exit_layer,
        "feature_layers": list(config.feature_layers),
        "depth": config.depth,
        "intermediate_size": config.intermediate_size,
        "texts": store.identity,
        **{name: getattr(args, name) for name in names},
    }


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that adapters and length predictors have in common."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory")
    add("--exit", required=True, help="layers before the exit, or their share: 1/2")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", help=f'.jsonl or .json file, or "{DEMO}"')
    source.add_argument("--texts", type=Path, help="what `spexis generate` has written")
    add("--out", type=Path, required=True, help="a new directory")
    add("--limit", type=count, help="use the first prompts only")
    add_generation_arguments(parser)
    add("--minutes", type=positive, help="end the training after so long")
    add("--accumulate", type=count, default=1, help="batches a step")
    add("--seed", type=natural, default=0, help="of sampling and of the order")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis train adapter",
        description="Train an exit adapter on the target model's own text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_training_arguments(parser)
    add = parser.add_argument
    add("--epochs", type=count, default=8, help="passes over the text")
    add("--learning-rate", type=positive, default=2e-3, help="its peak")
    add("--batch-tokens", type=count, default=24576, help="tokens a batch")
    add("--depth", type=count, default=1, help="layers of the adapter")
    add("--intermediate-size", type=natural, default=0, help="of their MLPs; 0: none")
    add("--features", help="layers whose states are read, as 0,7,15; the exit is last")
    add("--soft-weight", type=share, default=0.5, help="of soft labels in the loss")
    add("--cache", type=Path, help="keep the hidden states in this directory")
    args = parser.parse_args(argv)
    with errors_in_one_line():
        _run(args)


if __name__ == "__main__":
    main()
