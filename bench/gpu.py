# SPDX-License-Identifier: Apache-2.0
"""Honest times on a GPU: graphs over rotated inputs, medians, limits of this machine.

A Python launch takes longer than many kernels, so N launches are captured in a CUDA
graph. They go over inputs that together are larger than the second-level cache, which
would otherwise serve them. Times are compared inside one process only.
"""

import statistics
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LAUNCHES = 20  # in a graph, at least
REPLAYS = 15  # of which the median counts
RUNS = 3  # over all contestants in turn, of whose medians the median counts
DISTINCT_BYTES = 1_200_000_000  # of inputs; the second-level cache has 60 MB

Launch = Callable[[], Any]


def capture(launches: Sequence[Launch]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of all of `launches`, again and again, and how many it has."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()  # compiles
    torch.cuda.synchronize()
    count = max(LAUNCHES, len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            launches[i % len(launches)]()
    return graph, count


def replay_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of device time a launch, median of replays."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def compare(contestants: dict[str, Sequence[Launch]]) -> dict[str, float]:
    """Microseconds of each: three runs, in turn, so that none has the cooler GPU."""
    graphs = {name: capture(launches) for name, launches in contestants.items()}
    runs: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(RUNS):
        for name, (graph, count) in graphs.items():
            runs[name].append(replay_us(graph, count))
    return {name: statistics.median(times) for name, times in runs.items()}


def read_limit() -> float:
    """Bytes a microsecond that the memory is read with: a sum over 2 GiB."""
    data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    return data.nbytes / replay_us(*capture([data.sum]))


def launch_floor() -> float:
    """Microseconds of a launch that does next to nothing."""
    one = torch.zeros(1, device="cuda")
    return replay_us(*capture([lambda: one.add_(1)]))


def versions() -> dict[str, str]:
    """Of what takes part; what is not installed is left out."""
    found = {}
    for package in ("torch", "triton", "vllm", "flashinfer-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def header(command: str) -> dict[str, Any]:
    """What a file of results begins with."""
    return {
        "machine": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": command,
    }
