# SPDX-License-Identifier: Apache-2.0
"""Decode throughput of stock vLLM, by its default attention backend and by ours.

    python -m bench.e2e.drop_in --out bench/results/h200
    python -m bench.e2e.drop_in --out bench/results/h200 --ways greedy_head

One GPU, no pipeline, nothing speculated, vLLM's own `LLM`: what `--attention-backend
CUSTOM` alone makes of a model of noise; `greedy_head` also samples with `draft_head`.
Engines start in the order default, ours, default, ours; each case is written as it
ends, and what the file has is not measured again, so that a run which was cut off goes
on.

Prompts are not computed: vLLM's own `DecodeBenchConnector` fills their KV cache with
noise. Where this package is not installed, but on PYTHONPATH, vLLM finds CUSTOM through
the entry points that `python setup.py -q egg_info` writes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from bench.e2e.shapes import DUMMY_WEIGHTS, SHAPES
from spexis_runtime.train.prompts import write_text

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc of functions

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "ours": {"attention_config": {"backend": "CUSTOM"}},
    "greedy_head": {
        "attention_config": {"backend": "CUSTOM"},
        "worker_cls": "spexis_runtime.greedy_head.GreedyHeadWorker",
    },
}
RATIOS = {"ratio": "ours", "greedy_head_ratio": "greedy_head"}  # over the default
ROUNDS = 2
REQUESTS = (1, 8, 32, 64, 128, 256)
PROMPT_TOKENS, DECODE_TOKENS, WARM_UP_TOKENS = 928, 96, 8
BLOCK_SIZE = 16


def kv_cache_bytes(config: Any, requests: int) -> int:
    """Bytes of a bf16 KV cache for `requests`, with a block more than each needs."""
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    block = BLOCK_SIZE * 2 * config.num_key_value_heads * head_size * 2
    blocks = -(-(PROMPT_TOKENS + DECODE_TOKENS) // BLOCK_SIZE) + 1
    return config.num_hidden_layers * block * (requests * blocks + 1)


@contextmanager
def engine(config: Any, way: str, requests: list[int]) -> Iterator[Any]:
    """vLLM's own, with CUDA graphs for decode steps of just so many requests."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    with tempfile.TemporaryDirectory() as model:
        config.save_pretrained(model)
        llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=PROMPT_TOKENS + DECODE_TOKENS,
            max_num_seqs=max(requests),
            max_num_batched_tokens=2048,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=kv_cache_bytes(config, max(requests)),
            kv_transfer_config=KVTransferConfig(
                kv_connector="DecodeBenchConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"fill_std": 0.1},
            ),
            compilation_config=dict(
                mode=0,
                cudagraph_mode="FULL_DECODE_ONLY",
                cudagraph_capture_sizes=requests,
            ),
            **DUMMY_WEIGHTS,
            **WAYS[way],
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def what_runs(worker: Any) -> dict[str, str]:
    """Names of the attention backend and of the mode of CUDA graphs."""
    runner = worker.model_runner
    [[group]] = runner.attn_groups
    return {
        "attention": group.backend.get_name(),
        "cudagraph_mode": runner.cudagraph_manager.cudagraph_mode.name,
    }


def prompts_of(requests: int, start: int) -> list[dict[str, list[int]]]:
    """No two begin alike, nor do those of another `start`."""
    return [
        {
            "prompt_token_ids": [
                start + 3,
                i + 3,
                *((7 * i + 13 * j) % 200 + 3 for j in range(PROMPT_TOKENS - 2)),
            ]
        }
        for i in range(requests)
    ]


def step_times(llm: Any, requests: int, max_tokens: int, start: int) -> list[float]:
    """Seconds between steps that each gave every request a token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    for i, prompt in enumerate(prompts_of(requests, start)):
        llm.llm_engine.add_request(str(i), prompt, params)
    stamps, tokens = [], 0
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        if len(outputs) == requests:
            stamps.append(time.perf_counter())
    if tokens != requests * max_tokens or len(stamps) < max_tokens // 2:
        raise RuntimeError(
            f"{requests} requests of {max_tokens} tokens gave {tokens} tokens, all of "
            f"them one in {len(stamps)} steps"
        )
    return [b - a for a, b in zip(stamps, stamps[1:], strict=False)]


def tokens_per_second(llm: Any, requests: int, start: int) -> float:
    step_times(llm, requests, WARM_UP_TOKENS, start)  # compiles at first use
    times = step_times(llm, requests, DECODE_TOKENS, start + 1)
    return round(requests * len(times) / sum(times), 1)


class Results:
    """The file of all cases; one of a shape and a number of requests each."""

    def __init__(self, path: Path):
        self.path = path
        self.report: dict[str, Any] = {"cases": []}
        if path.exists():
            self.report = json.loads(path.read_text())

    def case(self, shape: str, requests: int) -> dict[str, Any]:
        """That of the file, or a new one without figures."""
        for case in self.report["cases"]:
            if (case["shape"], case["requests"]) == (shape, requests):
                return case
        case = {
            "shape": shape,
            "requests": requests,
            "context": [PROMPT_TOKENS, PROMPT_TOKENS + DECODE_TOKENS],
            "unit": "tok/s",
            "engines": {},
        }
        self.report["cases"].append(case)
        return case

    def add(
        self, shape: str, requests: int, way: str, figure: float, engine: dict[str, str]
    ) -> None:
        from vllm.platforms import current_platform

        case = self.case(shape, requests)
        case["engines"][way] = engine
        case.setdefault(way, []).append(figure)
        median = {w: statistics.median(case[w]) for w in WAYS if w in case}
        for name, way in RATIOS.items():
            if median.keys() >= {"default", way}:
                case[name] = round(median[way] / median["default"], 3)
        self.report = {
            "command": "python -m bench.e2e.drop_in",
            "machine": current_platform.get_device_name(),
            "date": date.today().isoformat(),
            "versions": {n: version(n) for n in ("vllm", "torch", "triton")},
            "cases": self.report["cases"],
        }
        write_text(self.path, json.dumps(self.report, indent=1) + "\n")


def run(
    results: Results, ways: list[str], name: str, config: Any, requests: list[int]
) -> None:
    """Measure what the file lacks of a shape, engine by engine."""
    for number in range(ROUNDS):
        for way in ways:
            missing = [
                n for n in requests if len(results.case(name, n).get(way, [])) <= number
            ]
            if not missing:
                continue
            with engine(config, way, requests) as llm:
                [runs] = llm.collective_rpc(what_runs)
                for i, n in enumerate(missing):
                    figure = tokens_per_second(llm, n, start=2 * i)
                    results.add(name, n, way, figure, runs)
                    print(
                        f"{name}, {n} requests, {way} ({runs}): {figure} tok/s",
                        flush=True,
                    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.e2e.drop_in",
        description="Measure merged_attention in stock vLLM beside its default.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of drop_in.json")
    shapes = ["llama-8b", "qwen3-32b"]
    add("--shapes", nargs="+", choices=SHAPES, default=shapes)
    add("--ways", nargs="+", choices=WAYS, default=["default", "ours"])
    add("--requests", nargs="+", type=int, default=list(REQUESTS))
    args = parser.parse_args(argv)
    if min(args.requests) < 1:
        parser.error(f"--requests must be at least 1, got {min(args.requests)}")
    if "spexis" not in entry_points(group="vllm.general_plugins").names:
        parser.error(
            "vLLM would not find the backend CUSTOM: spexis is not installed. Install "
            "it, or run `python setup.py -q egg_info` where it is on PYTHONPATH"
        )
    results = Results(args.out / "drop_in.json")
    for shape in args.shapes:
        run(results, args.ways, *SHAPES[shape], sorted(set(args.requests)))


if __name__ == "__main__":
    main()
