# SPDX-License-Identifier: Apache-2.0
"""Several stages on one GPU, each with its share of the SMs: for development and tests.

MPS gives every stage's process its share. NCCL refuses two ranks on one device unless
they seem to be on different hosts, so each gets a host name of its own and sockets.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.executor.ray_utils import ray

from spexis_runtime.config import SpexisConfig, SpexisConfigError

MPS_CONTROL = "nvidia-cuda-mps-control"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # MPS's own


def check_mps() -> None:
    """Raise SpexisConfigError where MPS neither runs nor can be started."""
    if not _mps_runs() and shutil.which(MPS_CONTROL) is None:
        raise SpexisConfigError(
            f"stages_per_gpu needs MPS: {MPS_CONTROL} is not on the PATH; the CUDA "
            "driver brings it along"
        )


def _mps_runs() -> bool:
    directory = os.environ.get(PIPE_DIRECTORY, DEFAULT_PIPE_DIRECTORY)
    return (Path(directory) / "control").exists()


def start_mps() -> None:
    """Start MPS for this process's children, unless it runs.

    It ends with the processes that the engine's guard ends.
    """
    if _mps_runs():
        return
    directory = tempfile.mkdtemp(prefix="spexis-mps-")
    os.environ[PIPE_DIRECTORY] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = directory
    subprocess.Popen([MPS_CONTROL, "-f"], stdout=subprocess.DEVNULL)


def worker_environment(stages_per_gpu: int) -> dict[str, str]:
    """Variables that a stage's process needs before it touches its device."""
    variables = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // stages_per_gpu)}
    if PIPE_DIRECTORY in os.environ:
        variables[PIPE_DIRECTORY] = os.environ[PIPE_DIRECTORY]
    return variables


class ColocatedRayWorkerProc(RayWorkerProc):
    """A stage that shares its GPU with others."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        config = SpexisConfig.from_additional_config(
            self._init_kwargs["vllm_config"].additional_config
        )
        node_id = ray.get_runtime_context().get_node_id()
        return node_id, [self._init_kwargs["rank"] // config.stages_per_gpu]

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        os.environ["NCCL_HOSTID"] = f"stage{self._init_kwargs['rank']}"
        os.environ["NCCL_NET"] = "Socket"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        super().initialize_worker(*args, **kwargs)
