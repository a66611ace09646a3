# SPDX-License-Identifier: Apache-2.0
"""Pictures of what `spexis eval` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_drafts(path: Path, title: str, results: dict[str, dict[str, Any]]) -> None:
    """PNG: acceptance over confidence rank (figure 9), reliability, depth.

    `results`: `draft_metrics` by name.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    rank, sure, deep = figure.subplots(1, 3)
    sure.plot([0, 1], [0, 1], color="0.7", linestyle="--")
    for name, result in results.items():
        curve = result["by_confidence_rank"]
        middle = [(i + 0.5) / len(curve) for i in range(len(curve))]
        rank.plot(middle, curve, marker=".", label=name)
        confidence, accuracy, _ = zip(*result["reliability"], strict=True)
        label = f"{name}, ECE {result['ece']:.3f}"
        sure.plot(confidence, accuracy, marker=".", label=label)
        depths = [(i + 1, a) for i, a in enumerate(result["by_depth"]) if a is not None]
        deep.plot(*zip(*depths, strict=True), marker="o", label=name)
    for dropped in (0.15, 0.3):
        rank.axvline(1 - dropped, color="0.7", linestyle=":")
    for axes, x, y in (
        (rank, "confidence rank, most confident first", "accepted"),
        (sure, "confidence", "accuracy"),
        (deep, "draft, the ones before being right", "accuracy"),
    ):
        axes.set(xlabel=x, ylabel=y, ylim=(0, 1))
        axes.legend()
    deep.set_xticks([1, 2, 3])
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def plot_lengths(path: Path, title: str, results: dict[str, dict[str, Any]]) -> None:
    """PNG: precision and recall at the cutoffs (table 4). `results`: by name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("precision", "recall"), strict=True):
        for name, result in results.items():
            rows = [r for r in result["thresholds"] if r[what] is not None]
            axes.plot(
                [str(r["below"]) for r in rows],
                [r[what] for r in rows],
                marker="o",
                label=name,
            )
        axes.set(xlabel="remaining length below", ylabel=what, ylim=(0, 1))
        axes.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
