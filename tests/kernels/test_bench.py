# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' own arithmetic, files and cases: what needs no GPU."""

import importlib
import json

import pytest
import torch

from bench import tune
from bench.kernels.cases import CASES
from bench.kernels.plot import plot, table
from bench.kernels.results import Results, geometric_mean, record
from spexis_kernels.draft_head import _settings, draft_head_workspace

HEADER = {"machine": "a GPU", "versions": {"torch": "1"}, "date": "", "command": "c"}


def test_record() -> None:
    entry = record("a case", 4.0, {"slow": 8.0, "fast": 6.0}, 3.0)
    assert entry == {
        "case": "a case",
        "ours_us": 4.0,
        "rivals": {"slow": 8.0, "fast": 6.0},
        "best_rival": "fast",
        "ratio": 1.5,
        "limit_us": 3.0,
        "fraction_of_limit": 0.75,
    }
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


def test_results_resume(tmp_path) -> None:
    path = tmp_path / "h200" / "draft_head.json"
    first = Results(path, HEADER)
    assert not first.done("a")
    first.add(record("a", 2.0, {"rival": 3.0}, 1.0))
    again = Results(path, {**HEADER, "date": "a later one"})
    assert again.done("a") and not again.done("b")
    again.add(record("b", 1.0, {"rival": 1.0}, 1.0))
    content = json.loads(path.read_text())
    assert [entry["case"] for entry in content["cases"]] == ["a", "b"]
    assert {key: content[key] for key in HEADER} == HEADER
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(ValueError, match="has results of machine a GPU"):
        Results(path, {**HEADER, "machine": "another"})


def test_cases_are_those_of_the_targets() -> None:
    counts = {operation: len(cases) for operation, cases in CASES.items()}
    assert counts == {
        "merged_attention": 33,
        "merged_attention_fused": 33,
        "merged_attention_chunks": 4,
        "merged_attention_fp8": 3,
        "draft_head": 16,
        "pool": 3,
    }
    for cases in CASES.values():
        assert len({case.name for case in cases}) == len(cases)
    names = [case.name for case in CASES["merged_attention"]]
    assert "64/8 x 64 x 8192" in names and "64/8 x 256 x mixed 1024" in names


def test_table_and_plot(tmp_path) -> None:
    entries = [record(name, 2.0, {"r": 3.0}, 1.0) for name in "ab"]
    entries.append(record("c", 4.0, {"r": 1.0, "other": 2.0}, 3.0))
    content = {**HEADER, "cases": entries}
    line = table({"draft_head": content}).splitlines()[-1]
    assert line == "| `draft_head` | 3 | 0.83x, 0.25x | 75% |"
    pytest.importorskip("matplotlib")
    plot(content, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_tune_combinations_and_cases() -> None:
    assert tune.combinations(["a=1,2", "b=3"]) == [
        {},
        {"a": 1, "b": 3},
        {"a": 2, "b": 3},
    ]
    assert tune.combinations([]) == [{}]
    names = [case.name for case in tune.chosen_cases("merged_attention", ["mixed"])]
    assert names == ["64/8 x 128 x mixed 2048", "64/8 x 256 x mixed 1024"]
    assert tune.chosen_cases("draft_head", []) == CASES["draft_head"]


def test_tune_ranks_by_time_over_default() -> None:
    ranked = tune.ranked([({}, [2.0, 8.0]), ({"a": 1}, [1.0, 8.0])])
    assert [entry["change"] for entry in ranked] == [{"a": 1}, {}]
    assert ranked[0]["time_over_default"] == pytest.approx(0.5**0.5, abs=1e-4)


@pytest.mark.parametrize("operation", tune.SETTINGS)
def test_tune_changes_settings(operation: str) -> None:
    """Of every operation, where the operation looks them up, and back again."""
    module_name, function = tune.SETTINGS[operation]
    module = importlib.import_module(module_name)
    before = getattr(module, function)
    with tune.changed_settings(operation, {"num_stages": 77}):
        if operation == "draft_head":
            assert module._settings(5, torch.float32).num_stages == 77
        else:
            query = torch.empty(1, 8, 64)
            cache = torch.empty(1, 16, 8, 64)
            assert module._settings(query, cache).num_stages == 77
    assert getattr(module, function) is before


def test_tune_changes_what_is_launched() -> None:
    """A tile of another size shows in the workspace."""
    hidden, weight = torch.empty(4, 32), torch.empty(1024, 32)
    tile = _settings(4, torch.float32).block_v
    assert len(draft_head_workspace(hidden, weight).token) == 1024 // tile
    with tune.changed_settings("draft_head", {"block_v": 64}):
        assert len(draft_head_workspace(hidden, weight).token) == 1024 // 64
