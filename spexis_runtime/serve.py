# SPDX-License-Identifier: Apache-2.0
"""`spexis serve`: vLLM's OpenAI-compatible server, with speculation.

vLLM's own parser, checks and server; here its options are completed with ours.
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from spexis_runtime.config import SpexisConfigError
from spexis_runtime.no_gpu.environment import configure_environment
from spexis_runtime.prototype_options import add_prototype_options, translate
from spexis_runtime.versions import UnsupportedVersionError, check_versions

DESCRIPTION = """vLLM's OpenAI-compatible API server, with the stages of its pipeline
speculating past each other. Takes every option of `vllm serve`; those of speculation
are under --help=Spexis. Without --exit-model it is vLLM's plain pipeline parallelism.
"""


def row_budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


def add_own_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Spexis", "Speculation over a pipeline's stages.")
    group.add_argument(
        "--exit-model",
        metavar="DIR",
        help="Directory of an exit adapter trained for the model. The first stage gets "
        "its exit_layer layers, the others share the rest.",
    )
    group.add_argument(
        "--row-budget",
        type=row_budget,
        default="auto",
        metavar="{auto,ROWS}",
        help="Decode rows of a stage step, at least ceil(max_num_seqs / "
        "pipeline_parallel_size). auto: what promises most tokens a second by step "
        "times measured at start; without a GPU, every running request.",
    )
    group.add_argument(
        "--drop-ratio",
        type=float,
        help="The paper's alpha, in [0, 1), instead of a budget: of B running requests "
        "B / (1 + alpha (N - 1)) rows are run, least confident drafts dropped first.",
    )
    group.add_argument(
        "--admission",
        choices=("vllm", "history"),
        default="vllm",
        help="Which waiting requests start: by vLLM's rule, or also by the history of "
        "lengths, if KV memory will do when each ends like those before it.",
    )
    group.add_argument(
        "--log-dir",
        metavar="DIR",
        help="Directory for the log, one JSON line per iteration; made if missing.",
    )
    group.add_argument(
        "--stages-per-gpu",
        type=int,
        default=1,
        help="Stages that share a GPU through MPS, for development and tests; needs "
        "--kv-cache-memory-bytes.",
    )


def make_parser() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser, whose first word is `serve`, and that of what follows it."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="spexis")
    serve_parser = ServeSubcommand().subparser_init(
        parser.add_subparsers(dest="subparser")
    )
    for name in ("usage", "epilog"):  # say `vllm serve`
        text = getattr(serve_parser, name)
        setattr(serve_parser, name, text.replace("vllm serve", serve_parser.prog))
    serve_parser.description = DESCRIPTION
    add_own_options(serve_parser)
    add_prototype_options(serve_parser)
    return parser, serve_parser


def complete(args: argparse.Namespace) -> list[str]:
    """Check all options and turn ours into vLLM's, in `args`.

    Returns a line for each of the prototype's options. Raises SpexisConfigError or
    AdapterError; nothing has been started then.
    """
    from spexis_runtime.async_llm import AsyncEngineArgs

    args.model = args.model_tag or args.model
    notes = translate(args)
    if args.exit_model is not None and args.headless:
        raise SpexisConfigError(
            "exit_model cannot go with headless: stages on other nodes come through Ray"
        )
    engine_args = AsyncEngineArgs.from_cli_args(args).for_vllm()
    for field in dataclasses.fields(engine_args):
        setattr(args, field.name, getattr(engine_args, field.name))
    return notes


def interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    try:
        check_versions()
    except UnsupportedVersionError as error:
        sys.exit(f"spexis serve: error: {error}")
    configure_environment()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    from spexis_runtime import patches
    from spexis_runtime.async_llm import AsyncLLM

    cli_env_setup()
    argv = sys.argv[1:] if argv is None else argv
    parser, serve_parser = make_parser()
    args = parser.parse_args(["serve", *argv])
    try:
        notes = complete(args)
        ServeSubcommand().validate(args)
    except (ValueError, TypeError) as error:
        serve_parser.exit(2, f"{serve_parser.prog}: error: {error}\n")
    for note in notes:
        print(f"{serve_parser.prog}: {note}", file=sys.stderr)
    patches.async_llm_class(AsyncLLM)
    # not asyncio's own, under which the first Ctrl-C waits for an engine that starts
    signal.signal(signal.SIGINT, interrupt)
    try:
        with patches.interrupt_ends_start():
            ServeSubcommand.cmd(args)
    except KeyboardInterrupt:
        return 130
    return 0
