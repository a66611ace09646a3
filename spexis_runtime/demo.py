# SPDX-License-Identifier: Apache-2.0
"""The demo: chat prompts answered over two stages, with speculation and without.

    spexis demo

Prints the answers and what speculation changed, and writes `demo_report.json`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from spexis_runtime.demo_prompts import DEMO_PROMPTS
from spexis_runtime.iteration_log import (
    acceptance,
    accepted_of_all_drafts,
    read_iterations,
    tokens_per_step,
)
from spexis_runtime.no_gpu.environment import configure_environment, gpu_count, use_cpu
from spexis_runtime.tools.smollm2 import SmolLM2Error, ensure_smollm2

NUM_STAGES = 2
MAX_NUM_SEQS = 4
TEMPERATURES = 0.0, 0.7
ADAPTER = Path(__file__).parent / "adapters" / "smollm2-135m-instruct-layer15"

console = Console()


class Answers(NamedTuple):
    texts: list[str]
    token_ids: list[list[int]]
    iterations: list[dict[str, Any]]
    seconds: float

    @property
    def rows_per_step(self) -> float:
        """Decode rows of a stage step, empty steps included."""
        rows = sum(i["normal_rows"] + i["draft_rows"] for i in self.iterations)
        return rows / max(len(self.iterations), 1)


def answer(model: Path, exit_model: Path | None, max_tokens: int) -> list[Answers]:
    """Answer the demo's prompts in fp32, at each of `TEMPERATURES`.

    Times the answers, not the start.
    """
    from vllm import SamplingParams

    from spexis_runtime import LLM

    chats: Sequence[Any] = [[{"role": "user", "content": p}] for p in DEMO_PROMPTS]
    answers = []
    with tempfile.TemporaryDirectory() as log_dir:
        llm = LLM(
            str(model),
            exit_model=exit_model,
            pipeline_parallel_size=NUM_STAGES,
            log_dir=log_dir,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=256 << 20,
            attention_config={"backend": "CUSTOM"},
            enforce_eager=True,
        )
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
                for i in range(len(chats))
            ]
            before = len(read_iterations(log_dir))
            begin = time.perf_counter()
            outputs = [output.outputs[0] for output in llm.chat(chats, params)]
            seconds = time.perf_counter() - begin
            answers.append(
                Answers(
                    [output.text for output in outputs],
                    [list(output.token_ids) for output in outputs],
                    read_iterations(log_dir)[before:],
                    seconds,
                )
            )
        llm.llm_engine.engine_core.shutdown()
    return answers


def report(plain: list[Answers], speculative: list[Answers]) -> dict[str, Any]:
    """Figures of both runs: of the greedy answers, and beside them of the sampled."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "pipeline_parallel_size": NUM_STAGES,
        "requests": len(DEMO_PROMPTS),
        **compare(plain[0], speculative[0]),
        f"at_temperature_{TEMPERATURES[1]}": compare(plain[1], speculative[1]),
    }


def compare(plain: Answers, speculative: Answers) -> dict[str, Any]:
    """Figures of one pass; the prediction is equation (2) at the measured theta."""
    theta, n = acceptance(speculative.iterations), NUM_STAGES
    return {
        "tokens": sum(map(len, speculative.token_ids)),
        "identical_to_plain": speculative.token_ids == plain.token_ids,
        "acceptance": round(theta, 4),
        "accepted_of_all_drafts": round(
            accepted_of_all_drafts(speculative.iterations), 4
        ),
        "tokens_per_step": {
            "pp": round(tokens_per_step(plain.iterations), 4),
            "sp": round(tokens_per_step(speculative.iterations), 4),
        },
        "predicted_tokens_per_step_ratio": round(n / (n - theta * (n - 1)), 4),
        "seconds": {
            "pp": round(plain.seconds, 2),
            "sp": round(speculative.seconds, 2),
        },
    }


def show(
    title: str, figures: dict[str, Any], plain: Answers, speculative: Answers
) -> None:
    table = Table(title=title)
    for column in ("", "plain PP", "speculative"):
        table.add_column(column, justify="left" if not column else "right")
    steps = figures["tokens_per_step"]
    seconds = figures["seconds"]
    for name, pp, sp in (
        ("tokens", sum(map(len, plain.token_ids)), figures["tokens"]),
        ("acceptance", "-", f"{figures['acceptance']:.1%}"),
        ("accepted of all drafts", "-", f"{figures['accepted_of_all_drafts']:.1%}"),
        (
            "rows per stage step",
            f"{plain.rows_per_step:.2f}",
            f"{speculative.rows_per_step:.2f}",
        ),
        ("verified tokens per stage step", f"{steps['pp']:.2f}", f"{steps['sp']:.2f}"),
        ("seconds", seconds["pp"], seconds["sp"]),
    ):
        table.add_row(name, str(pp), str(sp))
    console.print(table)
    console.print(
        f"verified tokens per step: {steps['sp'] / steps['pp']:.2f}x of plain PP; "
        f"{figures['predicted_tokens_per_step_ratio']:.2f}x predicted from the "
        "acceptance (equation 2)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="spexis demo",
        description="Answer chat prompts over two stages, with speculation and not.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_report.json"), help="the report"
    )
    args = parser.parse_args(argv)
    if args.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, got {args.max_tokens}")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no directory {args.out.absolute().parent}")
    gpus = gpu_count()
    if gpus < NUM_STAGES:
        console.print(
            f"{gpus} GPUs found, {NUM_STAGES} stages wanted: taking the CPU path"
        )
        use_cpu()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    configure_environment()

    console.rule("1 of 3: the model")
    try:
        model = ensure_smollm2(dtype="float32")
    except SmolLM2Error as error:
        sys.exit(f"error: {error}")
    console.print(f"SmolLM2-135M-Instruct is in {model}")
    console.rule("2 of 3: two stages, speculating")
    speculative = answer(model, ADAPTER, args.max_tokens)
    for prompt, text in zip(DEMO_PROMPTS, speculative[0].texts, strict=True):
        console.print(f"\n> {prompt}", style="bold", markup=False)
        console.print(text.strip(), markup=False)
    console.rule("3 of 3: the same two stages, plain pipeline parallelism")
    plain = answer(model, None, args.max_tokens)

    figures = report(plain, speculative)
    show("Greedy answers", figures, plain[0], speculative[0])
    sampled = figures[f"at_temperature_{TEMPERATURES[1]}"]
    show(f"At temperature {TEMPERATURES[1]}", sampled, plain[1], speculative[1])
    scratch = args.out.with_name(args.out.name + ".tmp")
    scratch.write_text(json.dumps(figures, indent=2) + "\n")
    scratch.replace(args.out)
    console.print(f"wrote {args.out}")
    if not (figures["identical_to_plain"] and sampled["identical_to_plain"]):
        console.print("the two runs differ: speculation is not lossless", style="red")
        return 1
    console.print("every token is the same as without speculation", style="green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
