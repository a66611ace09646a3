# SPDX-License-Identifier: Apache-2.0
"""`spexis report`: a page of charts from the per-iteration log, without a network.

What the log does not have is not drawn: plain pipeline parallelism has no drafts.
"""

import argparse
import html
import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from spexis_runtime.iteration_log import (
    acceptance,
    accepted_of_all_drafts,
    newest_log,
    read_iterations,
    tokens_per_step,
)
from spexis_runtime.timeline import timeline

Iterations = list[dict[str, Any]]
POINTS = 200  # of a line, at most
TENTHS = 10
WIDTH, HEIGHT, MARGIN = 860, 200, 50  # of a chart, in pixels
COLOURS = ("#1b6ca8", "#d1495b", "#66a182")
STYLE = """body{font:15px sans-serif;margin:2em auto;max-width:900px}
td{padding:.1em 1em .1em 0}td+td{text-align:right}h2{margin:1.2em 0 .2em}
svg{font:11px sans-serif}"""


class Chart(NamedTuple):
    title: str
    unit: str
    lines: dict[str, list[float | None]]  # name -> a value a point, None: a gap


def summary(iterations: Iterations) -> dict[str, str]:
    """name -> its value as text, of at least one iteration."""
    newest = iterations[-1]
    steps = [i["step_milliseconds"] for i in iterations if i["step_milliseconds"]]
    tokens = sum(i["valid_rows"] for i in iterations)
    seconds = sum(i["milliseconds"] for i in iterations) / 1e3
    return {
        "iterations": str(len(iterations)),
        "seconds": f"{seconds:.1f}",
        "tokens": str(tokens),
        "tokens a second": f"{tokens / max(seconds, 1e-3):.1f}",
        "tokens an iteration": f"{tokens_per_step(iterations):.2f}",
        "acceptance": f"{acceptance(iterations):.1%}",
        "accepted of all drafts": f"{accepted_of_all_drafts(iterations):.1%}",
        "step, median": f"{statistics.median(steps):.2f} ms" if steps else "-",
        "running": str(newest["running"]),
        "waiting": str(newest["waiting"]),
        "KV blocks in use": str(newest["kv_blocks_used"]),
        "preemptions": str(newest["preemptions"]),
    }


def charts(parts: list[Iterations]) -> list[Chart]:
    """Charts over `parts`, the iterations of each point of a line."""

    def mean(value: Any) -> list[float | None]:
        return [statistics.fmean(map(value, part)) for part in parts]

    def step_time(share: float) -> list[float | None]:
        return [
            steps[int(share * (len(steps) - 1))] if steps else None
            for part in parts
            for steps in [sorted(i["step_milliseconds"] or 0 for i in part)]
            for steps in [[step for step in steps if step]]
        ]

    return [
        Chart(
            "Acceptance",
            "accepted drafts / drafts whose prefix was right",
            {
                "acceptance": [
                    acceptance(part)
                    if any(i["drafts_after_valid"] for i in part)
                    else None
                    for part in parts
                ]
            },
        ),
        Chart(
            "Decode rows of an iteration",
            "rows",
            {
                "normal": mean(lambda i: i["normal_rows"]),
                "accepted drafts": mean(lambda i: i["accepted_drafts"]),
                "void drafts": mean(lambda i: i["draft_rows"] - i["accepted_drafts"]),
            },
        ),
        Chart(
            "Requests",
            "requests",
            {
                "running": mean(lambda i: i["running"]),
                "waiting": mean(lambda i: i["waiting"]),
            },
        ),
        Chart(
            "KV blocks in use", "blocks", {"used": mean(lambda i: i["kv_blocks_used"])}
        ),
        Chart(
            "Time of a step while the pipeline was busy",
            "ms",
            {"median": step_time(0.5), "95th percentile": step_time(0.95)},
        ),
    ]


def confidence_chart(iterations: Iterations) -> Chart:
    """Over the tenths of a step's drafts, the most confident first."""
    right, drafts = [0] * TENTHS, [0] * TENTHS
    for iteration in iterations:
        outcomes = iteration["drafts_by_confidence"]
        for rank, outcome in enumerate(outcomes):
            tenth = TENTHS * (2 * rank + 1) // (2 * len(outcomes))
            right[tenth] += outcome == "1"
            drafts[tenth] += 1
    return Chart(
        "Acceptance over confidence rank",
        "accepted drafts / drafts whose prefix was right",
        {
            "acceptance": [
                a / b if b else None for a, b in zip(right, drafts, strict=True)
            ]
        },
    )


def split(iterations: Iterations, most: int) -> list[Iterations]:
    """`most` parts or fewer, of nearly the same length, in order."""
    count = min(most, len(iterations))
    edges = [len(iterations) * i // count for i in range(count + 1)]
    return [iterations[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def svg(chart: Chart, places: list[float], unit: str = "s") -> str:
    """The chart over `places`, from left to right, of each point."""
    values = [v for line in chart.lines.values() for v in line if v is not None]
    top, end = max(values, default=0) or 1, places[-1] or 1

    def point(x: float, y: float) -> str:
        across = MARGIN + x / end * (WIDTH - 2 * MARGIN)
        return f"{across:.1f},{HEIGHT - 30 - y / top * (HEIGHT - 50):.1f}"

    def text(x: float, y: float, words: str, anchor: str, colour: str = "#444") -> str:
        place = f'x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"'
        return f"<text {place}>{html.escape(words)}</text>"

    body = [
        f'<path d="M{point(0, top)} L{point(0, 0)} L{point(end, 0)}" fill="none" '
        'stroke="#999"/>',
        text(MARGIN - 5, 24, f"{top:.4g}", "end"),
        text(MARGIN - 5, HEIGHT - 28, "0", "end"),
        text(WIDTH - MARGIN, HEIGHT - 12, f"{end:.4g} {unit}", "end"),
        text(MARGIN, HEIGHT - 12, chart.unit, "start"),
    ]
    for i, ((name, line), colour) in enumerate(
        zip(chart.lines.items(), COLOURS, strict=False)
    ):
        pieces, pen = [], "M"
        for x, y in zip(places, line, strict=True):
            if y is not None:
                pieces.append(pen + point(x, y))
            pen = "M" if y is None else "L"
        body.append(
            f'<path d="{" ".join(pieces)}" fill="none" stroke="{colour}" '
            'stroke-width="1.5" stroke-linecap="round"/>'
        )
        body.append(text(WIDTH - MARGIN - 150 * i, 12, name, "end", colour))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(body)}</svg>'


def page(iterations: Iterations, title: str) -> str:
    parts = split(iterations, POINTS)
    ends = accumulate(sum(i["milliseconds"] for i in part) / 1e3 for part in parts)
    return "\n".join(_page(iterations, title, charts(parts), list(ends)))


def _page(
    iterations: Iterations, title: str, charts: list[Chart], seconds: list[float]
) -> Iterable[str]:
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Spexis: {title}'
    yield f"</title><style>{STYLE}</style><h1>Spexis</h1><p>{html.escape(title)}</p>"
    yield "<table>"
    for name, value in summary(iterations).items():
        yield f"<tr><td>{name}</td><td>{value}</td></tr>"
    yield "</table>"
    for chart in charts:
        yield f"<h2>{chart.title}</h2>{svg(chart, seconds)}"
    if any(i["drafts_by_confidence"] for i in iterations):
        chart = confidence_chart(iterations)
        tenths = [100 * (i + 1) / TENTHS for i in range(TENTHS)]
        drawn = svg(chart, tenths, "% of a step's drafts, most confident first")
        yield f"<h2>{chart.title}</h2>{drawn}"
    if second := timeline(iterations):
        yield f"<h2>The second with most tokens, across stages</h2>{second}"
        yield "<p>Placed by when the last stage's results came.</p>"
    yield "</html>"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spexis report",
        description="Draw the newest per-iteration log of a folder as an HTML page.",
    )
    parser.add_argument("log_dir", type=Path, help="the log_dir of an engine")
    parser.add_argument(
        "--out", type=Path, help="the page (default: report.html beside the log)"
    )
    args = parser.parse_args(argv)
    log, iterations = newest_log(args.log_dir), read_iterations(args.log_dir)
    if log is None or not iterations:
        parser.error(f"{args.log_dir} has no log with an iteration in it")
    out = args.out or args.log_dir / "report.html"
    if not out.absolute().parent.is_dir():
        parser.error(f"--out: there is no directory {out.absolute().parent}")
    out.write_text(page(iterations, log.name), encoding="utf-8")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
