# SPDX-License-Identifier: Apache-2.0
"""Argument checks and write-back shared by the operations on the request pool."""

import torch

from spexis_kernels.pool import RequestPool, Rows


def check_vector(
    name: str, tensor: torch.Tensor, length: int, *dtypes: torch.dtype
) -> None:
    """Raise ValueError unless `tensor` is a contiguous [length] of one of `dtypes`."""
    if (
        tensor.shape != (length,)
        or tensor.dtype not in dtypes
        or not tensor.is_contiguous()
    ):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be a contiguous [{length}] {wanted}, got "
            f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
        )


def check_rows(name: str, rows: Rows, num_rows: int) -> None:
    """Raise ValueError unless all of `rows` are contiguous [num_rows] int32."""
    for field, tensor in rows._asdict().items():
        check_vector(f"{name}.{field}", tensor, num_rows, torch.int32)


def write_back(pool: RequestPool, changed: RequestPool) -> None:
    """Copy into `pool` those tensors that `changed` does not share with it."""
    for old, new in zip(pool, changed, strict=True):
        if new is not old:
            old.copy_(new)
