# SPDX-License-Identifier: Apache-2.0
"""A stage of a speculative pipeline: vLLM's worker with our model runner."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker

from spexis_runtime import patches
from spexis_runtime.adapter.config import load_adapter_config
from spexis_runtime.config import PARTITION, SpexisConfig, layer_partition
from spexis_runtime.model_runner import SpexisModelRunner
from spexis_runtime.step_profile import StepProfile, profile_decode_steps

logger = init_logger(__name__)


@contextlib.contextmanager
def end_process_on_error(what: str) -> Iterator[None]:
    """A step that raises ends this process.

    vLLM reports errors of the last stage only; those of another stage would leave its
    neighbours, and the user, waiting for ever. A dead stage is noticed within seconds.
    """
    finished = False
    try:
        yield
        finished = True
    finally:
        if not finished:
            logger.exception("%s failed, this stage ends", what)
            os._exit(1)


class FailFast:
    """Mixin over a vLLM worker class whose failed steps end the process."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        with end_process_on_error("execute_model"):
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        with end_process_on_error("sample_tokens"):
            return super().sample_tokens(grammar_output)  # type: ignore[misc]


class StageWorker(FailFast):
    """Mixin over a vLLM worker class that builds `model_runner_cls` as its runner."""

    model_runner_cls: type[SpexisModelRunner]
    replaced_runner: tuple[str, str]
    model_runner: SpexisModelRunner

    def init_device(self) -> None:
        self._set_layer_partition()
        with patches.model_runner_class(*self.replaced_runner, self.model_runner_cls):
            super().init_device()  # type: ignore[misc]

    def _set_layer_partition(self) -> None:
        """vLLM takes the layers of this stage from the environment."""
        config: VllmConfig = self.vllm_config  # type: ignore[attr-defined]
        exit_model = SpexisConfig.from_additional_config(
            config.additional_config
        ).exit_model
        assert exit_model is not None
        os.environ[PARTITION] = layer_partition(
            config.model_config.hf_config.num_hidden_layers,
            load_adapter_config(exit_model).exit_layer,
            config.parallel_config.pipeline_parallel_size,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        output = super().execute_model(scheduler_output)
        runner = self.model_runner
        if runner.is_first_pp_rank and runner.has_rows and runner.plan.drafting:
            with end_process_on_error("draft"):
                runner.draft()
        return output

    def profile_decode_steps(self) -> StepProfile:
        return profile_decode_steps(self.model_runner)

    def check_integrity(self) -> dict[str, Any]:
        """What must be equal on all stages; raises AssertionError where it is broken.

        Call it when no request is running.
        """
        return self.model_runner.check_integrity()


class SpexisWorker(StageWorker, Worker):
    """The stage on a GPU."""

    model_runner_cls = SpexisModelRunner
    replaced_runner = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")
