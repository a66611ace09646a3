# SPDX-License-Identifier: Apache-2.0
"""A user's script: asks the same twice, and in between for something long."""

import json
import signal
import sys
from typing import Any

from vllm import SamplingParams

from spexis_runtime import LLM

PROMPTS = [{"prompt_token_ids": [1, 5 + i, 9]} for i in range(6)]


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    # as in a terminal; a shell starts its background jobs with it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, adapter = sys.argv[1:]
    llm = LLM(
        model,
        exit_model=adapter,
        pipeline_parallel_size=2,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )

    def answers(max_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    say(answers(12))
    say("now something long")
    try:
        say(answers(1000))
    except KeyboardInterrupt:
        say("interrupted")
    say(answers(12))


if __name__ == "__main__":
    main()
