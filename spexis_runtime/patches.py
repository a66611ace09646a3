# SPDX-License-Identifier: Apache-2.0
"""The ledger: every wrap and patch of vLLM 0.26.0, with reason and removal condition.

All other changes to vLLM are subclasses handed over through its own options. When the
pinned version changes, this file is what has to be read again.
"""

import contextlib
import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spexis_kernels.gumbel import gumbel_noise_reference


@contextlib.contextmanager
def model_runner_class(module: str, name: str, replacement: type) -> Iterator[None]:
    """While a worker's `init_device` runs, `module.name` is `replacement`.

    Reason: `Worker.init_device` imports the V2 runner by name and has no hook for
    another class. Remove when vLLM lets a worker name its runner class.
    """
    owner = importlib.import_module(module)
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def interrupt_ends_start() -> Iterator[None]:
    """Ctrl-C while an engine starts is raised.

    Reason: the socket on which the client waits for its engine swallows it, and the
    client then waits for an engine that has nobody to report to. Remove when
    `zmq_socket_ctx` lets KeyboardInterrupt pass.
    """
    import vllm.v1.engine.utils as utils

    original = utils.zmq_socket_ctx

    @contextlib.contextmanager
    def zmq_socket_ctx(*args: Any, **kwargs: Any) -> Iterator[Any]:
        interrupt = None
        with original(*args, **kwargs) as socket:
            try:
                yield socket
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    utils.zmq_socket_ctx = zmq_socket_ctx
    try:
        yield
    finally:
        utils.zmq_socket_ctx = original


def async_llm_class(replacement: type) -> None:
    """vLLM's server builds `replacement` as its engine, in this process.

    Reason: `build_async_engine_client_from_engine_args` names `AsyncLLM` and hands it
    no stat loggers; those of vLLM's plug-in group would be in every vLLM of the
    environment, and turn on the statistics that a user has turned off. Remove when the
    server takes stat loggers, or the class, from its arguments.
    """
    import vllm.v1.engine.async_llm as async_llm

    async_llm.AsyncLLM = replacement


def ray_worker_class(replacement: type) -> None:
    """The Ray executor builds `replacement` for its actors, in this process.

    Reason: `RayExecutorV2._init_executor` names `RayWorkerProc`, a module global.
    Remove when the executor takes its worker class from an attribute.
    """
    import vllm.v1.executor.ray_executor_v2 as ray_executor

    ray_executor.RayWorkerProc = replacement


def end_wait_on_shutdown(response_mq: Any) -> None:
    """A wait for an answer of another node's stage ends when the executor shuts down.

    Reason: vLLM's executor shuts its queues down when a stage has died, which wakes a
    reader of shared memory, but not one of a socket: the engine would wait for ever.
    Remove when `MessageQueue.dequeue` looks at `shutting_down` there too.
    """
    dequeue = response_mq.dequeue

    def dequeue_or_end(timeout: float | None = None, **kwargs: Any) -> Any:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while not response_mq.shutting_down:
            left = deadline - time.monotonic()
            try:
                return dequeue(timeout=max(0.0, min(1.0, left)), **kwargs)
            except TimeoutError:
                if left <= 0:
                    raise
        raise RuntimeError("cancelled")

    response_mq.dequeue = dequeue_or_end


def allocate_without_caching(kv_cache_manager: Any) -> None:
    """`allocate_slots` of this manager puts no block in the prefix cache.

    Reason: it caches blocks up to the newest known token, whose slot may still hold the
    KV of a rejected draft (design section 3, point 6), and blocks of a prompt that this
    very step computes, which another request of the step would then read while they are
    written. `SpexisScheduler` caches both later. Remove when `allocate_slots` lets its
    caller say how many tokens are safe to cache.
    """
    allocate_slots = kv_cache_manager.allocate_slots

    def allocate(*args: Any, **kwargs: Any) -> Any:
        # the scheduler passes delay_cache_blocks=False for the requests it admits
        kwargs["delay_cache_blocks"] = True
        return allocate_slots(*args, **kwargs)

    kv_cache_manager.allocate_slots = allocate


def ask_before_admission(
    kv_cache_manager: Any, may_start: Callable[[Any], bool]
) -> None:
    """`allocate_slots` gives a request nothing where `may_start` is false.

    Reason: vLLM admits whoever fits now, and has no hook for another rule. A head that
    gets no blocks stays at the head, and nobody behind it is tried. Remove when the
    scheduler has such a hook.
    """
    allocate_slots = kv_cache_manager.allocate_slots

    def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not may_start(request):
            return None
        return allocate_slots(request, *args, **kwargs)

    kv_cache_manager.allocate_slots = allocate


# ---- only on a machine without a GPU -------------------------------------------------
_c_ops: list[torch.library.Library] = []


def define_missing_c_ops() -> None:
    """Define the schemas of the operators that vLLM looks up on its CPU path.

    Reason: the CUDA wheel's `_C` library needs a CUDA driver to load. The operators are
    looked up, never run: custom ops are off. Remove when the wheel loads without one.
    """
    if _c_ops:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for schema in (
        "init_cpu_memory_env(int[] ids) -> ()",
        "silu_and_mul(Tensor! out, Tensor input) -> ()",
        "rms_norm(Tensor! out, Tensor input, Tensor weight, float eps) -> ()",
        "fused_add_rms_norm(Tensor! x, Tensor! r, Tensor w, float eps) -> ()",
        "rotary_embedding(Tensor positions) -> ()",
    ):
        library.define(schema)
    library.impl("init_cpu_memory_env", lambda ids: None, "CompositeExplicitAutograd")
    _c_ops.append(library)


def shim_streams() -> None:
    """Complete vLLM's stand-ins for CUDA streams and events on the CPU.

    Reason: its V2 runner calls methods that the stand-ins of its CPU worker lack, since
    pipelines are not run there. Remove when they have them.
    """
    import vllm.v1.worker.cpu.shm as shm

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    stream = shm._StreamPlaceholder
    stream.record_event = lambda self, *args: shm._EventPlaceholder()
    stream.wait_event = nothing
    stream.synchronize = nothing
    shm._EventPlaceholder.wait = nothing
    torch.Tensor.record_stream = nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


def gumbel_sample_in_torch() -> None:
    """vLLM's sampler draws its tokens in plain torch, with the same noise.

    Reason: Triton's interpreter has no libdevice, whose log1p the kernel needs, and
    takes hundreds of milliseconds for a vocabulary of 50,000. Remove when vLLM samples
    without Triton on a CPU.
    """
    import vllm.v1.worker.gpu.sample.sampler as sampler

    def gumbel_sample(
        logits: torch.Tensor,  # [num_tokens, vocab_size], after the temperature
        expanded_idx_mapping: torch.Tensor,  # [num_tokens]
        temperature: torch.Tensor,  # [max_num_reqs]
        seed: torch.Tensor,  # [max_num_reqs]
        pos: torch.Tensor,  # [num_tokens]
        apply_temperature: bool,
        use_fp64: bool = False,
    ) -> torch.Tensor:
        slots = expanded_idx_mapping.long()
        rows = temperature[slots].nonzero()[:, 0]  # the others are greedy
        noise = gumbel_noise_reference(
            seed[slots[rows]][:, None],
            pos[rows][:, None].long(),
            torch.arange(logits.shape[1]),
        )
        return logits.float().index_add(0, rows, noise).argmax(dim=-1)

    sampler.gumbel_sample = gumbel_sample


def top_k_top_p_in_torch() -> None:
    """vLLM's sampler takes its own plain-torch top-k and top-p.

    Reason: it prefers its Triton kernel where Triton is there, and that one does not
    run in the interpreter. Remove when it looks at the tensors' device.
    """
    import vllm.v1.worker.gpu.sample.sampler as sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    sampler.apply_top_k_top_p = apply_top_k_top_p_pytorch


def small_kernels_in_torch() -> None:
    """The kernels that move a few integers for each request run in plain torch.

    Reason: Triton's interpreter takes most of a step's time for them. The V2 runner
    takes them by name, so this comes before it is imported. Remove when vLLM's CPU path
    does without Triton.
    """
    from spexis_runtime.no_gpu.small_kernels import REPLACED

    for owner, functions in REPLACED.items():
        for function in functions:
            setattr(pkgutil.resolve_name(owner), function.__name__, function)


def sleep_between_looks() -> None:
    """A process that waits for a message between engine and stages sleeps.

    Reason: vLLM's wait spins for the first second, on a core that the stages of a
    machine without a GPU compute on. Remove when it can be told not to.
    """
    import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)
