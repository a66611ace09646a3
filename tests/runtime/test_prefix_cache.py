# SPDX-License-Identifier: Apache-2.0
"""Prefix caching under speculation: hits on prompts and on text being generated."""

import pytest
import worker_probes
from driver import differing, run
from models import VOCAB_SIZE, make_adapter, make_model
from vllm import SamplingParams

BLOCK = 16


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


@pytest.fixture(scope="module")
def llm(start, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    model = make_model("llama", tmp)
    llm = start(
        model,
        exit_model=make_adapter(model, 2, tmp),
        pipeline_parallel_size=2,
        skip_tokenizer_init=True,
    )
    llm.collective_rpc(worker_probes.poison_new_blocks)
    return llm


@pytest.mark.works(
    "prefix caching: hits on text that is being generated",
    stages=[2],
)
@pytest.mark.parametrize("theta, row_budget", [(0.5, 4), (0.0, 4), (0.8, "auto")])
def test_followers_of_running_requests(llm, theta, row_budget):
    """A request joins with the text so far of another as its prompt, block by block."""
    shared = [(j * 17) % (VOCAB_SIZE - 3) + 3 for j in range(37)]
    requests = [(shared[: 16 + 7 * i] + [50 + i], params(40)) for i in range(4)]
    rpc = llm.collective_rpc
    rpc(worker_probes.set_rows)
    rpc(worker_probes.stub_drafts, args=([(p, []) for p, _ in requests], 0.0))
    llm.reset_prefix_cache()
    expected = run(llm, requests).outputs

    followed: list[tuple[int, int]] = []
    texts = [p + expected[i] for i, (p, _) in enumerate(requests)]

    def follow(i, output):
        length = len(requests[i][0]) + len(output) if i < 1000 else 0
        if i >= 1000 or length % BLOCK or len(output) > 30 or len(followed) >= 6:
            return None
        followed.append((i, length + 1))
        return texts[i][: length + 1], params(6)

    records = [(p, expected[i]) for i, (p, _) in enumerate(requests)]
    records += [
        (text[: n + 1], text[n + 1 :])
        for text in texts
        for n in range(0, len(text), BLOCK)
    ]
    llm.reset_prefix_cache()
    rpc(worker_probes.stub_drafts, args=(records, theta))
    rpc(worker_probes.set_rows, kwargs={"row_budget": row_budget})
    result = run(llm, requests, on_output=follow)
    assert differing(result, expected) == []
    assert len(followed) >= 3
    for number, (i, length) in enumerate(followed):
        got = result.outputs[1000 + number]
        want = texts[i][length : length + 6]
        assert got[: len(want)] == want, f"follower {number} of request {i}"
