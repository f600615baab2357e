"""Building and loading the native library: one line says what is wrong and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import glm5
from glm5.errors import KernelError
from glm5.kernels.cpu import build, library
from glm5.kernels.cpu.library import native, proven_set, runnable_sets
from glm5.kernels.cpu.proof import CHECKS, disagreement

SOURCE = Path(glm5.__file__).parents[1]


def copied_package(tmp_path: Path, with_library: bool) -> Path:
    """A source tree with the kernels only, outside the installed one."""
    target = tmp_path / "src"
    left_out = shutil.ignore_patterns("__pycache__", *(() if with_library else ("_native*",)))
    shutil.copytree(SOURCE / "glm5" / "kernels", target / "glm5" / "kernels", ignore=left_out)
    for name in ("__init__.py", "errors.py", "device.py"):
        shutil.copy(SOURCE / "glm5" / name, target / "glm5" / name)
    return target


def run(source: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(source), **variables})


def test_a_missing_compiler_is_one_line_that_says_what_to_install(tmp_path):
    source = copied_package(tmp_path, with_library=False)
    result = run(source, "-m", "glm5.kernels.cpu", CXX="no-such-compiler")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "no-such-compiler not found" in result.stderr and "install g++" in result.stderr and "CXX" in result.stderr
    assert not list((source / "glm5" / "kernels" / "cpu").glob("_native*"))


def test_a_compiler_that_fails_is_one_line_and_leaves_nothing_behind(tmp_path):
    source = copied_package(tmp_path, with_library=False)
    (source / "glm5" / "kernels" / "cpu" / "isa.cpp").write_text("this is not C++\n")
    result = run(source, "-m", "glm5.kernels.cpu")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "isa.cpp" in result.stderr
    assert not [path for path in (source / "glm5" / "kernels" / "cpu").iterdir() if "native" in path.name]


def test_a_missing_library_names_the_file_and_the_command(tmp_path):
    source = copied_package(tmp_path, with_library=False)
    code = "import torch; from glm5.kernels import dispatch; dispatch.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)"
    result = run(source, "-c", code)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("glm5.errors.KernelError: native kernels: ") and "make setup" in last


def test_a_library_of_other_sources_is_refused(tmp_path):
    source = copied_package(tmp_path, with_library=True)
    with open(source / "glm5" / "kernels" / "cpu" / "mask.h", "a") as file:
        file.write("// edited\n")
    result = run(source, "-c", "from glm5.kernels.cpu.library import native; native()")
    assert "compiled from other sources; run 'python -m glm5.kernels.cpu'" in result.stderr


def test_an_instruction_set_that_the_library_lacks_is_refused():
    with pytest.raises(KernelError, match="no sve2 form"):
        native("sve2")


def test_the_library_contains_the_plain_form_and_prefers_the_best():
    assert runnable_sets()[-1] == "plain"
    assert set(runnable_sets()) <= set(build.instruction_sets())


@pytest.mark.parametrize("name", runnable_sets())
def test_every_form_of_the_library_proves_itself(name):
    assert disagreement(native(name)) is None


@pytest.mark.parametrize("name", CHECKS)
def test_a_function_that_computes_nothing_is_noticed(name):
    assert disagreement({**native("plain"), name: lambda *arguments: 0}) == name


def test_a_form_that_is_wrong_on_this_machine_is_passed_over_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(library, "runnable_sets", lambda: ("avx2", "plain"))
    monkeypatch.setattr(library, "disagreement", lambda functions: "rms_norm")
    monkeypatch.setattr(library, "native", lambda name: {})
    assert proven_set.__wrapped__() == "plain"
    [record] = caplog.records
    assert "\n" not in record.message and "python -m glm5.kernels.cpu" in record.message
    assert "rms_norm gives wrong results in its avx2 form" in record.message


def test_importing_the_build_module_needs_no_torch():
    code = "import sys; from glm5.kernels.cpu import build; assert 'torch' not in sys.modules"
    assert run(SOURCE, "-c", code).returncode == 0
