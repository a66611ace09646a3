# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say; that of the client is run by test_serve.py."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
from models import make_adapter
from processes import outlast, processes
from small_models import save_small_model

from spexis_kernels.dispatch import interpreted_kernels
from spexis_runtime.adapter import load_adapter_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("models") / "small")


def test_each_one_is_run():
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    tests = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    for name in files:
        assert f'"{name}"' in tests or f'load("{name[:-3]}")' in tests, name


def test_kernels_alone():
    """The references, and the kernels themselves in Triton's interpreter."""
    example = load("kernels")
    options = ["--length", "32", "--stages", "3", "--noise"]
    right, some_right, wrong = (
        example.main([*options, noise]) for noise in ("0", "0.1", "9")
    )
    assert right == 1
    assert right < some_right < 2.5 < wrong <= 3
    options = ["--length", "5", "--requests", "3"]
    want = example.main(options)
    with interpreted_kernels():
        assert example.main(options) == want


def test_kernels_alone_need_no_vllm():
    """Nor anything else of the runtime's."""
    check = "import sys, kernels; print(sorted({'vllm', 'ray'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=EXAMPLES, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


def test_training_an_adapter(model, tmp_path, capsys):
    out = load("train_adapter").main(
        ["--model", str(model), "--exit", "1/2", "--out", str(tmp_path / "mine")]
        + ["--max-new-tokens", "4"]
    )
    assert load_adapter_config(str(out)).exit_layer == 2
    said = capsys.readouterr().out
    assert "draft 1 " in said
    assert "ECE " in said


WAIT_FOR_NODES = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR")
while len([node for node in ray.nodes() if node["Alive"]]) < int(sys.argv[2]):
    time.sleep(0.2)
"""


@pytest.fixture
def several_nodes(monkeypatch) -> Iterator[str]:
    """The address of a cluster of two nodes, each with room for a stage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("PORT", str(port))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    script, address = EXAMPLES / "several_nodes.sh", f"127.0.0.1:{port}"
    nodes = []
    for words in (["head"], ["join", "127.0.0.1"]):
        nodes.append(subprocess.Popen([script, *words]))
        wait_for_port(port)
    wait = [sys.executable, "-c", WAIT_FOR_NODES, address, str(len(nodes))]
    subprocess.run(wait, check=True, timeout=120)
    yield address
    started = [processes(node.pid) for node in nodes]
    for node in reversed(nodes):
        node.terminate()
        node.wait(timeout=60)
    for of_node in started:
        assert not outlast(of_node)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        assert time.monotonic() < deadline, f"nothing answers at port {port}"
        time.sleep(0.2)


def test_offline_on_several_nodes(several_nodes, model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", several_nodes)
    answers = load("offline").main(
        ["--model", str(model), "--exit-model", str(make_adapter(model, 2, tmp_path))]
        + ["--max-tokens", "8"]
    )
    assert len(answers) == 3
    assert all(answers)


def test_drop_in_attention(model):
    """With vLLM's own `LLM`; the backend's outputs are compared elsewhere."""
    assert load("drop_in_attention").main([str(model), "--max-tokens", "4"])
