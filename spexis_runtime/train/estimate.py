# SPDX-License-Identifier: Apache-2.0
"""What a training will take, before it starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from spexis_runtime.train.distill import LOGITS_ROWS
from spexis_runtime.train.loop import BatchStep
from spexis_runtime.train.prompts import TrainError
from spexis_runtime.train.target import Target
from spexis_runtime.train.texts import Text

GIB = 1 << 30


class Memory(NamedTuple):
    """Bytes on the device."""

    target: int
    training: int  # weights, gradients and AdamW's two moments, float32
    states: int  # of the largest batch: a few tensors a layer at a time, and features
    logits: int  # float32, of one part of a batch; 0 for length predictors

    def line(self) -> str:
        parts = (f"{n / GIB:.2f} {name}" for name, n in self._asdict().items())
        return f"memory: {sum(self) / GIB:.2f} GiB ({', '.join(parts)})"


def estimate_memory(
    target: Target,
    module: nn.Module,
    batches: Sequence[Sequence[Text]],
    num_features: int,
    *,
    logits: bool,
) -> Memory:
    config, itemsize = target.model.config, target.model.dtype.itemsize
    tokens = max(len(texts) * max(len(t.ids) for t in texts) for texts in batches)
    # the MLP's two inner tensors are the widest of a layer of the target; an adapter
    # keeps about twenty states a token for its gradient
    widths = 2 * config.intermediate_size + (24 + num_features) * config.hidden_size
    return Memory(
        sum(p.numel() * p.element_size() for p in target.model.parameters()),
        sum(p.numel() for p in module.parameters()) * 4 * 4,
        tokens * widths * itemsize,
        # draft and target, their softmaxes, the gradient
        6 * min(LOGITS_ROWS, tokens) * config.vocab_size * 4 if logits else 0,
    )


def check_memory(memory: Memory, device: torch.device) -> None:
    """Raises TrainError where a GPU has too little."""
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if sum(memory) > total:
        raise TrainError(
            f"the training needs about {sum(memory) / GIB:.1f} GiB, the GPU has "
            f"{total / GIB:.1f}: give --batch-tokens a smaller number"
        )


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Raises TrainError where less than `needed` bytes are free at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise TrainError(
            f"{what} takes {needed / GIB:.1f} GiB, {folder} has {free / GIB:.1f} free"
        )


def time_batches(
    module: nn.Module, step: BatchStep, batches: Sequence[Sequence[Text]]
) -> float:
    """Seconds of a pass over `batches`, from the one in the middle; weights stay.

    It runs twice: the first time pays for what is set up once.
    """
    middle = len(batches) // 2
    for _ in range(2):
        start = time.perf_counter()
        step(middle, 1.0).tolist()
        seconds = time.perf_counter() - start
    module.zero_grad(set_to_none=True)
    tokens = [sum(len(t.ids) for t in texts) for texts in batches]
    return seconds * sum(tokens) / tokens[middle]
