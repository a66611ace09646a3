# SPDX-License-Identifier: Apache-2.0
"""Draw docs/pipeline.png: two stages over time, plain and speculative.

    python docs/pipeline_picture.py

The speculative half is played out by the protocol's own rules for four requests whose
drafts are right two times in three.
"""

import random
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NUM_REQUESTS, NUM_STAGES, TICKS, THETA = 4, 2, 9, 0.67
COLORS = {"normal": "#4878a8", "draft": "#8fbf7f", "void": "#d9d9d9"}
Row = tuple[int, int, str]  # request, position, kind


def plain() -> list[list[Row]]:
    """Rows of stage 0 by tick: two micro-batches take turns."""
    halves = [(0, 1), (2, 3)]
    return [[(r, t // 2, "normal") for r in halves[t % 2]] for t in range(TICKS)]


def speculative() -> list[list[Row]]:
    """Rows of stage 0 by tick: every request, with the token it has or its draft."""
    rng = random.Random(5)
    position = [0] * NUM_REQUESTS  # next to feed
    right = [True] * NUM_REQUESTS  # is the draft for it right?
    kind = ["normal"] * NUM_REQUESTS
    steps: list[list[Row]] = []
    for _ in range(TICKS):
        step = []
        for r in range(NUM_REQUESTS):
            valid = kind[r] == "normal" or right[r]
            step.append((r, position[r], kind[r] if valid else "void"))
            if valid:
                position[r], kind[r] = position[r] + 1, "draft"
                right[r] = rng.random() < THETA
            else:  # told of it now: feed the verified token at the next step
                kind[r], right[r] = "normal", True
        steps.append(step)
    return steps


def draw(axes: plt.Axes, steps: list[list[Row]], title: str) -> None:
    verified = 0
    for tick, step in enumerate(steps):
        for stage in range(NUM_STAGES):
            for lane, (request, position, kind) in enumerate(step):
                x, y = tick + stage, -stage * (NUM_REQUESTS + 1) - lane
                if x >= TICKS:
                    continue
                verified += stage == NUM_STAGES - 1 and kind != "void"
                axes.add_patch(
                    plt.Rectangle(
                        (x + 0.04, y), 0.92, 0.9, facecolor=COLORS[kind], edgecolor="w"
                    )
                )
                axes.text(
                    x + 0.5,
                    y + 0.42,
                    f"{'ABCD'[request]}{position}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="black" if kind == "void" else "white",
                )
    axes.set_xlim(0, TICKS)
    axes.set_ylim(-NUM_STAGES * (NUM_REQUESTS + 1) + 1.8, 1.2)
    axes.set_yticks([-(s * (NUM_REQUESTS + 1)) - 1 for s in range(NUM_STAGES)])
    axes.set_yticklabels([f"stage {s}" for s in range(NUM_STAGES)])
    axes.set_title(f"{title}: {verified} tokens verified in {TICKS} ticks", fontsize=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def main() -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.2))
    draw(above, plain(), "Plain pipeline parallelism, two micro-batches")
    draw(below, speculative(), "Speculative parallelism, all requests every step")
    below.set_xlabel("time, in stage steps (A3: request A, position 3)")
    below.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=c) for c in COLORS.values()],
        labels=["verified token", "draft that is right", "draft that is wrong: void"],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncol=3,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("pipeline.png"), dpi=130)


if __name__ == "__main__":
    main()
