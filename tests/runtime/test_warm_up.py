# SPDX-License-Identifier: Apache-2.0
"""What a stage on a GPU does at the start, here in the middle of its life."""

import worker_probes
from driver import differing, run
from models import VOCAB_SIZE, make_adapter, make_model
from vllm import SamplingParams


def test_warm_up_and_profile_leave_nothing_behind(start, tmp_path) -> None:
    model = make_model("llama", tmp_path)
    llm = start(
        model,
        exit_model=make_adapter(model, 2, tmp_path),
        pipeline_parallel_size=2,
        skip_tokenizer_init=True,
        row_budget="auto",
    )
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, detokenize=False)
    requests = [([i + 3, (7 * i) % VOCAB_SIZE], params) for i in range(8)]
    expected = run(llm, requests).outputs
    llm.collective_rpc(worker_probes.warm_up)
    for profile in llm.collective_rpc(worker_probes.step_profile):
        assert profile.rows == (1, 2, 4, 8)
        assert min(profile.plain_ms + profile.drafting_ms) > 0
    llm.collective_rpc("check_integrity")
    assert differing(run(llm, requests), expected) == []
