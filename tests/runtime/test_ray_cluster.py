# SPDX-License-Identifier: Apache-2.0
"""Two stages of two tensor-parallel ranks, on two nodes of a running Ray cluster."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import worker_probes
from conftest import shut_down
from driver import differing, run
from models import make_adapter, make_model, make_requests
from ray.cluster_utils import Cluster
from vllm import SamplingParams

from spexis_runtime.no_gpu.platform import STAGE_RESOURCE

RANKS = 2  # of a stage
LONG = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True, detokenize=False)
NODE: dict[str, Any] = dict(
    num_cpus=RANKS, num_gpus=0, resources={STAGE_RESOURCE: RANKS}
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True, head_node_args=NODE | dict(include_dashboard=False)
    )
    cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("qwen2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def options(model):
    return dict(skip_tokenizer_init=True, max_num_seqs=8)


@pytest.fixture(scope="module")
def expected(start, model, options):
    plain = start(model, **options)
    outputs = run(plain, make_requests()).outputs
    shut_down(plain)
    return outputs


@pytest.fixture(scope="module")
def llm(start, cluster, model, options, expected, tmp_path_factory):
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        llm = start(
            model,
            exit_model=make_adapter(model, 2, tmp_path_factory.mktemp("adapter")),
            pipeline_parallel_size=2,
            tensor_parallel_size=RANKS,
            num_gpu_blocks_override=25,  # small: requests get preempted
            **options,
        )
    finally:
        del os.environ["RAY_ADDRESS"]
    llm.collective_rpc(worker_probes.poison_new_blocks)
    return llm


def os_pid(worker: Any) -> int:
    return os.getpid()


def node_of(worker: Any) -> tuple[int, str]:
    return worker.model_runner.is_last_pp_rank, ray.get_runtime_context().get_node_id()


def test_a_stage_a_node(llm):
    placed = llm.collective_rpc(node_of)
    assert len(placed) == 2 * RANKS
    assert len(set(placed)) == len({node for _, node in placed}) == 2


def test_drafts_over_vocabulary_shards_are_those_over_the_whole(llm):
    """What each rank drafts, against logits of the whole vocabulary."""
    llm.collective_rpc(worker_probes.check_drafts)
    run(llm, make_requests())
    checked = llm.collective_rpc(worker_probes.checked_drafts)
    assert min(checked[:RANKS]) > 100, "both ranks of stage 0 draft"


@pytest.mark.works(
    "tensor parallelism inside stages",
    "stages on several Ray nodes",
    stages=[2],
)
@pytest.mark.parametrize("theta", [0.6, 1.0])
def test_tokens_equal_plain(llm, expected, theta):
    requests = make_requests()
    records = [(prompt, expected[i]) for i, (prompt, _) in enumerate(requests)]
    llm.collective_rpc(worker_probes.stub_drafts, args=(records, theta))
    result = run(llm, requests, staggered=True, abort_rate=0.02)
    assert differing(result, expected) == []
    assert result.total("accepted_drafts") > 0
    assert result.preemptions > 0
    states = llm.collective_rpc("check_integrity")
    assert all(state == states[0] for state in states), "slot numbers differ"


def test_a_dead_stage_of_another_node_is_noticed(llm):
    """vLLM alone would wait for its answer for ever."""
    llm.collective_rpc(worker_probes.own_drafts)
    pid = llm.collective_rpc(os_pid)[-1]
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(Exception, match="(?i)engine|executor|worker"):
        run(llm, [([5, 6, 7], LONG)])
    assert time.monotonic() - begin < 30


@pytest.mark.works(
    "attaching to a running Ray cluster, which stays",
    stages=[2],
)
def test_the_cluster_outlives_the_engine(cluster, llm):
    shut_down(llm)
    ray.init(address=cluster.address, logging_level="ERROR")
    try:
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        deadline = time.monotonic() + 20
        while ray.available_resources().get(STAGE_RESOURCE) != 2 * RANKS:
            assert time.monotonic() < deadline, "the engine still holds its slots"
            time.sleep(0.2)
    finally:
        ray.shutdown()


def test_too_few_slots_are_refused(start, cluster, model, options, capfd, monkeypatch):
    """In a line that says what to do; vLLM would wait for more."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(RuntimeError, match="failed"):
        start(model, pipeline_parallel_size=4, tensor_parallel_size=RANKS, **options)
    line = (
        f"has {2 * RANKS} {STAGE_RESOURCE} of the {4 * RANKS} needed: start its nodes"
    )
    assert line in capfd.readouterr().err
