# SPDX-License-Identifier: Apache-2.0
"""`merged_attention` alone, in stock vLLM: no speculation, one stage, vLLM's own `LLM`.

    python examples/drop_in_attention.py MODEL

The same as `vllm serve MODEL --attention-backend CUSTOM`. Installing this package is
enough for the name CUSTOM to mean `merged_attention`.
"""

import argparse

from vllm import LLM, SamplingParams


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="Hugging Face directory or name")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args(argv)
    llm = LLM(
        args.model,
        attention_config={"backend": "CUSTOM"},
        max_model_len=256,
        kv_cache_memory_bytes=1 << 28,
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    (output,) = llm.generate([args.prompt], params, use_tqdm=False)
    print(output.outputs[0].text)
    return output.outputs[0].text


if __name__ == "__main__":
    main()
