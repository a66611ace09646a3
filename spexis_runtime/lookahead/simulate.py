# SPDX-License-Identifier: Apache-2.0
"""`spexis simulate`: serve a load in the simulator, by several rules of admission."""

import argparse
import json
import shlex
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from spexis_runtime.lookahead.plan import positive, share

MEAN_PROMPT, MEAN_OUTPUT, SIGMA = 200, 200, 0.8


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spexis simulate",
        description="Serve a load in the simulator and say what became of it.",
    )
    parser.add_argument("--times", required=True, help="JSON of step times")
    parser.add_argument("--stages", type=positive, default=2)
    parser.add_argument("--requests", type=positive, default=10_000)
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--rate", type=float, help="Poisson arrivals a second")
    load.add_argument("--burst", type=positive, help="requests that come at once")
    load.add_argument("--trace", help="JSON lines: arrival_ms, prompt_tokens, ...")
    parser.add_argument(
        "--burst-ms", type=float, default=10_000, help="from burst to burst"
    )
    parser.add_argument("--prompt-tokens", type=positive, default=MEAN_PROMPT)
    parser.add_argument("--output-tokens", type=positive, default=MEAN_OUTPUT)
    parser.add_argument("--max-tokens", type=positive, default=2048)
    parser.add_argument(
        "--sigma", type=float, default=SIGMA, help="of the logarithm of the lengths"
    )
    parser.add_argument("--blocks", type=positive, required=True, help="of KV memory")
    parser.add_argument("--max-num-seqs", type=positive, default=256)
    parser.add_argument("--theta", type=share, help="acceptance; left out: plain PP")
    parser.add_argument(
        "--rows", default="all", help='"all", "auto" or a number of decode rows'
    )
    parser.add_argument(
        "--admission", nargs="+", default=["vllm"], help="vllm, history, lookahead"
    )
    parser.add_argument(
        "--predictor",
        type=share,
        default=0.7,
        help="share of lengths whose bucket is predicted right (lookahead)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args(argv)


def make_workload(args: argparse.Namespace) -> Any:
    import numpy as np

    from spexis_runtime.lookahead.simulator import workload as w

    if args.trace:
        return w.read_trace(args.trace)
    rng = np.random.default_rng(args.seed)
    arrivals = (
        w.poisson_arrivals(rng, args.requests, args.rate)
        if args.rate
        else w.burst_arrivals(args.requests, args.burst, args.burst_ms)
    )
    most = args.max_tokens
    prompts, outputs = (
        w.lognormal_lengths(rng, args.requests, mean, args.sigma, most)
        for mean in (args.prompt_tokens, args.output_tokens)
    )
    return w.Workload.make(arrivals, prompts, outputs, most)


def make_rows(args: argparse.Namespace, sp: Any, pp: Any) -> Any:
    """Plain PP, or drafts with the row budget that was asked for."""
    import numpy as np

    from spexis_runtime.lookahead.draft_law import DraftLaw
    from spexis_runtime.lookahead.row_budget import RowBudget
    from spexis_runtime.lookahead.simulator import Rows

    if args.theta is None:
        return Rows()
    law, seqs = DraftLaw.uniform(args.theta), args.max_num_seqs
    if args.rows == "auto":
        return Rows(RowBudget.auto(law, args.stages, seqs, sp, pp), law)
    most = seqs if args.rows == "all" else positive(args.rows)
    return Rows(RowBudget.of_table(np.minimum(np.arange(seqs + 1), most), sp, pp), law)


def make_policy(rule: str, args: argparse.Namespace, workload: Any) -> tuple[Any, Any]:
    """The policy, and the predictor's confusion matrix; calibrated on this workload."""
    import numpy as np

    from spexis_runtime.lookahead.admission import AdmissionPolicy
    from spexis_runtime.lookahead.memory import (
        HORIZON,
        MAX_AGE,
        NUM_BUCKETS,
        MemoryTables,
        RemainingLengths,
        bucket_of,
    )

    if rule != "lookahead":
        return AdmissionPolicy.make(rule), None
    wrong = (1 - args.predictor) / (NUM_BUCKETS - 1)
    confusion = np.full((NUM_BUCKETS, NUM_BUCKETS), wrong)
    np.fill_diagonal(confusion, args.predictor)
    columns = HORIZON + MAX_AGE + 1
    # positions of all requests by the tokens that remain
    lengths = np.minimum(workload.output_tokens, columns - 1)
    left = np.array([(lengths >= n).sum() for n in range(1, columns)], dtype=float)
    left = np.append(left, (workload.output_tokens - lengths).sum())
    buckets = [bucket_of(n) for n in range(1, columns + 1)]
    remaining = RemainingLengths.from_counts(confusion[buckets].T * left)
    theta = args.theta or 0.0
    rate = 1 / (args.stages - theta * (args.stages - 1))
    tables = MemoryTables.make(remaining, theta, args.stages)
    return AdmissionPolicy.make(rule, tables, rate), confusion


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    from rich.console import Console
    from rich.table import Table

    from spexis_runtime.lookahead.simulator import Machine, simulate
    from spexis_runtime.lookahead.step_times import read_step_times

    try:
        times = read_step_times(args.times)
        plain = times.stage(args.stages, speculative=False)
        drafting = times.stage(args.stages, speculative=args.theta is not None)
        machine = Machine(
            num_stages=args.stages,
            plain=plain,
            speculative=drafting,
            num_blocks=args.blocks,
            max_num_seqs=args.max_num_seqs,
        )
        workload = make_workload(args)
        rows = make_rows(args, drafting, plain)
        policies = {rule: make_policy(rule, args, workload) for rule in args.admission}
        machine.check(workload)
    except (OSError, ValueError, argparse.ArgumentTypeError) as error:
        sys.exit(f"error: {error}")
    figures: dict[str, dict[str, float]] = {}
    for rule, (policy, confusion) in policies.items():
        start = time.process_time()
        result = simulate(
            machine,
            workload,
            rows,
            policy,
            confusion=confusion,
            seed=args.seed,
            progress=True,
        )
        figures[rule] = result.summary()
        figures[rule]["cpu_seconds_to_simulate"] = time.process_time() - start
    table = Table("", *figures)
    for name in next(iter(figures.values())):
        table.add_row(name, *(f"{figures[rule][name]:,.4g}" for rule in figures))
    Console().print(table)
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k != "json"}
        content = dict(
            command=shlex.join(["spexis", "simulate", *(argv or sys.argv[1:])]),
            date=date.today().isoformat(),
            settings=settings,
            machine=times.machine,
            figures=figures,
        )
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
