# SPDX-License-Identifier: Apache-2.0
"""Decode throughput of speculative and of plain pipeline parallelism, cell by cell.

    python -m bench.e2e.decode_throughput --shape qwen3-32b --out DIR
    python -m bench.e2e.decode_report DIR

Runs engines one after another, PP-SP-PP-SP, and writes a file for each into DIR/raw. A
cell that is there already is left out, so that a run which was cut off goes on. Weights
are noise and drafts are replayed (`bench/e2e/replay.py`).

Plain PP runs each cell twice. *Split*: prompts are new and enter 1,024 tokens a step,
so that the requests fall into N groups and every stage is busy. *Bunched*: the prompts
are in the prefix cache and enter in one step, so that one stage is busy at a time.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench.e2e.shapes import DUMMY_WEIGHTS, SHAPES, write_shape
from spexis_runtime.train.prompts import write_text

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc of functions

ROUNDS = ("pp-1", "sp-1", "pp-2", "sp-2")
THETAS = (0.596, 0.785, 0.9)
MAX_NUM_SEQS = 256
BLOCK_SIZE = 16
DECODE_TOKENS = 112  # of each request


class Cell(NamedTuple):
    requests: int
    context: int  # tokens of a prompt, and one more


CELLS = [
    *(Cell(requests, 128) for requests in (16, 32, 64, 128, 256)),
    *(Cell(requests, 1024) for requests in (16, 32, 64, 128)),
]
# where fixed budgets are swept, as shares of the requests
SWEPT = [Cell(32, 128), Cell(128, 128), Cell(32, 1024), Cell(128, 1024)]
BUDGETS = (0.5, 0.625, 0.75, 0.875, 1.0)


class Case(NamedTuple):
    cell: Cell
    how: str  # "split" or "bunched" of plain PP; "replay" of ours
    theta: float | None
    row_budget: int | str | None  # None: plain PP


def cases(plain: bool, cells: list[Cell]) -> Iterator[Case]:
    for cell in cells:
        if plain:
            yield Case(cell, "split", None, None)
            yield Case(cell, "bunched", None, None)
            continue
        for theta in THETAS:
            yield Case(cell, "replay", theta, "auto")
        if cell in SWEPT:
            for share in BUDGETS:
                budget = int(share * cell.requests)
                yield Case(cell, "replay", THETAS[1], budget)


def steady(iterations: list[dict[str, Any]], cell: Cell, stages: int) -> list[dict]:
    """Ticks in which every request decodes, after the pipeline has filled."""
    full = [
        i
        for i, tick in enumerate(iterations)
        if tick["running"] == cell.requests and not tick["prefill_tokens"]
    ]
    last_prefill = max(
        (i for i, tick in enumerate(iterations) if tick["prefill_tokens"]), default=0
    )
    window = [i for i in full if i > last_prefill + 2 * stages]
    if not window:
        raise RuntimeError(f"{cell}: no tick in which all requests decode")
    return iterations[window[0] : window[-1] + 1]


def figures(ticks: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = sum(tick["milliseconds"] for tick in ticks) / 1e3
    tokens = sum(tick["valid_rows"] for tick in ticks)
    rows = [tick["normal_rows"] + tick["draft_rows"] for tick in ticks]
    fed = [n for n in rows if n]
    right = sum(tick["drafts_after_valid"] for tick in ticks)
    accepted = sum(tick["accepted_drafts"] for tick in ticks)
    return {
        "ticks": len(ticks),
        "tok_s": round(tokens / seconds, 1),
        "step_ms": round(seconds * 1e3 / len(ticks), 3),
        "rows": round(sum(fed) / max(len(fed), 1), 2),  # of a step that has any
        "empty_ticks": len(rows) - len(fed),
        "tokens_per_step": round(tokens / len(ticks), 3),
        "acceptance": round(accepted / right, 4) if right else None,
        "kv_blocks": max(tick["kv_blocks_used"] for tick in ticks),
    }


@contextmanager
def engine(shape: str, plain: bool, stages: int, per_gpu: int, kv_bytes: int) -> Any:
    from bench.e2e.replay import constant_output
    from spexis_runtime import LLM

    with tempfile.TemporaryDirectory() as folder:
        files = write_shape(SHAPES[shape], Path(folder), stages)
        llm = LLM(
            str(files.model),
            exit_model=None if plain else files.exit_model,
            pipeline_parallel_size=stages,
            stages_per_gpu=per_gpu,
            log_dir=str(Path(folder) / "log"),
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=1024,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=kv_bytes,
            enable_prefix_caching=True,
            compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"),
            **DUMMY_WEIGHTS,
        )
        try:
            llm.collective_rpc(constant_output)
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def prompts_of(cell: Cell, start: int) -> list[dict[str, list[int]]]:
    """No two begin alike, nor do those of another `start`; all but one token cached."""
    length = cell.context // BLOCK_SIZE * BLOCK_SIZE + 1
    return [
        {
            "prompt_token_ids": [
                start % 1000 + 3,
                i + 3,
                *((7 * i + 13 * j) % 1000 + 3 for j in range(length - 2)),
            ]
        }
        for i in range(cell.requests)
    ]


def measure(llm: Any, case: Case, stages: int, start: int) -> dict[str, Any]:
    from vllm import SamplingParams

    from bench.e2e.replay import OUTPUT_TOKEN, replay, set_row_budget
    from spexis_runtime.iteration_log import read_iterations

    if case.theta is not None:
        llm.collective_rpc(replay, args=(case.theta,))
        llm.collective_rpc(set_row_budget, args=(case.row_budget,))
    prompts = prompts_of(case.cell, start)
    if case.how == "bunched":
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    log_dir = llm.spexis_config.log_dir
    before = len(read_iterations(log_dir))
    params = SamplingParams(
        temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [OUTPUT_TOKEN] * DECODE_TOKENS
    if any(list(o.outputs[0].token_ids) != expected for o in outputs):
        raise RuntimeError(f"{case}: an output that the model cannot have made")
    ticks = steady(read_iterations(log_dir)[before:], case.cell, stages)
    result = figures(ticks)
    busy = 1 - result["empty_ticks"] / result["ticks"]
    if case.how == "split" and busy < 0.9:
        raise RuntimeError(f"{case}: stages busy in {busy:.0%} of the ticks, not split")
    return result


def run_round(name: str, args: argparse.Namespace, cells: list[Cell]) -> None:
    """One engine: measure what its file does not have yet."""
    path = args.out / "raw" / f"{args.shape}-{name}.json"
    done = json.loads(path.read_text()) if path.exists() else {"cases": []}
    have = {json.dumps(result["case"]) for result in done["cases"]}
    plain = name.startswith("pp")
    missing = [
        (start, case)
        for start, case in enumerate(cases(plain, cells))
        if json.dumps(case) not in have
    ]
    if not missing:
        return
    from vllm.platforms import current_platform

    sharing = args.stages_per_gpu
    gpu = current_platform.get_device_name()
    done |= {
        "shape": args.shape,
        "stages": args.stages,
        "machine": f"one {gpu}, {sharing} stages on it" if sharing > 1 else gpu,
        "date": date.today().isoformat(),
        "versions": {n: version(n) for n in ("vllm", "ray", "torch", "triton")},
    }
    with engine(args.shape, plain, args.stages, sharing, args.kv_gib << 30) as llm:
        for start, case in missing:
            result = measure(llm, case, args.stages, start)
            done["cases"].append({"case": case, **result})
            print(name, case, json.dumps(result), flush=True)
            write_text(path, json.dumps(done, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.e2e.decode_throughput",
        description="Measure decode throughput of SP and PP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", required=True, choices=SHAPES)
    add("--out", type=Path, required=True, help="directory of the results")
    add("--stages", type=int, default=2)
    add("--stages-per-gpu", type=int, default=2)
    add("--kv-gib", type=int, default=20, help="KV cache of a stage")
    add("--rounds", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    add("--requests", nargs="+", type=int, help="only cells of so many")
    add("--contexts", nargs="+", type=int, help="only cells of such prompts")
    args = parser.parse_args(argv)
    cells = [
        cell
        for cell in CELLS
        if cell.requests in (args.requests or [cell.requests])
        and cell.context in (args.contexts or [cell.context])
    ]
    for name in args.rounds:
        run_round(name, args, cells)


if __name__ == "__main__":
    main()
