# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation of exit adapters, in plain torch and transformers."""
