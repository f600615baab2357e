"""Groups that are trained again: which, how often, and through crashes."""

import random

from glm5.rl.config import ReplayConfig, RLConfig
from glm5.rl.ledger import Ledger

from .factories import add_group


def open_ledger(directory, **replay):
    return Ledger(directory / "ledger.sqlite", max_staleness=2, pad_groups=True,
                  replay=ReplayConfig(share=0.5, **replay))


def groups_of(batch):
    return sorted({sample.group_id.removeprefix("calculator-") for sample in batch.samples})


def test_a_share_of_a_batch_is_whole_groups():
    config = RLConfig(name="r", tasksets={"calculator": 1.0}, groups_per_batch=7, replay=ReplayConfig(share=0.4))
    assert (config.fresh_groups, config.reused_groups) == (5, 2)
    assert RLConfig(name="r", tasksets={"calculator": 1.0}).reused_groups == 0


def test_groups_are_used_as_often_as_allowed_the_least_used_and_newest_first(tmp_path):
    ledger = open_ledger(tmp_path, max_uses=2, max_age=2)
    ledger.record_version(0, 0)
    used = []
    for step in range(5):
        ledger.record_version(step + 1, step)
        add_group(ledger, step, version=step + 1)
        batch = ledger.lease(1, step, reuse=1)
        used.append(groups_of(batch))
        assert batch.groups == len(used[-1]) and batch.reused == batch.groups - 1 and batch.episodes == 4 * batch.groups
        assert max(batch.staleness.values()) == step - min(int(name) for name in used[-1])
    # step 1 reuses 0; step 2 reuses 1, as 0 was used twice; and so on
    assert used == [["0"], ["0", "1"], ["1", "2"], ["2", "3"], ["3", "4"]]
    ledger.ack(batch.batch_id, 5)
    assert ledger.counts().reuses == 4 and ledger.check() == []
    assert sum(ledger.trained_staleness().values()) == 20  # the first uses
    ledger.close()


def test_a_group_beyond_the_age_is_not_used_again(tmp_path):
    ledger = open_ledger(tmp_path, max_uses=9, max_age=2)
    ledger.record_version(0, 0)
    ledger.record_version(1, 3)
    add_group(ledger, 0)
    assert ledger.lease(1, 0, reuse=1).reused == 0
    add_group(ledger, 1)
    assert groups_of(ledger.lease(1, 2, reuse=1)) == ["0", "1"]
    add_group(ledger, 2, version=1)
    assert groups_of(ledger.lease(1, 3, reuse=1)) == ["2"]
    ledger.close()


def test_a_crash_undoes_the_uses_of_its_batches_only(tmp_path):
    ledger = open_ledger(tmp_path, max_uses=2, max_age=9)
    ledger.record_version(0, 0)
    for index in range(3):
        add_group(ledger, index)
    first = ledger.lease(1, 0, reuse=1)
    second = ledger.lease(1, 1, reuse=1)
    third = ledger.lease(1, 2, reuse=1)
    assert [groups_of(batch) for batch in (first, second, third)] == [["0"], ["0", "1"], ["1", "2"]]
    ledger.recover(second.batch_id, 2)  # the checkpoint holds two batches
    assert ledger.counts().reuses == 1 and ledger.check() == []
    again = ledger.lease(1, 2, reuse=1)
    assert groups_of(again) == ["1", "2"] and ledger.counts().reuses == 2
    ledger.recover(0, 0)  # no checkpoint at all: what was acked is gone, what was leased returns
    assert ledger.counts().reuses == 0 and ledger.check() == []
    assert ledger.counts().dropped_groups == {"rollback": 2} and ledger.counts().groups["ready"] == 1
    ledger.close()


def test_no_use_is_lost_or_counted_twice_in_random_histories(tmp_path):
    """Against a plain model: the weights are a list of (group, batch) uses; a crash cuts it at the checkpoint."""
    for seed in range(6):
        (tmp_path / str(seed)).mkdir()
        choose = random.Random(seed)
        ledger = open_ledger(tmp_path / str(seed), max_uses=3, max_age=100)
        ledger.record_version(0, 0)
        opened, lineage, saved = 0, [], (0, [])
        for _ in range(60):
            act = choose.choice(["add", "add", "train", "train", "save", "crash"])
            if act == "add":
                add_group(ledger, opened)
                opened += 1
            elif act == "train":
                batch = ledger.lease(1, 0, reuse=choose.randrange(3))
                if batch is not None:
                    lineage = [*lineage, *((name, batch.batch_id) for name in groups_of(batch))]
            elif act == "save":
                saved = (max((batch for _, batch in lineage), default=saved[0]), lineage)
                if choose.random() < 0.5:  # else killed before the ack
                    ledger.ack(saved[0], 0)
            else:
                ledger.recover(saved[0], 0)
                lineage = saved[1]
            assert ledger.check() == []
            assert len(lineage) == len(set(lineage))
            uses = [name for name, _ in lineage]
            assert max(map(uses.count, uses), default=0) <= 3
            assert ledger.counts().reuses == len(uses) - len(set(uses))
        ledger.close()


def test_a_batch_is_filled_with_groups_to_train_again_when_asked_for(tmp_path):
    ledger = open_ledger(tmp_path, max_uses=2, max_age=100)
    ledger.record_version(0, 0)
    for index in range(3):
        add_group(ledger, index)
    sizes = []
    while (batch := ledger.lease(2, 0, fill=True)) is not None:
        sizes.append((batch.groups, batch.reused))
    assert sizes == [(2, 0), (2, 1), (2, 2)]  # three groups, twice each
    ledger.close()
