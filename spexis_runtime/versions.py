# SPDX-License-Identifier: Apache-2.0
"""The versions this runtime is written against; checked before anything starts."""

from importlib.metadata import PackageNotFoundError, version

VLLM_VERSION = "0.26.0"
RAY_SERIES = "2.60."


class UnsupportedVersionError(RuntimeError):
    """Another version of vLLM or Ray than this runtime is written against."""


def check_versions() -> None:
    """Raise UnsupportedVersionError unless vLLM and Ray are the supported ones."""
    for package, wanted in (("vllm", VLLM_VERSION), ("ray", RAY_SERIES)):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        release = found.partition("+")[0] + "."  # without a local version
        if not release.startswith(wanted.rstrip(".") + "."):
            raise UnsupportedVersionError(
                f"spexis_runtime needs {package} {wanted.rstrip('.')}, found {found}"
            )
