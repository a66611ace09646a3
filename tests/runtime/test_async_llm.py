# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM`: many streams at once, equal to plain vLLM; streams that are dropped."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from conftest import shut_down
from models import make_adapter
from small_models import save_small_model
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from spexis_runtime import AsyncEngineArgs, AsyncLLM
from spexis_runtime.iteration_log import read_iterations

PROMPTS = ["The sky", "a", "12345 67", "Once upon a time there was", "x" * 100]
OPTIONS: dict[str, Any] = dict(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=64 << 20,
)


def params(number: int, **options: Any) -> SamplingParams:
    sampled = dict(temperature=0.8, seed=number) if number % 2 else dict(temperature=0)
    return SamplingParams(max_tokens=20 + number, ignore_eos=True, **sampled | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def expected(start, model) -> list[str]:
    plain = start(model, **OPTIONS)
    outputs = plain.generate(PROMPTS, list(map(params, range(len(PROMPTS)))))
    shut_down(plain)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def loop():
    """One event loop: the engine lives on that which it was started in."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(model, expected, loop, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("speculative")
    engine_args = AsyncEngineArgs(
        model=str(model),
        exit_model=str(make_adapter(model, 2, tmp)),
        pipeline_parallel_size=2,
        log_dir=str(tmp),
        **OPTIONS,
    )

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(engine_args)

    engine = loop.run_until_complete(start())
    engine.log_dir = tmp
    yield engine
    engine.shutdown()


def stream(engine: AsyncLLM, number: int, name: str) -> AsyncIterator[Any]:
    delta = params(number, output_kind=RequestOutputKind.DELTA)
    return engine.generate(PROMPTS[number], delta, name)


async def text_of(engine: AsyncLLM, number: int, name: str) -> tuple[str, int]:
    pieces = [o.outputs[0].text async for o in stream(engine, number, name)]
    return "".join(pieces), len(pieces)


@pytest.mark.works(
    "AsyncLLM",
    stages=[2],
)
def test_streams_equal_plain(engine, expected, loop):
    """Three of each at once, more than run at a time."""

    async def all_of_them() -> list[tuple[str, int]]:
        streams: list[Coroutine] = [
            text_of(engine, i % len(PROMPTS), f"stream-{i}")
            for i in range(3 * len(PROMPTS))
        ]
        return await asyncio.gather(*streams)

    streams = loop.run_until_complete(all_of_them())
    assert [text for text, _ in streams] == expected * 3
    assert all(pieces > 5 for _, pieces in streams)


@pytest.mark.works(
    "AsyncLLM: dropped streams",
    stages=[2],
)
def test_dropped_streams_give_back_what_they_hold(engine, expected, loop):
    async def drop_all_but_the_last() -> tuple[str, int]:
        async def drop(number: int) -> None:
            pieces = 0
            async for _ in stream(engine, number, f"dropped-{number}"):
                pieces += 1
                if pieces > number:
                    return  # closes the generator: the request is aborted

        *_, last = await asyncio.gather(
            *map(drop, range(4)), text_of(engine, 4, "kept")
        )
        return last

    text, _ = loop.run_until_complete(drop_all_but_the_last())
    assert text == expected[4]
    # what the engine holds is seen at the end of a later step
    loop.run_until_complete(text_of(engine, 1, "after"))
    assert read_iterations(engine.log_dir)[-1]["kv_blocks_used"] == 0
    states = loop.run_until_complete(engine.collective_rpc("check_integrity"))
    assert all(state == states[0] for state in states)
