# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM`: vLLM's own, built from `AsyncEngineArgs` that know of speculation."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import vllm
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM

from spexis_runtime.engine_options import OWN_OPTIONS, engine_options
from spexis_runtime.versions import check_versions


@dataclass
class AsyncEngineArgs(vllm.AsyncEngineArgs):
    """vLLM's, with the options of `spexis_runtime.LLM`.

    `AsyncLLM.from_engine_args(AsyncEngineArgs(model=..., exit_model=...))` raises what
    `LLM` raises.
    """

    exit_model: str | None = None
    row_budget: int | Literal["auto"] = "auto"
    drop_ratio: float | None = None
    log_dir: str | None = None
    stages_per_gpu: int = 1

    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
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
        engine_args = vllm.AsyncEngineArgs(model=self.model, **options)
        return engine_args.create_engine_config(*args, **kwargs)
