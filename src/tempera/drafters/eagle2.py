"""EAGLE-2: EAGLE's draft model with dynamic trees."""

from dataclasses import replace

from tempera.drafters.dynamic import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft, load
from tempera.probs import Sampling
from tempera.targets.adapter import TransformerTarget


def confidence(sampling: Sampling) -> Sampling:
    """What candidates are ranked by: the guided distribution at the target's temperature, cut nowhere.

    Nothing is drawn from it, so it may differ from the target's. Cut at the draft's top-k or top-p, it would give tokens no chance that
    the target keeps; at temperature 0 it would have no second choice at all, so there it is that of temperature 1.
    """
    return replace(sampling, temperature=sampling.temperature or 1.0, top_k=0, top_p=1.0)


def build(path: str, target: TransformerTarget, branches: int = 10, depth: int = 5, nodes: int = 59) -> DynamicTreeDrafter:
    """The EAGLE-2 drafter of a trained EAGLE draft. See `dynamic.DynamicTreeDrafter` and `eagle.build`.

    Raises:
        TemperaError: the directory holds no sound draft, or one for another target; or the tree is not possible.
    """
    model = EagleDraft(load(path, target), target, confidence)
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)
