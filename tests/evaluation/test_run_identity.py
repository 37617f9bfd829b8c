"""What a run's identity records."""

from typing import Any

import torch
from tiny_evaluation import Blocks
from tiny_networks import captions, llamagen, tiny_eagle, tiny_target

from tempera.decoding.trees import Tree
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle_network import build_eagle
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.jacobi import sjd
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation.pipeline import Method, Pipeline
from tempera.evaluation.run_identity import run_identity
from tempera.rules.standard import Exact
from tempera.runtime.files import sha256_file
from tempera.runtime.processor import Placement
from tempera.targets.transformer import TransformerTarget


def recorded(
    target: TransformerTarget, drafter: Any, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    method = Method(drafter, Exact())
    pipeline = Pipeline(target, method, Blocks(lambda: None), 0, torch.device("cpu"))
    verification = {"rule": {"_target_": "mine.Power", "alpha": 2}}
    return run_identity(
        options or {}, None, pipeline, verification, Placement(torch.device("cpu"), torch.float32)
    )


def test_options_weights_tree_and_rule_are_recorded(tmp_path):
    target = tiny_target()
    save_draft(tiny_eagle(target), tmp_path)
    drafter = build_eagle(str(tmp_path), target, Tree.chain(2))
    drawn = {"seed": 0, "guidance": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    drawn["entropy_temperature"] = [2.5, 3, 0.6]
    options = {"tree": "chain", **drawn, "delta": 2, "drafter.window": 4}
    assert recorded(target, drafter, options) == {
        "method": "exact",
        **options,
        "dtype": "float32",
        "compiled": None,
        "target": target.identity,
        "draft": sha256_file(tmp_path / "model.safetensors")[:16],
        "verification": {"rule": {"_target_": "mine.Power", "alpha": 2}},
        "branching": [-1, 0],
        "image_decoder": None,
    }


def test_a_draft_is_recorded_by_its_weights_if_it_has_some():
    target, small = tiny_target(), tiny_target(network=llamagen(seed=1), conditioner=captions)
    drafter = StaticTreeDrafter(IndependentDraft(small, target), Tree.chain(2))
    assert recorded(target, drafter)["draft"] == small.identity != target.identity
    for drafter in (NoDraft(), sjd(target, 4)):
        values = recorded(target, drafter)
        assert values["draft"] is None and values["branching"] is None
