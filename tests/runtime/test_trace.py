# SPDX-License-Identifier: Apache-2.0
"""Idle time of a trace, and its picture."""

import pytest

from bench.e2e.trace import FIRST_KERNEL, Kernel, figures, idle_us, plot


def stage_0(num_steps: int) -> list[Kernel]:
    """Steps of 100 us: work, a collective beside it and beyond, 10 us of nothing."""
    kernels = []
    for i in range(num_steps):
        at = 100.0 * i
        kernels += [
            Kernel(FIRST_KERNEL, at, at + 5),
            Kernel("gemm", at + 5, at + 60),
            Kernel("ncclDevKernel_Broadcast", at + 50, at + 90),
        ]
    return kernels


def test_idle_is_where_no_kernel_runs():
    kernels = [Kernel("a", 0, 10), Kernel("b", 5, 12), Kernel("c", 20, 50)]
    assert idle_us(kernels, 0, 40) == 8
    assert idle_us(kernels, 11, 60) == 8 + 10
    assert idle_us([], 3, 7) == 4


def test_figures_and_picture(tmp_path):
    got = figures(stage_0(12))
    assert got == {"steps": 11, "step_us": 100, "idle_us": 10, "idle_share": 0.1}
    with pytest.raises(RuntimeError, match="8 steps in the trace"):
        figures(stage_0(9))
    plot([stage_0(12), stage_0(12)], tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 3000
