# SPDX-License-Identifier: Apache-2.0
"""`spexis profile`: step times of a model on this machine, for plans and simulations.

    spexis profile --model DIR --exit-model ADAPTER --layouts 2x1 1x2 --out TIMES.json

Starts an engine for each kind of stage, PP x TP, plain and with drafts, and writes what
`lookahead/step_times.py` describes after each; what the file has already is left out.
Decode rows have contexts of one token: what attention adds is not in the times.
"""

import argparse
import asyncio
import dataclasses
import shlex
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from spexis_runtime.adapter import AdapterError
from spexis_runtime.config import SpexisConfigError
from spexis_runtime.engine_arguments import engine_args, engine_parser, machine
from spexis_runtime.engine_options import DEFAULT_MAX_NUM_SEQS
from spexis_runtime.lookahead.step_times import (
    Kind,
    StageTimes,
    StepTimes,
    StepTimesError,
    describe,
    read_step_times,
    write_step_times,
)
from spexis_runtime.no_gpu.environment import gpu_count
from spexis_runtime.train.arguments import errors_in_one_line

EXTENSION = "spexis_runtime.step_profile.ProfileExtension"


def layout(text: str) -> tuple[int, int]:
    """
    >>> layout("2x4")
    (2, 4)
    """
    pipeline, cross, tensor = text.partition("x")
    if not (cross and pipeline.isdecimal() and tensor.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be PPxTP, like 2x1, got {text!r}")
    if min(int(pipeline), int(tensor)) < 1:
        raise argparse.ArgumentTypeError(f"sizes must be at least 1, got {text!r}")
    return int(pipeline), int(tensor)


def kinds_of(layouts: list[tuple[int, int]], exit_model: str | None) -> list[Kind]:
    """Plain, and with drafts where there are stages to speculate past.

    >>> kinds_of([(2, 1), (1, 2)], "adapter")
    [(2, 1, False), (2, 1, True), (1, 2, False)]
    """
    kinds: list[Kind] = []
    for pipeline, tensor in layouts:
        kinds.append((pipeline, tensor, False))
        if exit_model is not None and pipeline > 1:
            kinds.append((pipeline, tensor, True))
    return list(dict.fromkeys(kinds))


def args_of(kind: Kind, base: Any) -> Any:
    """The engine's arguments for `kind`; raises what they are refused with."""
    pipeline, tensor, speculative = kind
    made = dataclasses.replace(
        base,
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        exit_model=base.exit_model if speculative else None,
        # what the engine would choose by these very times does not matter here
        row_budget=(base.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
        if speculative
        else "auto",
        drop_ratio=None,
        admission="vllm",
        stages_per_gpu=base.stages_per_gpu if pipeline > 1 else 1,
        worker_extension_cls=EXTENSION,
    )
    found = gpu_count()
    if found and pipeline * tensor > found * made.stages_per_gpu:
        raise SpexisConfigError(
            f"{describe(kind)} needs {pipeline * tensor} GPUs, found {found}"
        )
    made.for_vllm()
    return made


def slowest(stages: list[dict[str, list[Any]]]) -> StageTimes:
    """Of all stages; prefill as what it adds to a step with the fewest rows.

    Prompts so short that nothing of it was measured are left out.
    """
    times = {
        name: [max(column) for column in zip(*(s[name] for s in stages), strict=True)]
        for name in stages[0]
    }
    added = [
        (tokens, ms - times["milliseconds"][0])
        for tokens, ms in zip(
            times["prefill_tokens"], times["prefill_milliseconds"], strict=True
        )
        if ms > times["milliseconds"][0]
    ]
    return StageTimes(
        tuple(times["rows"]),
        tuple(round(ms, 4) for ms in times["milliseconds"]),
        tuple(tokens for tokens, _ in added),
        tuple(round(ms, 4) for _, ms in added),
    )


async def measure(args: Any, drafting: bool) -> StageTimes:
    """Start an engine, ask all its stages at once, end it."""
    from spexis_runtime.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(args)
    try:
        return slowest(await engine.collective_rpc("profile_stage", args=(drafting,)))
    finally:
        engine.shutdown()


def start_file(path: Path, model: str, on: str, source: str) -> StepTimes:
    """What is there already, or nothing; StepTimesError if it is another's."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return StepTimes(on, model, source, {})
    found = read_step_times(path)
    if (found.machine, found.model) != (on, model):
        raise StepTimesError(
            f"{path} has the times of {found.model} on {found.machine!r}, not of "
            f"{model} on {on!r}: give another file"
        )
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = engine_parser(
        "spexis profile",
        "Measure a stage's step times by rows, for `spexis plan` and `simulate`.",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON of the times")
    parser.add_argument(
        "--layouts",
        type=layout,
        nargs="+",
        help="PPxTP each; left out: that of the other options",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    source = f"{shlex.join(['spexis', 'profile', *argv])}, {date.today()}"
    with errors_in_one_line():
        try:
            base = engine_args(args)
            own = (base.pipeline_parallel_size, base.tensor_parallel_size)
            layouts = args.layouts or [own]
            kinds = kinds_of(layouts, base.exit_model)
            todo = {kind: args_of(kind, base) for kind in kinds}
            workers = max(pipeline * tensor for pipeline, tensor in layouts)
            on = machine(workers, base.stages_per_gpu)
            model = str(base.served_model_name or Path(base.model).name)
            times = start_file(args.out, model, on, source)
        except (SpexisConfigError, AdapterError, StepTimesError) as error:
            sys.exit(f"error: {error}")
        missing = [kind for kind in kinds if kind not in times.stages]
        for number, kind in enumerate(missing, 1):
            print(f"[{number}/{len(missing)}] {describe(kind)}: starts", flush=True)
            start = time.monotonic()
            stage = asyncio.run(measure(todo[kind], drafting=kind[2]))
            times.stages[kind] = stage
            write_step_times(times, args.out)
            print(
                f"[{number}/{len(missing)}] {describe(kind)}: "
                f"{stage.milliseconds[0]:.2f} ms with {stage.rows[0]} row, "
                f"{stage.milliseconds[-1]:.2f} ms with {stage.rows[-1]} "
                f"({time.monotonic() - start:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
