# SPDX-License-Identifier: Apache-2.0
"""Workers for a machine without a GPU: vLLM's CPU worker, plain and speculative."""

from spexis_runtime import patches

patches.shim_streams()
patches.small_kernels_in_torch()
patches.sleep_between_looks()
patches.gumbel_sample_in_torch()
patches.top_k_top_p_in_torch()

from vllm.v1.worker.cpu.model_runner import CPUModelRunner  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

from spexis_runtime.greedy_head import GreedyHeadRunner, WithGreedyHead  # noqa: E402
from spexis_runtime.model_runner import SpexisModelRunner  # noqa: E402
from spexis_runtime.worker import FailFast, StageWorker  # noqa: E402


class NoGpuWorker(FailFast, CPUWorker):
    """Plain vLLM, for pipelines without speculation."""


class SpexisCPUModelRunner(SpexisModelRunner, CPUModelRunner):
    """The speculative runner over vLLM's CPU runner."""


class SpexisNoGpuWorker(StageWorker, CPUWorker):
    """A stage of a speculative pipeline."""

    model_runner_cls = SpexisCPUModelRunner
    replaced_runner = ("vllm.v1.worker.cpu.model_runner", "CPUModelRunner")


class GreedyHeadCPUModelRunner(GreedyHeadRunner, CPUModelRunner):
    """vLLM's CPU runner with the greedy head."""


class GreedyHeadNoGpuWorker(WithGreedyHead, FailFast, CPUWorker):
    """Plain vLLM with the greedy head."""

    model_runner_cls = GreedyHeadCPUModelRunner
    replaced_runner = ("vllm.v1.worker.cpu.model_runner", "CPUModelRunner")
