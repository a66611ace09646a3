# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends `spexis serve` once requests have ended, and all that it has started."""

import json
import threading

import httpx
import pytest
from models import make_adapter
from processes import outlast, processes
from server import Server
from small_models import save_small_model

OPTIONS = ("--pipeline-parallel-size", 2, "--dtype", "float32", "--max-num-seqs", 4)
TOKENS = 100
SMALL = ("--max-model-len", 256, "--kv-cache-memory-bytes", 64 << 20)


@pytest.fixture
def server(tmp_path):
    model = save_small_model(tmp_path / "small")
    adapter = make_adapter(model, 2, tmp_path)
    server = Server(
        model,
        tmp_path / "output",
        *("--exit-model", adapter, *OPTIONS, *SMALL, "--shutdown-timeout", 60),
    )
    yield server
    server.kill()


@pytest.mark.works("spexis serve: SIGTERM lets requests end, then ends", stages=[2])
def test_sigterm_drains(server):
    server.wait_until_ready()
    body = {
        "model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
        "prompt": "x",
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines: list[str] = []
    running = threading.Event()

    def stream() -> None:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                running.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert running.wait(timeout=60)
    started = processes(server.process.pid)
    assert any("ray::" in command for command in started.values())
    server.process.terminate()
    seen = len(lines)
    thread.join(timeout=120)
    assert server.process.wait(timeout=60) == 0
    assert not outlast(started)
    assert len(lines) > seen, "had ended before the signal"
    data = [line for line in lines if line.startswith("data: ")]
    assert data[-1] == "data: [DONE]"
    usage = json.loads(data[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == TOKENS
