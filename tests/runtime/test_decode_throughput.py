# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the benchmark: what is steady, and what the report makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.e2e.decode_report import main as report
from bench.e2e.decode_throughput import (
    BUDGETS,
    CELLS,
    SWEPT,
    THETAS,
    Cell,
    cases,
    figures,
    prompts_of,
    steady,
)

STAGES = 2


def tick(running: int, rows: int, valid: int, **others: Any) -> dict[str, Any]:
    return {
        "running": running,
        "prefill_tokens": 0,
        "milliseconds": 10.0,
        "normal_rows": rows,
        "draft_rows": 0,
        "valid_rows": valid,
        "drafts_after_valid": 0,
        "accepted_drafts": 0,
        "kv_blocks_used": 7,
    } | others


def test_steady_ticks_are_those_in_which_all_decode() -> None:
    warm = [tick(4, 2, 2, milliseconds=99.0)] * (2 * STAGES)
    filling = [tick(2, 2, 2, prefill_tokens=64), tick(4, 0, 0, prefill_tokens=64)]
    full = [tick(4, 2, 2), tick(4, 0, 0), tick(4, 4, 4)]
    log = [*filling, *warm, *full, tick(3, 3, 3), tick(4, 4, 4, prefill_tokens=0)]
    window = steady(log[:-1], Cell(4, 128), STAGES)
    assert window == full
    got = figures(window)
    assert (got["ticks"], got["empty_ticks"], got["rows"]) == (3, 1, 3.0)
    assert got["tok_s"] == pytest.approx(6 / 0.03)
    assert got["acceptance"] is None
    with pytest.raises(RuntimeError, match="no tick in which all requests decode"):
        steady(filling, Cell(4, 128), STAGES)


def test_each_cell_of_the_grid_is_run() -> None:
    plain, ours = list(cases(True, CELLS)), list(cases(False, CELLS))
    assert {(c.cell, c.how) for c in plain} == {
        (cell, how) for cell in CELLS for how in ("split", "bunched")
    }
    auto = {(c.cell, c.theta) for c in ours if c.row_budget == "auto"}
    assert auto == {(cell, theta) for cell in CELLS for theta in THETAS}
    assert len(ours) - len(auto) == len(SWEPT) * len(BUDGETS)


def test_prompts_share_no_prefix() -> None:
    cell = Cell(8, 32)
    prompts = [p["prompt_token_ids"] for p in prompts_of(cell, 1) + prompts_of(cell, 2)]
    assert {len(prompt) for prompt in prompts} == {33}  # all but one token in blocks
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 16


def write_round(folder: Path, name: str, results: list[dict[str, Any]]) -> None:
    (folder / "raw").mkdir(exist_ok=True)
    file = {
        "shape": "toy",
        "stages": STAGES,
        "machine": "none",
        "date": "2026-12-03",
        "versions": {},
        "cases": results,
    }
    (folder / "raw" / f"toy-{name}.json").write_text(json.dumps(file))


def result(case: list[Any], tok_s: float, step_ms: float, **others: Any) -> dict:
    return {
        "case": case,
        "tok_s": tok_s,
        "step_ms": step_ms,
        "rows": 16.0,
        "empty_ticks": 0,
        "ticks": 9,
        "tokens_per_step": 11.0,
        "acceptance": None,
        "kv_blocks": 70,
    } | others


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split, wider = [[16, 128], "split", None, None], [[32, 128], "split", None, None]
    plain = [result(split, 1000.0, 8.0), result(wider, 1900.0, 10.0)]
    write_round(tmp_path, "pp-1", plain)
    ours = [[16, 128], "replay", 0.6, "auto"]
    for name, tok_s in (("sp-1", 1100.0), ("sp-2", 1140.0)):
        write_round(tmp_path, name, [result(ours, tok_s, 10.0, acceptance=0.6)])
    report([str(tmp_path)])
    [case] = json.loads((tmp_path / "decode_throughput.json").read_text())["cases"]
    assert case["ratio"] == 1.12
    assert case["rounds"] == 2
    assert case["predicted_tokens_per_step"] == pytest.approx(16 / 1.4, abs=1e-3)
    assert case["step_ms"] == {"ours": 10.0, "split_pp": 8.0, "pp_at_k": 10.0}
    assert case["fraction_of_model"] == pytest.approx(
        1120 / (1e5 * 16 / 1.4 / 1e3), abs=1e-3
    )
    assert (tmp_path / "decode_throughput_toy.png").stat().st_size > 5000
    assert "1.12x of split PP" in capsys.readouterr().out
