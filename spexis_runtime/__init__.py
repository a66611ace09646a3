# SPDX-License-Identifier: Apache-2.0
"""Speculative parallelism for vLLM: an early exit drafts, the pipeline verifies."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spexis_runtime.async_llm import AsyncEngineArgs as AsyncEngineArgs
    from spexis_runtime.async_llm import AsyncLLM as AsyncLLM
    from spexis_runtime.llm import LLM as LLM

__all__ = ["LLM", "AsyncEngineArgs", "AsyncLLM"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import vLLM only when it is needed, and with the environment it needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spexis_runtime.no_gpu.environment import configure_environment
    from spexis_runtime.versions import check_versions

    check_versions()
    configure_environment()
    if name == "LLM":
        from spexis_runtime import llm

        return llm.LLM
    from spexis_runtime import async_llm

    return getattr(async_llm, name)
