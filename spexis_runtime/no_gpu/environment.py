# SPDX-License-Identifier: Apache-2.0
"""The environment variables that vLLM's CUDA build needs where there is no GPU.

They must be set before vLLM and Triton are imported, so nothing is imported here.
"""

import os

NO_GPU_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # empty, or vLLM turns Triton off: no driver
    "TRITON_INTERPRET": "1",  # vLLM's own small kernels run in the interpreter
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "OMP_NUM_THREADS": "1",  # the stages share the cores
    # no compilers at every stage's start, for kernels that need CUDA (humming-kernels)
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
}
ALWAYS = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # the runner that speculation is built on
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a late Ray call must not start another cluster
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def gpu_count() -> int:
    """GPUs that this process may use, counted without starting CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return count if visible is None else min(count, len(visible.split(",")))


def use_cpu() -> None:
    """Make this process and its children ignore the machine's GPUs."""
    os.environ.update(NO_GPU_ENVIRONMENT)


def configure_environment() -> None:
    """Set what vLLM needs here, before it is imported; set values are kept."""
    for name, value in ALWAYS.items():
        os.environ.setdefault(name, value)
    if gpu_count() == 0:
        use_cpu()
