# SPDX-License-Identifier: Apache-2.0
"""From a user's options to vLLM's: refuse what cannot be, set what is needed."""

import difflib
import os
from dataclasses import fields
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.transformers_utils.config import get_config

from spexis_runtime.adapter.config import check_adapter_matches, load_adapter_config
from spexis_runtime.config import (
    KEY,
    PARTITION,
    SpexisConfig,
    SpexisConfigError,
    check_log_dir,
    layer_partition,
)
from spexis_runtime.no_gpu.environment import gpu_count

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MEMORY_SHARE = 0.9  # of a GPU
NO_GPU_KV_CACHE_BYTES = 1 << 30  # of a stage; vLLM would want 92 % of all memory
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
OWN_OPTIONS = tuple(field.name for field in fields(SpexisConfig))


def engine_options(
    model: str, own_options: dict[str, Any], options: dict[str, Any]
) -> tuple[SpexisConfig, dict[str, Any]]:
    """Check everything; return our settings and vLLM's options that make them happen.

    Args:
        own_options: those named in `SpexisConfig`.
        options: vLLM's that were given, without `model`.

    Raises SpexisConfigError or AdapterError. Nothing is started; `log_dir` is created.
    """
    paths = {
        name: _absolute(name, own_options[name]) for name in ("exit_model", "log_dir")
    }
    config = SpexisConfig(**own_options | paths)
    options = dict(options)
    _check_options(model, options)
    if config.exit_model is not None:
        if options.get("max_num_seqs") is None:
            options["max_num_seqs"] = DEFAULT_MAX_NUM_SEQS
        _check_speculation(model, config, options)
    if config.stages_per_gpu > 1:
        _check_colocation(config.stages_per_gpu, options)
    if config.log_dir is not None:
        check_log_dir(config.log_dir)
    return config, options | _settings(config, options)


def _settings(config: SpexisConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The options for vLLM that make `config` happen."""
    additional = options.get("additional_config") or {}
    settings: dict[str, Any] = dict(
        additional_config=additional | config.to_additional_config()
    )
    if config.exit_model is not None:
        settings["scheduler_cls"] = "spexis_runtime.scheduler.SpexisScheduler"
        settings["worker_cls"] = (
            "spexis_runtime.worker.SpexisWorker"
            if gpu_count()
            else "spexis_runtime.no_gpu.worker.SpexisNoGpuWorker"
        )
    elif config.log_dir is not None:
        settings["scheduler_cls"] = "spexis_runtime.scheduler.LoggedScheduler"
    if options.get("pipeline_parallel_size", 1) > 1:
        from spexis_runtime.executor import SpexisRayExecutor

        settings["distributed_executor_backend"] = SpexisRayExecutor
        settings["async_scheduling"] = True
    sizes = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    if not gpu_count() and not any(options.get(name) for name in sizes):
        settings["kv_cache_memory_bytes"] = NO_GPU_KV_CACHE_BYTES
    if config.stages_per_gpu > 1:
        share = DEFAULT_MEMORY_SHARE / config.stages_per_gpu
        settings["gpu_memory_utilization"] = options.get(
            "gpu_memory_utilization", share
        )
    return settings


def _absolute(name: str, path: Any) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SpexisConfigError(f"{name} must be a path, got {path!r}")
    return os.path.abspath(path)


def check_model_path(model: str) -> None:
    """Refuse a path where there is nothing.

    vLLM would look for a repository of that name, which is ORGANISATION/NAME at most.
    """
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and not os.path.exists(model):
        raise SpexisConfigError(f"model {model} does not exist")


def _check_options(model: str, options: dict[str, Any]) -> None:
    known = {field.name for field in fields(AsyncEngineArgs)} | {"chat_template"}
    names = sorted(known.union(OWN_OPTIONS))
    for name in sorted(options.keys() - known):
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SpexisConfigError(f"unknown option {name}{hint}")
    additional = options.get("additional_config") or {}
    if not isinstance(additional, dict) or KEY in additional:
        raise SpexisConfigError(
            f"additional_config must be a dict without {KEY!r}, which is set from the "
            f"other arguments, got {additional!r}"
        )
    for name in ("pipeline_parallel_size", "tensor_parallel_size"):
        size = options.get(name, 1)
        if type(size) is not int or size < 1:
            raise SpexisConfigError(
                f"{name} must be an int of at least 1, got {size!r}"
            )
    check_model_path(model)


def _check_speculation(
    model: str, config: SpexisConfig, options: dict[str, Any]
) -> None:
    """Refuse what cannot speculate."""
    num_stages = options.get("pipeline_parallel_size", 1)
    config.check_pipeline(num_stages, options["max_num_seqs"])
    for names, why in (
        (
            ("speculative_config", "spec_method", "spec_model"),
            "two ways to draft cannot be combined",
        ),
        (
            ("enable_lora",),
            "the host, where vLLM maps LoRA's adapters to a step's rows, does not know "
            "these (docs/limits.md says what it would take)",
        ),
        (("quantization",), "quantised models are not supported with speculation yet"),
        (
            ("kv_transfer_config", "kv_offloading_size"),
            "KV connectors are not supported with speculation",
        ),
        (("enable_sleep_mode",), "sleep is not supported with speculation"),
        (("enable_prompt_embeds",), "rows are fed by their tokens"),
        (("enable_dbo",), "a step is one batch"),
        (("logits_processors",), "vLLM's V2 model runner takes none of its users'"),
        (("hf_overrides",), "the adapter is checked against the model's own config"),
    ):
        for name in names:
            if options.get(name):
                raise SpexisConfigError(f"exit_model cannot go with {name}: {why}")
    for name, only in (
        ("data_parallel_size", 1),
        ("decode_context_parallel_size", 1),
        ("prefill_context_parallel_size", 1),
        ("runner", "generate"),
        ("convert", "none"),
        ("model_impl", "vllm"),
    ):
        if options.get(name) not in (None, "auto", only):
            raise SpexisConfigError(
                f"exit_model needs {name} {only}, got {options[name]!r}"
            )
    for name in ("distributed_executor_backend", "worker_cls", "scheduler_cls"):
        if name in options:
            raise SpexisConfigError(
                f"exit_model sets {name} itself, got {options[name]!r}: leave it out"
            )
    if options.get("async_scheduling") is False:
        raise SpexisConfigError("exit_model needs async_scheduling, got False")
    assert config.exit_model is not None
    adapter = load_adapter_config(config.exit_model)
    hf_config = _model_config(model, options)
    if getattr(hf_config, "quantization_config", None):
        raise SpexisConfigError(
            f"exit_model cannot go with {model}: quantised models are not supported "
            "with speculation yet"
        )
    architecture = (getattr(hf_config, "architectures", None) or ["unknown"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise SpexisConfigError(
            f"exit_model supports {', '.join(SUPPORTED_ARCHITECTURES)}; "
            f"{model} is a {architecture}"
        )
    check_adapter_matches(adapter, hf_config)
    partition = layer_partition(
        hf_config.num_hidden_layers, adapter.exit_layer, num_stages
    )
    given = os.environ.get(PARTITION)
    if given not in (None, partition):
        raise SpexisConfigError(
            f"{PARTITION} is {given}, but the adapter needs {partition}: unset it"
        )


def _check_colocation(stages_per_gpu: int, options: dict[str, Any]) -> None:
    num_stages = options.get("pipeline_parallel_size", 1)
    if num_stages % stages_per_gpu:
        raise SpexisConfigError(
            f"pipeline_parallel_size must be a multiple of stages_per_gpu "
            f"({stages_per_gpu}), got {num_stages}"
        )
    if options.get("tensor_parallel_size", 1) != 1:
        raise SpexisConfigError(
            "stages_per_gpu needs tensor_parallel_size 1, got "
            f"{options['tensor_parallel_size']}"
        )
    needed, found = num_stages // stages_per_gpu, gpu_count()
    if found < needed:
        raise SpexisConfigError(
            f"{num_stages} stages with stages_per_gpu {stages_per_gpu} need {needed} "
            f"GPUs, found {found}"
        )
    if not options.get("kv_cache_memory_bytes"):
        raise SpexisConfigError(
            "stages_per_gpu needs kv_cache_memory_bytes: stages that share a GPU "
            "cannot measure what is free on it"
        )
    from spexis_runtime.colocated import check_mps

    check_mps()


def _model_config(model: str, options: dict[str, Any]) -> Any:
    try:
        return get_config(
            model, options.get("trust_remote_code", False), options.get("revision")
        )
    except (OSError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise SpexisConfigError(f"model {model} has no usable config: {line}") from None
