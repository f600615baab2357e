"""A round of continual learning with a tiny model: real filtering, SFT, DPO and publication; scripted evaluations."""

import json
import shutil
from typing import ClassVar

import pytest

from glm5.config import build_config
from glm5.continual import learn
from glm5.continual.config import ContinualConfig
from glm5.errors import ConfigError, DataError
from glm5.model.checkpoint import load_model
from glm5.rl.config import RLConfig
from tests.rl.conftest import checkpoint  # noqa: F401  the tiny model of the RL tests

ROLLOUTS = RLConfig(name="gate", tasksets={"calculator": 1.0})


def write_collection(directory, count=6):
    directory.mkdir()
    responses, feedback = [], []
    for number in range(2 * count):  # every question twice: a liked and a disliked answer
        liked = number % 2 == 0
        responses.append({"time": number, "response_id": f"{number:024x}", "owner": "ann", "tools": [], "messages": [
            {"role": "user", "content": f"add {number // 2}"},
            {"role": "assistant", "content": "cat" if liked else "def"}], "finish_reason": "stop"})
        feedback.append({"response_id": f"{number:024x}", "owner": "ann", "score": float(liked)})
    for name, records in (("responses", responses), ("feedback", feedback)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def config(directory, collection, **changes):
    replayed = collection.parent / "replayed.jsonl"
    replayed.write_text(json.dumps({"messages": [{"role": "user", "content": "a"},
                                                 {"role": "assistant", "content": "b"}]}) + "\n")
    return build_config(ContinualConfig, {
        "name": "round", "collections": [str(collection)], "min_conversations": 4,
        "sft": {"stage": "sft", "name": "sft", "init": str(directory), "steps": 2, "batch_rows": 2, "length": 64,
                "mtp_steps": 0, "train_indexer": False, "bias_rate": 0.0, "device": "cpu",
                "data": {"conversations": [str(replayed)]}},
        "preference": {"name": "preference", "objective": "dpo", "steps": 2, "batch_pairs": 2, "length": 64,
                       "held_out_fraction": 0.3, "device": "cpu"},
        "gate": {"rollouts": "rl.toml", "tasks": 4}, **changes}, "test")


class Scripted(learn._Round):
    """A round whose evaluations are given: solved tasks of four before and after."""

    solved: ClassVar[dict[str, int]] = {"before": 2, "after": 2}
    evaluated: ClassVar[list[str]] = []

    def _outcomes(self, when, checkpoint):  # noqa: F811
        path = self.run_dir / f"{when}.json"
        if not path.exists():
            self.evaluated.append(when)
            path.write_text(json.dumps({f"t/heldout/{index}": index < self.solved[when] for index in range(4)}))
        return json.loads(path.read_text())


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(learn, "_Round", Scripted)
    monkeypatch.setattr(Scripted, "evaluated", [])
    return Scripted


def test_a_round_publishes_and_goes_on_where_it_was_killed(checkpoint, tmp_path, scripted):  # noqa: F811
    settings = config(checkpoint, write_collection(tmp_path / "collection"))
    result = learn.run_continual(settings, ROLLOUTS, tmp_path / "run")
    rows = {row["name"]: row["value"] for row in result.rows}
    assert rows["filter.kept"] == 6 and rows["filter.disliked"] == 6 and rows["filter.pairs"] == 6
    assert result.refusal == "" and result.published == tmp_path / "run" / "published"
    decision = json.loads((tmp_path / "run" / "decision.json").read_text())
    assert decision["published"] and (tmp_path / "run" / "preference" / "final.json").exists()
    published = load_model(result.published).lm_head.weight
    assert not published.equal(load_model(checkpoint).lm_head.weight)

    # What a kill before publication leaves; new answers that came in meanwhile belong to the next round.
    shutil.rmtree(tmp_path / "run" / "published")
    (tmp_path / "run" / "decision.json").unlink()
    shutil.rmtree(tmp_path / "collection")
    again = learn.run_continual(settings, ROLLOUTS, tmp_path / "run")
    assert load_model(again.published).lm_head.weight.equal(published)
    assert scripted.evaluated == ["before", "after"] and again.rows == result.rows
    with pytest.raises(ConfigError, match="holds a round with other settings"):
        learn.run_continual(config(checkpoint, tmp_path, min_conversations=5), ROLLOUTS, tmp_path / "run")


def test_a_worse_model_is_not_published(checkpoint, tmp_path, scripted, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Scripted, "solved", {"before": 2, "after": 1})
    settings = config(checkpoint, write_collection(tmp_path / "collection"), preference=None)
    result = learn.run_continual(settings, ROLLOUTS, tmp_path / "run")
    assert result.refusal == "refused: pass@1 fell on t by 0.250 (allowed 0.020); nothing was published"
    assert result.published is None and not (tmp_path / "run" / "published").exists()
    assert not (tmp_path / "run" / "preference").exists()


def test_too_few_answers_are_no_round(checkpoint, tmp_path):  # noqa: F811
    settings = config(checkpoint, write_collection(tmp_path / "collection", 2))
    with pytest.raises(DataError, match="2 answers are left"):
        learn.run_continual(settings, ROLLOUTS, tmp_path / "run")
    assert not (tmp_path / "run" / "sft").exists()


def test_settings(checkpoint, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match="expected dpo"):
        config(checkpoint, tmp_path, preference={"name": "p", "steps": 1})
    with pytest.raises(ConfigError, match="directory of the deployed model"):
        config("stage:sft", tmp_path)
