# SPDX-License-Identifier: Apache-2.0
"""Single operations in stock vLLM on one GPU: tokens, in CUDA graphs, in fp32.

Run alone, as `test_two_stages_on_one_gpu.py`. Where the package is on PYTHONPATH only,
`python setup.py -q egg_info` first: vLLM finds CUSTOM through its entry points.
"""

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_TOKENS = 64
WORKER = "spexis_runtime.greedy_head.GreedyHeadWorker"


def tokens(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    """Greedy answers to the demo's prompts by a new engine, which is ended then."""
    import vllm

    from bench.e2e.drop_in import what_runs
    from spexis_runtime.demo_prompts import DEMO_PROMPTS
    from spexis_runtime.tools.smollm2 import ensure_smollm2

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    llm = vllm.LLM(
        str(ensure_smollm2(dtype="float32")),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
        attention_config={"backend": "CUSTOM"},
        compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"),
        **options,
    )
    [runs] = llm.collective_rpc(what_runs)
    eager = options.get("enforce_eager", False)
    mode = "NONE" if eager else "FULL_DECODE_ONLY"
    assert runs == {"attention": "CUSTOM", "cudagraph_mode": mode}
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS],
        vllm.SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def eager() -> list[list[int]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return tokens(monkeypatch, enforce_eager=True)


def test_graphs_give_the_tokens_of_eager_steps(
    eager: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(monkeypatch) == eager


def test_the_greedy_head_gives_the_tokens_of_logits(
    eager: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens(monkeypatch, worker_cls=WORKER) == eager
