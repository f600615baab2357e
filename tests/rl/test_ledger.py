import sqlite3

import pytest

from glm5.errors import ServiceError
from glm5.rl.ledger import Ledger, Progress

from .factories import add_group, make_episode, open_ledger


@pytest.fixture
def ledger(tmp_path):
    opened = open_ledger(tmp_path)
    opened.record_version(0, 0)
    yield opened
    assert opened.check() == []
    opened.close()


def test_a_group_enters_whole_and_is_leased_once(ledger):
    assert add_group(ledger, 0) == ""
    assert ledger.lease(2, 0) is None
    add_group(ledger, 1)
    batch = ledger.lease(2, 0)
    assert (batch.batch_id, batch.groups, batch.episodes, len(batch.samples)) == (1, 2, 8, 8)
    assert [sample.advantage for sample in batch.samples] == [-0.5, 0.5, 0.5, -0.5] * 2
    assert set(batch.staleness.values()) == {0}
    assert ledger.lease(1, 0) is None


def test_samples_come_back_exactly_as_they_were_recorded(ledger):
    add_group(ledger, 0)
    sample = ledger.lease(1, 0).samples[1]
    original = make_episode("calculator-0", 1).trajectories[0]
    assert sample.trajectory == original


def test_recover_acks_what_the_checkpoint_holds_and_returns_the_rest(ledger):
    for index in range(4):
        add_group(ledger, index)
    first, second = ledger.lease(2, 0), ledger.lease(2, 1)
    assert ledger.recover(first.batch_id, 1) == 2
    assert ledger.counts().groups == {"acked": 2, "ready": 2}
    again = ledger.lease(2, 1)
    assert again.batch_id == 3
    assert [sample.sample_id for sample in again.samples] == [sample.sample_id for sample in second.samples]
    assert ledger.counts().batches == {"acked": 1, "returned": 1, "leased": 1}


def test_resuming_from_an_older_checkpoint_drops_what_only_the_newer_one_held(ledger):
    for index in range(2):
        add_group(ledger, index)
    kept, lost = ledger.lease(1, 0), ledger.lease(1, 1)
    ledger.ack(lost.batch_id, 2)
    ledger.recover(kept.batch_id, 1)
    assert ledger.counts().dropped_groups == {"rollback": 1}
    assert ledger.counts().groups["acked"] == 1


def test_groups_sampled_by_weights_of_a_lost_timeline_are_dropped(ledger):
    ledger.record_version(1, 5)
    add_group(ledger, 0, version=1)
    assert ledger.lease(1, 3) is None
    assert ledger.counts().dropped_groups == {"rollback": 1}


def test_stale_groups_are_dropped_when_they_enter_and_when_they_would_be_leased(ledger):
    add_group(ledger, 0)
    assert ledger.lease(1, 3) is None
    ledger.set_progress(3, 0)
    assert add_group(ledger, 1) == "stale"
    assert ledger.counts().dropped_groups == {"stale": 2}
    assert ledger.counts().episodes == {"stale": 8}


def test_the_staleness_bound_itself_is_still_trained(ledger):
    add_group(ledger, 0)
    batch = ledger.lease(1, 2)
    assert set(batch.staleness.values()) == {2}
    ledger.ack(batch.batch_id, 3)
    assert ledger.trained_staleness() == {2: 4}


def test_the_oldest_policy_is_leased_first(ledger):
    ledger.record_version(1, 1)
    add_group(ledger, 0, version=1)
    add_group(ledger, 1, version=0)
    assert ledger.lease(1, 1).samples[0].group_id == "calculator-1"


def test_zero_variance_groups_are_dropped_but_counted_and_their_rewards_reported(ledger):
    assert add_group(ledger, 0, rewards=(1.0, 1.0, 1.0)) == "zero_variance"
    assert ledger.counts().episodes == {"zero_variance": 3}
    assert ledger.rewards_since(0) == ({"calculator": [1.0, 1.0, 1.0]}, 1)
    assert ledger.rewards_since(1) == ({}, 1)


def test_fates_separate_failed_episodes_from_dropped_groups(ledger):
    add_group(ledger, 0, rewards=(1.0, 0.0, 1.0, None), outcomes=["ok", "ok", "ok", "infra_error"])
    add_group(ledger, 1, rewards=(1.0, None, None), outcomes=["ok", "infra_error", "cancelled"])
    batch = ledger.lease(1, 0)
    assert batch.episodes == 4 and len(batch.samples) == 3
    ledger.ack(batch.batch_id, 1)
    assert ledger.counts().episodes == {"trained": 3, "infra_error": 2, "cancelled": 1, "too_few_valid": 1}


def test_superseded_attempts_are_kept_and_counted(ledger):
    ledger.open_group("g", taskset="shell", task_id="t", task_index=0, size=2)
    failed = make_episode("g", 0, None, "infra_error", attempt=0)
    assert ledger.close_group("g", [[failed, make_episode("g", 0, 1.0, attempt=1)], [make_episode("g", 1, 0.0)]]) == ""
    assert ledger.counts().retried == 1


def test_a_version_that_was_never_published_is_not_trained(ledger):
    assert add_group(ledger, 0, version=9) == "unknown_version"


def test_task_indices_are_not_repeated_after_a_restart(tmp_path, ledger):
    assert ledger.next_task_index("calculator") == 0
    add_group(ledger, 0)
    ledger.open_group("calculator-1", taskset="calculator", task_id="t", task_index=1, size=4)
    reopened = open_ledger(tmp_path)
    assert reopened.drop_open_groups("interrupted") == 1
    assert reopened.next_task_index("calculator") == 2
    assert reopened.accepted_and_in_flight() == (1, 0)
    reopened.close()


def test_progress_and_versions_survive(tmp_path, ledger):
    ledger.record_version(4, 7)
    ledger.set_progress(7, 4)
    reopened = open_ledger(tmp_path)
    assert reopened.progress() == Progress(7, 4)
    assert reopened.newest_version() == 4
    reopened.close()


def test_a_closed_group_takes_no_more_episodes(ledger):
    add_group(ledger, 0)
    with pytest.raises(ServiceError, match="is not open"):
        ledger.close_group("calculator-0", [[make_episode("calculator-0", slot)] for slot in range(4)])


def test_a_wrong_number_of_slots_stores_nothing(ledger):
    ledger.open_group("g", taskset="shell", task_id="t", task_index=0, size=3)
    for count in (2, 4):
        with pytest.raises(ServiceError, match=f"{count} slots ended, expected 3"):
            ledger.close_group("g", [[make_episode("g", slot, reward=float(slot % 2))] for slot in range(count)])
    assert ledger.drop_open_groups("cancelled") == 1
    assert ledger.counts().dropped_groups == {"cancelled": 1}


def test_a_group_without_signal_may_end_with_fewer_slots(ledger):
    ledger.open_group("g", taskset="shell", task_id="t", task_index=0, size=5)
    assert ledger.close_group("g", [[make_episode("g", slot, reward=1.0)] for slot in range(2)]) == "zero_variance"
    assert ledger.check() == [] and ledger.counts().episodes == {"zero_variance": 2}


def test_a_database_error_is_one_line_and_undone(ledger):
    add_group(ledger, 0)
    with pytest.raises(ServiceError, match="UNIQUE constraint failed"):
        ledger.open_group("other", taskset="calculator", task_id="t", task_index=0, size=2)
    assert ledger.next_task_index("calculator") == 1


def test_check_finds_books_that_do_not_balance(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.record_version(0, 0)
    add_group(ledger, 0)
    batch = ledger.lease(1, 0)
    tampered = sqlite3.connect(tmp_path / "ledger.sqlite")
    tampered.execute("DELETE FROM episodes WHERE slot = 0")
    tampered.execute("UPDATE groups SET state = 'acked'")
    tampered.commit()
    assert {line.partition(":")[0] for line in ledger.check()} == {
        "ended group without one final episode per slot", "group and its batch in different states"}
    tampered.execute("UPDATE group_counts SET number = 7 WHERE state = 'acked'")
    tampered.execute("UPDATE payload_bytes SET number = 7 WHERE place = 'file'")
    tampered.execute("UPDATE episodes SET body = NULL WHERE slot = 1")
    tampered.execute("UPDATE leases SET is_reuse = 1")
    tampered.commit()
    tampered.close()
    assert {line.partition(":")[0] for line in ledger.check()} == {
        "ended group without one final episode per slot", "group and its batch in different states",
        "counted groups are not those of the rows", "counted payload bytes are not those of the rows",
        "payload and its place disagree", "reuse without an earlier batch in which the group was new"}
    assert batch.batch_id == 1
    ledger.close()


def test_a_ledger_of_another_format_is_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ServiceError, match="format 99, expected 3"):
        Ledger(tmp_path / "ledger.sqlite", max_staleness=1, pad_groups=True)
