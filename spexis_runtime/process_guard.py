# SPDX-License-Identifier: Apache-2.0
"""Kills the processes that it was told of as soon as whoever told it has ended.

A process of its own, so that it works however the other ended: SIGKILL cannot be
caught, and vLLM's client terminates an engine that reports its death before that has
cleaned up. Ray's agents outlive their raylet by up to a minute otherwise. Run as a
script; imports nothing of the package.
"""

import contextlib
import subprocess
import sys

import psutil


class ProcessGuard:
    """Ends processes with this one."""

    def __init__(self) -> None:
        # the pipe is this process's alone, so that it closes when this process ends
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
            text=True,
        )

    def watch_children(self) -> None:
        """Guard all processes that this one has started so far, at any depth.

        But for Python's resource trackers: they end with the process they belong to,
        after they have removed its shared memory.
        """
        assert self.process.stdin is not None
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                is_tracker = any("resource_tracker" in part for part in child.cmdline())
                if not is_tracker and child.pid != self.process.pid:
                    self.process.stdin.write(f"{child.pid}\n")
        self.process.stdin.flush()


def main() -> None:
    guarded = []
    for line in sys.stdin:
        with contextlib.suppress(psutil.NoSuchProcess):
            # knows its start time too, so that no later process of that number is meant
            guarded.append(psutil.Process(int(line)))
    for process in guarded:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
