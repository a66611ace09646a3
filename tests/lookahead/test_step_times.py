# SPDX-License-Identifier: Apache-2.0
"""Step-time tables: between and beyond the points, and what is refused."""

import json

import pytest

from spexis_runtime.lookahead.step_times import (
    StageTimes,
    StepTimes,
    StepTimesError,
    read_step_times,
    write_step_times,
)

STAGE = StageTimes((8, 16, 64), (10.0, 11.0, 17.0), (100, 200), (5.0, 12.0))


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [(0, 10), (8, 10), (12, 10.5), (16, 11), (40, 14), (64, 17), (80, 19)],
)
def test_decode_times(rows, milliseconds):
    assert STAGE.decode_ms(rows) == pytest.approx(milliseconds)
    assert STAGE.decode_table(90)[rows] == pytest.approx(milliseconds)


@pytest.mark.parametrize(
    ("tokens", "milliseconds"), [(0, 0), (50, 2.5), (150, 8.5), (300, 19)]
)
def test_prefill_times(tokens, milliseconds):
    assert STAGE.prefill_ms(tokens) == pytest.approx(milliseconds)
    assert STAGE.prefill_table(300)[tokens] == pytest.approx(milliseconds)


def test_without_prefill_times_prefill_costs_nothing():
    assert StageTimes((8,), (10.0,)).prefill_ms(500) == 0
    assert StageTimes((8,), (10.0,)).decode_ms(500) == 10


def test_what_is_written_is_read(tmp_path):
    times = StepTimes("m", "n", "s", {(2, 1, True): STAGE, (1, 2, False): STAGE})
    write_step_times(times, tmp_path / "times.json")
    assert read_step_times(tmp_path / "times.json") == times


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "no rows"),
        (((8, 16), (10.0,)), "2 rows but 1 times"),
        (((16, 8), (10.0, 11.0)), r"rows must increase from 1 on, got \[16, 8\]"),
        (((0, 8), (10.0, 11.0)), "rows must increase from 1 on"),
        (((8,), (0.0,)), "times by rows must be > 0"),
        (((8,), (1.0,), (5,), ("1",)), "times by prefill_tokens must be > 0"),
    ],
)
def test_impossible_times_are_refused(arguments, message):
    with pytest.raises(StepTimesError, match=message):
        StageTimes(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        (json.dumps({"machine": "m"}), "lacks 'stages'"),
        (
            json.dumps(
                {
                    "stages": 2
                    * [
                        dict(
                            pipeline_parallel_size=2,
                            tensor_parallel_size=1,
                            speculative=False,
                            rows=[8],
                            milliseconds=[1.0],
                        )
                    ]
                }
            ),
            "PP=2 TP=1 is there twice",
        ),
    ],
)
def test_files_that_are_no_table_are_refused(content, message, tmp_path):
    path = tmp_path / "times.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StepTimesError, match=message) as refused:
        read_step_times(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
