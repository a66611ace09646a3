# SPDX-License-Identifier: Apache-2.0
"""Sentinels and row kinds, defined once for kernels, runtime and tests."""

PAD_SLOT_ID = -1
"""A row, or a KV slot, that is not there: read nothing, write nothing."""

INVALID_TOKEN = -1
"""No token: no draft, or a row that turned out void."""

PAD, PREFILL, NORMAL, DRAFT = -1, 0, 1, 2
"""Row kinds (design section 3): a normal row feeds a verified token, a draft row a
drafted one, a prefill row ends a chunk of known tokens."""
