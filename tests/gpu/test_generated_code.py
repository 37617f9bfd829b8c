"""Code for a GPU, generated and compiled without one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None or importlib.util.find_spec("triton") is None,
    reason="needs a build of torch with CUDA, and Triton",
)
def test_the_code_of_rounds_is_generated_and_compiled() -> None:
    script = Path(__file__).with_name("generate_code.py")
    run = subprocess.run(
        [sys.executable, script, "ar"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed: " in run.stdout
