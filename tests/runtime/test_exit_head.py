# SPDX-License-Identifier: Apache-2.0
"""The exit head in a pipeline computes what the trained module does."""

from typing import Any

import pytest
import torch
import transformers
import worker_probes
from models import make_adapter, make_model
from tolerances import FP32_REDUCTION, LOGPROBS
from vllm import SamplingParams

from spexis_runtime.exit_head import calibrated
from spexis_runtime.train.batches import target_states
from spexis_runtime.train.model import ExitAdapter
from spexis_runtime.train.target import Target


def record_states(worker: Any) -> None:
    """Keep, on stage 0, what each step leaves for the LM head at its positions."""
    runner = worker.model_runner
    if not runner.is_first_pp_rank:
        return
    head = worker_probes.exit_head(runner)
    runner.recorded = {}

    def record(model: Any, args: Any, kwargs: Any, output: Any) -> None:
        for position, x in zip(
            kwargs["positions"].tolist(), head.hidden_states, strict=False
        ):
            runner.recorded[position] = x.tolist()

    runner.model.register_forward_hook(record, with_kwargs=True)


def recorded_states(worker: Any) -> dict[int, list[float]]:
    return getattr(worker.model_runner, "recorded", {})


def test_full_block_with_features(start, tmp_path):
    model = make_model("llama", tmp_path)
    adapter = make_adapter(
        model, 2, tmp_path, depth=2, intermediate_size=64, feature_layers=(0, 1, 2)
    )
    llm = start(
        model,
        exit_model=adapter,
        pipeline_parallel_size=2,
        tensor_parallel_size=1,
        skip_tokenizer_init=True,
    )
    llm.collective_rpc(record_states)
    prompt = [(7 * i) % 900 + 5 for i in range(80)]  # more than a step's 64 tokens
    params = SamplingParams(
        temperature=0.0, max_tokens=16, detokenize=False, ignore_eos=True
    )
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], params)
    ids = [*prompt, *answer.outputs[0].token_ids][:-1]
    found = llm.collective_rpc(recorded_states)[0]

    hf_model = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    ours = ExitAdapter.load(adapter)
    states = target_states(
        Target(hf_model, None), torch.tensor([ids]), ours.config.feature_layers
    )
    with torch.no_grad():
        expected = ours(states.features, states.cos, states.sin)[0]
    # the last step that fed a position fed its right token: later ones need it
    theirs = torch.tensor([found[position] for position in range(len(ids))])
    torch.testing.assert_close(theirs, expected, **LOGPROBS)


@pytest.mark.parametrize("steps", [1, 4])
def test_calibration_is_linear_between_its_values(steps):
    values = torch.tensor([0.1, 0.2, 0.6, 0.7, 0.9])[:: 4 // steps]
    confidence = torch.tensor([0.0, 0.125, 0.25, 0.5, 0.6, 0.99, 1.0])
    knots = torch.arange(steps + 1) / steps
    expected = [
        next(
            values[i] + (c - knots[i]) * steps * (values[i + 1] - values[i])
            for i in range(steps)
            if c <= knots[i + 1]
        )
        for c in confidence
    ]
    torch.testing.assert_close(
        calibrated(confidence, values), torch.stack(expected), **FP32_REDUCTION
    )
    assert calibrated(confidence, torch.tensor([])) is confidence
