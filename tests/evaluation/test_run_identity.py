"""What a run's identity records of target and method."""

from typing import Any

import torch
from tiny_evaluation import Blocks
from tiny_networks import captions, llamagen, tiny_eagle, tiny_target

from tempera.decoding.trees import Tree
from tempera.drafters.eagle import build_eagle
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.jacobi import sjd
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation.pipeline import Method, Pipeline
from tempera.evaluation.run_identity import run_identity
from tempera.rules.standard import Exact
from tempera.runtime.files import sha256_file
from tempera.targets.transformer import TransformerTarget


def recorded(target: TransformerTarget, drafter: Any) -> dict[str, Any]:
    pipeline = Pipeline(
        target, Method(drafter, Exact()), Blocks(lambda: None), 0, torch.device("cpu")
    )
    return run_identity({}, {}, {}, pipeline, torch.float32)


def test_weights_tree_rule_and_type_are_recorded(tmp_path):
    target = tiny_target()
    tiny_eagle(target).save_pretrained(tmp_path)
    assert recorded(target, build_eagle(str(tmp_path), target, Tree.chain(2))) == {
        "method": "exact",
        "dtype": "float32",
        "compiled": None,
        "target": target.identity,
        "draft": sha256_file(tmp_path / "model.safetensors")[:16],
        "verification": "Exact()",
        "branching": [-1, 0],
    }


def test_a_smaller_model_is_recorded_by_its_weights():
    target, small = tiny_target(), tiny_target(network=llamagen(seed=1), conditioner=captions)
    drafter = StaticTreeDrafter(IndependentDraft(small, target), Tree.chain(2))
    assert recorded(target, drafter)["draft"] == small.identity != target.identity


def test_a_drafter_without_weights_or_a_given_tree_records_neither():
    target = tiny_target()
    for drafter in (NoDraft(), sjd(target, 4)):
        values = recorded(target, drafter)
        assert values["draft"] is None and values["branching"] is None
