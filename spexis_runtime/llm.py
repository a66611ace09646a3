# SPDX-License-Identifier: Apache-2.0
"""`LLM`: vLLM's `LLM` with speculative parallelism."""

import contextlib
import difflib
import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import get_config

from spexis_runtime.adapter.config import check_adapter_matches, load_adapter_config
from spexis_runtime.config import KEY, SpexisConfig, SpexisConfigError, check_log_dir
from spexis_runtime.no_gpu.environment import configure_environment, gpu_count
from spexis_runtime.versions import check_versions

DEFAULT_MAX_NUM_SEQS = 256
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
OWN_OPTIONS = ("exit_model", "row_budget", "drop_ratio", "log_dir")
PARTITION = "VLLM_PP_LAYER_PARTITION"


class LLM(vllm.LLM):
    """vLLM's `LLM`, with the pipeline's stages speculating past each other.

    Takes every argument of `vllm.LLM`, has its methods and gives its outputs. Beside
    them:

    Args:
        exit_model: directory of an exit adapter trained for `model`; stage 0 then holds
            its `exit_layer` layers. None: plain pipeline parallelism.
        row_budget: decode rows of a stage step, at least
            ceil(max_num_seqs / pipeline_parallel_size); "auto" feeds all.
        drop_ratio: alpha of the paper's section 5.1, in [0, 1), instead of a budget: of
            B running requests, B / (1 + alpha (N - 1)) rows are fed (equation 3).
        log_dir: directory for the per-iteration JSONL log; created if missing.

    Raises:
        SpexisConfigError, AdapterError (both ValueError): for settings or an adapter
            that cannot be, before any worker starts.
        UnsupportedVersionError: for another vLLM or Ray than the supported ones.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        exit_model: str | os.PathLike[str] | None = None,
        row_budget: int | Literal["auto"] = "auto",
        drop_ratio: float | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_versions()
        configure_environment()
        model = os.fspath(model)
        config = SpexisConfig(
            exit_model=_absolute("exit_model", exit_model),
            row_budget=row_budget,
            drop_ratio=drop_ratio,
            log_dir=_absolute("log_dir", log_dir),
        )
        _check_options(model, kwargs)
        partition = None
        if config.exit_model is not None:
            if kwargs.get("max_num_seqs") is None:
                kwargs["max_num_seqs"] = DEFAULT_MAX_NUM_SEQS
            partition = _check_speculation(model, config, kwargs)
        if config.log_dir is not None:
            check_log_dir(config.log_dir)
        with _layer_partition_set(partition):
            super().__init__(model, **_engine_options(config, kwargs))
        self.spexis_config = config


def _absolute(name: str, path: Any) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SpexisConfigError(f"{name} must be a path, got {path!r}")
    return os.path.abspath(path)


def _check_options(model: str, options: dict[str, Any]) -> None:
    known = {field.name for field in fields(EngineArgs)} | {"chat_template"}
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
    num_stages = options.get("pipeline_parallel_size", 1)
    if type(num_stages) is not int or num_stages < 1:
        raise SpexisConfigError(
            f"pipeline_parallel_size must be an int of at least 1, got {num_stages!r}"
        )
    # vLLM would look for a repository of that name, ORGANISATION/NAME at most
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and not os.path.exists(model):
        raise SpexisConfigError(f"model {model} does not exist")


def _engine_options(config: SpexisConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for `vllm.LLM` that make `config` happen."""
    options = dict(kwargs)
    num_stages = options.get("pipeline_parallel_size", 1)
    if config.exit_model is not None:
        options["scheduler_cls"] = "spexis_runtime.scheduler.SpexisScheduler"
        options["worker_cls"] = (
            "spexis_runtime.worker.SpexisWorker"
            if gpu_count()
            else "spexis_runtime.no_gpu.worker.SpexisNoGpuWorker"
        )
    elif config.log_dir is not None:
        options["scheduler_cls"] = "spexis_runtime.scheduler.LoggedScheduler"
    if num_stages > 1:
        from spexis_runtime.executor import SpexisRayExecutor

        options["distributed_executor_backend"] = SpexisRayExecutor
        options["async_scheduling"] = True
    additional = options.get("additional_config") or {}
    options["additional_config"] = additional | config.to_additional_config()
    return options


def _check_speculation(
    model: str, config: SpexisConfig, options: dict[str, Any]
) -> str:
    """Refuse what cannot speculate; return the layer partition for the adapter."""
    num_stages = options.get("pipeline_parallel_size", 1)
    config.check_pipeline(num_stages, options["max_num_seqs"])
    for name, why in (
        ("speculative_config", "two ways to draft cannot be combined"),
        ("spec_method", "two ways to draft cannot be combined"),
        ("enable_lora", "LoRA is not supported with speculation yet"),
        ("quantization", "quantised models are not supported with speculation yet"),
        ("kv_transfer_config", "KV connectors are not supported with speculation"),
        ("enable_sleep_mode", "sleep is not supported with speculation"),
        ("hf_overrides", "the adapter is checked against the model's own config"),
    ):
        if options.get(name):
            raise SpexisConfigError(f"exit_model cannot go with {name}: {why}")
    for name, only in (
        ("tensor_parallel_size", 1),
        ("data_parallel_size", 1),
        ("decode_context_parallel_size", 1),
        ("prefill_context_parallel_size", 1),
        ("runner", "generate"),
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
    return partition


def _model_config(model: str, options: dict[str, Any]) -> Any:
    try:
        return get_config(
            model, options.get("trust_remote_code", False), options.get("revision")
        )
    except (OSError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise SpexisConfigError(f"model {model} has no usable config: {line}") from None


@contextlib.contextmanager
def _layer_partition_set(partition: str | None) -> Iterator[None]:
    """vLLM's workers read the partition from the environment when they start."""
    given = os.environ.get(PARTITION)
    if partition is not None:
        os.environ[PARTITION] = partition
    try:
        yield
    finally:
        if partition is not None and given is None:
            del os.environ[PARTITION]


def layer_partition(num_hidden_layers: int, exit_layer: int, num_stages: int) -> str:
    """Layers of each stage, comma separated: `exit_layer`, then the rest split evenly.

    >>> layer_partition(30, 15, 2)
    '15,15'
    >>> layer_partition(30, 8, 4)
    '8,8,7,7'
    """
    rest, stages = num_hidden_layers - exit_layer, num_stages - 1
    if rest < stages:
        raise SpexisConfigError(
            f"exit_layer {exit_layer} of {num_hidden_layers} leaves {rest} layers for "
            f"{stages} more stages: at least one each is needed"
        )
    sizes = [rest // stages + (i < rest % stages) for i in range(stages)]
    return ",".join(map(str, [exit_layer, *sizes]))
