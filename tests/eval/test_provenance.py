"""What a result was measured on."""

import subprocess
from pathlib import Path

import glm5
from glm5.device import peak_memory_bytes
from glm5.eval.provenance import commit, hardware


def test_hardware_is_one_line_with_cores_memory_and_python():
    line = hardware()
    assert "\n" not in line
    assert "cores" in line and "GB" in line and "Python 3" in line and "torch" in line


def test_commit_is_that_of_the_source_tree_or_the_version():
    command = ["git", "-C", str(Path(glm5.__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    found = commit()
    if head.returncode == 0:
        assert found.removesuffix("+changes") == head.stdout.strip()
    else:
        assert found == f"glm5 {glm5.__version__}"


def test_peak_memory_grows_with_what_is_allocated():
    before = peak_memory_bytes()
    block = bytearray(before + 50_000_000)
    assert peak_memory_bytes() >= len(block)
