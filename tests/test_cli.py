# SPDX-License-Identifier: Apache-2.0
"""The `spexis` command finds its commands, and says so where there is none."""

import subprocess
import sys

import pytest

from spexis_runtime import __version__
from spexis_runtime.cli import COMMANDS, main


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for words, command in COMMANDS.items():
        assert f"  {words} " in shown
        assert command.help in shown


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_has_its_own_help(words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--help"])
    assert end.value.code == 0
    assert f"spexis {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["sevre"], "error: no such command: sevre"),
        (["train", "adaptor", "--model"], "error: no such command: train adaptor"),
        (["--model", "x"], "error: no such command: x"),
    ],
)
def test_a_wrong_command_is_named(argv, line, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.endswith(line + "\n")


def test_without_a_command_it_says_how(capsys):
    assert main([]) == 2
    assert "usage: spexis COMMAND" in capsys.readouterr().out


def test_installed():
    """And quick: no command's module, torch or vLLM is imported for it."""
    command = [sys.executable, "-X", "importtime", "-m", "spexis_runtime.cli"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == __version__
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "spexis_runtime" in imported
    assert not imported & {"torch", "vllm", "ray"}
