# SPDX-License-Identifier: Apache-2.0
"""`spexis profile` on a machine without a GPU: its file, and what it refuses."""

from pathlib import Path

import huggingface_hub
import pytest
from models import make_adapter
from small_models import save_small_model

from spexis_runtime import profile_steps
from spexis_runtime.lookahead.plan import candidates
from spexis_runtime.lookahead.step_times import StageTimes, read_step_times


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    model = save_small_model(folder / "small")
    return [
        *("--model", str(model), "--exit-model", str(make_adapter(model, 2, folder))),
        *("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "67108864"),
    ]


def test_profile_plain_and_with_drafts(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "times.json"
    command = [*arguments, "--layouts", "2x1", "--out", str(out)]
    profile_steps.main(command)
    times = read_step_times(out)
    assert set(times.stages) == {(2, 1, False), (2, 1, True)}
    assert times.model == "small"
    assert "no GPU" in times.machine
    for stage in times.stages.values():
        assert stage.rows == (1, 2, 4)
        assert set(stage.prefill_tokens) <= {16, 64}
    assert candidates(times, [4], theta=0.6)[0].tokens_per_second[0] > 0
    assert "[2/2] PP=2 TP=1 with drafts" in capfd.readouterr().out
    assert list(out.parent.iterdir()) == [out]  # no scratch is left

    written = out.read_bytes()
    profile_steps.main(command)  # all is there: no engine starts
    assert "starts" not in capfd.readouterr().out
    assert out.read_bytes() == written


def test_slowest_stage_and_what_prefill_adds() -> None:
    def stage(decode: list[float], prefill: list[float]) -> dict[str, list[float]]:
        return dict(
            rows=[1, 8],
            milliseconds=decode,
            prefill_tokens=[16, 64],
            prefill_milliseconds=prefill,
        )

    found = profile_steps.slowest([stage([2, 3], [1.5, 5]), stage([1, 4], [2.0, 4])])
    assert found == StageTimes((1, 8), (2, 4), (64,), (3,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--exit-model", "nowhere"], "nowhere"),
        (["--model", "./nowhere"], "model ./nowhere does not exist"),
        (["--enable-lora"], "exit_model cannot go with enable_lora"),
    ],
)
def test_refused_before_an_engine_starts(
    arguments: list[str],
    changes: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_steps, "measure", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    out = tmp_path / "times.json"
    with pytest.raises(SystemExit, match=message):
        profile_steps.main(
            [*arguments, *changes, "--layouts", "2x1", "--out", str(out)]
        )
    assert not out.exists()


def test_a_file_of_another_model_is_not_continued(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_steps, "measure", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    out = tmp_path / "times.json"
    out.write_text('{"machine": "m", "model": "o", "source": "", "stages": []}')
    with pytest.raises(SystemExit, match="has the times of o on 'm', not of small"):
        profile_steps.main([*arguments, "--layouts", "2x1", "--out", str(out)])
