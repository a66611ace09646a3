# SPDX-License-Identifier: Apache-2.0
"""The option names of the paper's prototype, and what stands for them here.

Its commands run as they are: each of its options is taken for the one that does the
same, checked against what says it here, or has nothing left to do.
"""

import argparse
import os
from typing import Any, NamedTuple

from spexis_runtime.adapter.config import load_adapter_config
from spexis_runtime.config import SpexisConfigError


class PrototypeOption(NamedTuple):
    names: tuple[str, ...]
    meaning: str  # here; shown by --help, and when the option is used
    settings: dict[str, Any]  # for argparse


VERSIONS = ("1.0", "2.0", "2.5")
OPTIONS = (
    PrototypeOption(
        ("--enable-spexis", "--enable-specpipe"),
        "speculation is on wherever there is an --exit-model; needs one",
        dict(action="store_true"),
    ),
    PrototypeOption(
        ("--spexis-ver", "--sppp-ver"),
        "1.0 runs all drafts, so no --drop-ratio; 2.0 may have one; 2.5 runs as 2.0, "
        "as there is no admission by predicted lengths yet",
        dict(choices=VERSIONS),
    ),
    PrototypeOption(
        ("--exit-layer",),
        "the adapter knows it; must agree",
        dict(nargs="+", metavar="LAYER"),
    ),
    PrototypeOption(
        ("--exit-models",),
        "the one entry that is not None, the first stage's, is the --exit-model",
        dict(nargs="+", metavar="PATH"),
    ),
    PrototypeOption(
        ("--exit-model-dir",),
        "taken as --exit-model, or its folder exit_1_N for N stages if there is one",
        dict(metavar="DIR"),
    ),
    PrototypeOption(
        ("--exit-model-type",), "not needed: the adapter knows it", dict(metavar="TYPE")
    ),
    PrototypeOption(
        ("--cpu-embedding-path",),
        "not needed: the first stage reads the embedding from the model's own weights",
        dict(metavar="FILE"),
    ),
    PrototypeOption(
        ("--length-predictor-path",),
        "not used: there is no admission by predicted lengths yet",
        dict(metavar="PATH"),
    ),
    PrototypeOption(
        ("--enable-log",),
        "a --log-dir alone turns the log on; needs one",
        dict(action="store_true"),
    ),
    PrototypeOption(("--logdir",), "taken as --log-dir", dict(metavar="DIR")),
)


def add_prototype_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Prototype", "Option names of the paper's prototype, and what they mean here."
    )
    for option in OPTIONS:
        group.add_argument(*option.names, help=option.meaning, **option.settings)


def translate(args: argparse.Namespace) -> list[str]:
    """Set our options from the prototype's; return a line for each that was given.

    Raises SpexisConfigError where they contradict each other, AdapterError where
    `--exit-layer` meets an adapter that cannot be read.
    """
    _translate_exit_model(args)
    _same(args, "log_dir", "--log-dir", args.logdir, "--logdir")
    for flag, needed in (("enable_spexis", "exit_model"), ("enable_log", "log_dir")):
        if getattr(args, flag) and getattr(args, needed) is None:
            raise SpexisConfigError(
                f"--{flag.replace('_', '-')} needs --{needed.replace('_', '-')}"
            )
    if args.spexis_ver == VERSIONS[0] and args.drop_ratio is not None:
        raise SpexisConfigError(
            f"--spexis-ver {VERSIONS[0]} drops nothing, but --drop-ratio is "
            f"{args.drop_ratio}: leave one of them out"
        )
    return [
        f"{option.names[0]}: {option.meaning}"
        for option in OPTIONS
        if getattr(args, option.names[0][2:].replace("-", "_"))
    ]


def _translate_exit_model(args: argparse.Namespace) -> None:
    folder = args.exit_model_dir
    if folder is not None:
        of_stages = os.path.join(folder, f"exit_1_{args.pipeline_parallel_size}")
        folder = of_stages if os.path.isdir(of_stages) else folder
    _same(args, "exit_model", "--exit-model", folder, "--exit-model-dir")
    paths = _of_first_stage("--exit-models", args.exit_models)
    _same(args, "exit_model", "--exit-model", paths, "--exit-models")
    layer = _of_first_stage("--exit-layer", args.exit_layer)
    if layer is not None and args.exit_model is not None:
        found = load_adapter_config(args.exit_model).exit_layer
        if layer != str(found):
            raise SpexisConfigError(
                f"--exit-layer is {layer}, but {args.exit_model} has exit_layer {found}"
            )


def _same(
    args: argparse.Namespace, name: str, option: str, value: Any, other: str
) -> None:
    """Take `value`, given as `other`, for the option unless that says otherwise."""
    if value is None:
        return
    if getattr(args, name) not in (None, value):
        raise SpexisConfigError(
            f"{option} is {getattr(args, name)} and {other} {value}: give one of them"
        )
    setattr(args, name, value)


def _of_first_stage(option: str, entries: list[str] | None) -> str | None:
    """The prototype has one entry a stage, the text None for one without an exit."""
    if entries is None:
        return None
    if entries[0] == "None" or any(entry != "None" for entry in entries[1:]):
        raise SpexisConfigError(
            f"{option} {' '.join(entries)}: the first stage drafts, and no other"
        )
    return entries[0]
