# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds, and what it needs: the kernels alone need no vLLM."""

import importlib.metadata as metadata
import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("spexis_kernels", "spexis_runtime")
ADAPTER_FILES = ("README.md", "config.json", "model.safetensors")

# Python that does not find some modules, as if they were not installed
WITHOUT = """
import sys
path, missing = sys.argv[1], set(sys.argv[2].split(","))
class Missing:
    def find_spec(self, name, *_):
        top = name.partition(".")[0]
        if top in missing:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.path.insert(0, path)
sys.meta_path.insert(0, Missing())
del sys.argv[1:3]
"""


def build(folder: Path, kind: str, out: Path) -> Path:
    call = f"build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; {call}"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind])
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Of a copy of the source, with an adapter of empty files."""
    out = tmp_path_factory.mktemp("distributions")
    source = out / "source"
    for name in (*PACKAGES, "tests"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "adapters"),
        )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    adapter = source / "spexis_runtime/adapters/some-layer1"
    adapter.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (adapter / name).touch()
    return build(source, "sdist", out)


@pytest.fixture(scope="module")
def wheel(sdist) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    return build(
        sdist.parent / sdist.name.removesuffix(".tar.gz"), "wheel", sdist.parent
    )


def test_distributions(sdist, wheel):
    """sdist and wheel hold both packages with the adapters' files, and no tests."""
    stem = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    expected |= {
        f"spexis_runtime/adapters/some-layer1/{name}" for name in ADAPTER_FILES
    }
    assert expected - in_sdist == set()
    assert {name for name in in_wheel if ".dist-info/" not in name} == expected
    assert f"{stem}.dist-info/licenses/LICENSE" in in_wheel
    assert {name for name in in_sdist if name.startswith("tests")} == set()


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """A directory with what the wheel holds."""
    path = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(path)
    return path


def needed(requirements: list[str]) -> set[str]:
    """Names of the distributions that `requirements` bring, at any depth."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in found:
            found.add(name)
            waiting += map(Requirement, metadata.requires(name) or [])
    return found


def run_with_bare_dependencies(
    installed: Path, code: str
) -> subprocess.CompletedProcess:
    """Run `code` where nothing is but the wheel and what it asks for without extras."""
    (info,) = installed.glob("*.dist-info")
    requirements = metadata.Distribution.at(info).requires or []
    distributions = needed([line for line in requirements if "extra ==" not in line])
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not distributions & set(map(canonicalize_name, owners))
    }
    assert {"vllm", "ray", "rich", "transformers"} <= others
    missing = ",".join(others - {*PACKAGES})
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, str(installed), missing],
        cwd=installed,
        capture_output=True,
        text=True,
    )


def test_the_kernels_need_torch_triton_and_numpy_alone(installed):
    code = f"""
import json, runpy, spexis_kernels
assert spexis_kernels.__file__.startswith({str(installed)!r})
runpy.run_path({str(ROOT / "examples" / "kernels.py")!r}, run_name="__main__")
print(json.dumps(sorted(sys.modules)))
"""
    done = run_with_bare_dependencies(installed, code)
    assert done.returncode == 0, done.stderr
    assert "all equal to plain decoding" in done.stdout
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "triton", "numpy"} <= modules
    assert not modules & {"vllm", "ray", "rich", "spexis_runtime"}


@pytest.mark.parametrize("words", ["serve --help", "demo --help", "top logs"])
def test_the_runtime_says_what_it_needs(installed, words):
    code = f"from spexis_runtime.cli import main; sys.exit(main({words.split()!r}))"
    done = run_with_bare_dependencies(installed, code)
    assert done.returncode
    assert done.stderr.splitlines()[-1].startswith(
        f"spexis {words.split()[0]} needs what is not installed here ("
    )
    assert "pip install 'spexis[" in done.stderr


@pytest.fixture(scope="module")
def environment(wheel) -> Path:
    """One into which pip has put the wheel, and nothing else."""
    path = wheel.parent / "environment"
    venv.create(path)
    into = ["--python", path / "bin" / "python"]
    command = [sys.executable, "-m", "pip", *into, "install", "--quiet", "--no-index"]
    done = subprocess.run(
        [*command, "--no-deps", wheel], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return path


def run_in(environment: Path, *words: str) -> subprocess.CompletedProcess:
    program, *arguments = words
    return subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=environment,
        env={"PATH": ""},
        capture_output=True,
        text=True,
    )


def test_the_command_is_installed(environment):
    shown = run_in(environment, "spexis", "--version")
    assert shown.stdout.strip() == metadata.version("spexis")
    needs = run_in(environment, "spexis", "serve", "model")
    assert needs.returncode
    assert "spexis_runtime needs vllm" in needs.stderr


def test_vllm_would_find_its_plugins(environment):
    """And no logits processor, which would rule out vLLM's V2 model runner."""
    code = """
from importlib.metadata import distribution
from importlib.util import find_spec
for point in distribution("spexis").entry_points:
    print(point.group, find_spec(point.module) is not None)
"""
    lines = run_in(environment, "python", "-c", code).stdout.splitlines()
    assert sorted(lines) == [
        "console_scripts True",
        "vllm.general_plugins True",
        "vllm.platform_plugins True",
    ]


def test_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras.keys() == {"vllm", "demo", "bench", "dev"}
    names = {Requirement(line).name for line in project["dependencies"]}
    assert names == {"torch", "triton", "numpy"}
    for name in ("demo", "bench", "dev"):
        assert any(line.startswith("spexis[") for line in extras[name]), name
