# SPDX-License-Identifier: Apache-2.0
"""The `spexis` command: `spexis WORDS ARGUMENTS` runs `main(ARGUMENTS)` of a module."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from spexis_runtime import __version__


class Command(NamedTuple):
    module: str  # imported only when its command runs
    help: str


COMMANDS = {
    "demo": Command("demo", "answer prompts with speculation and without"),
    "serve": Command("serve", "vLLM's OpenAI-compatible server, with speculation"),
    "top": Command("top", "show live what an engine that writes a log is doing"),
    "report": Command("report", "draw the log of an engine as a page of charts"),
    "generate": Command("train.generate", "let a model answer prompts, for training"),
    "train adapter": Command("train.adapter", "train an exit adapter for a model"),
    "train length": Command("train.length", "train a length predictor for a model"),
    "eval adapter": Command("train.evaluate", "measure an exit adapter"),
    "eval length": Command("train.evaluate_length", "measure a length predictor"),
    "profile": Command("profile_steps", "measure step times of a model and machine"),
    "plan": Command("lookahead.plan", "predict the throughput of PP x TP x SP"),
    "simulate": Command("lookahead.simulate", "serve a load in the simulator"),
}


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {words:<{width}}{c.help}" for words, c in COMMANDS.items()]
    return "\n".join(
        [
            f"Spexis {__version__}: speculative parallelism for vLLM",
            "",
            "usage: spexis COMMAND [arguments]; spexis COMMAND --help says which",
            "",
            *lines,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int | None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv in ([], ["-h"], ["--help"]):
        print(usage())
        return 0 if argv else 2
    if argv == ["--version"]:
        print(__version__)
        return 0
    for words, command in COMMANDS.items():
        length = len(words.split())
        if argv[:length] == words.split():
            try:
                module = importlib.import_module(f"spexis_runtime.{command.module}")
                return module.main(argv[length:])
            except ModuleNotFoundError as error:  # a bare install, without extras
                print(
                    f"spexis {words} needs what is not installed here ({error.name}): "
                    "pip install 'spexis[demo]'",
                    file=sys.stderr,
                )
                return 1
    print(usage(), file=sys.stderr)
    shown = " ".join(word for word in argv[:2] if not word.startswith("-"))
    print(f"\nerror: no such command: {shown or argv[0]}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
