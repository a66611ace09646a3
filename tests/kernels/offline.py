# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of public functions for a GPU that is not there.

Tensors on the device "meta" stand in for the GPU's. Triton must not interpret
(TRITON_INTERPRET unset when it is imported), so tests run this in a process of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from spexis_kernels import QKNorm, Rotary, dispatch, draft_head, merged_attention
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


H200 = Device((9, 0), 132)
META = {"device": "meta"}


def attention(
    num_heads: int = 64,
    num_kv_heads: int = 8,
    *,
    cache_dtype: torch.dtype = torch.bfloat16,
    fused: bool = False,
    query_len: int = 1,
) -> None:
    """Launch `merged_attention` on 64 requests of a Llama- or Qwen3-like model."""
    dtype, head_size, rows, tokens = torch.bfloat16, 128, 64, 64 * query_len
    new = torch.empty(2, tokens, num_kv_heads, head_size, dtype=dtype, **META)
    cache = torch.empty(4096, 2, 16, num_kv_heads, head_size, dtype=cache_dtype, **META)
    scale = None if cache_dtype == dtype else torch.empty(1, **META)
    rotary = qk_norm = None
    if fused:
        cos_sin = torch.empty(4096, head_size, dtype=dtype, **META)
        rotary = Rotary(cos_sin, torch.empty(tokens, dtype=torch.int64, **META))
        weights = torch.empty(2, head_size, dtype=dtype, **META)
        qk_norm = QKNorm(weights[0], weights[1], 1e-6)
    merged_attention(
        torch.empty(tokens, num_heads, head_size, dtype=dtype, **META),
        new[0],
        new[1],
        cache[:, 0],
        cache[:, 1],
        torch.empty(rows, 64, dtype=torch.int32, **META),
        torch.empty(rows + 1, dtype=torch.int32, **META),
        torch.empty(rows, dtype=torch.int32, **META),
        torch.empty(tokens, dtype=torch.int64, **META),
        max_query_len=query_len,
        scale=head_size**-0.5,
        k_scale=scale,
        v_scale=scale,
        rotary=rotary,
        qk_norm=qk_norm,
    )


def head(rows: int) -> None:
    """Launch `draft_head` at the size of Llama-70B."""
    hidden = torch.empty(rows, 8192, dtype=torch.bfloat16, **META)
    draft_head(hidden, torch.empty(128256, 8192, dtype=torch.bfloat16, **META))


CASES: dict[str, Callable[[], None]] = {
    "decode": attention,
    "decode_fused": partial(attention, fused=True),
    "decode_fp8": partial(attention, cache_dtype=torch.float8_e4m3fn),
    "decode_tp8": partial(attention, 8, 1),
    "merged": partial(attention, query_len=4),
    "draft_head_16": partial(head, 16),
    "draft_head_128": partial(head, 128),
    "draft_head_256": partial(head, 256),
}


def main() -> None:
    """Print what the first kernel of each case needs, as JSON."""
    needs = {}
    for name, case in CASES.items():
        with compiling_for(H200) as launched:
            case()
        ptx = launched[0].asm["ptx"]
        needs[name] = usage(launched[0])._asdict() | {
            "async_copies": len(re.findall(r"cp\.async\.cg.*, 0x10", ptx)),
            "narrow_copies": len(re.findall(r"cp\.async\.ca", ptx)),
            "wgmma": ptx.count("wgmma.mma_async"),
        }
    json.dump(needs, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
