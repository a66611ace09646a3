# SPDX-License-Identifier: Apache-2.0
"""Answer some prompts with speculation over a pipeline's stages.

    python examples/offline.py [--model DIR --exit-model DIR --stages 2]

Without arguments: SmolLM2-135M, which is fetched once, and the adapter shipped for it.
On a machine without a GPU the stages compute on its processor. Where RAY_ADDRESS names
a Ray cluster, the stages run on its nodes: see several_nodes.sh.
"""

import argparse
from pathlib import Path

import spexis_runtime
from spexis_runtime.tools.smollm2 import ensure_smollm2

ADAPTERS = Path(spexis_runtime.__file__).parent / "adapters"
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time"]


def main(argv: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="Hugging Face directory")
    parser.add_argument("--exit-model", help="directory of its exit adapter")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args(argv)
    if args.model is None:
        args.model = ensure_smollm2()
        args.exit_model = ADAPTERS / "smollm2-135m-instruct-layer15"

    llm = spexis_runtime.LLM(
        args.model,
        exit_model=args.exit_model,
        pipeline_parallel_size=args.stages,
        max_model_len=256,
        max_num_seqs=8,
    )
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0, args.max_tokens
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt}|{answer}")
    return answers


if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    main()
