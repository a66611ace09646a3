# SPDX-License-Identifier: Apache-2.0
"""`spexis plan`: every layout of the table, predicted, in order, drawn."""

import json
import re

import pytest

from spexis_runtime.lookahead.plan import best_of_each_kind, candidates, main
from spexis_runtime.lookahead.step_times import StageTimes, StepTimes, write_step_times

PP = StageTimes((8, 64), (10.0, 12.0))
TP = StageTimes((8, 64), (16.0, 20.0))
TIMES = StepTimes(
    "two GPUs",
    "a model",
    "made up",
    {(2, 1, False): PP, (2, 1, True): PP, (1, 2, False): TP},
)


def test_candidates_are_predicted_and_in_order():
    found = candidates(TIMES, [16, 64], 0.8)
    assert len(found) == 11 + 2
    rates = {c.name: c.tokens_per_second for c in found}
    assert rates["PP=1 TP=2"][1] == pytest.approx(1e3 * 64 / 20)
    assert rates["PP=2 TP=1"][1] == pytest.approx(1e3 * 32 / PP.decode_ms(32))
    assert rates["PP=2 TP=1 SP alpha=0"][1] == pytest.approx(1e3 * 64 / 1.2 / 12)
    last = [c.tokens_per_second[-1] for c in found]
    assert last == sorted(last, reverse=True)
    names = [c.name for c in best_of_each_kind(found)]
    assert names == ["PP=2 TP=1 SP alpha=0", "PP=1 TP=2", "PP=2 TP=1"]


def test_better_drafts_make_dropping_worth_it():
    steep = StageTimes((8, 64), (10.0, 40.0))
    times = StepTimes("m", "n", "s", {(2, 1, True): steep})
    assert candidates(times, [64], 0.6, theta_gain=0.4)[0].layout.alpha > 0
    with_gain = candidates(times, [64], 0.9, theta_gain=1.0)
    assert max(c.tokens_per_second[0] for c in with_gain) <= 1e3 * 64 / 10


def test_command(tmp_path, capsys):
    times, out, png = (
        tmp_path / name for name in ("times.json", "out.json", "out.png")
    )
    write_step_times(TIMES, times)
    main(
        ["--times", str(times), "--theta", ".8", "--json", str(out), "--png", str(png)]
    )
    shown = capsys.readouterr().out
    assert "two GPUs, theta 0.8" in shown
    assert "PP=1 TP=2" in shown
    assert len(json.loads(out.read_text())["candidates"]) == 13
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--times", "nowhere.json", "--theta", ".8"], "nowhere.json cannot be read"),
        (["--times", "x", "--theta", "1.8"], r"must be in \[0, 1\], got 1.8"),
        (["--times", "x", "--theta", ".8", "--requests", "0"], "must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(argv)
    said = str(refused.value) + capsys.readouterr().err
    assert re.search(message, said)
