# SPDX-License-Identifier: Apache-2.0
"""Measure an exit adapter: how often its draft is what the target says.

    spexis eval adapter --model DIR --adapter DIR (--prompts FILE | --texts TEXTS)
        [--out NAME]

Prints a table, and writes NAME.json and NAME.png. Greedy text and text of each
temperature are reported beside each other; drafts for sampled text share its noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from spexis_runtime.adapter import check_adapter_matches
from spexis_runtime.train.arguments import count, errors_in_one_line, natural
from spexis_runtime.train.drafts import collect_drafts
from spexis_runtime.train.generate import (
    add_generation_arguments,
    check_tokenizer,
    generate_texts,
)
from spexis_runtime.train.metrics import draft_metrics
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.plots import plot_drafts
from spexis_runtime.train.prompts import DEMO, read_prompts, write_text
from spexis_runtime.train.report import command, origin
from spexis_runtime.train.target import Target, load_config, load_target
from spexis_runtime.train.texts import Text, TextStore


def evaluate_adapter(
    target: Target, adapter: ExitAdapter, texts: list[Text]
) -> dict[str, dict[str, Any]]:
    """`draft_metrics` of the texts of each temperature: "greedy", "T=0.7", ..."""
    results = {}
    for temperature in sorted({t.temperature for t in texts}):
        own = [t for t in texts if t.temperature == temperature]
        drafts = collect_drafts(target, adapter, own)
        name = f"T={temperature:g}" if temperature else "greedy"
        results[name] = draft_metrics(drafts, adapter.config.calibration)
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Table 3 and the figures around it, as text."""
    lines = []
    for name, result in results.items():
        cells = result["by_task"] | {"all": result["accuracy"]}
        cells |= {
            f"-{float(d):.0%}": a for d, a in result["accuracy_after_dropping"].items()
        }
        depths = [a for a in result["by_depth"] if a is not None]
        cells |= {f"draft {i}": a for i, a in enumerate(depths, 1)}
        cells["ECE"] = result["ece"]
        width = max(map(len, cells)) + 1
        lines.append(
            f"{name}, {result['num_texts']} texts, {result['num_tokens']} tokens"
        )
        lines += [f"  {key:<{width}} {value:.3f}" for key, value in cells.items()]
    return "\n".join(lines)


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that adapters and length predictors have in common."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", help=f'.jsonl or .json file, or "{DEMO}"')
    source.add_argument("--texts", type=Path, help="what `spexis generate` has written")
    add("--limit", type=count, help="use the first prompts only")
    add("--seed", type=natural, default=0, help="of the sampling")
    add("--out", help="write OUT.json and OUT.png")
    add_generation_arguments(parser)


def evaluation_texts(args: argparse.Namespace, scratch: Path) -> TextStore:
    if args.texts is not None:
        return TextStore.open(args.texts)
    return generate_texts(
        args.model,
        read_prompts(args.prompts, args.limit),
        scratch / "texts",
        temperatures=args.temperatures,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        num_self_prompts=args.self_prompts,
        seed=args.seed,
    )


def _run(args: argparse.Namespace, scratch: Path) -> None:
    adapter = ExitAdapter.load(args.adapter)
    check_adapter_matches(adapter.config, load_config(args.model))
    store = evaluation_texts(args, scratch)
    target = load_target(args.model, adapter.config.exit_layer)
    check_tokenizer(target, store)
    results = evaluate_adapter(target, adapter, list(store.texts()))
    name = Path(args.adapter).resolve().name
    report = {
        "adapter": name,
        "command": command("spexis eval adapter", args),
        **origin(target.device),
        "texts": store.settings,
        "results": results,
    }
    print(table(results))
    if args.out is not None:
        write_text(Path(f"{args.out}.json"), json.dumps(report, indent=2) + "\n")
        plot_drafts(Path(f"{args.out}.png"), name, results)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis eval adapter",
        description="Measure an exit adapter on its model's own text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--adapter", required=True, help="adapter directory")
    add_evaluation_arguments(parser)
    args = parser.parse_args(argv)
    with errors_in_one_line(), tempfile.TemporaryDirectory() as scratch:
        _run(args, Path(scratch))


if __name__ == "__main__":
    main()
