# SPDX-License-Identifier: Apache-2.0
"""All metadata lives in pyproject.toml."""

from setuptools import setup

setup()
