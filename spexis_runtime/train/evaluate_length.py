# SPDX-License-Identifier: Apache-2.0
"""Measure a length predictor: precision, recall of "fewer than 4 ... 64 tokens left".

    spexis eval length --model DIR --predictor DIR (--prompts FILE | --texts TEXTS)
        [--out NAME]

Prints a table, and writes NAME.json and NAME.png. Text that was cut at the token limit
counts only as far as it shows that more was left.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from spexis_runtime.adapter.length import check_length_matches
from spexis_runtime.length_predictor import LengthPredictor
from spexis_runtime.train.arguments import errors_in_one_line
from spexis_runtime.train.evaluate import add_evaluation_arguments, evaluation_texts
from spexis_runtime.train.generate import check_tokenizer
from spexis_runtime.train.lengths import collect_lengths, length_metrics
from spexis_runtime.train.plots import plot_lengths
from spexis_runtime.train.prompts import write_text
from spexis_runtime.train.report import command, origin
from spexis_runtime.train.target import load_config, load_target


def table(result: dict[str, Any]) -> str:
    """Table 4 as text."""
    columns = [name for name in result["thresholds"][0] if name != "below"]
    lines = ["below  " + "  ".join(columns)]
    for row in result["thresholds"]:
        cells = [
            f"{'-' if row[name] is None else row[name]:>{len(name)}}"
            for name in columns
        ]
        lines.append(f"{row['below']:>5}  " + "  ".join(cells))
    return "\n".join(lines)


def _run(args: argparse.Namespace, scratch: Path) -> None:
    predictor = LengthPredictor.load(args.predictor)
    check_length_matches(predictor.config, load_config(args.model))
    store = evaluation_texts(args, scratch)
    target = load_target(args.model, predictor.config.exit_layer)
    check_tokenizer(target, store)
    texts = list(store.texts())
    result = length_metrics(collect_lengths(target, predictor, texts), predictor)
    name = Path(args.predictor).resolve().name
    report = {
        "predictor": name,
        "command": command("spexis eval length", args),
        **origin(target.device),
        "texts": store.settings,
        "num_ended": sum(text.ended for text in texts),
        "results": {"all": result},
    }
    print(table(result))
    if args.out is not None:
        write_text(Path(f"{args.out}.json"), json.dumps(report, indent=2) + "\n")
        plot_lengths(Path(f"{args.out}.png"), name, {"all": result})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="spexis eval length",
        description="Measure a length predictor on its model's own text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--predictor", required=True, help="its directory")
    add_evaluation_arguments(parser)
    args = parser.parse_args(argv)
    with errors_in_one_line(), tempfile.TemporaryDirectory() as scratch:
        _run(args, Path(scratch))


if __name__ == "__main__":
    main()
