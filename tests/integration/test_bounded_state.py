"""What a process keeps does not grow with what it decodes and reads."""

import gc
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from tiny_evaluation import tiny_pipeline

import tempera
from tempera.data.prompts import Prompt
from tempera.decoding.trees import Tree
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation.pipeline import Method
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.rules import codebook_neighbours
from tempera.rules.codebook_neighbours import Neighbours
from tempera.rules.neighbourhood import Lantern
from tempera.rules.standard import Relaxed

CONSTANT = {"_named", "_named_paths", "_adapter", "_clips_tokens", "results", "_processor"}
"""Caches of what the package ships, trees, options' types, CLIP's tokens, the papers' results, and
of the processor's name.
"""


def live_tensors() -> int:
    gc.collect()
    return sum(type(one) is torch.Tensor for one in gc.get_objects())


def test_many_settings_and_hundreds_of_prompts_leave_nothing_behind() -> None:
    torch.manual_seed(0)
    target, counts = TableTarget(vocab_size=4, length=6), list[int]()
    draft = TableDraft(target)
    for setting in range(18):
        neighbours = Neighbours.build(torch.randn(4, 3), 2, "l2")
        for rule in (Relaxed((1 + setting / 30, 1.0)), Lantern(neighbours, 0.1 + setting / 60)):
            method = Method(StaticTreeDrafter(draft, Tree.from_paths([[0], [0, 0], [1]])), rule)
            pipeline = tiny_pipeline()
            prompts = [Prompt(f"{setting}-{place}", "a ring") for place in range(10)]
            pipeline.tokens(prompts, method, diagnostics=isinstance(rule, Relaxed))
        if setting % 3 == 2:
            counts.append(live_tensors())
    assert max(counts[4:]) <= max(counts[2:4]), counts
    assert len(codebook_neighbours._BUILT) <= codebook_neighbours.MOST


def caches() -> Iterator[tuple[str, Any]]:
    """Every cached function of the package."""
    for module in pkgutil.walk_packages(tempera.__path__, "tempera."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "cache_parameters"):
                yield name, value.cache_parameters()["maxsize"]


def test_every_cache_has_a_bound() -> None:
    found = dict(caches())
    assert {"_moved", "_chain", "on_device"} <= found.keys()
    assert {name for name, most in found.items() if most is None} <= CONSTANT
