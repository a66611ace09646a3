# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: makes `--attention-backend CUSTOM` ours."""


def register() -> None:
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(
        AttentionBackendEnum.CUSTOM, "spexis_runtime.attention.SpexisAttentionBackend"
    )
