# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA build on a machine without a GPU: for tests, demos and development."""
