# SPDX-License-Identifier: Apache-2.0
"""One second of a pipeline, stage by stage, as the per-iteration log lets it be seen.

Stages are not timed one by one. But they run the steps in order, and each tick brings a
result: in the tick that ends with the result of step t, stage s of N runs step
t + N - 1 - s. So the bars are as long as the last stage took.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

PROMPT = "prompt tokens"
PARTS = {
    "normal rows": "#1b6ca8",
    "accepted drafts": "#66a182",
    "void drafts": "#d1495b",
    PROMPT: "#bbbbbb",
}
WIDTH, MARGIN, LANE = 860, 50, 40  # pixels; a lane a stage
BAR, CAP = 28, 6  # pixels, of most decode rows; of prompt tokens, however many
SECONDS = 1.0


class Bar(NamedTuple):
    """A step on a stage."""

    stage: int
    start: float  # seconds since the log began
    end: float
    step: dict[str, Any]  # its line of the log


def rows_of(step: dict[str, Any]) -> dict[str, int]:
    """What a step ran, of each of `PARTS`."""
    accepted = step["accepted_drafts"]
    counts = (
        step["normal_rows"],
        accepted,
        step["draft_rows"] - accepted,
        step["prefill_tokens"],
    )
    return dict(zip(PARTS, counts, strict=True))


def busiest_second(iterations: list[dict[str, Any]]) -> tuple[float, float]:
    """The start and end of that which brought most tokens, seconds since the start."""
    ends = list(accumulate(i["milliseconds"] / 1e3 for i in iterations))
    best, best_start, first, tokens = -1, 0.0, 0, 0
    for end, iteration in zip(ends, iterations, strict=True):
        tokens += iteration["valid_rows"]
        while ends[first] <= end - SECONDS:
            tokens -= iterations[first]["valid_rows"]
            first += 1
        if tokens > best:
            best, best_start = tokens, max(0.0, end - SECONDS)
    return best_start, best_start + SECONDS


def bars(iterations: list[dict[str, Any]], start: float, end: float) -> Iterator[Bar]:
    """Those of all stages that lie between two times, seconds since the log began."""
    ends = accumulate(i["milliseconds"] / 1e3 for i in iterations)
    for tick, (arrival, iteration) in enumerate(zip(ends, iterations, strict=True)):
        length = iteration["step_milliseconds"]
        if length is None or not start <= arrival - length / 1e3 < arrival <= end:
            continue  # the pipeline was empty before this result, or it is outside
        for stage in reversed(range(iteration["stages"])):
            step = tick + iteration["stages"] - 1 - stage
            between = iterations[tick + 1 : step + 1]
            if step >= len(iterations) or any(
                later["step_milliseconds"] is None for later in between
            ):
                break  # it began when the pipeline had been empty
            yield Bar(stage, arrival - length / 1e3, arrival, iterations[step])


def timeline(iterations: list[dict[str, Any]]) -> str | None:
    """An SVG of the second that brought most tokens; None if no step was timed in it.

    A bar's height is its decode rows, with a cap where prompt tokens were in the step.
    """
    start, end = busiest_second(iterations)
    drawn = list(bars(iterations, start, end))
    if not drawn:
        return None
    most = max(bar.step["normal_rows"] + bar.step["draft_rows"] for bar in drawn) or 1
    stages = max(bar.stage for bar in drawn) + 1
    scale = (WIDTH - 2 * MARGIN) / SECONDS
    body = [
        f'<text x="{WIDTH - MARGIN - 150 * i}" y="12" text-anchor="end" '
        f'fill="{colour}">{name}</text>'
        for i, (name, colour) in enumerate(PARTS.items())
    ]
    for stage in range(stages):
        floor = 20 + (stage + 1) * LANE
        body.append(
            f'<text x="{MARGIN - 5}" y="{floor}" text-anchor="end">stage {stage}</text>'
            f'<path d="M{MARGIN},{floor} L{WIDTH - MARGIN},{floor}" stroke="#999"/>'
        )
    for bar in drawn:
        top = 20.0 + (bar.stage + 1) * LANE
        across = MARGIN + (bar.start - start) * scale
        width = max(0.5, (bar.end - bar.start) * scale - 0.5)
        for name, rows in rows_of(bar.step).items():
            height = CAP * bool(rows) if name == PROMPT else rows / most * BAR
            top -= height
            if rows:
                body.append(
                    f'<rect x="{across:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{height:.1f}" fill="{PARTS[name]}"><title>step '
                    f"{bar.step['step']}: {rows} {name}</title></rect>"
                )
    height = 20 + stages * LANE + 20
    body += [
        f'<text x="{x}" y="{height - 4}" text-anchor="{anchor}">{seconds:.3f} s</text>'
        for x, anchor, seconds in (
            (MARGIN, "start", start),
            (WIDTH - MARGIN, "end", end),
        )
    ]
    return f'<svg viewBox="0 0 {WIDTH} {height}">{"".join(body)}</svg>'
