# SPDX-License-Identifier: Apache-2.0
"""One Ray actor a stage: vLLM's Ray executor, also on a machine without a GPU."""

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_port
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.executor.ray_utils import ray

from spexis_runtime import patches
from spexis_runtime.config import SpexisConfig, SpexisConfigError
from spexis_runtime.no_gpu.environment import ALWAYS, NO_GPU_ENVIRONMENT
from spexis_runtime.no_gpu.platform import STAGE_RESOURCE
from spexis_runtime.process_guard import ProcessGuard
from spexis_runtime.step_profile import STEP_TIMES, StepProfile


class NoGpuRayWorkerProc(RayWorkerProc):
    """A stage without a device: its rank stands for the device number."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        node_id = ray.get_runtime_context().get_node_id()
        return node_id, [self._init_kwargs["rank"]]


def _live_and_die_with_parent() -> None:
    """End this engine process when its parent dies, and not before.

    Ctrl-C in a terminal goes to the parent's whole process group, but is for the parent
    to act upon: blocked here, in threads and processes that start later too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-parent").start()


class SpexisRayExecutor(RayExecutorV2):
    """vLLM's Ray executor; with no GPU on a cluster that has stage slots."""

    @property
    def spexis_config(self) -> SpexisConfig:
        return SpexisConfig.from_additional_config(self.vllm_config.additional_config)

    def _init_executor(self) -> None:
        own_process = multiprocessing.parent_process() is not None
        if own_process:  # else the engine runs in the user's
            _live_and_die_with_parent()
            self.guard = ProcessGuard()
        if current_platform.ray_device_key == STAGE_RESOURCE:
            patches.ray_worker_class(NoGpuRayWorkerProc)
            patches.sleep_between_looks()
            if not ray.is_initialized():
                self._init_ray_without_gpu(own_process)
        elif self.spexis_config.stages_per_gpu > 1:
            self._prepare_colocation()
        try:
            super()._init_executor()
        finally:
            if own_process:
                self.guard.all_started()
        for response_mq in self.response_mqs:
            if response_mq._is_remote_reader:
                patches.end_wait_on_shutdown(response_mq)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> Any:
        """Warm up; with `row_budget="auto"`, tell the scheduler how long steps take."""
        warm_up = super().initialize_from_config(kv_cache_configs)
        config = self.spexis_config
        speculates = config.exit_model is not None
        if speculates and config.chooses_rows and current_platform.is_cuda():
            profiles = self.collective_rpc("profile_decode_steps")
            profile = StepProfile.slowest(profiles)
            self.vllm_config.additional_config[STEP_TIMES] = profile
        return warm_up

    def _init_ray_without_gpu(self, own_process: bool) -> None:
        """Attach to the cluster at RAY_ADDRESS, or start a private one."""
        num_workers = self.parallel_config.world_size
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            ray.init(
                address="local",
                num_cpus=num_workers,
                num_gpus=0,
                resources={STAGE_RESOURCE: num_workers},
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
            if own_process:  # the guard ends it, and at once
                atexit.unregister(ray.shutdown)
            return
        ray.init(address=address, logging_level=logging.ERROR)
        slots = int(ray.cluster_resources().get(STAGE_RESOURCE, 0))
        if slots < num_workers:
            raise SpexisConfigError(
                f"the Ray cluster at {address} has {slots} {STAGE_RESOURCE} of the "
                f"{num_workers} needed: start its nodes with --resources "
                f"'{{\"{STAGE_RESOURCE}\": {num_workers}}}'"
            )

    def _prepare_colocation(self) -> None:
        """To Ray, each stage has a GPU of its own."""
        from spexis_runtime.colocated import ColocatedRayWorkerProc, start_mps

        start_mps()
        patches.ray_worker_class(ColocatedRayWorkerProc)
        ray.init(
            address="local",
            num_gpus=self.parallel_config.world_size,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )

    @staticmethod
    def _select_tcpstore_port(local_dp_rank: int | None, master_port: int) -> int:
        # vLLM's choice starts at port 100 without data parallelism, so that engines
        # that start at the same time take the same one
        return get_open_port()

    def _build_runtime_env(self) -> dict[str, Any]:
        runtime_env = super()._build_runtime_env()
        variables = runtime_env["env_vars"]
        variables.update({name: os.environ[name] for name in ALWAYS})
        if current_platform.ray_device_key == STAGE_RESOURCE:
            variables.update(NO_GPU_ENVIRONMENT)
        elif self.spexis_config.stages_per_gpu > 1:
            from spexis_runtime.colocated import worker_environment

            variables.update(worker_environment(self.spexis_config.stages_per_gpu))
        return runtime_env

    def _join_monitor_thread(self) -> None:
        # a dead stage wakes the monitor at once, instead of at its next poll in 5 s
        if ray.is_initialized():
            for handle in getattr(self, "ray_worker_handles", []):
                ray.kill(handle.actor)
        super()._join_monitor_thread()
