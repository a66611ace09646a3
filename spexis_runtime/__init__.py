# SPDX-License-Identifier: Apache-2.0
"""Speculative parallelism for vLLM: an early exit drafts, the pipeline verifies."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spexis_runtime.llm import LLM as LLM

__all__ = ["LLM"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import vLLM only when `LLM` is asked for, and with the environment it needs."""
    if name == "LLM":
        from spexis_runtime.no_gpu.environment import configure_environment
        from spexis_runtime.versions import check_versions

        check_versions()
        configure_environment()
        from spexis_runtime.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
