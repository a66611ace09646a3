# SPDX-License-Identifier: Apache-2.0
"""`spexis serve` in a process of its own, for tests."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT = 300  # seconds, on a slow machine


class Server:
    """Starts at once; `wait_until_ready` before the first request.

    Args:
        options: of `spexis serve`, after the model.
        log: file for what it prints.
    """

    def __init__(self, model: Path, log: Path, *options: Any):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "spexis_runtime.cli", "serve", model]
        command += ["--host", "127.0.0.1", "--port", port, *options]
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdout=stream,
                stderr=subprocess.STDOUT,
                # its lines of statistics are to be written too
                env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},
                start_new_session=True,  # a process group of its own
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no server:\n{self.log.read_text()[-5000:]}")
            time.sleep(0.3)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> dict[str, float]:
        """name -> its value, summed over labels."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def kill(self) -> None:
        """The process; what it has started ends with it."""
        self.process.kill()
        self.process.wait()
