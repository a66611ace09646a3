# SPDX-License-Identifier: Apache-2.0
"""Train a length predictor on the target model's own text.

    spexis train length --model DIR --exit 1/2 (--prompts FILE | --texts TEXTS)
        --out DIR

It learns from the states after the exit layer how few tokens of the answer are still
to come. Only the target's first layers are loaded. `spexis train adapter` says what
OUT.csv, OUT.json, OUT.texts and OUT.checkpoint are.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import torch

from spexis_runtime.adapter import AdapterError
from spexis_runtime.adapter.length import LengthConfig, save_length_predictor
from spexis_runtime.length_predictor import LengthPredictor
from spexis_runtime.train.adapter import (
    add_training_arguments,
    exit_layer,
    open_texts,
    split,
)
from spexis_runtime.train.arguments import count, errors_in_one_line, positive, share
from spexis_runtime.train.batches import StateSource, make_batches
from spexis_runtime.train.card import length_card
from spexis_runtime.train.estimate import check_memory, estimate_memory, time_batches
from spexis_runtime.train.generate import check_tokenizer
from spexis_runtime.train.lengths import (
    LengthStep,
    Predictions,
    choose_cutoff,
    collect_lengths,
    fit_sigmoid,
    length_metrics,
)
from spexis_runtime.train.loop import Plan, fit
from spexis_runtime.train.prompts import TrainError, write_text
from spexis_runtime.train.report import command, origin, training_report
from spexis_runtime.train.target import load_config, load_target


def calibrated_config(
    config: LengthConfig, found: Predictions, precision: float
) -> LengthConfig:
    """With scales and offsets fitted to `found`, and cutoffs of that precision."""
    scales, offsets, cutoffs = [], [], []
    for i in range(len(config.thresholds)):
        known = found.known[:, i]
        z, truth = found.logits[known, i].astype(float), found.below[known, i]
        scale, offset = fit_sigmoid(z, truth)
        p = 1 / (1 + torch.exp(-torch.from_numpy(z * scale + offset)))
        scales.append(scale)
        offsets.append(offset)
        cutoffs.append(choose_cutoff(p.numpy(), truth, precision))
    return replace(
        config, scales=tuple(scales), offsets=tuple(offsets), cutoffs=tuple(cutoffs)
    )


def _run(args: argparse.Namespace) -> None:
    out: Path = args.out
    if out.exists():
        raise AdapterError(f"{out} already exists")
    hf_config = load_config(args.model)
    layer = exit_layer(args.exit, hf_config.num_hidden_layers)
    config = LengthConfig.for_model(hf_config, layer, tuple(args.inner_sizes))
    store = open_texts(args)
    learnt, held_out = split(list(store.texts()))
    if not any(text.ended for text in held_out):
        raise TrainError(
            f"no answer that came to its end was held out of {store.path}: give more "
            "prompts, or a higher --max-new-tokens"
        )
    target = load_target(args.model, layer)
    check_tokenizer(target, store)
    batches = make_batches(learnt, args.batch_tokens, args.seed)
    torch.manual_seed(args.seed)
    predictor = LengthPredictor(config).to(target.device)
    memory = estimate_memory(target, predictor, batches, 1, logits=False)
    print(memory.line(), flush=True)
    check_memory(memory, target.device)
    states = StateSource(target, (layer,))
    step = LengthStep(target, predictor, batches, states)
    a_pass = time_batches(predictor, step, batches)
    print(
        f"{len(learnt)} texts, {len(batches)} batches: about {a_pass / 60:.1f} min a "
        f"pass, {args.epochs * a_pass / 60:.1f} for {args.epochs}",
        flush=True,
    )
    checkpoint = out.with_name(out.name + ".checkpoint")
    names = ("batch_tokens", "accumulate", "seed", "learning_rate", "inner_sizes")
    history = fit(
        predictor,
        len(batches),
        step,
        Plan(
            args.epochs,
            args.learning_rate,
            args.accumulate,
            args.seed,
            60 * (args.minutes or math.inf),
        ),
        log=out.with_name(out.name + ".csv"),
        checkpoint=checkpoint,
        settings={
            "exit_layer": layer,
            "texts": store.identity,
            **{name: getattr(args, name) for name in names},
        },
    )
    predictor.requires_grad_(False).eval()
    found = collect_lengths(target, predictor, held_out)
    predictor.config = config = calibrated_config(config, found, args.precision)
    report = {
        "predictor": out.name,
        "model": Path(args.model).name,
        "exit_layer": layer,
        "command": command("spexis train length", args),
        **origin(target.device),
        "texts": store.settings,
        "parameters": sum(p.numel() for p in predictor.parameters()),
        "training": training_report(history, learnt),
        "held_out": length_metrics(found, predictor),
    }
    dtype = hf_config.dtype or torch.bfloat16
    tensors = {name: t.to(dtype) for name, t in predictor.state_dict().items()}
    save_length_predictor(out, config, tensors)
    write_text(out / "README.md", length_card(report))
    write_text(out.with_name(out.name + ".json"), json.dumps(report, indent=2) + "\n")
    checkpoint.unlink()
    print(f"length predictor in {out}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis train length",
        description="Train a length predictor on the target model's own text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_training_arguments(parser)
    add = parser.add_argument
    add("--epochs", type=count, default=20, help="passes over the text")
    add("--learning-rate", type=positive, default=1e-3, help="its peak")
    add("--batch-tokens", type=count, default=24576, help="tokens a batch")
    add("--inner-sizes", type=count, nargs=2, default=[256, 64], help="of the layers")
    add("--precision", type=share, default=0.85, help="that cutoffs are chosen for")
    args = parser.parse_args(argv)
    with errors_in_one_line():
        _run(args)


if __name__ == "__main__":
    main()
