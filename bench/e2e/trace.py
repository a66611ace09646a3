# SPDX-License-Identifier: Apache-2.0
"""A picture of what the stages' kernels do over some steps, and how stage 0 idles.

    python -m bench.e2e.trace --shape llama-8b --out bench/results/h200-halves

Writes trace_<shape>.json and .png. A step of stage 0 begins with the kernel that
chooses rows. Its idle time is that in which no kernel of stage 0 runs; collective
kernels, which wait for another stage, count neither as work nor as idle time.
"""

import argparse
import json
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench.e2e.shapes import SHAPES
from spexis_runtime.train.prompts import write_text

REQUESTS, CONTEXT, TOKENS, SECONDS = 32, 128, 1200, 0.5
FIRST_KERNEL = "_select_rows_kernel"


class Kernel(NamedTuple):
    name: str
    begin_us: float
    end_us: float


def start_trace(worker: Any) -> None:
    """For `LLM.collective_rpc`."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    worker.model_runner.trace = torch.profiler.profile(activities=activities)
    worker.model_runner.trace.start()


def stop_trace(worker: Any) -> list[tuple[str, float, float]]:
    """The kernels of this stage since `start_trace`: name, begin and end in us."""
    import torch

    trace = worker.model_runner.trace
    trace.stop()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def is_wait(name: str) -> bool:
    return "nccl" in name.lower()


def idle_us(kernels: list[Kernel], begin: float, end: float) -> float:
    """Microseconds of [begin, end) in which none of `kernels` runs."""
    idle, busy_until = 0.0, begin
    for kernel in sorted(kernels, key=lambda k: k.begin_us):
        if kernel.end_us <= begin or kernel.begin_us >= end:
            continue
        idle += max(0.0, kernel.begin_us - busy_until)
        busy_until = max(busy_until, kernel.end_us)
    return idle + max(0.0, end - busy_until)


def steps_of(kernels: list[Kernel]) -> list[tuple[float, float]]:
    starts = sorted(k.begin_us for k in kernels if FIRST_KERNEL in k.name)
    return list(zip(starts, starts[1:], strict=False))


def figures(kernels: list[Kernel]) -> dict[str, Any]:
    """Of stage 0: medians over its steps."""
    steps = steps_of(kernels)
    if len(steps) < 10:
        raise RuntimeError(f"{len(steps)} steps in the trace, at least 10 are needed")
    idle = [idle_us(kernels, *step) for step in steps]
    length = [end - begin for begin, end in steps]
    return {
        "steps": len(steps),
        "step_us": round(statistics.median(length), 1),
        "idle_us": round(statistics.median(idle), 1),
        "idle_share": round(
            statistics.median(i / n for i, n in zip(idle, length, strict=True)), 4
        ),
    }


def plot(stages: list[list[Kernel]], out: Path) -> None:
    """Four steps of stage 0, a lane a stage: work, and waits for the other stage."""
    from matplotlib.figure import Figure

    steps = steps_of(stages[0])
    middle = len(steps) // 2
    begin, end = steps[middle][0], steps[min(middle + 3, len(steps) - 1)][1]
    figure = Figure(figsize=(12, 1.2 + 0.8 * len(stages)), layout="constrained")
    axes = figure.subplots()
    for lane, kernels in enumerate(stages):
        for waiting, colour in ((True, "tab:grey"), (False, "tab:blue")):
            spans = [
                ((k.begin_us - begin) / 1e3, (k.end_us - k.begin_us) / 1e3)
                for k in kernels
                if is_wait(k.name) == waiting and begin <= k.begin_us < end
            ]
            height = 0.2 if waiting else 0.7
            axes.broken_barh(spans, (lane - height / 2, height), facecolors=colour)
    for start, _ in steps:
        if begin <= start < end:
            axes.axvline((start - begin) / 1e3, color="tab:red", linewidth=0.8)
    axes.set(
        xlabel="ms; red: stage 0 begins a step; grey: waits for another stage",
        yticks=range(len(stages)),
        yticklabels=[f"stage {i}" for i in range(len(stages))],
        xlim=(0, (end - begin) / 1e3),
    )
    axes.invert_yaxis()
    figure.savefig(out, dpi=120)


def record(args: argparse.Namespace) -> list[list[Kernel]]:
    from vllm import SamplingParams

    from bench.e2e.decode_throughput import Cell, engine, prompts_of
    from bench.e2e.replay import replay

    with engine(args.shape, False, 2, args.stages_per_gpu, args.kv_gib << 30) as llm:
        llm.collective_rpc(replay, args=(0.785,))
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts_of(Cell(REQUESTS, CONTEXT), 0)):
            llm.llm_engine.add_request(f"request-{i}", prompt, params)
        begin = time.perf_counter()
        while time.perf_counter() < begin + 2:
            llm.llm_engine.step()
        llm.collective_rpc(start_trace)
        begin = time.perf_counter()
        while time.perf_counter() < begin + SECONDS:
            llm.llm_engine.step()
        traced = llm.collective_rpc(stop_trace)
    return [[Kernel(*kernel) for kernel in stage] for stage in traced]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.e2e.trace",
        description="Trace the stages' kernels over some steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", required=True, choices=SHAPES)
    add("--out", type=Path, required=True, help="directory of the results")
    add("--stages-per-gpu", type=int, default=2)
    add("--kv-gib", type=int, default=8, help="KV cache of a stage")
    args = parser.parse_args(argv)
    from vllm.platforms import current_platform

    gpu = current_platform.get_device_name()
    stages = record(args)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(stages, args.out / f"trace_{args.shape}.png")
    report = {
        "command": f"python -m bench.e2e.trace --shape {args.shape}",
        "machine": f"one {gpu}, {args.stages_per_gpu} stages on it",
        "date": date.today().isoformat(),
        "versions": {n: version(n) for n in ("vllm", "ray", "torch", "triton")},
        "requests": REQUESTS,
        "stage_0": figures(stages[0]),
    }
    path = args.out / f"trace_{args.shape}.json"
    write_text(path, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["stage_0"]))


if __name__ == "__main__":
    main()
