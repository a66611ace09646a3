# SPDX-License-Identifier: Apache-2.0
"""`spexis plan`: the best PP x TP x SP by a machine's step times, a load and a theta.

Every layout in the table of step times is a candidate, plain and with drafts, the
latter with each alpha. The prediction is the cost model's (Table 1 of the paper), for
steady decoding; prefill is not in it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spexis_runtime.lookahead.cost_model import Layout
from spexis_runtime.lookahead.step_times import (
    StepTimes,
    StepTimesError,
    read_step_times,
)

ALPHAS = [round(0.05 * i, 2) for i in range(11)]


class Candidate(NamedTuple):
    """A layout and its predicted tokens a second at each number of requests."""

    layout: Layout
    tokens_per_second: list[float]

    @property
    def name(self) -> str:
        layout = self.layout
        name = f"PP={layout.pipeline_parallel_size} TP={layout.tensor_parallel_size}"
        if layout.speculative:
            name += f" SP alpha={layout.alpha:g}"
        return name


def candidates(
    times: StepTimes, requests: Sequence[int], theta: float, theta_gain: float = 0.0
) -> list[Candidate]:
    """All layouts of the table, best first by the last number of requests.

    Args:
        requests: that decode at a time.
        theta: acceptance of all drafts.
        theta_gain: Theta_alpha - theta at alpha = 0.5, linear below. The paper measured
            0.08 to 0.14 at its alphas of 0.15 and 0.3.
    """
    layouts = []
    for pipeline, tensor, speculative in times.stages:
        for alpha in ALPHAS if speculative else [0.0]:
            layouts.append(Layout(pipeline, tensor, speculative, alpha))
    made = []
    for layout in layouts:
        accepted = min(1.0, theta + theta_gain * layout.alpha / 0.5)
        rates = [layout.throughput(batch, accepted, times) for batch in requests]
        made.append(Candidate(layout, rates))
    return sorted(made, key=lambda c: -c.tokens_per_second[-1])


def best_of_each_kind(found: list[Candidate]) -> list[Candidate]:
    """The best alpha of each layout, in the order of `found`."""
    kinds: dict[tuple[int, int, bool], Candidate] = {}
    for candidate in found:
        layout = candidate.layout
        key = (
            layout.pipeline_parallel_size,
            layout.tensor_parallel_size,
            layout.speculative,
        )
        kinds.setdefault(key, candidate)
    return list(kinds.values())


def draw(
    found: list[Candidate], requests: Sequence[int], title: str, path: Path
) -> None:
    """Write a PNG: predicted throughput by requests, a line a candidate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for candidate in found:
        axes.plot(
            requests, candidate.tokens_per_second, marker="o", label=candidate.name
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(requests), [str(batch) for batch in requests])
    axes.set(xlabel="requests", ylabel="tokens a second, predicted", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(found: list[Candidate], requests: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("layout")
    for batch in requests:
        table.add_column(f"{batch} requests", justify="right")
    best = [max(column) for column in zip(*(c[1] for c in found), strict=True)]
    for candidate in found:
        rates = zip(candidate.tokens_per_second, best, strict=True)
        cells = [f"[bold]{r:.0f}[/]" if r == most else f"{r:.0f}" for r, most in rates]
        table.add_row(candidate.name, *cells)
    Console().print(table)


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1], got {text}")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis plan",
        description="Predict the throughput of every layout that was profiled.",
    )
    parser.add_argument("--times", required=True, help="JSON of step times")
    parser.add_argument(
        "--requests",
        type=positive,
        nargs="+",
        default=[16, 32, 64, 128],
        help="requests that decode at a time; the order is by the last",
    )
    parser.add_argument("--theta", type=share, required=True, help="acceptance")
    parser.add_argument(
        "--theta-gain",
        type=share,
        default=0.0,
        help="how much higher theta is with half of the drafts dropped",
    )
    parser.add_argument("--all", action="store_true", help="every alpha, not the best")
    parser.add_argument("--json", type=Path, help="write the predictions here")
    parser.add_argument("--png", type=Path, help="draw them here")
    args = parser.parse_args(argv)
    try:
        times = read_step_times(args.times)
        found = candidates(times, args.requests, args.theta, args.theta_gain)
    except StepTimesError as error:
        sys.exit(f"error: {error}")
    shown = found if args.all else best_of_each_kind(found)
    print(f"{times.model}\n{times.machine}, theta {args.theta:g}")
    show(shown, args.requests)
    if args.json:
        result: dict[str, Any] = dict(
            machine=times.machine,
            model=times.model,
            source=times.source,
            theta=args.theta,
            theta_gain=args.theta_gain,
            requests=args.requests,
            candidates=[
                dict(name=c.name, tokens_per_second=c.tokens_per_second) for c in found
            ],
        )
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.png:
        draw(shown, args.requests, f"{times.machine}, theta {args.theta:g}", args.png)


if __name__ == "__main__":
    main()
