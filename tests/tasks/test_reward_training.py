"""A reward model from comparisons: pairs as rows, the command, and a run that follows what it likes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from asyncrl.cli.main import main
from asyncrl.config import Config, RewardTrainingConfig
from asyncrl.data.ragged import rows_of
from asyncrl.datasets import Preference
from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.tasks.reward_model import EncodedPair, _encoded, encode_pairs, pair_rows, split_held_out
from asyncrl.tasks.run import train, train_reward_model
from engines.training.scratch import make_scratch_model

SIZE = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128}


def question(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number % 10}+{number // 10 % 10}"}]


def answer(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_scratch_model(folder, conversations=[[*question(n), *answer(str(n))] for n in range(50)], **SIZE)
    return str(folder)


@pytest.fixture
def comparisons(tmp_path: Path) -> Path:
    """Numbers are better than words."""
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": question(n), "chosen": answer(str(n)), "rejected": answer("yes" if n % 2 else "no")}
        for n in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(runs: Path, model: str, pairs: Path, **changes: Any) -> RewardTrainingConfig:
    tables: dict[str, Any] = {
        "name": "judge",
        "runs": str(runs),
        "cluster": {"backend": "local"},
        "batch_size": 16,
        "model": {"path": model},
        "preferences": {"files": str(pairs), "held_out_share": 0.2},
        "trainer": {"lr": 1e-2},
        "telemetry": {"progress": "none"},
    }
    return RewardTrainingConfig.from_mapping(tables | changes)


def test_pairs_are_the_tokens_that_would_have_been_sampled(model: str) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    asked = {"prompt": tuple(question(3)), "chosen": tuple(answer("3")), "rejected": tuple(answer("thirty three"))}
    pairs, left_out = encode_pairs(renderer, [Preference(**asked, margin=0.5)], max_seq_len=64)
    assert left_out == 0
    assert (
        pairs[0].chosen
        == tuple(renderer.prompt(question(3)))
        + renderer.encode_conversation([*question(3), *answer("3")]).token_ids[len(renderer.prompt(question(3))) :]
    )
    assert pairs[0].chosen[-1] == renderer.end_of_turn_id
    batch = pair_rows([*pairs, EncodedPair((1, 2), (3,))])
    assert [row.tolist() for row in rows_of(batch.batch["input_ids"])][2:] == [[1, 2], [3]]
    assert batch.batch["margins"].tolist() == [0.5, 0.5, 0.0, 0.0]
    short = encode_pairs(renderer, [Preference(**asked)], max_seq_len=len(pairs[0].chosen))
    assert short == ([], 1)
    with pytest.raises(InvalidDataError, match=r"preference 0 has the margin -1\.0"):
        encode_pairs(renderer, [Preference(**asked, margin=-1.0)], max_seq_len=64)


def test_some_pairs_are_kept_to_be_asked_about() -> None:
    pairs = [EncodedPair((number,), (0,)) for number in range(10)]
    learned, asked = split_held_out(pairs, share=0.3, seed=1)
    assert (len(learned), len(asked)) == (7, 3)
    assert {pair.chosen for pair in learned} | {pair.chosen for pair in asked} == {pair.chosen for pair in pairs}
    assert split_held_out(pairs, share=0.3, seed=1) == (learned, asked)
    assert split_held_out(pairs[:1], share=0.9, seed=1) == (pairs[:1], [])


@pytest.mark.slow
def test_it_learns_what_is_liked_and_a_run_follows_it(
    tmp_path: Path, model: str, comparisons: Path, small_config: Callable[..., Config]
) -> None:
    made = config(tmp_path / "runs", model, comparisons, epochs=3)
    summary = train_reward_model(made)
    assert summary["held_out_accuracy"] >= 0.9
    assert (summary["pairs"], summary["held_out_pairs"], summary["steps"]) == (48, 12, 9)
    (run,) = (tmp_path / "runs").glob("judge-*")
    assert summary["model"] == str(run / "reward_model")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: it knew nothing
    assert RewardTrainingConfig.from_mapping(tomllib.loads((run / "config.toml").read_text())) == made

    run_config = small_config(
        steps=2,
        eval={"tasks": 0},
        model={"path": model, "source": None},
        reward={"source": "model", "options": {"path": summary["model"], "scale": 2.0}, "workers": 2},
        algorithm={"advantage": "gae"},
        critic={"path": summary["model"], "lr": 1e-3},
    )
    assert train(run_config)["weight_version"] == 2


@pytest.mark.slow
def test_another_vocabulary_is_refused(tmp_path: Path, model: str, small_config: Callable[..., Config]) -> None:
    other = tmp_path / "other"
    make_scratch_model(other, conversations=[answer("entirely other words")], vocab_size=300, **SIZE)
    with pytest.raises(ConfigError, match="a different vocabulary"):
        train(
            small_config(
                steps=1,
                model={"path": model, "source": None},
                reward={"source": "model", "options": {"path": str(other)}},
            )
        )


def test_what_cannot_be_trained_is_told(tmp_path: Path, model: str, comparisons: Path) -> None:
    with pytest.raises(InvalidDataError, match="every preference is longer than max_seq_len = 2"):
        train_reward_model(config(tmp_path, model, comparisons, max_seq_len=2))
    with pytest.raises(ConfigError, match="needs one of path and source"):
        RewardTrainingConfig.from_mapping(config(tmp_path, model, comparisons).model_dump(mode="json") | {"model": {}})
    with pytest.raises(ConfigError, match="would not fit"):
        config(tmp_path, model, comparisons, max_seq_len=100, max_tokens_per_microbatch=50)


def test_the_command_tells_what_is_missing(
    tmp_path: Path, model: str, comparisons: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "judge.toml"
    file.write_text(config(tmp_path / "runs", model, comparisons).to_toml())
    assert main(["train-reward-model", str(file), "--dry-run"]) == 0
    assert "held_out_share = 0.2" in capsys.readouterr().out
    assert main(["train-reward-model", str(file), "--preferences.files", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert main(["train-reward-model", str(file), "--trainer.lrr", "1"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["train-reward-model"]) == 2


def test_a_reward_model_may_begin_with_a_model_at_a_url(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    pairs = [Preference(prompt=question(1), chosen=answer("1"), rejected=answer("no"))]
    assert _encoded(f"file://{model}", pairs, max_seq_len=64) == _encoded(model, pairs, max_seq_len=64)
