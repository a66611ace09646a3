# SPDX-License-Identifier: Apache-2.0
"""Small tensors: torch's threads would only get in each other's way."""

import torch

torch.set_num_threads(1)
