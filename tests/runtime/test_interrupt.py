# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, as a terminal sends it: to all processes of the user's script."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import interruptible
import pytest
from models import make_adapter, make_model
from processes import outlast, processes


@pytest.fixture
def script(tmp_path: Path) -> Iterator[subprocess.Popen]:
    model = make_model("llama", tmp_path)
    command = [sys.executable, interruptible.__file__, model]
    script = subprocess.Popen(
        [*command, make_adapter(model, 2, tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own
    )
    yield script
    script.kill()
    script.wait()


def interrupt(script: subprocess.Popen) -> None:
    os.killpg(script.pid, signal.SIGINT)


@pytest.mark.works(
    "Ctrl-C in `generate`, and `generate` again",
    stages=[2],
)
def test_generate_and_generate_again(script):
    def said() -> object:
        return json.loads(script.stdout.readline())

    first = said()
    assert len(first) == len(interruptible.PROMPTS)
    assert said() == "now something long"
    time.sleep(1)
    interrupt(script)
    begin = time.monotonic()
    assert said() == "interrupted"
    assert time.monotonic() - begin < 10
    assert said() == first
    assert script.wait(timeout=120) == 0


def kill(script: subprocess.Popen) -> None:
    script.kill()


@pytest.mark.works(
    "Ctrl-C, or SIGKILL, while the engine starts",
    stages=[2],
)
@pytest.mark.parametrize("end", [interrupt, kill])
def test_start(script, end):
    """The script ends, and all that it has started so far."""
    deadline = time.monotonic() + 180
    while not any("ray::" in command for command in processes(script.pid).values()):
        assert time.monotonic() < deadline, "no stage was started"
        time.sleep(0.1)
    started = processes(script.pid)
    end(script)
    assert script.wait(timeout=60) != 0
    assert not outlast(started)
