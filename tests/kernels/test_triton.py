"""The Triton forms in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5.errors import ConfigError, KernelError
from glm5.kernels import dispatch
from tests.kernels.triton_cases import CASES

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (extra gpu)")
def test_triton_forms_equal_the_reference_in_the_interpreter():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton_cases"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_triton_form_equals_the_reference_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    CASES[name](torch.device("cuda"))


def test_a_form_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="expected one of auto, reference, native, triton"):
        with dispatch.prefer("opencl"):
            pass


def test_the_preferred_form_ends_with_its_block():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with dispatch.prefer("reference"):
        inside = dispatch.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(dispatch.rms_norm(x, weight, 1e-5), inside)


def test_missing_triton_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("glm5.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(KernelError, match=r"glm5\[gpu\]"):
        with dispatch.prefer("triton"):
            dispatch.swiglu(torch.randn(2, 8))
