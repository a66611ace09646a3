# SPDX-License-Identifier: Apache-2.0
"""What an adapter sees: batches of the target's text and its hidden states there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spexis_runtime.train.generate import Target, Text


class Batch(NamedTuple):
    ids: torch.Tensor  # [rows, length] int64, padded with 0 on the right
    drafts: torch.Tensor  # [rows, length] bool: the next token is of the response


class States(NamedTuple):
    hidden: torch.Tensor  # [rows, length, hidden_size] after the exit layer, no norm
    final: torch.Tensor  # [rows, length, hidden_size] ready for the LM head
    cos: torch.Tensor  # [1, length, head_dim]
    sin: torch.Tensor  # [1, length, head_dim]


def make_batches(
    texts: Sequence[Text], max_tokens: int, shuffle: random.Random | None = None
) -> list[Batch]:
    """Batches of like length, of at most `max_tokens` tokens or of one text.

    With `shuffle` texts of one length, and the batches, come in random order.
    """
    order = list(texts)
    if shuffle:
        shuffle.shuffle(order)
    order.sort(key=lambda text: len(text.ids), reverse=True)
    batches = []
    while order:
        rows = max(1, max_tokens // len(order[0].ids))
        batches.append(_collate(order[:rows]))
        order = order[rows:]
    if shuffle:
        shuffle.shuffle(batches)
    return batches


def _collate(texts: Sequence[Text]) -> Batch:
    length = max(len(text.ids) for text in texts)
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    drafts = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        drafts[row, text.prompt_length - 1 : len(text.ids) - 1] = True
    return Batch(ids, drafts)


@torch.no_grad()
def target_states(target: Target, ids: torch.Tensor, exit_layer: int) -> States:
    """The target's states over `ids` [rows, length], which may be padded on the right.

    Attention is causal, so that padding reaches no position before it.
    """
    backbone = target.model.model
    out = backbone(input_ids=ids, output_hidden_states=True, use_cache=False)
    hidden = out.hidden_states[exit_layer]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    cos, sin = backbone.rotary_emb(hidden, positions)
    return States(hidden, out.last_hidden_state, cos, sin)
