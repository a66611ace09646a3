# SPDX-License-Identifier: Apache-2.0
"""The platform plug-in: vLLM's CPU platform, on top of its CUDA wheel."""

from spexis_runtime.no_gpu.environment import configure_environment, gpu_count

STAGE_RESOURCE = "spexis_stage"
"""The Ray resource that stands for a device: one a pipeline stage."""


def platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform's path where no GPU is."""
    if gpu_count():
        return None
    configure_environment()
    return "spexis_runtime.no_gpu.cpu_platform.NoGpuPlatform"
