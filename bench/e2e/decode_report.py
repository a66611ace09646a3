# SPDX-License-Identifier: Apache-2.0
"""Put the rounds of `decode_throughput` together: JSON, plots, a table.

    python -m bench.e2e.decode_report bench/results/h200-halves

Reads DIR/raw/*.json, writes DIR/decode_throughput.json and, where matplotlib is, two
PNG files a shape. A cell's figures are the mean over its rounds.

`step_ms.pp_at_k` is the time of plain PP's step with as many rows as ours has: that of
the split cell with N times the requests at the same context, where there is one.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from spexis_runtime.lookahead.cost_model import effective_batch
from spexis_runtime.train.prompts import write_text

Key = tuple[str, int, int, str, float | None, int | str | None]


def read_rounds(raw: Path) -> tuple[dict[Key, dict[str, Any]], list[dict[str, Any]]]:
    """Mean figures by shape, requests, context, how, theta, budget; and the files."""
    found: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    files = [json.loads(path.read_text()) for path in sorted(raw.glob("*.json"))]
    for file in files:
        for result in file["cases"]:
            (requests, context), how, theta, budget = result["case"]
            found[file["shape"], requests, context, how, theta, budget].append(result)
    means = {}
    for key, results in found.items():
        means[key] = {
            name: statistics.fmean(r[name] for r in results)
            for name, value in results[0].items()
            if isinstance(value, int | float)
        }
        means[key]["rounds"] = len(results)
    return means, files


def cases(means: dict[Key, dict[str, Any]], stages: int) -> list[dict[str, Any]]:
    """An entry for each of our cells that plain PP has run too."""
    entries = []
    for (shape, requests, context, how, theta, budget), ours in means.items():
        split = means.get((shape, requests, context, "split", None, None))
        if how != "replay" or split is None:
            continue
        bunched = means.get((shape, requests, context, "bunched", None, None))
        wider = means.get((shape, stages * requests, context, "split", None, None))
        acceptance = ours.get("acceptance", 0.0)
        # the closed form is that of k = B
        full = budget in ("auto", requests) and ours["rows"] > 0.95 * requests
        predicted = effective_batch(requests, stages, acceptance) if full else None
        pp_at_k = wider["step_ms"] if wider and full else None
        entries.append(
            {
                "model": shape,
                "requests": requests,
                "theta": theta,
                "context": context,
                "budget": budget,
                "ours_tok_s": round(ours["tok_s"], 1),
                "split_pp_tok_s": round(split["tok_s"], 1),
                "bunched_pp_tok_s": bunched and round(bunched["tok_s"], 1),
                "ratio": round(ours["tok_s"] / split["tok_s"], 3),
                "rows": round(ours["rows"], 2),
                "acceptance": round(acceptance, 4),
                "tokens_per_step": round(ours["tokens_per_step"], 3),
                "predicted_tokens_per_step": predicted and round(predicted, 3),
                "fraction_of_model": predicted
                and pp_at_k
                and round(ours["tok_s"] / (1e3 * predicted / pp_at_k), 3),
                "step_ms": {
                    "ours": round(ours["step_ms"], 3),
                    "split_pp": round(split["step_ms"], 3),
                    "pp_at_k": pp_at_k and round(pp_at_k, 3),
                },
                "kv_blocks": {
                    "ours": ours["kv_blocks"],
                    "split_pp": split["kv_blocks"],
                },
                "rounds": ours["rounds"],
            }
        )
    return sorted(
        entries,
        key=lambda e: (e["model"], e["context"], e["requests"], e["theta"]),
    )


def plot(entries: list[dict[str, Any]], stages: int, out: Path) -> None:
    """Throughput over requests, and tokens a step against the model, a shape each."""
    from matplotlib.figure import Figure

    for shape in sorted({e["model"] for e in entries}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        speed, steps = figure.subplots(1, 2)
        auto = [e for e in entries if e["model"] == shape and e["budget"] == "auto"]
        for context in sorted({e["context"] for e in auto}):
            of = [e for e in auto if e["context"] == context]
            pp = {e["requests"]: e["split_pp_tok_s"] for e in of}
            speed.plot(list(pp), list(pp.values()), "k--", label=f"PP, {context}")
            for theta in sorted({e["theta"] for e in of}):
                line = [e for e in of if e["theta"] == theta]
                label = f"theta {theta}, context {context}"
                requests = [e["requests"] for e in line]
                speed.plot(requests, [e["ours_tok_s"] for e in line], "o-", label=label)
                steps.plot(
                    [effective_batch(e["requests"], stages, theta) for e in line],
                    [e["tokens_per_step"] for e in line],
                    "o",
                    label=label,
                )
        most = max(e["requests"] for e in auto)
        steps.plot([0, most], [0, most], "k-", linewidth=0.5)
        speed.set(xlabel="requests", ylabel="decode tokens/s", title=shape)
        steps.set(xlabel="equation (2)", ylabel="verified tokens a step")
        speed.legend(fontsize=7)
        figure.savefig(out / f"decode_throughput_{shape}.png", dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.e2e.decode_report",
        description="Put the rounds of decode_throughput together.",
    )
    parser.add_argument("dir", type=Path, help="the --out of decode_throughput")
    args = parser.parse_args(argv)
    means, files = read_rounds(args.dir / "raw")
    if not files:
        parser.error(f"{args.dir / 'raw'} has no results")
    [stages] = {file["stages"] for file in files}
    report = {
        "command": "python -m bench.e2e.decode_throughput, of each shape, then "
        "python -m bench.e2e.decode_report",
        "machine": sorted({file["machine"] for file in files}),
        "date": max(file["date"] for file in files),
        "versions": files[0]["versions"],
        "cases": cases(means, stages),
    }
    out = args.dir / "decode_throughput.json"
    write_text(out, json.dumps(report, indent=1) + "\n")
    plot(report["cases"], stages, args.dir)
    for e in report["cases"]:
        print(
            f"{e['model']} {e['requests']:>4} x {e['context']:<5} theta {e['theta']} "
            f"budget {e['budget']}: {e['ours_tok_s']} tok/s, {e['ratio']}x of split PP"
        )


if __name__ == "__main__":
    main()
