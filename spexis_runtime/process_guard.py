# SPDX-License-Identifier: Apache-2.0
"""Kills what an engine's process has started as soon as that process has ended.

A process of its own, so that it works however the other ended: SIGKILL cannot be
caught, and vLLM's client terminates an engine that reports its death before that has
cleaned up. Ray's agents outlive their raylet by up to a minute otherwise. Run as a
script; imports nothing of the package.
"""

import contextlib
import os
import select
import subprocess
import sys

import psutil

LOOK_EVERY = 0.2  # seconds, while the engine starts


class ProcessGuard:
    """Ends processes with this one."""

    def __init__(self) -> None:
        # the pipe is this process's alone, so that it closes when this process ends
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def all_started(self) -> None:
        """What is to be guarded runs by now: no need to look for more."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


def started_by(process: psutil.Process) -> set[psutil.Process]:
    """At any depth, but for this process and Python's resource trackers.

    Those end with the process they belong to, after they have removed its shared
    memory. A `psutil.Process` knows its start time: no later process of that number is
    meant.
    """
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                is_tracker = any("resource_tracker" in part for part in child.cmdline())
                if not is_tracker and child.pid != os.getpid():
                    found.add(child)
    return found


def main() -> None:
    engine_pid = int(sys.argv[1])
    if os.getppid() != engine_pid:
        return  # it has ended already, before it started anything
    engine = psutil.Process(engine_pid)
    guarded: set[psutil.Process] = set()
    wait: float | None = LOOK_EVERY
    while True:
        told, _, _ = select.select([sys.stdin], [], [], wait)
        if told and not os.read(sys.stdin.fileno(), 1):
            break
        guarded |= started_by(engine)
        if told:
            wait = None
    for process in list(guarded):
        guarded |= started_by(process)
    for process in guarded:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
