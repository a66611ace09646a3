# SPDX-License-Identifier: Apache-2.0
"""What holds for the files of the repository, whatever they compute."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from pre_commit.languages import pygrep

import spexis_runtime
from spexis_runtime.adapter import load_adapter_config
from spexis_runtime.adapter.length import load_length_config
from spexis_runtime.versions import RAY_SERIES, VLLM_VERSION

ROOT = Path(__file__).parents[1]
PACKAGES = ("spexis_kernels", "spexis_runtime")
MAX_LINES = 450  # of a file of the packages; 400 is what to aim at
MAX_WEIGHT_BYTES = 16_000_000

PYTHON_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.py"),
        *(
            path
            for top in (*PACKAGES, "tests", "bench", "docs", "examples")
            for path in (ROOT / top).rglob("*.py")
        ),
    ]
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYGREP_HOOKS = {
    hook["id"]: hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
    if hook["language"] == "pygrep"
}


def grep(hook: dict[str, Any], files: list[str]) -> int:
    """Run a pygrep hook of pre-commit; nonzero where it complains."""
    return pygrep.main([*hook.get("args", []), hook["entry"], *files])


@pytest.mark.parametrize("hook", PYGREP_HOOKS)
def test_rules_of_the_source(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = PYGREP_HOOKS[hook]
    files = [
        path
        for path in PYTHON_FILES
        if re.search(rule.get("files", ""), path)
        and not re.search(rule.get("exclude", "^$"), path)
    ]
    assert files
    monkeypatch.chdir(ROOT)
    assert grep(rule, files) == 0


SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    ("hook", "source", "complains"),
    [
        ("spdx", SPDX + "x = 1\n", False),
        ("spdx", SPDX, False),
        ("spdx", "", True),
        ("spdx", "x = 1\n" + SPDX, True),
        ("no-host-sync", "return loss.items()\n", False),
        ("no-host-sync", "return loss.item()\n", True),
        ("no-host-sync", "return x.cpu()\n", True),
        ("no-host-sync", "torch.cuda.synchronize()\n", True),
        ("no-block-ptr", "tl.make_tensor_descriptor(x)\n", False),
        ("no-block-ptr", "tl.make_block_ptr(x)\n", True),
    ],
)
def test_rules_can_fail(
    hook: str, source: str, complains: bool, tmp_path: Path
) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    assert bool(grep(PYGREP_HOOKS[hook], [str(path)])) == complains


def test_files_are_short() -> None:
    lines = {
        path: len((ROOT / path).read_text().splitlines())
        for path in PYTHON_FILES
        if path.startswith(PACKAGES)
    }
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}
    assert len(lines) > 20


def test_every_test_is_collected() -> None:
    """Functions `test_*` outside `tests/**/test_*.py` would never run."""
    stray, found = [], 0
    for path in PYTHON_FILES:
        tests = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        found += len(tests)
        if tests and not re.fullmatch(r"tests/(.*/)?test_\w+\.py", path):
            stray.append(path)
    assert stray == []
    assert found > 50


# ---- versions ---------------------------------------------------------------------
def pins(lines: list[str]) -> dict[str, str]:
    """Name to version, of the lines that pin one."""
    found = (re.match(r"([\w.-]+)==([^\s;]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match}


def test_versions_agree() -> None:
    project = PYPROJECT["project"]
    assert project["version"] == spexis_runtime.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert newest and newest[1] == spexis_runtime.__version__
    assert f"| {newest[1]} | {VLLM_VERSION} | {RAY_SERIES}" in changelog

    runtime = pins(project["optional-dependencies"]["vllm"])
    assert runtime["vllm"] == VLLM_VERSION
    assert runtime["ray"].startswith(RAY_SERIES)
    bench, dev = (
        pins(project["optional-dependencies"][extra]) for extra in ("bench", "dev")
    )
    lock = pins((ROOT / "requirements.txt").read_text().splitlines())
    pinned = runtime | bench | dev
    assert {name: lock.get(name) for name in pinned} == pinned
    for line in project["optional-dependencies"]["dev"]:
        assert "==" in line or line == "spexis[bench]"


def test_lock_is_complete() -> None:
    """It is installed without resolving, so what it lacks would not be there."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


# ---- what is shipped --------------------------------------------------------------
@pytest.mark.parametrize("group", ["vllm.platform_plugins", "vllm.general_plugins"])
def test_entry_points(group: str) -> None:
    assert callable(entry_points(group=group)["spexis"].load())


def test_shipped_adapters() -> None:
    total = 0
    predictors = sorted((ROOT / "spexis_runtime" / "length_predictors").glob("*"))
    for predictor in predictors:
        assert predictor.name.endswith(
            f"-layer{load_length_config(predictor).exit_layer}"
        )
        total += (predictor / "model.safetensors").stat().st_size
    adapters = sorted((ROOT / "spexis_runtime" / "adapters").glob("*"))
    assert "smollm2-135m-instruct-layer15" in [adapter.name for adapter in adapters]
    for adapter in adapters:
        config = load_adapter_config(adapter)
        assert adapter.name.endswith(f"-layer{config.exit_layer}")
        assert (
            (adapter / "README.md").read_text().startswith("---\nlicense: apache-2.0")
        )
        total += (adapter / "model.safetensors").stat().st_size
    assert 0 < total < MAX_WEIGHT_BYTES  # all of them together


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall("^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_of_a_page(name: str) -> None:
    """Those within the repository lead somewhere."""
    page = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page() -> None:
    """In the order in which they are to be read."""
    index = (ROOT / "docs" / "README.md").read_text()
    assert {Path(page).name for page in PAGES} - {"README.md"} == set(
        re.findall(r"\]\((\w+\.md)\)", index)
    )
    order = ["how_it_works", "choosing", "training", "serving", "metrics", "kernels"]
    order += ["limits", "troubleshooting"]
    places = [index.index(f"({name}.md)") for name in order]
    assert places == sorted(places)
