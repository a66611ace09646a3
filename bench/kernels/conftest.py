# SPDX-License-Identifier: Apache-2.0
"""The option of `make bench-kernels`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--results", required=True, help="folder of the JSON files, one an operation"
    )
