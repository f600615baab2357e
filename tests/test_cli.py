"""The command line: one line and exit code 2 for what a user can fix, no torch where none is needed."""

import json
import os
import subprocess
import sys

import pytest

from glm5 import process
from glm5.errors import ServiceError
from glm5.model.config import preset

CONFIGS = "configs/nano"


def glm5(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "glm5", *arguments], capture_output=True, text=True, timeout=timeout)


def test_help_names_every_command_without_loading_torch():
    code = "import sys; from glm5.cli import app; from typer.testing import CliRunner\n" \
           "text = CliRunner().invoke(app, ['--help']).output; print(text); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("run", "train", "rl", "serve", "generate", "chat", "gateway", "orchestrator", "results", "env"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize(("arguments", "words"), [
    (("run", f"{CONFIGS}/pipeline.toml", "repotr.tasks=3"), ["pipeline.toml", "repotr", "did you mean 'report'"]),
    (("run", "no-such-file.toml"), ["no-such-file.toml", "cannot be read"]),
    (("train", f"{CONFIGS}/pretrain.toml", "stepps=3"), ["pretrain.toml", "stepps", "did you mean 'steps'"]),
    (("rl", f"{CONFIGS}/rl.toml", "group_size=1"), ["rl.toml", "group_size=1"]),
    (("results", "a.json", "b.json"), ["a.json", "cannot be read"]),
    (("generate", "no-such-directory", "hello"), ["no-such-directory"]),
    (("env", "check", "no-such-taskset"), ["no-such-taskset", "installed"]),
    (("model", "info", "no-such-preset"), ["no-such-preset", "nano"]),
    (("data", "dedup", "no-such-folder", "--output", "kept.jsonl"), ["no-such-folder", "no such file or folder"]),
    (("data", "inspect", f"{CONFIGS}/pretrain.toml", "--tokenizer", "no-such-tokenizer"), ["no-such-tokenizer"]),
])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, tmp_path):
    done = glm5(*arguments)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]


def test_env_list_and_model_info_of_a_directory(tmp_path):
    assert glm5("env", "list").stdout.split() == ["calculator", "code", "gym", "maths", "python", "repair", "rooms",
                                                  "science", "shell", "writing"]
    (tmp_path / "config.json").write_text(json.dumps(preset("nano").to_json()))
    assert "parameters.total" in glm5("model", "info", str(tmp_path)).stdout


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with process.lock_directory(tmp_path), pytest.raises(ServiceError, match=f"process {os.getpid()} is running here"):
        with process.lock_directory(tmp_path):
            pass
    with process.lock_directory(tmp_path):
        pass


@pytest.mark.parametrize("command", [
    ("gateway", "--engine", "http://127.0.0.1:9", "--tokenizer", "any", "--store", "any.sqlite"),
    ("serve", "any-directory"),
    ("env", "serve", "calculator", "--sandbox", "none"),
    ("orchestrator", f"{CONFIGS}/rl.toml", "--run-dir", "RUN_DIR", "--gateway-url", "http://127.0.0.1:9"),
])
def test_a_taken_port_is_one_line_and_exit_code_2(command, tmp_path):
    command = [part.replace("RUN_DIR", str(tmp_path / "run")) for part in command]
    listener = process.bind("127.0.0.1", 0)
    try:
        done = glm5(*command, "--port", str(listener.getsockname()[1]))
    finally:
        listener.close()
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0
    assert "--port" in done.stderr
    assert not list(tmp_path.iterdir())


def test_parameter_counts_are_the_published_ones():
    done = glm5("model", "info", "glm-5", "--json")
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["parameters.total"] == 743_911_199_232
    assert rows["parameters.with_mtp"] == 753_864_119_552
