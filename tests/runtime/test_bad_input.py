# SPDX-License-Identifier: Apache-2.0
"""What cannot be is refused in one line: no process starts, no file is written."""

import json
import math
import multiprocessing
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import (
    BartConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
)
from vllm.v1.engine.llm_engine import LLMEngine

from spexis_runtime import LLM, AsyncEngineArgs
from spexis_runtime.adapter.config import (
    AdapterConfig,
    AdapterError,
    expected_tensors,
    save_adapter,
)
from spexis_runtime.config import SpexisConfig, SpexisConfigError
from spexis_runtime.engine_options import NO_GPU_KV_CACHE_BYTES
from spexis_runtime.versions import UnsupportedVersionError

PARTITION = "VLLM_PP_LAYER_PARTITION"
NUM_LAYERS = 4
SIZES: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=NUM_LAYERS,
)


BUILDABLE: dict[str, Any] = dict(
    model="model",
    pipeline_parallel_size=2,
    max_num_seqs=8,
    max_model_len=64,
    skip_tokenizer_init=True,
    load_format="dummy",
)


class EngineStarts(BaseException):
    """All checks were passed."""


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise EngineStarts

    monkeypatch.setattr(LLMEngine, "from_engine_args", start)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, of which only the config exists, and an adapter for `model`."""
    root = tmp_path_factory.mktemp("inputs")
    LlamaConfig(**SIZES).save_pretrained(root / "model")
    LlamaConfig(**SIZES | {"hidden_size": 64}).save_pretrained(root / "wide")
    LlamaConfig(**SIZES | {"vocab_size": 65}).save_pretrained(root / "wordy")
    LlamaConfig(**SIZES | {"num_hidden_layers": 6}).save_pretrained(root / "deep")
    LlamaConfig(**SIZES, model_type="qwen2").save_pretrained(root / "qwen2")
    for config_class, architecture in (
        (GPT2Config, "GPT2LMHeadModel"),
        (MixtralConfig, "MixtralForCausalLM"),
        (JambaConfig, "JambaForCausalLM"),
        (LlavaConfig, "LlavaForConditionalGeneration"),
        (BartConfig, "BartForConditionalGeneration"),
    ):
        other = config_class(architectures=[architecture])
        other.save_pretrained(root / other.model_type)
    LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"}).save_pretrained(
        root / "fp8"
    )
    config_file = root / "qwen2" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(
        json.dumps(
            config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        )
    )
    for name, text in (("broken", "{"), ("typeless", "{}")):
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
    (root / "empty").mkdir()
    adapter = AdapterConfig.for_model(LlamaConfig(**SIZES), 2)
    tensors = {n: torch.ones(shape) for n, shape in expected_tensors(adapter).items()}
    save_adapter(root / "adapter", adapter, tensors)
    whole = (root / "adapter" / "model.safetensors").read_bytes()
    save_adapter(root / "cut", adapter, tensors)
    (root / "cut" / "model.safetensors").write_bytes(whole[:-7])
    save_adapter(root / "weightless", adapter, tensors)
    (root / "weightless" / "model.safetensors").unlink()
    return root


@pytest.fixture(autouse=True)
def nothing_happens(root: Path, tmp_path: Path) -> Iterator[None]:
    """No process has started and no file was written, nor a log directory made."""
    children = psutil.Process().children(recursive=True)
    files = sorted(root.rglob("*"))
    yield
    assert not ray.is_initialized()
    assert multiprocessing.active_children() == []
    assert psutil.Process().children(recursive=True) == children
    assert sorted(root.rglob("*")) == files
    assert list(tmp_path.iterdir()) == []


def build(root: Path, logs: Path | None, **options: Any) -> LLM:
    """An engine that would start, but for `options`; paths are below `root`."""
    settings = BUILDABLE | dict(exit_model="adapter", log_dir=logs) | options
    for name in ("model", "exit_model"):
        if settings[name] and isinstance(settings[name], str):
            settings[name] = str(root / settings[name])
    return LLM(**settings)


def refused(
    line: str, error: type[Exception] = SpexisConfigError
) -> pytest.RaisesExc[Exception]:
    """Exactly of this type, with one line that has `line` in it."""
    pattern = rf"\A[^\n]*{re.escape(line)}[^\n]*\Z"
    return pytest.RaisesExc(error, match=pattern, check=lambda e: type(e) is error)


def test_what_the_cases_vary_is_accepted(root: Path) -> None:
    for options in (
        {},
        {"row_budget": 4},
        {"drop_ratio": 0},
        {"drop_ratio": 0.99},
        {"max_num_seqs": None},
        {"chat_template": None},
        {"exit_model": None},
        {"exit_model": None, "pipeline_parallel_size": 1},
    ):
        with pytest.raises(EngineStarts):
            build(root, None, **options)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": (
        {"max_num_seq": 8},
        "unknown option max_num_seq; did you mean max_num_seqs?",
    ),
    "misspelt own option": (
        {"row_budgets": 8},
        "unknown option row_budgets; did you mean row_budget?",
    ),
    "unknown option without a hint": ({"xyz": 1}, "unknown option xyz"),
    "drop_ratio 1": ({"drop_ratio": 1.0}, "drop_ratio must be in [0, 1), got 1.0"),
    "drop_ratio < 0": ({"drop_ratio": -0.1}, "drop_ratio must be in [0, 1), got -0.1"),
    "drop_ratio NaN": ({"drop_ratio": math.nan}, "must be in [0, 1), got nan"),
    "drop_ratio text": ({"drop_ratio": "0.5"}, "must be in [0, 1), got '0.5'"),
    "drop_ratio bool": ({"drop_ratio": False}, "must be in [0, 1), got False"),
    "ratio and budget": (
        {"drop_ratio": 0.5, "row_budget": 6},
        "drop_ratio (0.5) and row_budget (6) are two ways to say the same thing",
    ),
    "row_budget 0": ({"row_budget": 0}, "'auto' or an int of at least 1, got 0"),
    "row_budget bool": ({"row_budget": True}, "an int of at least 1, got True"),
    "row_budget float": ({"row_budget": 4.0}, "an int of at least 1, got 4.0"),
    "row_budget text": ({"row_budget": "all"}, "'auto' or an int of at least 1, got"),
    "row_budget below B / N": (
        {"row_budget": 3, "max_num_seqs": 7},
        "row_budget must be at least max_num_seqs / pipeline_parallel_size = "
        "ceil(7 / 2) = 4, got 3",
    ),
    "row_budget below the default B / N": (
        {"row_budget": 127, "max_num_seqs": None},
        "ceil(256 / 2) = 128, got 127",
    ),
    "row_budget without drafts": (
        {"row_budget": 8, "exit_model": None},
        "row_budget needs exit_model",
    ),
    "drop_ratio without drafts": (
        {"drop_ratio": 0.5, "exit_model": None},
        "drop_ratio needs exit_model",
    ),
    "one stage": (
        {"pipeline_parallel_size": 1},
        "exit_model needs pipeline_parallel_size >= 2, got 1",
    ),
    "more stages than layers": (
        {"pipeline_parallel_size": 4},
        "exit_layer 2 of 4 leaves 2 layers for 3 more stages: at least one each",
    ),
    "stages_per_gpu 0": (
        {"stages_per_gpu": 0},
        "stages_per_gpu must be an int of at least 1, got 0",
    ),
    "stages that do not fill their GPUs": (
        {"stages_per_gpu": 2, "pipeline_parallel_size": 3},
        "pipeline_parallel_size must be a multiple of stages_per_gpu (2), got 3",
    ),
    "stages on a GPU that is not there": (
        {"stages_per_gpu": 2},
        "2 stages with stages_per_gpu 2 need 1 GPUs, found 0",
    ),
    "max_num_seqs text": (
        {"max_num_seqs": "8"},
        "max_num_seqs must be an int of at least 1, got '8'",
    ),
    "max_num_seqs 0": (
        {"max_num_seqs": 0},
        "max_num_seqs must be an int of at least 1, got 0",
    ),
    "exit_model no path": ({"exit_model": 5}, "exit_model must be a path, got 5"),
    "exit_model empty": ({"exit_model": ""}, "exit_model must be a path, got ''"),
    "log_dir no path": ({"log_dir": 5}, "log_dir must be a path, got 5"),
    "model is missing": ({"model": "none"}, "none does not exist"),
    "model without config": ({"model": "empty"}, "empty has no usable config: "),
    "model with broken config": ({"model": "broken"}, "broken has no usable config: "),
    "model of no type": ({"model": "typeless"}, "typeless has no usable config: "),
    "executor": (
        {"distributed_executor_backend": "mp"},
        "exit_model sets distributed_executor_backend itself, got 'mp'",
    ),
    "scheduler": ({"scheduler_cls": "a.B"}, "exit_model sets scheduler_cls itself"),
}

UNSUPPORTED = "exit_model supports LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
REFUSED_FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "other architectures": ({"model": "gpt2"}, f"{UNSUPPORTED}; "),
    "mixture of experts": ({"model": "mixtral"}, UNSUPPORTED),
    "hybrid models": ({"model": "jamba"}, UNSUPPORTED),
    "multimodal models": ({"model": "llava"}, UNSUPPORTED),
    "encoder-decoder models": ({"model": "bart"}, UNSUPPORTED),
    "pooling": (
        {"runner": "pooling"},
        "exit_model needs runner generate, got 'pooling'",
    ),
    "embedding": ({"convert": "embed"}, "exit_model needs convert none, got 'embed'"),
    "models run by transformers": (
        {"model_impl": "transformers"},
        "exit_model needs model_impl vllm, got 'transformers'",
    ),
    "quantised models": ({"model": "fp8"}, "quantised models are not supported"),
    "quantisation on loading": ({"quantization": "fp8"}, "cannot go with quantization"),
    "vLLM's speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "exit_model cannot go with speculative_config: two ways to draft",
    ),
    "LoRA": (
        {"enable_lora": True},
        "exit_model cannot go with enable_lora: the host, where vLLM maps",
    ),
    "KV connectors": ({"kv_transfer_config": {"a": 1}}, "go with kv_transfer_config"),
    "KV offloading": ({"kv_offloading_size": 4.0}, "go with kv_offloading_size"),
    "sleep and wake-up": (
        {"enable_sleep_mode": True},
        "cannot go with enable_sleep_mode",
    ),
    "prompt embeddings": ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
    "dual batch overlap": (
        {"enable_dbo": True},
        "exit_model cannot go with enable_dbo",
    ),
    "custom logits processors": (
        {"logits_processors": ["a.B"]},
        "exit_model cannot go with logits_processors",
    ),
    "data parallelism": (
        {"data_parallel_size": 2},
        "exit_model needs data_parallel_size 1, got 2",
    ),
    "context parallelism": (
        {"decode_context_parallel_size": 2},
        "exit_model needs decode_context_parallel_size 1, got 2",
    ),
    "async_scheduling=False": (
        {"async_scheduling": False},
        "exit_model needs async_scheduling, got False",
    ),
}


@pytest.mark.parametrize("options, line", CASES.values(), ids=CASES)
def test_refused(
    root: Path, tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    with refused(line):
        build(root, tmp_path / "log", **options)


@pytest.mark.refuses
@pytest.mark.parametrize("feature", REFUSED_FEATURES)
def test_feature_is_refused(root: Path, tmp_path: Path, feature: str) -> None:
    """By `LLM` and by `AsyncEngineArgs` alike."""
    options, line = REFUSED_FEATURES[feature]
    with refused(line):
        build(root, tmp_path / "log", **options)
    settings = BUILDABLE | options
    settings["model"] = str(root / settings["model"])
    engine_args = AsyncEngineArgs(exit_model=str(root / "adapter"), **settings)
    with refused(line):
        engine_args.create_engine_config()


def test_async_engine_args_check_what_llm_checks(root: Path) -> None:
    settings = BUILDABLE | dict(model=str(root / "model"))
    adapter = str(root / "adapter")
    with refused("drop_ratio must be in [0, 1), got 1.0"):
        AsyncEngineArgs(
            exit_model=adapter, drop_ratio=1.0, **settings
        ).create_engine_config()
    config = AsyncEngineArgs(
        exit_model=adapter, row_budget=6, **settings
    ).create_engine_config()
    spexis_config = SpexisConfig.from_additional_config(config.additional_config)
    assert spexis_config == SpexisConfig(exit_model=adapter, row_budget=6)
    assert config.scheduler_config.max_num_seqs == 8
    # without a GPU a start must not need most of the machine's memory
    assert config.cache_config.kv_cache_memory_bytes == NO_GPU_KV_CACHE_BYTES


@pytest.mark.parametrize("exit_model", ["adapter", None])
@pytest.mark.parametrize("size", [0, -1, "2", 2.0, True, None])
@pytest.mark.parametrize("name", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_number_of_stages_and_ranks(
    root: Path, tmp_path: Path, name: str, size: Any, exit_model: str | None
) -> None:
    with refused(f"{name} must be an int of at least 1, got {size!r}"):
        build(root, tmp_path / "log", exit_model=exit_model, **{name: size})


@pytest.mark.parametrize(
    "options, line",
    [
        ({"exit_model": "none"}, "none is not a directory"),
        ({"exit_model": "model"}, "config.json lacks architecture, "),
        ({"exit_model": "weightless"}, "model.safetensors is missing"),
        ({"exit_model": "cut"}, "model.safetensors is truncated: "),
        ({"model": "wide"}, "hidden_size is 32 in the adapter, 64 in the model"),
        ({"model": "wordy"}, "vocab_size is 64 in the adapter, 65 in the model"),
        ({"model": "deep"}, "num_hidden_layers is 4 in the adapter, 6 in the model"),
        ({"model": "qwen2"}, "model_type is llama in the adapter, qwen2 in the model"),
    ],
)
def test_adapter(
    root: Path, tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    with refused(line, AdapterError):
        build(root, tmp_path / "log", **options)


def test_exit_layer_beyond_the_model(root: Path, tmp_path: Path) -> None:
    file = root / "weightless" / "config.json"
    good = file.read_text()
    file.write_text(json.dumps(json.loads(good) | {"exit_layer": NUM_LAYERS}))
    line = "adapter exit_layer must be in 1..3 for a model of 4 layers, got 4"
    with refused(line, AdapterError):
        build(root, tmp_path / "log", exit_model="weightless")
    file.write_text(good)


@pytest.mark.parametrize("package", ["vllm", "ray"])
@pytest.mark.parametrize("exit_model", ["adapter", None])
def test_other_versions(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    exit_model: str | None,
) -> None:
    versions = {"vllm": "0.26.0+cu129", "ray": "2.60.1"}
    monkeypatch.setattr("spexis_runtime.versions.version", versions.__getitem__)
    with pytest.raises(EngineStarts):
        build(root, None, exit_model=exit_model)
    right = {"vllm": "0.26.0", "ray": "2.60"}[package]
    for other in ("0.26.1", "0.26.0rc1", "2.6", "2.600.0", "1"):
        versions[package] = other
        line = f"spexis_runtime needs {package} {right}, found {other}"
        with refused(line, UnsupportedVersionError):
            build(root, tmp_path / "log", exit_model=exit_model)


@pytest.mark.parametrize("exit_model", ["adapter", None])
def test_log_dir_that_cannot_be(root: Path, exit_model: str | None) -> None:
    file = root / "model" / "config.json"
    for log_dir in (file / "log", file):
        with refused(f"log_dir '{log_dir}' cannot be created: "):
            build(root, log_dir, exit_model=exit_model)


def test_log_dir_is_made_when_all_is_well(root: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "new" / "log"
    with pytest.raises(EngineStarts):
        build(root, log_dir)
    assert log_dir.is_dir()
    log_dir.rmdir()
    log_dir.parent.rmdir()


def test_layer_partition(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARTITION, "1,3")
    with refused("VLLM_PP_LAYER_PARTITION is 1,3, but the adapter needs 2,2: unset it"):
        build(root, None)
    assert os.environ[PARTITION] == "1,3"
    monkeypatch.setenv(PARTITION, "2,2")
    with pytest.raises(EngineStarts):
        build(root, None)
