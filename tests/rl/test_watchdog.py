import sys

import pytest

from glm5.errors import ServiceError
from glm5.rl import watchdog
from glm5.rl.operation import SupervisionConfig
from glm5.rl.watchdog import keep_running
from glm5.runlog import read_jsonl

QUICK = SupervisionConfig(max_restarts=3, backoff_s=0.01)
LIFE = """
import os, signal, sys, time
from pathlib import Path
from glm5.rl.watchdog import Heartbeat

log = Path(sys.argv[1])
lives = len(log.read_text()) if log.exists() else 0
with open(log, "a") as file:
    file.write("x")
with Heartbeat(stall_s={stall}):
    time.sleep(0.3)
    {end}
"""


def run(tmp_path, end, config=QUICK, stall=60):
    script = tmp_path / "life.py"
    script.write_text(LIFE.format(end=end, stall=stall))
    keep_running([str(script), str(tmp_path / "lives")], tmp_path, config, [sys.executable])


def lives(tmp_path):
    return len((tmp_path / "lives").read_text())


def deaths(tmp_path):
    return [event["why"] for event in read_jsonl(tmp_path / "events.jsonl") if event["kind"] == "trainer_died"]


def test_a_killed_trainer_and_one_that_fails_are_started_again_until_one_ends_well(tmp_path):
    run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if lives == 0 else sys.exit(2) if lives == 1 else None")
    assert lives(tmp_path) == 3
    assert deaths(tmp_path) == ["exited with -9", "exited with 2"]


def test_a_stopped_trainer_is_silent_and_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "SILENT_S", 3.0)
    run(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP) if lives == 0 else None")
    assert lives(tmp_path) == 2
    assert [why.rpartition(" for ")[0] for why in deaths(tmp_path)] == ["gave no sign of life"]


def test_a_trainer_whose_main_thread_stands_still_is_silent_too(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "SILENT_S", 3.0)
    run(tmp_path, "time.sleep(600) if lives == 0 else None", stall=0.5)
    assert lives(tmp_path) == 2


def test_an_error_before_the_first_sign_of_life_is_the_users(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("import sys; sys.exit(2)")
    with pytest.raises(SystemExit) as ended:
        keep_running([str(script)], tmp_path, QUICK, [sys.executable])
    assert ended.value.code == 2 and deaths(tmp_path) == []


def test_an_early_error_of_a_later_life_is_not_the_users(tmp_path):
    script = tmp_path / "life.py"
    script.write_text("import sys\nfrom pathlib import Path\nlog = Path(sys.argv[1])\n"
                      "if log.exists() and len(log.read_text()) == 1:\n    log.write_text('xx')\n    sys.exit(2)\n"
                      + LIFE.format(end="sys.exit(1) if lives == 0 else None", stall=60))
    keep_running([str(script), str(tmp_path / "lives")], tmp_path, QUICK, [sys.executable])
    assert deaths(tmp_path) == ["exited with 1", "exited with 2"]


def test_a_trainer_that_dies_again_and_again_ends_with_one_line(tmp_path):
    with pytest.raises(ServiceError, match="the trainer exited with -9, the 2th time within 300 s"):
        run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", SupervisionConfig(max_restarts=1, backoff_s=0.01))
    assert lives(tmp_path) == 2


def test_without_a_watchdog_a_heartbeat_does_nothing(monkeypatch):
    monkeypatch.delenv(watchdog.PIPE_VARIABLE, raising=False)
    with watchdog.Heartbeat(1) as heartbeat:
        heartbeat.note()
    assert not watchdog.is_watched()
