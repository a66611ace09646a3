# SPDX-License-Identifier: Apache-2.0
"""`NoGpuPlatform`: what vLLM asks about the machine when there is no GPU."""

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from spexis_runtime import patches
from spexis_runtime.no_gpu.platform import STAGE_RESOURCE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

patches.define_missing_c_ops()

WORKERS = {
    "auto": "spexis_runtime.no_gpu.worker.NoGpuWorker",
    "spexis_runtime.greedy_head.GreedyHeadWorker": (
        "spexis_runtime.no_gpu.worker.GreedyHeadNoGpuWorker"
    ),
}
"""What a user's `worker_cls` is here."""


class NoGpuPlatform(CpuPlatform):
    """vLLM's CPU platform without compiled operators, with Ray and async scheduling."""

    ray_device_key = STAGE_RESOURCE

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel's compiled operators need a CUDA driver; there is none."""

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "spexis_runtime.attention.SpexisAttentionBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode

        parallel = vllm_config.parallel_config
        scheduler = vllm_config.scheduler_config
        cache = vllm_config.cache_config
        kept = parallel.distributed_executor_backend, scheduler.async_scheduling
        parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
        if not cache.user_specified_block_size:
            cache.block_size, cache.user_specified_block_size = 16, True
        super().check_and_update_config(vllm_config)
        # vLLM's CPU build switches both off; the V2 runner needs neither to be
        parallel.distributed_executor_backend, scheduler.async_scheduling = kept
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.custom_ops = ["none"]
