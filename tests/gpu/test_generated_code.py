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
GRAPHS = {"ar": (4, 1), "chain": (6, 1)}
"""Graphs that a round calls, with those of diagnostics, and those alone."""
MOST = {
    "ar, score": (17, 131),
    "ar, verify": (3, 53),
    "ar, append": (6, 55),
    "ar, record": (6, 49),
    "chain, propose": (18, 180),
    "chain, score": (17, 131),
    "chain, verify": (6, 73),
    "chain, append": (6, 55),
    "chain, observe": (12, 113),
    "chain, record": (3, 57),
    "ar by cuBLAS, score": (23, 124),
    "ar, keys skipped, score": (28, 124),
    "ar with int4, score": (23, 126),
    "eagle2, look": (9, 46),
    "priced, look": (3, 40),
}
"""Launches and guards of the parts of a round of two layers, and of a chain of two: where a
change makes them fewer, write the new numbers.
"""


@pytest.fixture(scope="module")
def said() -> str:
    """What the script prints."""
    script = Path(__file__).with_name("generate_code.py")
    command = [sys.executable, script, "--count"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_kernels_of_a_round_are_compiled(said: str) -> None:
    assert said.count("passed: ") == 2 and " 5 of them of few_rows_product" in said, said


def test_products_of_four_bits_are_one_call_each(said: str) -> None:
    assert "8 torch.ops.aten._weight_int4pack_mm.default\n" in said, said


def test_graphs_of_a_round_do_not_grow(said: str) -> None:
    found = re.findall(r"^(.+): (\d+) graphs a round, (\d+) of them for diagnostics$", said, re.M)
    assert {method: (int(all), int(looks)) for method, all, looks in found} == GRAPHS, said


def test_launches_and_guards_of_a_round_do_not_grow(said: str) -> None:
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
