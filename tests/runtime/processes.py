# SPDX-License-Identifier: Apache-2.0
"""What a process has started, and what of it is left."""

import contextlib
import time

import psutil

TRACKER = "multiprocessing.resource_tracker"


def processes(pid: int | None = None) -> dict[int, str]:
    """Everything that process `pid`, or else this one, has started and that is alive.

    Down to Ray's agents; but for the dead that nobody has waited for yet, and Python's
    own resource tracker.
    """
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and TRACKER not in command:
                found[process.pid] = command[:200]
    return found


def alive(processes: dict[int, str]) -> dict[int, str]:
    """Those of `processes` that still run, whoever their parent is by now."""
    left = {}
    for pid, command in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left[pid] = command
    return left


def outlast(before: dict[int, str]) -> dict[int, str]:
    """Those of `before` that still run after a while."""
    deadline = time.monotonic() + 20
    while (left := alive(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left
