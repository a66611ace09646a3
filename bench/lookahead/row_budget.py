# SPDX-License-Identifier: Apache-2.0
"""The row budget "auto" against fixed alphas, cell by cell in the simulator.

    python -m bench.lookahead.row_budget --out bench/results/simulator

Steady decoding: B requests that all arrive at once and are equally long, enough memory.
Step times: those measured so far, of PP=2; for four stages half of them, as each stage
has half of the layers. Beyond 128 rows the line goes on.
"""

import argparse
import json
import math
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spexis_runtime.lookahead.admission import AdmissionPolicy
from spexis_runtime.lookahead.cost_model import selective_rows
from spexis_runtime.lookahead.draft_law import DraftLaw
from spexis_runtime.lookahead.row_budget import RowBudget
from spexis_runtime.lookahead.simulator import Machine, Rows, Workload, simulate
from spexis_runtime.lookahead.step_times import StageTimes, read_step_times

TABLES = {
    name: f"bench/results/{name}/step_times_qwen3_32b.json"
    for name in ("h200-halves", "h200-x2")
}
ALPHAS = [round(0.05 * i, 2) for i in range(11)]
THETAS = [0.3, 0.5, 0.6, 0.7, 0.785, 0.9]
STAGES, BATCHES = [2, 4], [16, 32, 64, 128, 256]


class Cell(NamedTuple):
    table: str
    num_stages: int
    batch: int
    theta: float


def stage_times(table: str, num_stages: int, speculative: bool) -> StageTimes:
    root = Path(__file__).parents[2]
    times = read_step_times(root / TABLES[table]).stage(2, speculative=speculative)
    share = 2 / num_stages
    return StageTimes(times.rows, tuple(share * ms for ms in times.milliseconds))


def tokens_per_second(
    cell: Cell, budgets: dict[str, RowBudget], output: int
) -> dict[str, float]:
    """Throughput of each budget."""
    law = DraftLaw.uniform(cell.theta)
    machine = Machine(
        num_stages=cell.num_stages,
        plain=stage_times(cell.table, cell.num_stages, False),
        speculative=stage_times(cell.table, cell.num_stages, True),
        num_blocks=cell.batch * (output // 16 + 4),
        max_num_seqs=cell.batch,
        max_num_batched_tokens=8192,
    )
    ones = np.ones(cell.batch)
    workload = Workload.make(0 * ones, 16 * ones, output * ones)
    policy = AdmissionPolicy.make("vllm")
    rates = {}
    for name, budget in budgets.items():
        result = simulate(machine, workload, Rows(budget, law), policy)
        rates[name] = result.throughput
    return rates


def compare(cell: Cell, output: int = 400) -> dict[str, float]:
    """Tokens a second with "auto" and each fixed alpha, all with the same drafts."""
    plain, drafting = (
        stage_times(cell.table, cell.num_stages, speculative)
        for speculative in (False, True)
    )
    law = DraftLaw.uniform(cell.theta)
    budgets = {
        "auto": RowBudget.auto(law, cell.num_stages, cell.batch, drafting, plain)
    }
    for alpha in ALPHAS:
        fixed = [
            math.ceil(selective_rows(decodes, cell.num_stages, alpha))
            for decodes in range(cell.batch + 1)
        ]
        budgets[f"alpha {alpha}"] = RowBudget.of_table(np.array(fixed), drafting, plain)
    return tokens_per_second(cell, budgets, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for the JSON"
    )
    parser.add_argument("--output-tokens", type=int, default=400)
    args = parser.parse_args()
    cells = [
        Cell(table, num_stages, batch, theta)
        for table in TABLES
        for num_stages in STAGES
        for batch in BATCHES
        for theta in THETAS
    ]
    rows = []
    for cell in cells:
        rates = compare(cell, args.output_tokens)
        auto = rates.pop("auto")
        best = max(rates, key=lambda name: rates[name])
        rows.append(cell._asdict() | dict(auto=auto, best_alpha=best, best=rates[best]))
        print(f"{cell}  auto {auto:.0f}  {best} {rates[best]:.0f}", flush=True)
    ratios = [row["auto"] / row["best"] for row in rows]
    result = dict(
        command="python -m bench.lookahead.row_budget",
        date=date.today().isoformat(),
        output_tokens=args.output_tokens,
        least_ratio=min(ratios),
        mean_ratio=float(np.mean(ratios)),
        cells=rows,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "row_budget.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"auto / best alpha: least {min(ratios):.3f}, mean {np.mean(ratios):.3f}")


if __name__ == "__main__":
    main()
