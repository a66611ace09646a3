# SPDX-License-Identifier: Apache-2.0
"""What is learnt from: batches of the target's text and its hidden states there."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from spexis_runtime.train.prompts import TrainError, write_text
from spexis_runtime.train.target import Target
from spexis_runtime.train.texts import Labels, Text, save_tensors


class Batch(NamedTuple):
    ids: torch.Tensor  # [rows, length] int64, padded with 0 on the right
    drafts: torch.Tensor  # [rows, length] bool: the next token is of the response
    texts: Sequence[Text]  # [rows]

    def labels(self) -> Labels | None:
        """Of all `drafts`, in their order, where the texts have labels."""
        labels = [text.labels for text in self.texts if text.labels is not None]
        if not labels:
            return None
        return Labels(*(torch.cat(column) for column in zip(*labels, strict=True)))


class States(NamedTuple):
    features: torch.Tensor  # [rows, length, num_features * hidden_size], no norm
    final: torch.Tensor | None  # [rows, length, hidden_size] ready for the LM head
    cos: torch.Tensor  # [1, length, head_dim]
    sin: torch.Tensor  # [1, length, head_dim]


def make_batches(
    texts: Sequence[Text], max_tokens: int, seed: int = 0
) -> list[list[Text]]:
    """Texts of like length together, at most `max_tokens` padded tokens, or one text.

    Which texts of one length share a batch is random, by `seed`. Texts without a
    response are left out.
    """
    order = [text for text in texts if text.response]
    random.Random(seed).shuffle(order)
    order.sort(key=lambda text: len(text.ids), reverse=True)
    batches = []
    while order:
        rows = max(1, max_tokens // len(order[0].ids))
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def collate(texts: Sequence[Text]) -> Batch:
    length = max(len(text.ids) for text in texts)
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    drafts = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        drafts[row, text.prompt_length - 1 : len(text.ids) - 1] = True
    return Batch(ids, drafts, texts)


@torch.no_grad()
def target_states(
    target: Target, ids: torch.Tensor, feature_layers: Sequence[int]
) -> States:
    """The target's states over `ids` [rows, length], which may be padded on the right.

    Attention is causal, so that padding reaches no position before it. `final` is None
    for a target of its first layers only.
    """
    backbone = target.model.model
    streams: dict[int, torch.Tensor] = {}

    def keep(number: int):
        def hook(module: nn.Module, args: tuple) -> None:
            streams[number] = args[0]

        return hook

    modules = [*backbone.layers, backbone.norm]  # what the stream enters next
    handles = [
        modules[number].register_forward_pre_hook(keep(number))
        for number in feature_layers
    ]
    try:
        final = backbone(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    features = torch.cat([streams[number] for number in feature_layers], dim=-1)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    cos, sin = backbone.rotary_emb(final, positions)
    return States(features, None if target.num_layers else final, cos, sin)


class StateSource:
    """`target_states` of batches: computed each time, or once and kept in `folder`.

    A file a batch, in the target's element type: (num_features + 1) * hidden_size
    elements a token. A file is there whole or not, so that a killed run goes on.
    `identity` stands for the model and the batches; TrainError is raised where `folder`
    is of another.
    """

    def __init__(
        self,
        target: Target,
        feature_layers: Sequence[int],
        folder: Path | None = None,
        identity: str = "",
    ):
        self.target, self.feature_layers = target, tuple(feature_layers)
        self.folder = folder
        if folder is None:
            return
        file = folder / "states.json"
        content = json.dumps([identity, target.num_layers, *feature_layers])
        if file.exists() and file.read_text() != content:
            raise TrainError(f"{folder} holds states of something else: delete it")
        write_text(file, content)

    def __call__(self, index: int, batch: Batch) -> States:
        """States of `batch`, which is always the same for an `index`."""
        device = self.target.device
        if self.folder is None:
            return target_states(self.target, batch.ids.to(device), self.feature_layers)
        file = self.folder / f"batch-{index:06d}.safetensors"
        if file.exists():
            kept = load_file(file, device=str(device))
            return States(kept["features"], kept.get("final"), kept["cos"], kept["sin"])
        states = target_states(self.target, batch.ids.to(device), self.feature_layers)
        tensors = {k: t for k, t in states._asdict().items() if t is not None}
        save_tensors(file, tensors, {})
        return states
