import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.errors import ServiceError
from glm5.records import Episode, Trajectory
from glm5.rl.config import LedgerConfig, ReplayConfig
from glm5.rl.ledger import Ledger
from glm5.rl.payloads import decode_payload, encode_payload
from glm5.rl.replay import EpisodeFilter, read_episode, read_episodes

from .factories import add_group, make_episode


def open_ledger(directory, *, max_staleness=8, replay=None, **config):
    ledger = Ledger(directory / "ledger.sqlite", max_staleness=max_staleness, pad_groups=True,
                    config=LedgerConfig(**config), replay=replay)
    if ledger.newest_version() < 0:
        ledger.record_version(0, 0)
    return ledger


def places(directory):
    return {item.episode.group_id: item.place for item in read_episodes(directory, EpisodeFilter())}


def test_a_payload_comes_back_exactly():
    trajectories = [
        Trajectory(ids=[0, 2**31 - 1, 7], loss_mask=[False, True, True], logprobs=[0.0, -0.1, -1e-30],
                   versions=[-1, 3, 2**20], turn_ids=["a-1", "a-2"]),
        Trajectory(ids=[], loss_mask=[], logprobs=[], versions=[])]
    episode = Episode(episode_id="e", group_id="g", task_id="t", taskset="s", outcome="ok", reward=1.0,
                      reward_parts={"format": 0.5, "ü": 1.0}, trajectories=trajectories)
    assert decode_payload(encode_payload(episode)) == (episode.reward_parts, trajectories)
    empty = make_episode("g", 0, None, "infra_error", trajectories=0)
    assert decode_payload(encode_payload(empty)) == ({}, [])


def test_what_is_beyond_the_budget_moves_to_files_and_comes_back(tmp_path):
    one = sum(len(encode_payload(make_episode("g", slot))) for slot in range(4))
    ledger = open_ledger(tmp_path, budget_bytes=2 * one)
    for index in range(5):
        add_group(ledger, index)
    sizes = ledger.payload_bytes()
    assert sizes["database"] <= 2 * one and sizes["file"] >= 3 * one - 20 and sizes["removed"] == 0
    # the oldest are leased first, so the newest leave first
    assert [group for group, place in sorted(places(tmp_path).items()) if place == "database"] == [
        "calculator-0", "calculator-1"]
    batch = ledger.lease(5, 0)
    assert batch.samples[17].trajectory == make_episode("calculator-4", 1).trajectories[0]
    assert read_episode(tmp_path, "calculator-3-s2a0").episode == make_episode("calculator-3", 2, 1.0)
    assert ledger.check() == []
    ledger.close()


def test_trained_groups_leave_before_those_that_wait(tmp_path):
    one = sum(len(encode_payload(make_episode("g", slot))) for slot in range(4))
    ledger = open_ledger(tmp_path, budget_bytes=2 * one + 40)
    add_group(ledger, 0)
    add_group(ledger, 1)
    ledger.ack(ledger.lease(1, 0).batch_id, 1)
    add_group(ledger, 2)
    assert places(tmp_path) == {"calculator-0": "file", "calculator-1": "database", "calculator-2": "database"}
    ledger.close()


def test_a_budget_of_nothing_keeps_everything_in_files(tmp_path):
    ledger = open_ledger(tmp_path, budget_bytes=0)
    add_group(ledger, 0)
    assert ledger.payload_bytes()["database"] == 0 and len(ledger.lease(1, 0).samples) == 4
    ledger.close()


def test_retention_removes_the_oldest_that_ended_and_keeps_their_rows(tmp_path):
    ledger = open_ledger(tmp_path, retain_bytes=1, budget_bytes=0)
    for index in range(3):
        add_group(ledger, index)
    add_group(ledger, 3, rewards=(1.0, 1.0))  # dropped: equal rewards
    ledger.ack(ledger.lease(2, 0).batch_id, 1)
    assert places(tmp_path) == {"calculator-0": "removed", "calculator-1": "removed", "calculator-2": "file",
                                "calculator-3": "removed"}
    assert [path.name for path in (tmp_path / "ledger.payloads").iterdir()] == ["calculator-2"]
    assert ledger.counts().episodes == {"trained": 8, "waiting": 4, "zero_variance": 2} and ledger.check() == []
    gone = read_episode(tmp_path, "calculator-0-s1a0")
    assert gone.episode.trajectories == [] and gone.episode.reward == 1.0 and gone.place == "removed"
    assert ledger.payload_bytes()["removed"] > 0
    ledger.close()


def test_retention_leaves_what_may_be_trained_again(tmp_path):
    ledger = open_ledger(tmp_path, retain_bytes=1, replay=ReplayConfig(share=0.5, max_age=3))
    add_group(ledger, 0)
    ledger.ack(ledger.lease(1, 0).batch_id, 3)
    assert places(tmp_path) == {"calculator-0": "database"}
    add_group(ledger, 1)
    ledger.ack(ledger.lease(1, 3).batch_id, 4)
    assert places(tmp_path) == {"calculator-0": "removed", "calculator-1": "removed"}
    ledger.close()


def test_a_damaged_file_is_named(tmp_path):
    ledger = open_ledger(tmp_path, budget_bytes=0)
    add_group(ledger, 0)
    path = tmp_path / "ledger.payloads" / "calculator-0"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the checksum
    path.write_bytes(data)
    with pytest.raises(ServiceError, match=r"calculator-0: the payloads of group calculator-0 cannot be read"):
        ledger.lease(1, 0)
    path.unlink()
    with pytest.raises(ServiceError, match="restore the file"):
        ledger.lease(1, 0)
    assert ledger.counts().groups["ready"] == 1  # the lease was undone
    ledger.close()


def test_a_disk_that_takes_no_file_loses_nothing_and_says_what_to_do(tmp_path):
    ledger = open_ledger(tmp_path, budget_bytes=10**6)
    add_group(ledger, 0)
    ledger.close()
    (tmp_path / "ledger.payloads").write_text("not a directory")
    ledger = open_ledger(tmp_path, budget_bytes=0)
    with pytest.raises(ServiceError, match="cannot spill, nothing was lost; free space"):
        add_group(ledger, 1)
    assert ledger.counts().groups["ready"] == 2 and ledger.check() == []
    (tmp_path / "ledger.payloads").unlink()
    add_group(ledger, 2)
    assert ledger.payload_bytes()["database"] == 0 and len(ledger.lease(3, 0).samples) == 12
    ledger.close()


def test_a_full_disk_refuses_a_group_whole(tmp_path):
    """The limit on the size of files stands for the disk; only the child has it."""
    script = ("import resource, sys\nfrom pathlib import Path\nfrom tests.rl.factories import add_group, open_ledger\n"
              "from glm5.errors import ServiceError\nledger = open_ledger(Path(sys.argv[1]))\n"
              "ledger.record_version(0, 0)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, -1))\n"
              "try:\n    for index in range(100_000):\n        add_group(ledger, index)\n"
              "except ServiceError as error:\n    print(index, error)\n")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}, check=True)
    entered, message = done.stdout.split(" ", 1)
    assert "nothing of the transaction was kept; free space on its disk" in message
    ledger = open_ledger(tmp_path)
    assert int(entered) > 10 and ledger.counts().groups["ready"] in (int(entered), int(entered) + 1)
    ledger.drop_open_groups("interrupted")
    assert ledger.check() == [] and len(ledger.lease(int(entered), 0).samples) == 4 * int(entered)
    ledger.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1_500_000


def test_a_kill_between_any_two_writes_loses_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-m", "tests.rl.crash_ledger", str(tmp_path)], capture_output=True,
                          text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
