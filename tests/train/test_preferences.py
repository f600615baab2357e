"""Training from pairs: the loss by hand, packed scores against plain ones, resuming, the head on disk, DPO."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.data.preferences import pair_batch, read_pairs, split_pairs
from glm5.engine.scoring import Scorer
from glm5.errors import CheckpointError, ConfigError, DataError
from glm5.model.checkpoint import load_model
from glm5.model.reward import HEAD_FILE, RewardModel, load_reward_model
from glm5.tokenizer.bpe import load_tokenizer
from glm5.train.config import OptimizerConfig
from glm5.train.preference_config import PreferenceConfig
from glm5.train.preferences import (
    answer_logprobs,
    count_right,
    held_out_result,
    preference_loss,
    run_preferences,
)
from tests.rl.conftest import checkpoint  # noqa: F401  the tiny model of the RL tests

LENGTH = 64


def write_pairs(path, count=24):
    """Pairs whose better answer is "yes" and whose worse one is "no no"."""
    lines = [{"messages": [{"role": "user", "content": f"add {number}"}], "chosen": "yes", "rejected": "no no"}
             for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(init, pairs, **changes):
    return PreferenceConfig(**{
        "name": "p", "init": str(init), "pairs": (str(pairs),), "steps": 8, "batch_pairs": 4, "length": LENGTH,
        "held_out_fraction": 0.3, "checkpoint_every": 3, "device": "cpu",
        "optimizer": OptimizerConfig(lr=1e-2, kind="adamw", weight_decay=0.0), **changes})


def test_the_loss_by_hand():
    scores = torch.tensor([2.0, -1.0, 0.0, 1.0])  # chosen 2 and -1, rejected 0 and 1
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    assert preference_loss(scores).item() == pytest.approx(expected, abs=1e-6)
    assert preference_loss(torch.zeros(2)).item() == pytest.approx(math.log(2), abs=1e-6)
    centred = expected + 0.5 * ((2 + 0) ** 2 + (-1 + 1) ** 2) / 2
    assert preference_loss(scores, 0.5).item() == pytest.approx(centred, abs=1e-6)
    assert preference_loss(torch.tensor([-1e4, 1e4])).item() == pytest.approx(2e4)  # no overflow


def test_the_gradient_by_hand():
    scores = torch.tensor([1.0, 0.0], requires_grad=True)
    preference_loss(scores).backward()
    share = 1 / (1 + math.exp(1))  # 1 - sigmoid(margin)
    assert scores.grad.tolist() == pytest.approx([-share, share])


def test_a_tie_is_wrong():
    assert count_right(torch.tensor([1.0, 2.0, 3.0, 0.0, 2.0, 4.0])) == 1


def test_packed_scores_are_those_of_single_conversations(checkpoint, tmp_path):  # noqa: F811
    tokenizer = load_tokenizer(checkpoint)
    pairs = read_pairs(write_pairs(tmp_path / "pairs.jsonl", 5), tokenizer, LENGTH)
    model = RewardModel(load_model(checkpoint, dtype=torch.float32))
    with torch.no_grad():
        model.weight.copy_(torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(1)))
        batch = pair_batch(pairs, LENGTH, tokenizer.pad_id)
        rows = batch.rows
        packed = model(rows.ids_BT, rows.positions_BT, rows.documents_BT, batch.ends_N)
        assert 1 < rows.ids_BT.shape[0] < 10
        for number, sample in enumerate([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]):
            hidden = model.trunk.hidden(torch.from_numpy(sample.ids)[None], attention="sparse").hidden_BTD
            assert packed[number].item() == pytest.approx((hidden[0, -1] @ model.weight).item(), abs=1e-4)


def test_answer_log_probs_against_a_plain_sum(checkpoint, tmp_path):  # noqa: F811
    tokenizer = load_tokenizer(checkpoint)
    pairs = read_pairs(write_pairs(tmp_path / "pairs.jsonl", 3), tokenizer, LENGTH)
    model = load_model(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        found = answer_logprobs(model, pair_batch(pairs, LENGTH, tokenizer.pad_id), 6)
        for number, sample in enumerate([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]):
            ids = torch.from_numpy(sample.ids)
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
            plain = sum(logprobs[t - 1, ids[t]].item() for t in range(1, len(ids)) if sample.trained[t])
            assert found[number].item() == pytest.approx(plain, abs=1e-3)


def test_pairs_of_one_conversation_stay_on_one_side(checkpoint, tmp_path):  # noqa: F811
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, 40)
    path.write_text(path.read_text() * 2)
    train, held_out = split_pairs(read_pairs(path, load_tokenizer(checkpoint), LENGTH), 0.3)
    assert len(train) + len(held_out) == 80 and 6 <= len(held_out) <= 42
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in held_out}


@pytest.mark.parametrize(("line", "told"), [
    ('{"chosen": "a", "rejected": "b"}', "no list of objects in field 'messages'"),
    ('{"messages": [{"role": "user", "content": "q"}], "chosen": "a"}', "rejected: got 'None'"),
    ('{"messages": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "a"}', "are the same"),
    ('{"messages": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": [{"role": "user"}]}', "end with an"),
    ('{"messages": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "%s"}' % ("b " * 99), "exceed"),
    ("", "no pair")])
def test_bad_pairs_are_named(checkpoint, tmp_path, line, told):  # noqa: F811
    path = tmp_path / "pairs.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=told):
        read_pairs(path, load_tokenizer(checkpoint), LENGTH)


def test_a_reward_model_learns_and_a_run_that_is_continued_ends_alike(checkpoint, tmp_path):  # noqa: F811
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    whole = run_preferences(config(checkpoint, pairs), tmp_path / "whole")
    right, count = held_out_result(tmp_path / "whole")
    assert right == count > 0
    metrics = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and metrics[-1]["loss"] < 0.1

    cut = tmp_path / "cut"
    run_preferences(config(checkpoint, pairs), cut)
    (cut / "final.json").unlink()  # as if it had been killed after step 6
    for path in (cut / "checkpoints").iterdir():
        if path.name == "000008":
            import shutil
            shutil.rmtree(path)
    again = run_preferences(config(checkpoint, pairs), cut)
    assert load_file(again / HEAD_FILE)["weight"].tolist() == load_file(whole / HEAD_FILE)["weight"].tolist()
    assert run_preferences(config(checkpoint, pairs), cut) == again  # finished: nothing to do
    with pytest.raises(ConfigError, match="another value of steps"):
        run_preferences(config(checkpoint, pairs, steps=9), cut)

    scorer = Scorer(whole, "cpu")
    prompt = {"role": "user", "content": "add 99"}
    answers = ({"role": "assistant", "content": text} for text in ("yes", "no no", "yes"))
    conversations = [scorer.render([prompt, answer]) for answer in answers]
    scores, rewards = scorer.score(conversations)
    assert scores[0] == pytest.approx(scores[2], abs=1e-5) and scores[0] > scores[1]
    assert 0 < rewards[1] < 0.5 < rewards[0] < 1
    trained = read_pairs(pairs, load_tokenizer(checkpoint), LENGTH)[0]
    assert scorer.render([{"role": "user", "content": "add 0"}, {"role": "assistant", "content": "yes"}]
                         ) == trained.chosen.ids.tolist()
    with pytest.raises(DataError, match="ends with an answer"):
        scorer.render([prompt])


@pytest.mark.parametrize(("change", "told"), [
    (lambda head: head | {"weight": head["weight"] * math.nan}, "not finite"),
    (lambda head: head | {"spread": torch.zeros(())}, "not above 0"),
    (lambda head: head | {"weight": torch.zeros(3)}, "belongs to another model"),
    (lambda head: {"weight": head["weight"]}, "belongs to another model")])
def test_a_head_that_was_tampered_with_is_refused(checkpoint, tmp_path, change, told):  # noqa: F811
    model = RewardModel(load_model(checkpoint, dtype=torch.float32))
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="trained reward"):
        load_reward_model(tmp_path)
    save_file(model.head(), tmp_path / HEAD_FILE)
    assert load_reward_model(tmp_path).weight.shape == model.weight.shape
    save_file(change(model.head()), tmp_path / HEAD_FILE)
    with pytest.raises(CheckpointError, match=told):
        load_reward_model(tmp_path)


def test_calibration():
    model = RewardModel.__new__(RewardModel)
    torch.nn.Module.__init__(model)
    model.register_buffer("centre", torch.zeros(()))
    model.register_buffer("spread", torch.ones(()))
    model.calibrate(torch.tensor([1.0, 3.0]))
    assert (model.centre.item(), model.spread.item()) == pytest.approx((2.0, math.sqrt(2)))
    assert model.reward(torch.tensor([2.0])).item() == 0.5
    model.calibrate(torch.tensor([5.0, 5.0]))
    assert (model.centre.item(), model.spread.item()) == (5.0, 1.0)


def test_dpo_raises_the_chosen_answer_over_the_rejected_one(checkpoint, tmp_path):  # noqa: F811
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    settings = config(checkpoint, pairs, objective="dpo", beta=1.0, steps=6,
                      optimizer=OptimizerConfig(lr=3e-3, kind="adamw", weight_decay=0.0))
    final = run_preferences(settings, tmp_path / "dpo")
    assert not (final / HEAD_FILE).exists()
    metrics = [json.loads(line) for line in (tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is its own reference
    assert metrics[-1]["loss"] < 0.5
    tokenizer = load_tokenizer(checkpoint)
    batch = pair_batch(read_pairs(pairs, tokenizer, LENGTH), LENGTH, tokenizer.pad_id)
    with torch.no_grad():
        before, after = (answer_logprobs(load_model(path, dtype=torch.float32), batch, 32).view(2, -1)
                         for path in (checkpoint, final))
    assert ((after[0] - after[1]) > (before[0] - before[1])).all()


def test_settings():
    with pytest.raises(ConfigError, match="held_out_fraction"):
        config("x", "y", held_out_fraction=0.0)
    with pytest.raises(ConfigError, match="beta"):
        config("x", "y", beta=0.0)
    assert dataclasses.replace(config("x", "y"), pairs=()).pairs == ()
