# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of public functions for a GPU that is not there.

Tensors on the device "meta" stand in for the GPU's. Triton must not interpret
(TRITON_INTERPRET unset when it is imported), so tests run this in a process of its own.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from spexis_kernels import dispatch
from spexis_kernels._attention_settings import Device


class Usage(NamedTuple):
    """What ptxas says that one program of a kernel needs."""

    kernel: str
    threads: int
    registers: int  # a thread
    stack: int  # bytes a thread, spills included
    shared: int  # bytes


class _Driver:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling_for(device: Device) -> Iterator[list[Any]]:
    """Launches compile, and are added to the list that this yields, nothing else."""
    launched = []
    launch = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kw: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kw)
        launched.append(kernel)
        return kernel

    major, minor = device.capability
    driver = _Driver(10 * major + minor)
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(triton.JITFunction, "run", compile_only),
        mock.patch.object(dispatch, "_interpreted", True),
        mock.patch("spexis_kernels.merged_attention.device_of", lambda _: device),
    ):
        yield launched


def usage(kernel: Any) -> Usage:
    """Of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return Usage(
        kernel=kernel.metadata.name,
        threads=32 * kernel.metadata.num_warps,
        registers=int(found[1]),
        stack=int(found[2]),
        shared=kernel.metadata.shared,
    )
