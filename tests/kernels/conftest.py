# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests: on a GPU where there is one, else interpreted."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton decorates the kernels

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/tolerances.py

from spexis_kernels.dispatch import interpreted_kernels  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    # the interpreter's own, and numpy's where a kernel takes log(0) on purpose
    for warning in ("DeprecationWarning", "RuntimeWarning"):
        config.addinivalue_line(
            "filterwarnings", f"ignore::{warning}:triton.runtime.interpreter"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def device() -> Iterator[str]:
    """Device of a test's tensors, on which the public functions launch kernels."""
    if torch.cuda.is_available():
        yield "cuda"
    else:
        with interpreted_kernels():
            yield "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory shows: NaN, or a value that is no slot, token or count."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).min + 77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(
        torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k))
    )
