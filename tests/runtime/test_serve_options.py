# SPDX-License-Identifier: Apache-2.0
"""Options of `spexis serve`: vLLM's pass through, ours are checked, others' mapped."""

import argparse
import inspect
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import uvloop
from models import make_adapter
from small_models import save_small_model

from spexis_runtime import LLM, AsyncEngineArgs, serve
from spexis_runtime.config import SpexisConfig
from spexis_runtime.prototype_options import OPTIONS as PROTOTYPE_OPTIONS


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """`model` and, of 4 layers, adapters at 2 by two names."""
    root = tmp_path_factory.mktemp("options")
    save_small_model(root / "model")
    adapter = make_adapter(root / "model", 2, root)
    (root / "adapters").mkdir()
    (root / "adapters" / "exit_1_2").symlink_to(adapter)
    return root


@pytest.fixture
def run(root, monkeypatch, capsys):
    """`run(*options)`: what vLLM's server is started with, and what was said before."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    started: list[argparse.Namespace] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(started.append))
    monkeypatch.chdir(root)

    def run(*options: Any) -> tuple[argparse.Namespace, str]:
        handler = signal.getsignal(signal.SIGINT)
        try:
            assert serve.main(["model", *map(str, options)]) == 0
        finally:
            signal.signal(signal.SIGINT, handler)
        return started.pop(), capsys.readouterr().err

    return run


def spexis_config(args: argparse.Namespace) -> SpexisConfig:
    return SpexisConfig.from_additional_config(args.additional_config)


TWO_STAGES = ("--pipeline-parallel-size", 2)
SPECULATE = ("--exit-model", "model-exit2", *TWO_STAGES)


def test_vllm_s_options_pass_through(run):
    args, said = run(
        *("--max-model-len", "1k", "--served-model-name", "a", "b", "--port", 8123),
        *("--uvicorn-log-level", "warning", "--no-enable-prefix-caching"),
        "--compilation-config.cudagraph_capture_sizes+=1,2",
    )
    assert (args.model, args.max_model_len, args.port) == ("model", 1000, 8123)
    assert args.served_model_name == ["a", "b"]
    assert args.uvicorn_log_level == "warning"
    assert args.enable_prefix_caching is False
    assert args.scheduler_cls is None
    assert spexis_config(args) == SpexisConfig()
    assert not said


def test_ours_make_speculation_happen(run, root):
    options = ("--row-budget", 5, "--log-dir", "log", "--max-num-seqs", 8)
    args, said = run(*SPECULATE, *options, "--max-model-len", 64)
    assert spexis_config(args) == SpexisConfig(
        exit_model=str(root / "model-exit2"), row_budget=5, log_dir=str(root / "log")
    )
    assert args.scheduler_cls == "spexis_runtime.scheduler.SpexisScheduler"
    assert args.worker_cls == "spexis_runtime.no_gpu.worker.SpexisNoGpuWorker"
    assert args.distributed_executor_backend.__name__ == "SpexisRayExecutor"
    assert (args.max_num_seqs, args.max_model_len) == (8, 64)
    assert not said
    args, _ = run(*SPECULATE, "--drop-ratio", 0.5, "--admission", "history")
    assert spexis_config(args).drop_ratio == 0.5
    assert spexis_config(args).admission == "history"
    assert spexis_config(args).row_budget == "auto"


def test_every_setting_is_an_option_everywhere(run):
    args, _ = run(*SPECULATE)
    names = {field.name for field in fields(SpexisConfig)}
    assert names <= vars(args).keys()
    assert names <= {field.name for field in fields(AsyncEngineArgs)}
    assert names <= inspect.signature(LLM).parameters.keys()


def test_a_config_file_may_have_them_too(run, root, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "exit-model: model-exit2\npipeline-parallel-size: 2\ndrop-ratio: 0.25\n"
    )
    args, _ = run("--config", file)
    assert spexis_config(args).exit_model == str(root / "model-exit2")
    assert spexis_config(args).drop_ratio == 0.25


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--enable-specpipe", *SPECULATE), {}),
        (("--enable-spexis", "--exit-model-dir", "adapters", *TWO_STAGES), {}),
        (("--exit-model-dir", "model-exit2", *TWO_STAGES), {}),
        (("--exit-models", "model-exit2", "None", *TWO_STAGES), {}),
        (("--exit-layer", 2, "None", *SPECULATE), {}),
        (("--exit-model-type", "llama", *SPECULATE), {}),
        (("--cpu-embedding-path", "nowhere.bin", *SPECULATE), {}),
        (("--length-predictor-path", "nowhere", *SPECULATE), {}),
        (("--sppp-ver", "1.0", *SPECULATE), {}),
        (("--spexis-ver", 2.5, *SPECULATE, "--drop-ratio", 0.5), {"drop_ratio": 0.5}),
        (("--enable-log", "--logdir", "log", *SPECULATE), {"log_dir": "log"}),
    ],
)
def test_the_prototype_s_options_mean(run, root, options, settings):
    """The same speculation; one line for each of them says what it is taken for."""
    args, said = run(*options)
    got = spexis_config(args)
    assert Path(got.exit_model).resolve() == root / "model-exit2"
    assert got.drop_ratio == settings.get("drop_ratio")
    assert got.log_dir == (str(root / "log") if "log_dir" in settings else None)
    given = [o for o in PROTOTYPE_OPTIONS if {*o.names} & {*map(str, options)}]
    assert said.splitlines() == [
        f"spexis serve: {option.names[0]}: {option.meaning}" for option in given
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (SPECULATE[:2], "exit_model needs pipeline_parallel_size >= 2, got 1"),
        (("--drop-ratio", 0.5), "drop_ratio needs exit_model"),
        ((*SPECULATE, "--drop-ratio", 1), "drop_ratio must be in [0, 1), got 1.0"),
        ((*SPECULATE, "--row-budget", 5), "ceil(256 / 2) = 128, got 5"),
        ((*SPECULATE, "--enable-lora"), "exit_model cannot go with enable_lora"),
        ((*SPECULATE, "--quantization", "fp8"), "cannot go with quantization"),
        ((*SPECULATE, "--headless"), "exit_model cannot go with headless"),
        (("--exit-model", "none", *TWO_STAGES), "none is not a directory"),
        (("--enable-spexis", *TWO_STAGES), "--enable-spexis needs --exit-model"),
        (("--enable-log",), "--enable-log needs --log-dir"),
        (
            (*SPECULATE, "--sppp-ver", "1.0", "--drop-ratio", 0.5),
            "--spexis-ver 1.0 drops nothing, but --drop-ratio is 0.5",
        ),
        (
            (*SPECULATE, "--exit-layer", 1),
            "--exit-layer is 1, but model-exit2 has exit_layer 2",
        ),
        (
            (*SPECULATE, "--exit-model-dir", "other"),
            "--exit-model is model-exit2 and --exit-model-dir other: give one of them",
        ),
        (
            ("--exit-models", "a", "b", *TWO_STAGES),
            "--exit-models a b: the first stage drafts, and no other",
        ),
        (("--enable-auto-tool-choice",), "requires --tool-call-parser"),
    ],
)
def test_refused_in_one_line(run, capsys, options, line):
    with pytest.raises(SystemExit) as end:
        run(*options)
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("spexis serve: error: ")
    assert line in said


@pytest.mark.works("spexis serve: Ctrl-C while it starts")
def test_ctrl_c_at_start(root, monkeypatch):
    """At once: under asyncio's own handler the first one would wait for the engine."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    async def start_engine() -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still starting")

    monkeypatch.setattr(
        ServeSubcommand, "cmd", staticmethod(lambda args: uvloop.run(start_engine()))
    )
    monkeypatch.chdir(root)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert serve.main(["model"]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)


def test_help_in_vllm_s_manner(capsys, monkeypatch):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def shown(option: str) -> str:
        # which vLLM keeps for the life of the process
        monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
        with pytest.raises(SystemExit) as end:
            serve.main([option])
        assert end.value.code == 0
        return capsys.readouterr().out

    groups = shown("--help")
    assert "usage: spexis serve [model_tag] [options]" in groups
    assert "vllm serve --help" not in groups
    for name in ("Spexis", "Prototype", "Frontend", "ModelConfig", "SchedulerConfig"):
        assert f"{name} " in groups
    for name in ("exit-model", "row-budget", "drop-ratio", "log-dir", "stages-per-gpu"):
        assert f"--{name}" in shown("--help=spexis")
    assert "--max-num-seqs" in shown("--help=max_num_seqs")
