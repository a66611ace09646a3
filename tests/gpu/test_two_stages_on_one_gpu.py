# SPDX-License-Identifier: Apache-2.0
"""The runtime on one GPU, a stage on each half, in CUDA graphs: tokens, and no waiting.

Run alone, `python -m pytest tests/gpu`: `tests/runtime` hides the GPU from its process.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_STAGES, MAX_TOKENS = 2, 64


def generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    from spexis_runtime.demo_prompts import DEMO_PROMPTS

    chats = [[{"role": "user", "content": prompt}] for prompt in DEMO_PROMPTS]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=MAX_TOKENS)
        for i in range(len(chats))
    ]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def start(log_dir: str, exit_model: Any) -> Any:
    from spexis_runtime import LLM
    from spexis_runtime.tools.smollm2 import ensure_smollm2

    return LLM(
        str(ensure_smollm2(dtype="float32")),
        exit_model=exit_model,
        pipeline_parallel_size=NUM_STAGES,
        stages_per_gpu=NUM_STAGES,
        log_dir=log_dir,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=6,
        kv_cache_memory_bytes=1 << 30,
        attention_config={"backend": "CUSTOM"},
        compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"),
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    llm = start(str(tmp_path_factory.mktemp("log")), None)
    outputs = generate(llm)
    llm.llm_engine.engine_core.shutdown()
    return outputs


@pytest.fixture(scope="module")
def llm(expected: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from spexis_runtime.demo import ADAPTER

    patch = pytest.MonkeyPatch()
    # a step that waits for the device raises, and so ends its stage
    patch.setenv("VLLM_GPU_SYNC_CHECK", "error")
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to the stages
    llm = start(str(tmp_path_factory.mktemp("log")), ADAPTER)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    patch.undo()


def watch(worker: Any) -> None:
    """Drafting must not wait either; and count what runs as a graph."""
    runner = worker.model_runner
    draft, run = runner.draft, runner.graphs.run

    def checked_draft() -> None:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        draft()
        torch.cuda.set_sync_debug_mode(before)

    def counted_run(key: Any, function: Any) -> None:
        runner.replayed[key[0]] = runner.replayed.get(key[0], 0) + (
            key in runner.graphs.graphs
        )
        run(key, function)

    runner.replayed = {}
    runner.draft, runner.graphs.run = checked_draft, counted_run


def replayed(worker: Any) -> tuple[str | None, dict[str, int]]:
    return os.environ.get("VLLM_GPU_SYNC_CHECK"), worker.model_runner.replayed


def test_same_tokens_without_waiting(llm: Any, expected: list[list[int]]) -> None:
    from spexis_runtime.iteration_log import acceptance, read_iterations

    generate(llm)  # what is compiled at first use
    llm.collective_rpc(watch)
    before = len(read_iterations(llm.spexis_config.log_dir))
    assert generate(llm) == expected
    assert acceptance(read_iterations(llm.spexis_config.log_dir)[before:]) > 0.3
    (check, first), (_, last) = llm.collective_rpc(replayed)
    assert check == "error"
    assert first["inputs"] > MAX_TOKENS
    assert first["draft"] > MAX_TOKENS
    assert last["inputs"] > MAX_TOKENS
