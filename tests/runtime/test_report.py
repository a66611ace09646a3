# SPDX-License-Identifier: Apache-2.0
"""`spexis report` and `spexis top` show what the per-iteration log says."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spexis_runtime import report, top
from spexis_runtime.iteration_log import IterationLog, last_iterations, read_iterations
from spexis_runtime.timeline import bars, busiest_second, timeline

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
        stages=2,
        prefill_tokens=0,
        drafts_by_confidence="1100",
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
    *charts, _ = [ElementTree.fromstring(svg) for svg in SVG.findall(text)]
    assert len(charts) + 1 == len(re.findall("<h2>", text)) == 7
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


def test_acceptance_over_confidence_rank():
    """Two steps of ten drafts, one of two: halves count for the tenths in them."""
    lines = [
        iteration(0, drafts_by_confidence="1111100000"),
        iteration(1, drafts_by_confidence="1110000000"),
        iteration(2, drafts_by_confidence="10"),
        iteration(3, drafts_by_confidence=""),
    ]
    shares = report.confidence_chart(lines).lines["acceptance"]
    assert shares == [1, 1, 1, 0.5, 0.5, 0, 0, 0, 0, 0]
    lines[0]["drafts_by_confidence"] = lines[1]["drafts_by_confidence"] = ""
    alone = report.confidence_chart(lines).lines["acceptance"]
    assert [i for i, share in enumerate(alone) if share is not None] == [2, 7]
    lines[2]["drafts_by_confidence"] = ""
    assert "confidence rank" not in report.page(
        [line | {"milliseconds": 2.0} for line in lines], "no drafts"
    )


def timed(count: int, milliseconds: float, **values: Any) -> list[dict[str, Any]]:
    return [
        iteration(
            i, milliseconds=milliseconds, step_milliseconds=milliseconds, **values
        )
        for i in range(count)
    ]


def test_the_busiest_second():
    lines = timed(100, 20, valid_rows=1) + timed(50, 20, valid_rows=2)
    lines += timed(50, 20, valid_rows=1)
    assert busiest_second(lines) == pytest.approx((2.0, 3.0))
    assert busiest_second(lines[:3]) == (0.0, 1.0), "a log shorter than a second"


def test_each_stage_is_a_step_ahead_of_the_next():
    lines = timed(8, 10, stages=3)
    lines[5]["step_milliseconds"] = None  # the pipeline was empty before
    seen: dict[int, list[tuple[int, int]]] = {}
    for bar in bars(lines, 0, 1):
        tick = round(bar.end * 100) - 1
        assert bar.end - bar.start == pytest.approx(0.01)
        seen.setdefault(bar.stage, []).append((tick, bar.step["step"]))
    assert seen == {
        2: [(i, i) for i in (0, 1, 2, 3, 4, 6, 7)],
        1: [(i, i + 1) for i in (0, 1, 2, 3, 6)],
        0: [(i, i + 2) for i in (0, 1, 2)],
    }
    assert sorted({bar.end for bar in bars(lines, 0.0199, 0.041)}) == pytest.approx(
        [0.03, 0.04]
    )


def test_bars_show_what_became_of_rows():
    lines = timed(4, 10, prefill_tokens=2000)
    chart = ElementTree.fromstring(timeline(lines))
    titles = [rect.find("title").text for rect in chart.iter("rect")]
    assert len(titles) == 4 * (4 + 3)
    first = [title for title in titles if title.startswith("step 0: ")]
    assert [title.partition(": ")[2] for title in first] == [
        "3 normal rows",
        "2 accepted drafts",
        "2 void drafts",
        "2000 prompt tokens",
    ]
    heights = [float(rect.get("height")) for rect in chart.iter("rect")]
    assert heights[0] == pytest.approx(1.5 * heights[1], abs=0.2)
    assert heights[3] < heights[1], "a prompt would leave nothing of the rows to see"
    for line in lines:
        line["step_milliseconds"] = None
    assert timeline(lines) is None


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
