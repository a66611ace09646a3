# SPDX-License-Identifier: Apache-2.0
"""Figures of merit of drafts and of predicted lengths, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spexis_runtime.train.drafts import TextDrafts

ECE_BINS = 15
RANK_BINS = 20
CALIBRATION_STEPS = 16
MAX_DEPTH = 3
DROPPED = (0.15, 0.3, 0.5)
# Spec-Bench's categories by their names in the paper's table 3; eight are MT-bench's
TASKS = {
    "math_reasoning": "Math",
    "qa": "QA",
    "summarization": "Sum",
    "rag": "RAG",
    "translation": "Tran",
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction")
        + ("stem", "humanities"),
        "Mult",
    ),
}


def draft_metrics(
    drafts: TextDrafts, calibration: Sequence[float] = ()
) -> dict[str, Any]:
    """Accuracy of drafts, in all its cuts; `calibration` is that of the adapter.

    - `accuracy`: share of all tokens; `by_task`: of each Spec-Bench task (table 3), or
      of each category of other prompts.
    - `accuracy_after_dropping`: without the least confident share (figure 9).
    - `by_confidence_rank`: in twentieths of the tokens, the most confident first.
    - `by_depth`: of drafts whose one, two predecessors were right.
    - `ece`, `reliability`: 15 bins of confidence [mean confidence, accuracy, tokens].
    """
    hits: np.ndarray = drafts.hits.astype(np.float64)
    confidence = calibrate(drafts.confidence, calibration)
    category = np.array(drafts.categories)[drafts.text]
    if set(category) <= TASKS.keys():
        category = np.array([TASKS[name] for name in category])
    ranked = hits[np.argsort(-drafts.confidence, kind="stable")]
    kept = {str(d): max(1, round((1 - d) * len(ranked))) for d in DROPPED}
    bins = reliability(confidence, hits)
    return {
        "num_texts": len(np.unique(drafts.text)),
        "num_tokens": len(hits),
        "accuracy": _mean(hits),
        "by_task": {
            str(name): _mean(hits[category == name]) for name in np.unique(category)
        },
        "accuracy_after_dropping": {d: _mean(ranked[:n]) for d, n in kept.items()},
        "by_confidence_rank": [
            _mean(part) for part in np.array_split(ranked, min(RANK_BINS, len(ranked)))
        ],
        "by_depth": by_depth(drafts),
        "ece": round(expected_calibration_error(bins), 4),
        "reliability": [[round(c, 4), round(a, 4), int(n)] for c, a, n in bins],
    }


def by_depth(drafts: TextDrafts) -> list[float | None]:
    """Accuracy of draft 1, 2, 3 of a run, given that those before were right.

    A draft's row goes through the target's own first layers before the next draft is
    made, so that the draft after right ones is the same whether they are known to be
    right or not. None where there is no such draft.
    """
    result: list[float | None] = []
    right: np.ndarray = np.ones(len(drafts.hits), bool)
    for _ in range(MAX_DEPTH):
        result.append(_mean(drafts.hits[right]) if right.any() else None)
        same_text = drafts.text[1:] == drafts.text[:-1]
        before = (right & drafts.hits)[:-1] & same_text
        right = np.concatenate([[False], before])
    return result


def reliability(
    confidence: np.ndarray, hits: np.ndarray
) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, number) of each of 15 equal bins that has any."""
    index = np.minimum((confidence * ECE_BINS).astype(int), ECE_BINS - 1)
    return [
        (float(confidence[here].mean()), float(hits[here].mean()), int(here.sum()))
        for here in (index == i for i in range(ECE_BINS))
        if here.any()
    ]


def expected_calibration_error(bins: Sequence[tuple[float, float, int]]) -> float:
    total = sum(n for _, _, n in bins)
    return sum(n * abs(c - a) for c, a, n in bins) / total


def calibrate(confidence: np.ndarray, calibration: Sequence[float]) -> np.ndarray:
    """As `exit_head.calibrated`."""
    if not len(calibration):
        return confidence
    knots = np.linspace(0, 1, len(calibration))
    return np.asarray(np.interp(confidence, knots, calibration))


def fit_calibration(confidence: np.ndarray, hits: np.ndarray) -> tuple[float, ...]:
    """Values of `AdapterConfig.calibration` for softmax probabilities and outcomes.

    Least squares over functions that are linear between the knots, made to rise by
    isotonic regression of the knots, each weighing what lies near it.
    """
    place: np.ndarray = confidence.astype(np.float64) * CALIBRATION_STEPS
    below = np.minimum(place.astype(int), CALIBRATION_STEPS - 1)
    above_share = place - below
    basis = np.zeros((len(place), CALIBRATION_STEPS + 1))
    rows = np.arange(len(place))
    basis[rows, below] = 1 - above_share
    basis[rows, below + 1] = above_share
    knots = np.linspace(0, 1, CALIBRATION_STEPS + 1)
    # one pseudo-observation a knot, that the softmax probability is right
    normal = basis.T @ basis + np.eye(len(knots))
    values = np.linalg.solve(normal, basis.T @ hits + knots)
    rising = isotonic(values, basis.sum(0) + 1)
    return tuple(float(v) for v in np.clip(rising, 0, 1).round(4))


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest values that never fall, by weighted squares."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number
    for value, weight in zip(values, weights, strict=True):
        blocks.append((float(value), float(weight), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (m1, w1, n1), (m2, w2, n2) = blocks[-2:]
            blocks[-2:] = [((m1 * w1 + m2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return np.concatenate([np.full(n, mean) for mean, _, n in blocks])


def precision_recall(
    predicted: np.ndarray, truth: np.ndarray
) -> tuple[float | None, float | None]:
    """Of bools; None where nothing is predicted, or nothing is true."""
    right = float((predicted & truth).sum())
    return (
        round(right / predicted.sum(), 4) if predicted.any() else None,
        round(right / truth.sum(), 4) if truth.any() else None,
    )


def precision_at_recall(
    score: np.ndarray, truth: np.ndarray, recall: float
) -> float | None:
    """Best precision of a cutoff that finds at least the share `recall` of `truth`."""
    if not truth.any():
        return None
    order = np.argsort(-score, kind="stable")
    found = np.cumsum(truth[order])
    precision = found / np.arange(1, len(order) + 1)
    # a cutoff takes all of equal score
    ends = np.append(np.diff(score[order]) != 0, True)
    return round(float(precision[ends & (found >= recall * truth.sum())].max()), 4)


def _mean(values: np.ndarray) -> float:
    return round(float(values.mean()), 4)
