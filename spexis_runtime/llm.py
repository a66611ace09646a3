# SPDX-License-Identifier: Apache-2.0
"""`LLM`: vLLM's `LLM` with speculative parallelism."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

import vllm

from spexis_runtime import patches
from spexis_runtime.engine_options import engine_options
from spexis_runtime.no_gpu.environment import configure_environment
from spexis_runtime.versions import check_versions


class LLM(vllm.LLM):
    """vLLM's `LLM`, with the pipeline's stages speculating past each other.

    Takes every argument of `vllm.LLM`, has its methods and gives its outputs. Beside
    them:

    Args:
        exit_model: directory of an exit adapter trained for `model`; stage 0 then holds
            its `exit_layer` layers. None: plain pipeline parallelism.
        row_budget: decode rows of a stage step, at least
            ceil(max_num_seqs / pipeline_parallel_size); "auto": what promises most
            tokens a second by step times measured at start; without a GPU, all.
        drop_ratio: alpha of the paper's section 5.1, in [0, 1), instead of a budget: of
            B running requests, B / (1 + alpha (N - 1)) rows are fed (equation 3).
        admission: which waiting requests start: by vLLM's rule, or also by "history":
            if KV memory will do when each ends like those before it.
        log_dir: directory for the per-iteration JSONL log; created if missing.
        stages_per_gpu: stages that share a GPU through MPS, each with its share of the
            SMs; for development and tests. Needs `kv_cache_memory_bytes`.

    Raises:
        SpexisConfigError, AdapterError (both ValueError): for settings or an adapter
            that cannot be, before any worker starts.
        UnsupportedVersionError: for another vLLM or Ray than the supported ones.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        exit_model: str | os.PathLike[str] | None = None,
        row_budget: int | Literal["auto"] = "auto",
        drop_ratio: float | None = None,
        admission: Literal["vllm", "history"] = "vllm",
        log_dir: str | os.PathLike[str] | None = None,
        stages_per_gpu: int = 1,
        **kwargs: Any,
    ) -> None:
        check_versions()
        configure_environment()
        model = os.fspath(model)
        own_options = dict(
            exit_model=exit_model,
            row_budget=row_budget,
            drop_ratio=drop_ratio,
            admission=admission,
            log_dir=log_dir,
            stages_per_gpu=stages_per_gpu,
        )
        self.spexis_config, options = engine_options(model, own_options, kwargs)
        with patches.interrupt_ends_start():
            super().__init__(model, **options)

    def _run_completion(self, *args: Any, **kwargs: Any) -> Any:
        with self._requests_end_on_interrupt():
            return super()._run_completion(*args, **kwargs)

    def _run_chat(self, *args: Any, **kwargs: Any) -> Any:
        with self._requests_end_on_interrupt():
            return super()._run_chat(*args, **kwargs)

    def _render_and_run_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self._requests_end_on_interrupt():  # beam search
            return super()._render_and_run_requests(*args, **kwargs)

    @contextlib.contextmanager
    def _requests_end_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C in `generate` and its like aborts the requests, not the engine."""
        try:
            yield
        except KeyboardInterrupt:
            requests = list(self.llm_engine.output_processor.request_states)
            self.llm_engine.abort_request(requests, internal=True)
            raise
