# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for an H200, which need not be there, and fit into it.

In a process of its own: here the kernels are those of the interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REGISTERS = 65536  # of a multiprocessor
SHARED = 227 << 10  # bytes of shared memory that its programs may have
RESERVED = 1 << 10  # bytes more that each takes


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    """What each case of `offline.py` needs, by name."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / "offline.py")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name", ["decode", "decode_fused", "decode_fp8", "merged", "decode_tp8"]
)
def test_merged_attention(compiled: dict[str, dict[str, int]], name: str) -> None:
    """Two programs fit a multiprocessor, for which the settings launch two; K and V
    are loaded asynchronously, 16 bytes each; next to nothing is spilled."""
    needs = compiled[name]
    assert 2 * needs["threads"] * needs["registers"] <= REGISTERS
    assert 2 * (needs["shared"] + RESERVED) <= SHARED
    assert needs["stack"] <= 96  # loop invariants, once a tile
    assert needs["async_copies"] > 0
    # fp8 values take 8 bytes each, block ids of chunks are loaded so too
    assert (needs["narrow_copies"] == 0) == (name not in ("decode_fp8", "merged"))


@pytest.mark.parametrize("name", ["draft_head_16", "draft_head_128", "draft_head_256"])
def test_draft_head(compiled: dict[str, dict[str, int]], name: str) -> None:
    """No spills, the tensor cores' own instructions, tiles in shared memory."""
    needs = compiled[name]
    assert needs["threads"] * needs["registers"] <= REGISTERS
    assert needs["shared"] + RESERVED <= SHARED
    assert needs["stack"] == 0
    assert needs["wgmma"] > 0
