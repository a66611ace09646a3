# SPDX-License-Identifier: Apache-2.0
"""`spexis report` and `spexis top` show what the per-iteration log says."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spexis_runtime import report, top
from spexis_runtime.iteration_log import IterationLog, last_iterations, read_iterations

SVG = re.compile(r"<svg .*?</svg>")


def iteration(step: int, **values: Any) -> dict[str, Any]:
    defaults = dict(
        normal_rows=3,
        draft_rows=4,
        valid_rows=5,
        drafts_after_valid=4,
        accepted_drafts=2,
        row_budget=8,
        running=6,
        waiting=step % 3,
        preemptions=1,
        kv_blocks_used=10,
        step_milliseconds=2.0,
    )
    return dict(step=step) | defaults | values


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """450 iterations, every tenth after a pause."""
    log = IterationLog(str(tmp_path))
    for i in range(450):
        log.write(**iteration(i, step_milliseconds=None if i % 10 == 0 else 2.0))
    log.close()
    return tmp_path


def test_the_page_shows_the_log(log_dir, capsys):
    assert report.main([str(log_dir)]) == 0
    assert capsys.readouterr().out == f"wrote {log_dir / 'report.html'}\n"
    text = (log_dir / "report.html").read_text()
    for name, value in (
        ("iterations", "450"),
        ("tokens", "2250"),
        ("tokens an iteration", "5.00"),
        ("acceptance", "50.0%"),
        ("step, median", "2.00 ms"),
        ("preemptions", "1"),
    ):
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in text
    charts = [ElementTree.fromstring(svg) for svg in SVG.findall(text)]
    assert len(charts) == len(re.findall("<h2>", text)) == 5
    for chart in charts:
        axes, *lines = chart.findall("path")
        assert lines
        for line in lines:
            points = line.get("d").split()
            assert 2 <= len(points) <= report.POINTS
            assert points[0].startswith("M")
    assert "http" not in text, "a page that needs a network"


def test_lines_are_drawn_where_the_values_are():
    parts = report.split([iteration(i, running=i) for i in range(5)], 5)
    requests = next(c for c in report.charts(parts) if c.title == "Requests")
    assert requests.lines["running"] == [0, 1, 2, 3, 4]
    chart = ElementTree.fromstring(report.svg(requests, [1.0, 2.0, 3.0, 4.0, 5.0]))
    points = [
        tuple(map(float, point[1:].split(",")))
        for point in chart.findall("path")[1].get("d").split()
    ]
    across, down = zip(*points, strict=True)
    steps = [b - a for a, b in zip(across, across[1:], strict=False)]
    assert steps == pytest.approx([(report.WIDTH - 2 * report.MARGIN) / 5] * 4, abs=0.2)
    assert down[0] == report.HEIGHT - 30
    assert down[-1] == 20
    assert sorted(down, reverse=True) == list(down)


def test_a_gap_where_nothing_was_measured():
    iterations = [iteration(i) for i in range(3)]
    iterations[1]["step_milliseconds"] = None
    iterations[1]["drafts_after_valid"] = iterations[1]["accepted_drafts"] = 0
    charts = {c.title: c for c in report.charts(report.split(iterations, 3))}
    times = charts["Time of a step while the pipeline was busy"]
    assert times.lines["median"] == [2.0, None, 2.0]
    assert charts["Acceptance"].lines["acceptance"] == [0.5, None, 0.5]
    drawn = ElementTree.fromstring(report.svg(times, [1.0, 2.0, 3.0]))
    assert [p[0] for p in drawn.findall("path")[1].get("d").split()] == ["M", "M"]


def test_parts_hold_all_in_order():
    for length, most in ((1, 9), (9, 9), (10, 3), (1000, 7)):
        parts = report.split([{"step": i} for i in range(length)], most)
        assert len(parts) == min(length, most)
        assert [i["step"] for part in parts for i in part] == list(range(length))
        sizes = list(map(len, parts))
        assert max(sizes) - min(sizes) <= 1


def test_top_shows_the_last_iterations(log_dir, capsys):
    log = IterationLog(str(log_dir))
    log.write(**iteration(450, running=77))
    log.close()
    newest = max(log_dir.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    assert top.main([str(log_dir), "--once", "--last", "20"]) == 0
    shown = capsys.readouterr().out
    assert newest.name in shown
    rows = dict(re.findall(r"│ ([\w ,]+?) +│ +(\S+) │", shown))
    assert rows["running"] == "77"
    count = len(read_iterations(log_dir))
    assert rows["iterations"] == str(min(count, 20))


def test_top_without_a_log_yet(tmp_path, capsys):
    assert top.main([str(tmp_path), "--once"]) == 0
    assert "no log in" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 20, 450, 1000])
def test_the_end_of_a_log_is_read(log_dir, count):
    assert last_iterations(log_dir, count) == read_iterations(log_dir)[-count:]


@pytest.mark.parametrize(
    ("main", "options", "line"),
    [
        (report.main, ["{}"], "has no log with an iteration in it"),
        (report.main, ["{}/none"], "has no log with an iteration in it"),
        (top.main, ["{}/none"], "there is no directory"),
        (top.main, ["{}", "--last", "0"], "--last must be at least 1, got 0"),
        (top.main, ["{}", "--every", "0"], "--every must be > 0, got 0.0"),
    ],
)
def test_refused_in_one_line(main, options, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([option.format(tmp_path) for option in options])
    assert end.value.code == 2
    assert line in capsys.readouterr().err.splitlines()[-1]
