# SPDX-License-Identifier: Apache-2.0
"""Train an exit adapter for a model, and measure it on prompts that it has not seen.

    python examples/train_adapter.py --model DIR --exit 1/2 --out my-adapter

The model answers the prompts itself and the adapter learns from its answers. A useful
adapter needs thousands of prompts and a GPU; with the few written here it shows how.
The two steps are the commands `spexis train adapter` and `spexis eval adapter`.
"""

import argparse
import json
from pathlib import Path

from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.train import adapter, evaluate


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--exit", required=True, help="share of the layers, as 1/2")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--max-new-tokens", default="64", help="of an answer")
    args = parser.parse_args(argv)

    files = {}
    for name, prompts in (("train", DEMO_PROMPTS[:8]), ("unseen", DEMO_PROMPTS[8:])):
        files[name] = args.out.with_name(f"{args.out.name}-{name}.jsonl")
        lines = [json.dumps({"turns": [prompt]}) for prompt in prompts]
        files[name].write_text("\n".join(lines) + "\n")
    adapter.main(
        ["--model", args.model, "--exit", args.exit]
        + ["--prompts", str(files["train"]), "--out", str(args.out)]
        + ["--max-new-tokens", args.max_new_tokens]
    )
    evaluate.main(
        ["--model", args.model, "--adapter", str(args.out)]
        + ["--prompts", str(files["unseen"])]
        + ["--max-new-tokens", args.max_new_tokens]
    )
    return args.out


if __name__ == "__main__":
    main()
