import json
import os
import subprocess
import sys

from glm5.rl.reaper import ProcessRecord, process_tree, reap, start_time

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
FORK = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
time.sleep(600)
"""


def record_of_a_dead_owner(path, processes):
    record = ProcessRecord(path)
    record.note(processes)
    data = json.loads(path.read_text())
    data["owner"] = {str(os.getpid()): 1}  # this process started at another time
    path.write_text(json.dumps(data))


def test_what_a_killed_run_left_is_stopped_children_included(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", FORK, *SLEEP], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    path = tmp_path / "processes.json"
    record_of_a_dead_owner(path, [parent.pid])
    parent.kill()  # its child lives on, with another parent
    parent.wait()
    parent.stdout.close()
    assert start_time(child) is not None
    assert reap(path) == [child]
    assert start_time(child) is None and not path.exists()
    assert reap(path) == []


def test_an_id_that_was_given_away_again_is_not_touched(tmp_path):
    process = subprocess.Popen(SLEEP)
    path = tmp_path / "processes.json"
    try:
        record_of_a_dead_owner(path, [process.pid])
        data = json.loads(path.read_text())
        data["processes"][str(process.pid)] -= 1
        path.write_text(json.dumps(data))
        assert reap(path) == [] and process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_the_processes_of_a_living_owner_or_of_another_boot_are_not_touched(tmp_path):
    process = subprocess.Popen(SLEEP)
    path = tmp_path / "processes.json"
    try:
        ProcessRecord(path).note([process.pid])
        assert json.loads(path.read_text())["processes"] == {str(process.pid): start_time(process.pid)}
        assert reap(path) == []
        record_of_a_dead_owner(path, [process.pid])
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "boot": "another"}))
        assert reap(path) == [] and process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_damaged_or_missing_record_names_nothing(tmp_path):
    path = tmp_path / "processes.json"
    assert reap(path) == []
    for text in ("", "[]", "{}", '{"boot": "x", "owner": 1, "processes": []}'):
        path.write_text(text)
        assert reap(path) == []


def test_the_tree_of_a_process_that_ended_is_empty():
    process = subprocess.Popen(["true"])
    process.wait()
    assert process_tree([process.pid]) == {}
