# SPDX-License-Identifier: Apache-2.0
"""What an adapter drafts along texts of the target, as the runtime would draft it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from spexis_kernels import draft_head
from spexis_runtime.train.batches import collate, make_batches, target_states
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.target import Target
from spexis_runtime.train.texts import Text

BATCH_TOKENS = 8192


class TextDrafts(NamedTuple):
    """A draft for every token of every response, text after text."""

    hits: np.ndarray  # [tokens] bool: the draft is the token that the target said
    confidence: np.ndarray  # [tokens] float32, softmax probability of the draft
    text: np.ndarray  # [tokens] int64, number of the text, rising
    categories: list[str]  # [texts]


@torch.no_grad()
def collect_drafts(
    target: Target, adapter: ExitAdapter, texts: Sequence[Text]
) -> TextDrafts:
    """Drafts from the right prefix: greedy ones, or with the noise of a sampled text.

    The target needs no more than the adapter's first layers.
    """
    adapter = copy.deepcopy(adapter).to(target.device, target.model.dtype)
    head = target.lm_head if adapter.lm_head is None else adapter.lm_head.weight
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    numbered = {id(text): number for number, text in enumerate(texts)}
    with tqdm(total=len(texts), desc="draft", unit="text", mininterval=2) as bar:
        for group in make_batches(texts, BATCH_TOKENS):
            batch = collate(group)
            ids, drafts = batch.ids.to(target.device), batch.drafts.to(target.device)
            states = target_states(target, ids, adapter.config.feature_layers)
            x = adapter(states.features, states.cos, states.sin)[drafts]
            rows, position = drafts.nonzero(as_tuple=True)
            sampling = {}
            if any(text.temperature for text in group):
                per_text = {
                    "temperature": torch.tensor([t.temperature for t in group]),
                    "seed": torch.tensor([t.seed for t in group]),
                }
                sampling = {k: v.to(rows.device)[rows] for k, v in per_text.items()}
                sampling["position"] = position
            drafted = draft_head(x.to(head.dtype), head, **sampling)
            hits = drafted.token == ids.roll(-1, dims=1)[drafts]
            lengths = [len(text.response) for text in group]
            for text, *columns in zip(
                group,
                hits.cpu().split(lengths),
                drafted.confidence.cpu().split(lengths),
                strict=True,
            ):
                found[numbered[id(text)]] = (columns[0].numpy(), columns[1].numpy())
            bar.update(len(group))
    order = sorted(found)
    return TextDrafts(
        np.concatenate([found[i][0] for i in order] or [np.zeros(0, bool)]),
        np.concatenate([found[i][1] for i in order] or [np.zeros(0, np.float32)]),
        np.repeat(order, [len(found[i][0]) for i in order]).astype(np.int64),
        [text.category for text in texts],
    )
