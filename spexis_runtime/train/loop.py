# SPDX-License-Identifier: Apache-2.0
"""The training loop of adapters and length predictors: it survives being killed.

A checkpoint holds weights, optimizer and step; the order of the batches follows from
the seed. So a run that goes on from a checkpoint ends with the very weights of a run
that was never stopped, unless a time limit cuts either short.
"""

from __future__ import annotations

import csv
import io
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from spexis_runtime.train.prompts import TrainError, write_text

WARMUP_STEPS = 100
LOG_COLUMNS = ("step", "epoch", "loss", "hits", "learning_rate", "seconds")

BatchStep = Callable[[int, float], torch.Tensor]
"""(number of the batch, share of the step) -> [2] float32: loss and hits.

Adds the gradient of share * loss. Both results are means over the batch's tokens.
"""


class Plan(NamedTuple):
    epochs: int
    peak_rate: float
    accumulate: int = 1  # batches a step
    seed: int = 0
    seconds: float = math.inf  # ends soon after, at least one step done
    checkpoint_steps: int = 200
    weight_decay: float = 0.01


class Step(NamedTuple):
    """A line of the log; `hits`: the share of the tokens that it got right."""

    step: int
    epoch: int
    loss: float
    hits: float
    learning_rate: float
    seconds: float


def learning_rate(step: int, steps: int, progress: float, peak: float) -> float:
    """Linear warm-up by `step`, then a cosine down to a twentieth of `peak`.

    `progress` is the part of the training that is done, 0 .. 1.
    """
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, steps // 10)))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return peak * warmup * (0.95 * cosine + 0.05)


def fit(
    module: nn.Module,
    num_batches: int,
    batch_step: BatchStep,
    plan: Plan,
    *,
    log: Path,
    checkpoint: Path,
    settings: dict[str, Any],
) -> list[Step]:
    """Train `module` in place; returns every step, those before a kill included.

    Writes the CSV file `log` line by line, and `checkpoint` now and then and at the
    end; goes on from a checkpoint that is there. Raises TrainError where that was made
    with other `settings`, which are of JSON's types.
    """
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=plan.peak_rate,
        weight_decay=plan.weight_decay,
        betas=(0.9, 0.95),
    )
    history = _restore(checkpoint, module, optimizer, settings)
    per_epoch = -(-num_batches // plan.accumulate)
    steps = plan.epochs * per_epoch
    before = history[-1].seconds if history else 0.0
    start = time.perf_counter() - before
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = io.StringIO()
    csv.writer(rows).writerows([LOG_COLUMNS, *history])
    write_text(log, rows.getvalue())
    with (
        log.open("a", newline="") as stream,
        tqdm(
            total=steps, initial=len(history), desc="train", unit="step", mininterval=2
        ) as bar,
    ):
        writer = csv.writer(stream)
        for step in range(len(history), steps):
            elapsed = time.perf_counter() - start
            progress = max(step / steps, elapsed / plan.seconds)
            if step and progress >= 1:
                break
            rate = learning_rate(step, steps, min(progress, 1.0), plan.peak_rate)
            for group in optimizer.param_groups:
                group["lr"] = rate
            epoch, place = divmod(step, per_epoch)
            numbers = _order(num_batches, plan.seed, epoch)[place::per_epoch]
            optimizer.zero_grad(set_to_none=True)
            sums = sum(batch_step(n, 1 / len(numbers)) for n in numbers)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            loss, hits = (sums / len(numbers)).tolist()
            seconds = round(time.perf_counter() - start, 3)
            history.append(
                Step(step, epoch, round(loss, 4), round(hits, 4), rate, seconds)
            )
            writer.writerow(history[-1])
            stream.flush()
            bar.set_postfix(loss=f"{loss:.3f}", hits=f"{hits:.3f}", refresh=False)
            bar.update()
            if (step + 1) % plan.checkpoint_steps == 0:
                _save(checkpoint, module, optimizer, settings, history)
    _save(checkpoint, module, optimizer, settings, history)
    return history


def _order(num_batches: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_batches))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def _save(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    history: list[Step],
) -> None:
    """Replace the checkpoint as a whole. Raises OSError, and the old one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    content = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "settings": settings,
        "history": [tuple(step) for step in history],
    }
    # by way of memory: torch does not say OSError where a disk is full
    data = io.BytesIO()
    torch.save(content, data)
    try:
        scratch.write_bytes(data.getbuffer())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _restore(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> list[Step]:
    if not path.exists():
        return []
    saved = torch.load(path, weights_only=True, map_location="cpu")
    for name in saved["settings"].keys() | settings.keys():
        if saved["settings"].get(name) != settings.get(name):
            raise TrainError(
                f"{path} is of a training with other settings: {name} is "
                f"{saved['settings'].get(name)!r}, not {settings.get(name)!r}; "
                "delete it, or choose another --out"
            )
    module.load_state_dict(saved["module"])
    optimizer.load_state_dict(saved["optimizer"])
    return [Step(*step) for step in saved["history"]]
