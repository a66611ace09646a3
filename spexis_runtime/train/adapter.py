# SPDX-License-Identifier: Apache-2.0
"""Train an exit adapter on the target model's own text.

    spexis train adapter --model DIR --exit-layer 15
        --prompts FILE --out DIR [--evaluate FILE ...]

The target answers the prompts, once greedily and `--samples` times at temperature 0.8;
the adapter learns to say, from the states after `exit_layer` layers, what the target
says at the end. Beside the adapter directory OUT come OUT.csv, a line a step, and
OUT.json, the settings and the accuracy.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from tqdm import tqdm

from spexis_runtime.adapter import AdapterConfig, AdapterError, save_adapter
from spexis_runtime.train.batches import Batch, make_batches, target_states
from spexis_runtime.train.card import model_card
from spexis_runtime.train.evaluate import evaluate_prompts, write_text
from spexis_runtime.train.generate import (
    Target,
    Text,
    encode,
    generate,
    load_config,
    load_target,
)
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.prompts import DEMO, TrainError, read_prompts

SAMPLING_TEMPERATURE = 0.8
WARMUP_STEPS = 100
LOGITS_ROWS = 2048
LOG_COLUMNS = ("step", "epoch", "loss", "top1", "learning_rate", "seconds")


class Step(NamedTuple):
    """A line of the log; `top1`: how often both have the same first choice."""

    step: int
    epoch: int
    loss: float
    top1: float
    learning_rate: float
    seconds: float


def distillation_loss(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half KL divergence to the target, half cross-entropy on its first choice.

    Both are float32 logits [tokens, vocab_size]; the mean over the tokens.
    """
    divergence = F.kl_div(
        draft.log_softmax(-1),
        target.log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    return (divergence + F.cross_entropy(draft, target.argmax(-1))) / 2


def learning_rate(step: int, steps: int, progress: float, peak: float) -> float:
    """Linear warm-up by `step`, then a cosine down to a twentieth of `peak`.

    `progress` is the part of the training that is done, 0 .. 1.
    """
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, steps // 10)))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return peak * warmup * (0.95 * cosine + 0.05)


def train(
    target: Target,
    adapter: ExitAdapter,
    texts: list[Text],
    *,
    epochs: int,
    peak_rate: float,
    batch_tokens: int,
    seed: int,
    log: Path,
    deadline: float = math.inf,
) -> list[Step]:
    """Train `adapter` in place; its float32 weights see bfloat16 products on the GPU.

    Stops after `epochs`, or at `deadline` by time.perf_counter() but not before the
    first step; the learning rate falls by whichever is nearer. Writes each step to the
    CSV file `log` as it happens, and returns them all.
    """
    shuffle = random.Random(seed)
    optimizer = torch.optim.AdamW(
        adapter.parameters(), lr=peak_rate, weight_decay=0.01, betas=(0.9, 0.95)
    )
    steps = epochs * len(make_batches(texts, batch_tokens))
    history: list[Step] = []
    start = time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", newline="") as stream,
        tqdm(total=steps, desc="train", unit="step", mininterval=2) as bar,
    ):
        writer = csv.writer(stream)
        writer.writerow(LOG_COLUMNS)
        for epoch, batch in _epochs(texts, epochs, batch_tokens, shuffle):
            step, elapsed = len(history), time.perf_counter() - start
            progress = max(step / steps, elapsed / max(deadline - start, 1e-9))
            if step and progress >= 1:
                break
            rate = learning_rate(step, steps, min(progress, 1.0), peak_rate)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, top1 = _train_batch(target, adapter, optimizer, batch)
            seconds = round(time.perf_counter() - start, 3)
            history.append(Step(step, epoch, loss, top1, rate, seconds))
            writer.writerow(history[-1])
            stream.flush()
            bar.set_postfix(loss=f"{loss:.3f}", top1=f"{top1:.3f}", refresh=False)
            bar.update()
    return history


def _epochs(
    texts: list[Text], epochs: int, batch_tokens: int, shuffle: random.Random
) -> Iterator[tuple[int, Batch]]:
    for epoch in range(epochs):
        for batch in make_batches(texts, batch_tokens, shuffle):
            yield epoch, batch


def _train_batch(
    target: Target,
    adapter: ExitAdapter,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
) -> tuple[float, float]:
    ids, drafts = (tensor.to(target.device) for tensor in batch)
    states = target_states(target, ids, adapter.config.exit_layer)
    cuda = target.device.type == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
        x = adapter(states.hidden, states.cos, states.sin)[drafts]
    optimizer.zero_grad(set_to_none=True)
    # The logits are by far the largest tensors: make and drop them chunk by chunk.
    leaf = x.detach().requires_grad_()
    head = target.model.lm_head.weight
    sums = torch.zeros(2, device=target.device)
    for part, final in zip(
        leaf.split(LOGITS_ROWS), states.final[drafts].split(LOGITS_ROWS), strict=True
    ):
        drafted, wanted = adapter.logits(part, head), (final @ head.T).float()
        loss = distillation_loss(drafted, wanted) * (len(part) / len(leaf))
        loss.backward()
        hits = (drafted.detach().argmax(-1) == wanted.argmax(-1)).sum()
        sums += torch.stack((loss.detach(), hits / len(leaf)))
    x.backward(leaf.grad)
    nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
    optimizer.step()
    mean_loss, top1 = sums.tolist()
    return round(mean_loss, 4), round(top1, 4)


def _run(args: argparse.Namespace) -> None:
    out: Path = args.out
    if out.exists():
        raise AdapterError(f"{out} already exists")
    hf_config = load_config(args.model)
    config = AdapterConfig.for_model(hf_config, args.exit_layer)
    prompts = read_prompts(args.prompts, args.limit)
    for path in args.evaluate:
        read_prompts(path)
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    target = load_target(args.model)
    encoded = encode(target, prompts, args.max_prompt_tokens)
    texts = generate(target, encoded, args.max_new_tokens)
    for _ in range(args.samples):
        texts += generate(
            target, encoded, args.max_new_tokens, temperature=SAMPLING_TEMPERATURE
        )
    generated = time.perf_counter()
    adapter = ExitAdapter.from_target(config, target.model)
    history = train(
        target,
        adapter,
        texts,
        epochs=args.epochs,
        peak_rate=args.learning_rate,
        batch_tokens=args.batch_tokens,
        seed=args.seed,
        deadline=start + 60 * (args.minutes or math.inf),
        log=out.with_name(out.name + ".csv"),
    )
    dtype = hf_config.dtype or torch.bfloat16
    save_adapter(
        out, config, {name: t.to(dtype) for name, t in adapter.state_dict().items()}
    )
    trained = time.perf_counter()
    report: dict[str, Any] = {
        "model": Path(args.model).name,
        "exit_layer": args.exit_layer,
        "command": _command(args),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(target),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "training": {
            "prompts": Path(args.prompts).name,
            "prompts_by_source": dict(Counter(p.source for p in prompts)),
            "num_prompts": len(encoded),
            "num_too_long": len(prompts) - len(encoded),
            "num_texts": len(texts),
            "num_tokens": sum(len(t.ids) for t in texts),
            "num_response_tokens": sum(len(t.ids) - t.prompt_length for t in texts),
            "epochs": history[-1].epoch + 1,
            "steps": len(history),
            "generate_s": round(generated - start, 1),
            "train_s": round(trained - generated, 1),
            "last_epoch_loss": _last_epoch_mean(history, "loss"),
            "last_epoch_top1": _last_epoch_mean(history, "top1"),
        },
        "evaluation": [
            evaluate_prompts(target, ExitAdapter.load(out), path, limit=args.eval_limit)
            for path in args.evaluate
        ],
    }
    write_text(out.with_name(out.name + ".json"), json.dumps(report, indent=2) + "\n")
    write_text(out / "README.md", model_card(out.name, report))
    for result in report["evaluation"]:
        print(f"{result['prompts']}: top-1 agreement {result['top1']:.3f}")
    print(f"adapter in {out}")


def _last_epoch_mean(history: list[Step], name: str) -> float:
    last = [getattr(s, name) for s in history if s.epoch == history[-1].epoch]
    return round(sum(last) / len(last), 4)


def _command(args: argparse.Namespace) -> str:
    """The command without its folders, so that it reads the same everywhere."""
    words = ["spexis train adapter"]
    for name, value in vars(args).items():
        values = value if isinstance(value, list) else [value]
        shown = [Path(v).name if isinstance(v, str | Path) else str(v) for v in values]
        if value is not None and shown:
            words.append(f"--{name.replace('_', '-')} {' '.join(shown)}")
    return " ".join(words)


def _machine(target: Target) -> str:
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return "CPU"


def _natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {value}")
    return value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis train adapter",
        description="Train an exit adapter on the target model's own text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory")
    add("--exit-layer", type=int, required=True, help="layers before the adapter")
    add("--prompts", required=True, help=f'.jsonl or .json file, or "{DEMO}"')
    add("--out", type=Path, required=True, help="the adapter's new directory")
    add("--limit", type=_count, help="use the first prompts only")
    add("--max-prompt-tokens", type=_count, default=448, help="leave out longer ones")
    add("--max-new-tokens", type=_count, default=256, help="length of the answers")
    add("--samples", type=_natural, default=1, help="sampled answers a prompt")
    add("--epochs", type=_count, default=8, help="passes over the text")
    add("--minutes", type=_positive, help="end the training this soon after the start")
    add("--learning-rate", type=_positive, default=2e-3, help="its peak")
    add("--batch-tokens", type=_count, default=24576, help="tokens a step")
    add("--seed", type=int, default=0, help="of sampling and of the order")
    add("--evaluate", nargs="*", default=[DEMO], help="prompt sets to measure on")
    add("--eval-limit", type=_count, default=64, help="first prompts of each set")
    try:
        _run(parser.parse_args(argv))
    except (AdapterError, TrainError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
