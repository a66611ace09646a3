# SPDX-License-Identifier: Apache-2.0
"""docs/features.md is what the tests' markers say."""

import subprocess
import sys

import feature_table


def test_the_table_is_up_to_date():
    command = [sys.executable, feature_table.__file__, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
