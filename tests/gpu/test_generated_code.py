"""Code for a GPU, generated and compiled without one."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None or importlib.util.find_spec("triton") is None,
        reason="needs a build of torch with CUDA, and Triton",
    ),
]
MOST = {
    "ar, score": (17, 131),
    "ar, verify": (3, 53),
    "ar, commit": (1, 38),
    "chain, propose": (32, 221),
    "chain, score": (17, 131),
    "chain, verify": (6, 73),
    "chain, commit": (1, 38),
    "chain, observe": (12, 117),
    "ar by cuBLAS, score": (23, 130),
}
"""Launches and guards of the parts of a round of two layers, and of a chain of three: where a
change makes them fewer, write the new numbers.
"""


def generated(*arguments: str) -> str:
    """What the script prints."""
    script = Path(__file__).with_name("generate_code.py")
    command = [sys.executable, script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_code_of_rounds_is_generated_and_compiled() -> None:
    said = generated("ar")
    assert "passed: " in said and " 5 of them of few_rows_product" in said, said


def test_products_of_four_bits_are_one_call_each() -> None:
    said = generated("--count", "--int4", "ar")
    assert "8 torch.ops.aten._weight_int4pack_mm.default\n" in said
    launches, _ = MOST["ar by cuBLAS, score"]  # as many as of bfloat16
    assert re.search(rf"^ar, score: {launches} launches", said, re.MULTILINE), said


def test_launches_and_guards_of_a_round_do_not_grow() -> None:
    said = generated("--count", "ar", "chain")
    found = {
        part: (int(launches), int(guards))
        for part, launches, guards in re.findall(
            r"^(.+): (\d+) launches, (\d+) guards$", said, re.MULTILINE
        )
    }
    assert found.keys() == MOST.keys()
    assert all(
        a <= b for part, most in MOST.items() for a, b in zip(found[part], most, strict=True)
    ), found
    assert "topk" not in said, said
