# SPDX-License-Identifier: Apache-2.0
"""What a length predictor learns from texts, and what it tells of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from spexis_runtime.length_predictor import LengthPredictor
from spexis_runtime.train.batches import StateSource, collate, make_batches
from spexis_runtime.train.metrics import (
    expected_calibration_error,
    precision_at_recall,
    precision_recall,
    reliability,
)
from spexis_runtime.train.target import Target
from spexis_runtime.train.texts import Text

BATCH_TOKENS = 16384
RECALL = 0.5  # at which precision is compared
MIN_PREDICTED = 20  # predictions that a cutoff's precision is measured on, at least


class Truth(NamedTuple):
    """Of the rows in front of each token of a response: [response_length, thresholds].

    `below`: fewer tokens follow the row's own; `known`: so much is known of it. Where a
    text was cut at the token limit it is known only that more are left than are there.
    """

    below: torch.Tensor  # bool
    known: torch.Tensor  # bool


def remaining_truth(text: Text, thresholds: Sequence[int]) -> Truth:
    left = torch.arange(len(text.response), 0, -1)[:, None]
    below = left < torch.tensor(thresholds)
    known = torch.ones_like(below) if text.ended else ~below
    return Truth(below & known, known)


class LengthStep:
    """`loop.BatchStep` of a length predictor: binary cross-entropy of what is known."""

    def __init__(
        self,
        target: Target,
        predictor: LengthPredictor,
        batches: Sequence[Sequence[Text]],
        states: StateSource,
    ):
        self.target, self.predictor, self.batches = target, predictor, batches
        self.states = states

    def __call__(self, number: int, share: float) -> torch.Tensor:
        batch = collate(self.batches[number])
        device = self.target.device
        hidden = self.states(number, batch).features[batch.drafts.to(device)]
        truth = batch_truth(batch.texts, self.predictor.config.thresholds)
        below, known = (t.to(device) for t in truth)
        logits = self.predictor(hidden)
        losses = F.binary_cross_entropy_with_logits(
            logits, below.float(), weight=known.float(), reduction="sum"
        )
        total = known.sum().clamp(min=1)
        loss = losses / total
        (loss * share).backward()
        hits = (((logits > 0) == below) & known).sum() / total
        return torch.stack((loss.detach(), hits))


def batch_truth(texts: Sequence[Text], thresholds: Sequence[int]) -> Truth:
    """`remaining_truth` of all texts, one after the other."""
    truths = [remaining_truth(text, thresholds) for text in texts]
    return Truth(*(torch.cat(column) for column in zip(*truths, strict=True)))


class Predictions(NamedTuple):
    """[tokens, thresholds] each, over all response tokens."""

    logits: np.ndarray  # float32, not calibrated
    below: np.ndarray  # bool
    known: np.ndarray  # bool


@torch.no_grad()
def collect_lengths(
    target: Target, predictor: LengthPredictor, texts: Sequence[Text]
) -> Predictions:
    """The target needs no more than the predictor's first layers."""
    predictor = copy.deepcopy(predictor).to(target.device)
    states = StateSource(target, (predictor.config.exit_layer,))
    columns: list[list[torch.Tensor]] = [[], [], []]
    for number, group in enumerate(make_batches(texts, BATCH_TOKENS)):
        batch = collate(group)
        features = states(number, batch).features
        logits = predictor(features[batch.drafts.to(target.device)])
        truth = batch_truth(group, predictor.config.thresholds)
        for column, part in zip(columns, (logits.cpu(), *truth), strict=True):
            column.append(part)
    return Predictions(*(torch.cat(column).numpy() for column in columns))


def fit_sigmoid(logits: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """(scale, offset) so that sigmoid(scale * logit + offset) is the probability.

    Logistic regression by Newton's steps (Platt scaling), held near (1, 0) by a little
    weight, so that few or one-sided outcomes leave the logits alone.
    """
    x = np.stack([logits.astype(np.float64), np.ones(len(logits))], axis=1)
    prior = weights = np.array([1.0, 0.0])
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gradient = x.T @ (p - truth) + (weights - prior)
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + np.eye(2)
        weights = weights - np.linalg.solve(hessian, gradient)
    return float(weights[0]), float(weights[1])


def choose_cutoff(score: np.ndarray, truth: np.ndarray, precision: float) -> float:
    """The least score from which on predictions are right often enough.

    At least `MIN_PREDICTED` of them; above all scores where there is no such cutoff.
    """
    order = np.argsort(-score, kind="stable")
    found = np.cumsum(truth[order]) / np.arange(1, len(order) + 1)
    # a cutoff takes all of equal score
    ends = np.append(np.diff(score[order]) != 0, True)
    good = np.flatnonzero(ends & (found >= precision))
    good = good[good + 1 >= MIN_PREDICTED]
    return float(score[order][good[-1]]) if len(good) else float(score.max()) + 1.0


def length_metrics(found: Predictions, predictor: LengthPredictor) -> dict[str, Any]:
    """Table 4: precision and recall at the cutoffs, and what is around them."""
    config = predictor.config
    rows = []
    for i, threshold in enumerate(config.thresholds):
        known = found.known[:, i]
        z = found.logits[known, i].astype(np.float64)
        truth = found.below[known, i]
        p = 1 / (1 + np.exp(-(z * config.scales[i] + config.offsets[i])))
        precision, recall = precision_recall(p >= config.cutoffs[i], truth)
        rows.append(
            {
                "below": threshold,
                "tokens": int(known.sum()),
                "share": round(float(truth.mean()), 4) if len(truth) else None,
                "cutoff": round(config.cutoffs[i], 4),
                "precision": precision,
                "recall": recall,
                "precision_at_recall_0.5": precision_at_recall(p, truth, RECALL),
                "ece": (
                    round(expected_calibration_error(reliability(p, truth)), 4)
                    if len(truth)
                    else None
                ),
            }
        )
    return {"num_tokens": len(found.logits), "thresholds": rows}
