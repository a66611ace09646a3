# SPDX-License-Identifier: Apache-2.0
"""Commands that start engines of their own take every option of `spexis serve`'s."""

import argparse
from typing import Any

from spexis_runtime.no_gpu.environment import configure_environment, gpu_count


def engine_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser that knows vLLM's engine options and ours."""
    configure_environment()
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from spexis_runtime.serve import add_own_options

    parser = FlexibleArgumentParser(prog=prog, description=description)
    vllm.AsyncEngineArgs.add_cli_args(parser)
    add_own_options(parser)
    return parser


def engine_args(args: argparse.Namespace) -> Any:
    """`spexis_runtime.AsyncEngineArgs` as given; not checked yet."""
    from spexis_runtime.async_llm import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(args)


def machine(num_workers: int, stages_per_gpu: int) -> str:
    """What an engine of so many workers runs on, for people."""
    if not gpu_count():
        import os
        import platform

        return f"{os.cpu_count()} {platform.machine()} cores, no GPU"
    from vllm.platforms import current_platform

    gpu = current_platform.get_device_name()
    if stages_per_gpu > 1:
        return f"one {gpu}, {stages_per_gpu} stages on it"
    return f"{num_workers} x {gpu}"
