# SPDX-License-Identifier: Apache-2.0
"""A stage that dies or raises: an exception within seconds, and nothing left over."""

import os
import signal
import threading
import time

import psutil
import pytest
from conftest import shut_down
from models import make_adapter, make_model
from processes import outlast, processes
from vllm import SamplingParams

PROMPTS = [{"prompt_token_ids": [1, 5 + i, 9]} for i in range(4)]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


def stage_pid(worker) -> int:
    return os.getpid()


def raise_at_next_step(worker) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("made to fail")

    if worker.model_runner.is_first_pp_rank:
        worker.model_runner.execute_model = fail


@pytest.fixture
def llm(start, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    model = make_model("llama", tmp)
    return start(
        model,
        exit_model=make_adapter(model, 2, tmp),
        pipeline_parallel_size=2,
        skip_tokenizer_init=True,
    )


def kill_in_a_moment(llm, stage: int) -> None:
    pid = llm.collective_rpc(stage_pid)[stage]
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


def kill_first(llm) -> None:
    kill_in_a_moment(llm, 0)


def kill_last(llm) -> None:
    kill_in_a_moment(llm, -1)


def raise_in_first(llm) -> None:
    llm.collective_rpc(raise_at_next_step)


@pytest.mark.works(
    "a dead stage: an exception within seconds",
    "several engines in one process, also after a death",
    stages=[2],
)
@pytest.mark.parametrize("break_it", [kill_first, kill_last, raise_in_first])
def test_generate_raises_and_nothing_stays(start, llm, break_it):
    before = processes()
    assert any("ray::" in command for command in before.values())
    llm.generate(PROMPTS, SHORT, use_tqdm=False)
    break_it(llm)
    begin = time.monotonic()
    with pytest.raises(Exception, match="(?i)engine|executor|worker"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert time.monotonic() - begin < 30
    shut_down(llm)
    assert not outlast(before)


@pytest.mark.works(
    "a killed engine: nothing is left",
    stages=[2],
)
def test_a_killed_engine_takes_its_processes_along(llm):
    before = processes()
    children = psutil.Process().children()
    [engine] = [p for p in children if "EngineCore" in " ".join(p.cmdline())]
    engine.kill()
    assert not outlast(before)
