# SPDX-License-Identifier: Apache-2.0
"""What must be there before any test module is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton decorates the kernels
