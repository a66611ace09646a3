# SPDX-License-Identifier: Apache-2.0
"""Budgets, admissions and plans that see what is coming (paper, sections 4 and 5)."""
