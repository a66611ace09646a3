# SPDX-License-Identifier: Apache-2.0
"""One request at a time over two stages on the halves of one GPU: PP, SP, PP, SP.

    python -m bench.e2e.single_request --out bench/results/h200-halves

A lone request is what speculative parallelism must not slow down: plain pipeline
parallelism serves it at every second step of a stage. Two models: SmolLM2-135M with its
shipped adapter, and the shape of Llama-3.1-8B with weights and an adapter of noise,
whose drafts are all wrong, so that nothing is gained and all of the cost shows.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

NUM_STAGES = 2
PROMPT_TOKENS, SHORT, LONG, REPEATS = 128, 16, 272, 3
LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)


class Case(NamedTuple):
    name: str
    model: Path
    exit_model: Path
    options: dict[str, Any]


def smollm2(scratch: Path) -> Case:
    from spexis_runtime.demo import ADAPTER
    from spexis_runtime.tools.smollm2 import ensure_smollm2

    return Case("SmolLM2-135M-Instruct", ensure_smollm2(), ADAPTER, {})


def llama_8b(scratch: Path) -> Case:
    """A config, and an adapter of noise."""
    import torch
    from transformers import LlamaConfig

    from spexis_runtime.adapter.config import (
        AdapterConfig,
        expected_tensors,
        save_adapter,
    )

    model = scratch / "llama-3.1-8b-shape"
    config = LlamaConfig(**LLAMA_8B)
    config.save_pretrained(model)
    adapter = AdapterConfig.for_model(config, config.num_hidden_layers // 2)
    torch.manual_seed(0)
    tensors = {
        name: (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()
        for name, shape in expected_tensors(adapter).items()
    }
    exit_model = save_adapter(scratch / "adapter", adapter, tensors)
    options = dict(load_format="dummy", skip_tokenizer_init=True)
    return Case("Llama-3.1-8B shape, drafts all wrong", model, exit_model, options)


CASES = {"smollm2": smollm2, "llama-8b": llama_8b}


def measure(case: Case, speculative: bool) -> dict[str, Any]:
    """Milliseconds a token of one greedy request, from two lengths of output."""
    from vllm import SamplingParams

    from spexis_runtime import LLM
    from spexis_runtime.iteration_log import acceptance, read_iterations

    prompt = {"prompt_token_ids": [(7 * i) % 1000 + 3 for i in range(PROMPT_TOKENS)]}
    with tempfile.TemporaryDirectory() as log_dir:
        llm = LLM(
            str(case.model),
            exit_model=case.exit_model if speculative else None,
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

        def seconds(max_tokens: int) -> float:
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            begin = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            return time.perf_counter() - begin

        seconds(SHORT)  # compiles what is compiled at first use
        seconds(LONG)
        before = len(read_iterations(log_dir))
        times = [
            (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3
            for _ in range(REPEATS)
        ]
        iterations = read_iterations(log_dir)[before:]
        llm.llm_engine.engine_core.shutdown()
    tokens = sum(line["valid_rows"] for line in iterations)
    return {
        "ms_per_token": [round(t, 3) for t in times],
        "acceptance": round(acceptance(iterations), 4),
        "steps_per_token": round(len(iterations) / tokens, 3),
    }


def run(case: Case) -> dict[str, Any]:
    """Both ways, twice in turn; `ratio` is the speed of ours over plain PP's."""
    runs: dict[str, list[dict[str, Any]]] = {"pp": [], "sp": []}
    for name in ("pp", "sp") * 2:
        runs[name].append(measure(case, speculative=name == "sp"))
        print(case.name, name, json.dumps(runs[name][-1]), flush=True)
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
        "command": " ".join(["python -m bench.e2e.single_request", *sys.argv[1:]]),
        "machine": f"two halves of one {current_platform.get_device_name()}, MPS",
        "date": date.today().isoformat(),
        "versions": {n: version(n) for n in ("vllm", "ray", "torch", "triton")},
        "cases": [],
    }
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
