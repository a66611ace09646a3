# SPDX-License-Identifier: Apache-2.0
"""Engines for the runtime tests: on a machine without a GPU, their stages over Ray."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spexis_runtime.no_gpu.environment import configure_environment, use_cpu

use_cpu()
configure_environment()
# stages must find the tests' own modules, tests/tolerances.py and the package
_PATHS = [str(Path(__file__).parents[i]) for i in range(3)]
sys.path[:0] = _PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*_PATHS, os.environ.get("PYTHONPATH", "")]  # before Ray starts
)
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc of functions
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest  # noqa: E402


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`start(model, **options)`: an engine in fp32, ended at the end of the module."""
    from spexis_runtime import LLM

    engines: list[Any] = []

    def start(model: Path, **options: Any) -> Any:
        defaults: dict[str, Any] = dict(
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            block_size=16,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=True,
            log_dir=tmp_path_factory.mktemp("log"),
        )
        engines.append(LLM(str(model), **(defaults | options)))
        return engines[-1]

    yield start
    for engine in engines:
        shut_down(engine)


def shut_down(llm: Any) -> None:
    """End an engine and its Ray cluster now, not at garbage collection."""
    llm.llm_engine.engine_core.shutdown()
