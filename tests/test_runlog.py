"""What a run directory promises its readers: whole files, nothing lost or left over, readable progress."""

import os
import subprocess
import sys

import pytest

from glm5 import runlog
from glm5.runlog import remove_directory, remove_leftovers, replace_directory, temporary_path, tracked, write_atomic


@pytest.fixture
def dead():
    """Id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    return child.pid


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def make_directory(path, content):
    path.mkdir(parents=True)
    (path / "file").write_text(content)


def test_leftovers_of_dead_processes_go_and_those_of_the_living_stay(tmp_path, dead):
    below = tmp_path / "checkpoints"
    for process_id in (dead, os.getppid(), os.getpid()):
        make_directory(below / f".000003.{process_id}.tmp", "half")
        (tmp_path / f".config.json.{process_id}.tmp").write_text("half")
    make_directory(below / f"..000004.{dead}.tmp.{dead}.tmp", "half")
    make_directory(below / "000002", "whole")
    (tmp_path / ".lock").write_text("")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [f".config.json.{os.getppid()}.tmp", ".lock", "checkpoints"]
    assert names(below) == [f".000003.{os.getppid()}.tmp", "000002"]


def test_an_old_directory_comes_back_only_when_its_successor_is_missing(tmp_path, dead):
    make_directory(tmp_path / f".lost.{dead}.old", "before")
    make_directory(tmp_path / f".lost.{dead}.tmp", "after")
    make_directory(tmp_path / f".replaced.{dead}.old", "before")
    make_directory(tmp_path / "replaced", "after")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["lost", "replaced"]
    assert (tmp_path / "lost" / "file").read_text() == "before"
    assert (tmp_path / "replaced" / "file").read_text() == "after"


def test_a_directory_is_replaced_and_a_failed_replacement_changes_nothing(tmp_path):
    target = tmp_path / "target"
    for content in ("first", "second"):
        make_directory(temporary_path(target), content)
        replace_directory(temporary_path(target), target)
        assert (target / "file").read_text() == content
    with pytest.raises(OSError, match="No such file"):
        replace_directory(tmp_path / "missing", target)
    assert names(tmp_path) == ["target"] and (target / "file").read_text() == "second"
    remove_directory(target)
    assert names(tmp_path) == []


def test_a_refused_write_leaves_the_old_file(tmp_path):
    write_atomic(tmp_path / "file", "old")
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "file", 3)
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_progress_without_a_terminal_is_lines_with_rate_and_eta(capsys, monkeypatch):
    assert list(tracked(["aa", "bbb"], "tokenizer", "characters", len)) == ["aa", "bbb"]
    last = capsys.readouterr()
    assert last.out == "" and last.err.startswith("tokenizer: 2/2 ") and last.err.rstrip().endswith("ETA 0s")
    assert "characters/s" in last.err and last.err.count("\n") == 1
    monkeypatch.setattr(runlog, "LINE_PERIOD_S", 0)
    assert list(tracked([], "nothing", "files")) == []
    assert len(list(tracked(range(3), "three", "files"))) == 3
    assert capsys.readouterr().err.count("three: ") == 3
