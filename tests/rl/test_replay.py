import dataclasses
import json

import pytest
import torch

from glm5.errors import ConfigError, ServiceError
from glm5.model.checkpoint import load_model
from glm5.records import Trajectory
from glm5.rl.replay import EpisodeFilter, export_episodes, mismatch_rows, read_episode, read_episodes, transcript
from glm5.rl.summary import summary_rows
from glm5.tokenizer.bpe import load_tokenizer

from .factories import add_group, make_episode, open_ledger


@pytest.fixture
def run_dir(tmp_path):
    """Two groups: one trained, one dropped because its rewards are equal."""
    ledger = open_ledger(tmp_path)
    ledger.record_version(0, 0)
    ledger.set_progress(0, 0)
    add_group(ledger, 0)
    add_group(ledger, 1, rewards=(1.0, 1.0))
    batch = ledger.lease(1, 0)
    ledger.ack(batch.batch_id, 1)
    ledger.close()
    return tmp_path


def test_episodes_come_newest_first_with_what_became_of_them(run_dir):
    items = list(read_episodes(run_dir, EpisodeFilter()))
    assert [item.episode.episode_id for item in items] == [
        "calculator-1-s1a0", "calculator-1-s0a0", *(f"calculator-0-s{slot}a0" for slot in (3, 2, 1, 0))]
    assert (items[0].group_state, items[0].group_reason, items[0].batch_id) == ("dropped", "zero_variance", None)
    assert (items[2].group_state, items[2].batch_id, items[2].trainer_step, items[2].multiplicity) == ("acked", 1, 0, 1)
    assert items[2].episode == make_episode("calculator-0", 3, 0.0)


def test_filters_combine(run_dir):
    def count(**chosen):
        return len(list(read_episodes(run_dir, EpisodeFilter(**chosen))))

    assert count(state="acked") == 4 and count(state="acked", limit=3) == 3
    with pytest.raises(ServiceError, match="no group of taskset 'shell'; it has calculator"):
        count(taskset="shell")
    assert count(taskset="calculator", outcome="ok", state="dropped") == 2


def test_an_export_holds_the_exact_records(run_dir, tmp_path):
    assert export_episodes(run_dir, tmp_path / "episodes.jsonl", EpisodeFilter(state="acked")) == 4
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert rows[0]["trajectories"][0]["ids"] == [0, 1, 2, 3, 4] and rows[0]["group_state"] == "acked"
    assert rows[0]["trajectories"][0]["logprobs"] == [0.0, 0.0, 0.0, -0.5, -0.5]


def test_what_is_not_there_is_named(tmp_path, run_dir):
    with pytest.raises(ServiceError, match=r"ledger\.sqlite: missing; give the run directory"):
        list(read_episodes(tmp_path / "nowhere", EpisodeFilter()))
    with pytest.raises(ServiceError, match="no episode 'x'; list them"):
        read_episode(run_dir, "x")


def test_an_export_makes_its_folder_and_a_path_with_marks_is_read(run_dir, tmp_path):
    odd = tmp_path / "we#ird?d %20"
    odd.mkdir()
    (run_dir / "ledger.sqlite").rename(odd / "ledger.sqlite")
    assert export_episodes(odd, tmp_path / "new" / "folder" / "e.jsonl", EpisodeFilter(limit=2)) == 2
    assert len((tmp_path / "new" / "folder" / "e.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("content", "named"), [
    (b"", "ledger format 0, expected"), (b"no database" * 400, "not a readable ledger"),
    (None, "not a readable ledger")])
def test_a_ledger_that_is_empty_foreign_or_cut_off_is_one_line(run_dir, content, named):
    path = run_dir / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[:9000] if content is None else content)
    for read in (lambda: list(read_episodes(run_dir, EpisodeFilter())), lambda: summary_rows(run_dir)):
        with pytest.raises(ServiceError, match=named) as caught:
            read()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"outcome": "won"}, {"state": "done"}])
def test_unknown_filters_are_named(wrong):
    with pytest.raises(ConfigError, match="expected one of"):
        EpisodeFilter(**wrong)


def test_a_checkpoint_scores_its_own_tokens_as_recorded_and_shows_them(run_dir, checkpoint):
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, dtype=torch.float32)
    prompt, answer = tokenizer.encode("What is 12 + 30?"), tokenizer.encode(" 42")
    ids = [*prompt, *answer]
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    logprobs = [0.0] * len(prompt) + [float(scores[t - 1, ids[t]]) for t in range(len(prompt), len(ids))]
    mask = [False] * len(prompt) + [True] * len(answer)
    trajectory = Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs, versions=[3 if on else -1 for on in mask])
    item = read_episode(run_dir, "calculator-0-s0a0")
    item = dataclasses.replace(item, episode=dataclasses.replace(item.episode, trajectories=[trajectory]))
    rows = {row["name"]: row["value"] for row in mismatch_rows(item, checkpoint)}
    assert rows["replay.tokens"] == len(answer) and rows["replay.max_abs_difference"] < 1e-5
    text = transcript(item, load_tokenizer(checkpoint))
    assert text.endswith("What is 12 + 30?⟦ 42⟧") and "versions [3]" in text
