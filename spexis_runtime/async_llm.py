# SPDX-License-Identifier: Apache-2.0
"""vLLM's `AsyncLLM` and `AsyncEngineArgs`, which know of speculation."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import vllm
from vllm.config import VllmConfig
from vllm.v1.engine import async_llm
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import StatLoggerFactory

from spexis_runtime.config import METRICS
from spexis_runtime.engine_options import OWN_OPTIONS, check_model_path, engine_options
from spexis_runtime.metrics import PrometheusStatLogger
from spexis_runtime.versions import check_versions


class AsyncLLM(async_llm.AsyncLLM):
    """vLLM's, with the metrics of speculation beside vLLM's.

    They are there where the scheduler is ours, with `exit_model` or `log_dir`, unless a
    KV connector has the place that their figures travel in.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        *args: Any,
        stat_loggers: list[StatLoggerFactory] | None = None,
        **kwargs: Any,
    ) -> None:
        scheduler = str(vllm_config.scheduler_config.scheduler_cls)
        ours = scheduler.startswith("spexis_runtime.")
        if log_stats and ours and vllm_config.kv_transfer_config is None:
            vllm_config.additional_config[METRICS] = True
            stat_loggers = [PrometheusStatLogger, *(stat_loggers or [])]
        super().__init__(
            vllm_config,
            executor_class,
            log_stats,
            *args,
            stat_loggers=stat_loggers,
            **kwargs,
        )


@dataclass
class AsyncEngineArgs(vllm.AsyncEngineArgs):
    """vLLM's, with the options of `spexis_runtime.LLM`.

    `AsyncLLM.from_engine_args(AsyncEngineArgs(model=..., exit_model=...))` raises what
    `LLM` raises.
    """

    exit_model: str | None = None
    row_budget: int | Literal["auto"] = "auto"
    drop_ratio: float | None = None
    admission: Literal["vllm", "history"] = "vllm"
    log_dir: str | None = None
    stages_per_gpu: int = 1

    def __post_init__(self) -> None:
        check_model_path(self.model)  # vLLM's own looks for a repository where offline
        super().__post_init__()

    def for_vllm(self) -> vllm.AsyncEngineArgs:
        """The same in vLLM's terms: checked, with what makes speculation happen."""
        check_versions()
        defaults = vllm.AsyncEngineArgs(model=self.model)
        options = {
            field.name: value
            for field in dataclasses.fields(defaults)
            if field.name != "model"
            and (value := getattr(self, field.name)) != getattr(defaults, field.name)
        }
        own_options = {name: getattr(self, name) for name in OWN_OPTIONS}
        _, options = engine_options(self.model, own_options, options)
        return vllm.AsyncEngineArgs(model=self.model, **options)

    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
        return self.for_vllm().create_engine_config(*args, **kwargs)
