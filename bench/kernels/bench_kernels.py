# SPDX-License-Identifier: Apache-2.0
"""Measure every case that has no result yet; `make bench-kernels` on the GPU machine.

A case whose check fails is refused: it fails, and nothing is written. A run that is
interrupted goes on with the next case when started again.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # tolerances

from bench import gpu  # noqa: E402
from bench.kernels.cases import (  # noqa: E402
    CASES,
    AttentionCase,
    Case,
    HeadCase,
    PoolCase,
)
from bench.kernels.results import Results, record  # noqa: E402
from bench.kernels.work import Work  # noqa: E402

BF16_FLOP_PER_US = 790e6  # of a large product on an H200


@cache
def results(operation: str, folder: Path) -> Results:
    command = "make bench-kernels"
    return Results(folder / f"{operation}.json", gpu.header(command))


read_limit, launch_floor = cache(gpu.read_limit), cache(gpu.launch_floor)


def build(case: Case) -> Work:
    # late imports: one operation can be measured where another's rivals lack
    if isinstance(case, AttentionCase):
        from bench.kernels import attention

        return attention.build(case)
    from bench.kernels import small

    if isinstance(case, HeadCase):
        return small.build_head(case)
    assert isinstance(case, PoolCase)
    return small.build_pool(case)


ALL = [
    pytest.param(operation, case, id=f"{operation}: {case.name}")
    for operation, cases in CASES.items()
    for case in cases
]


@pytest.mark.parametrize("operation, case", ALL)
def bench_case(
    operation: str, case: Case, benchmark: Any, pytestconfig: pytest.Config
) -> None:
    file = results(operation, Path(pytestconfig.getoption("results")))
    if file.done(case.name):
        pytest.skip("measured already")
    work = build(case)
    assert not work.wrong, work.wrong
    limit_us = launch_floor()
    if work.io_bytes:
        bandwidth = work.io_bytes / read_limit()
        limit_us = max(bandwidth, work.flop / BF16_FLOP_PER_US)
    times = gpu.compare({"ours": work.ours, **work.rivals})
    entry = record(case.name, times.pop("ours"), times, limit_us)
    file.add(entry)

    graph, count = gpu.capture(work.ours)

    def replay() -> None:
        graph.replay()
        gpu.torch.cuda.synchronize()

    benchmark.pedantic(replay, rounds=gpu.REPLAYS, warmup_rounds=3)
    benchmark.extra_info |= entry | {
        "launches": count,
        "bytes": work.io_bytes,
        "read_limit_bytes_per_us": read_limit(),
    }
