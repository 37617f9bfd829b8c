"""On a GPU: models of transformers in memory, in float32 and bfloat16, against their own
`generate`.
"""

import pytest
import torch
from held_models import FAMILIES, Held

from tempera.wrapped.ids import generate_ids

pytestmark = pytest.mark.gpu


def on_gpu(held: Held, dtype: torch.dtype) -> Held:
    """The model and its inputs on the GPU."""
    held.model.to("cuda", dtype)
    for given in (held.inputs, held.ids):
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                given[name] = value.cuda()
    return held


@pytest.mark.parametrize("method", ["ar", "scd"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "chameleon"])
def test_greedy_images_are_those_of_generate(family: str, method: str) -> None:
    held = on_gpu(FAMILIES[family](), torch.float32)
    found = generate_ids(held.accelerated(method), **held.ids)
    assert found.is_cuda and torch.equal(found, held.greedy())


@pytest.mark.parametrize("method", ["ar", "scd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_in_bfloat16(family: str, method: str) -> None:
    """Which tokens they have is up to rounding; the format of the model is kept."""
    held = on_gpu(FAMILIES[family](), torch.bfloat16)
    found = generate_ids(held.accelerated(method, temperature=1.0), **held.ids, seed=1).cpu()
    layout = held.layout
    codes = (found >= layout.first_code) & (found < layout.first_code + layout.codes)
    ends = torch.zeros_like(codes)
    if layout.forced is not None:
        ends = (layout.forced >= 0).expand_as(codes)
    assert torch.equal(codes, ~ends)
    assert layout.line_end is None or (found[ends] == layout.line_end).all()
