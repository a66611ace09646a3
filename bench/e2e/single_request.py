# SPDX-License-Identifier: Apache-2.0
"""One request at a time over two stages on the halves of one GPU: PP, SP, PP, SP.

    python -m bench.e2e.single_request --out bench/results/h200-halves

A lone request is what speculative parallelism must not slow down: plain pipeline
parallelism serves it at every second step of a stage. Two models: the shape of
Llama-3.1-8B with weights and an adapter of noise, replay at the paper's accuracy of
that model's exit (.759), and SmolLM2-135M with its shipped adapter.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc of functions

NUM_STAGES = 2
PROMPT_TOKENS, SHORT, LONG, REPEATS = 128, 16, 272, 3
LLAMA_8B_THETA = 0.759  # the paper's, exit at one half


class Case(NamedTuple):
    name: str
    model: Path
    exit_model: Path
    options: dict[str, Any]
    theta: float | None = None  # of replay


def smollm2(scratch: Path) -> Case:
    from spexis_runtime.demo import ADAPTER
    from spexis_runtime.tools.smollm2 import ensure_smollm2

    return Case("SmolLM2-135M-Instruct", ensure_smollm2(), ADAPTER, {})


def llama_8b(scratch: Path) -> Case:
    from bench.e2e.shapes import DUMMY_WEIGHTS, SHAPES, write_shape

    files = write_shape(SHAPES["llama-8b"], scratch, NUM_STAGES)
    name = f"{SHAPES['llama-8b'].name}, replay at theta {LLAMA_8B_THETA}"
    return Case(name, *files, DUMMY_WEIGHTS, LLAMA_8B_THETA)


CASES = {"llama-8b": llama_8b, "smollm2": smollm2}


def measure(case: Case, text: list[int] | None) -> tuple[dict[str, Any], list[int]]:
    """Milliseconds a token of one greedy request, from two lengths of output.

    Args:
        text: what plain PP made of the prompt; None: this is plain PP.

    Returns the figures, and the prompt with the output.
    """
    from vllm import SamplingParams

    from bench.e2e.replay import constant_output, replay
    from spexis_runtime import LLM
    from spexis_runtime.iteration_log import acceptance, read_iterations

    prompt = {"prompt_token_ids": [(7 * i) % 1000 + 3 for i in range(PROMPT_TOKENS)]}
    with tempfile.TemporaryDirectory() as log_dir:
        llm = LLM(
            str(case.model),
            exit_model=None if text is None else case.exit_model,
            pipeline_parallel_size=NUM_STAGES,
            stages_per_gpu=NUM_STAGES,
            log_dir=log_dir,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=8,
            kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=False,
            compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"),
            **case.options,
        )

        if case.theta is not None:
            llm.collective_rpc(constant_output)
            if text is not None:
                llm.collective_rpc(replay, args=(case.theta,))

        def answer(max_tokens: int) -> list[int]:
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            [output] = llm.generate([prompt], params, use_tqdm=False)
            return list(output.outputs[0].token_ids)

        def seconds(max_tokens: int) -> float:
            begin = time.perf_counter()
            answer(max_tokens)
            return time.perf_counter() - begin

        answer(SHORT)  # compiles what is compiled at first use
        answered = prompt["prompt_token_ids"] + answer(LONG)
        before = len(read_iterations(log_dir))
        times = [
            (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3
            for _ in range(REPEATS)
        ]
        iterations = read_iterations(log_dir)[before:]
        llm.llm_engine.engine_core.shutdown()
    tokens = sum(line["valid_rows"] for line in iterations)
    figures = {
        "ms_per_token": [round(t, 3) for t in times],
        "acceptance": round(acceptance(iterations), 4),
        "steps_per_token": round(len(iterations) / tokens, 3),
        "same_text_as_pp": None if text is None else answered == text,
    }
    return figures, answered


def run(case: Case) -> dict[str, Any]:
    """Both ways, twice in turn; `ratio` is the speed of ours over plain PP's."""
    runs: dict[str, list[dict[str, Any]]] = {"pp": [], "sp": []}
    text: list[int] = []
    for name in ("pp", "sp") * 2:
        figures, answered = measure(case, text if name == "sp" else None)
        text = text or answered
        runs[name].append(figures)
        print(case.name, name, json.dumps(figures), flush=True)
    median = {
        name: statistics.median(t for r in results for t in r["ms_per_token"])
        for name, results in runs.items()
    }
    return {
        "case": case.name,
        "pp_ms_per_token": median["pp"],
        "sp_ms_per_token": median["sp"],
        "ratio": round(median["pp"] / median["sp"], 3),
        "runs": runs,
    }


def main() -> None:
    from vllm.platforms import current_platform

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the JSON")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python -m bench.e2e.single_request",
        "machine": f"two halves of one {current_platform.get_device_name()}, MPS",
        "date": date.today().isoformat(),
        "versions": {n: version(n) for n in ("vllm", "ray", "torch", "triton")},
        "cases": [],
    }
    if args.cases != list(CASES):
        report["command"] += " --cases " + " ".join(args.cases)
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "single_request.json"
    for name in args.cases:
        with tempfile.TemporaryDirectory() as scratch:
            report["cases"].append(run(CASES[name](Path(scratch))))
        scratch_file = out.with_suffix(".tmp")
        scratch_file.write_text(json.dumps(report, indent=2) + "\n")
        scratch_file.replace(out)


if __name__ == "__main__":
    main()
