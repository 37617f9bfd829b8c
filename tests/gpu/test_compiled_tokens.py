"""On a GPU: compiled rounds emit the tokens of eager ones. Nothing is downloaded. Each test
compiles the rounds of a method, which takes up to a minute or more.
"""

from functools import cache
from typing import Any

import pytest
import torch
from paths import CONF
from tiny_targets import composed

from tempera.config.parts import Parts
from tempera.decoding.random_streams import RandomStreams

pytestmark = pytest.mark.gpu
CONTINUOUS = {"cspd", "cspd_exact", "draft"}
METHODS = sorted({path.stem for path in (CONF / "method").glob("*.yaml")} - CONTINUOUS)
TINY = [
    "++model.network.sizes.hidden_size=64",
    "++model.network.sizes.intermediate_size=96",
    "++model.network.sizes.num_hidden_layers=2",
    "++model.network.sizes.num_attention_heads=2",
    "++model.network.sizes.num_key_value_heads=1",
    "weights=random",
    "temperature=0.05",  # random weights hardly prefer any token: rounding would tell
]
LAYOUTS = {
    "lumina": [*TINY, "image_size=64"],
    "emu3": [*TINY, "image_size=32"],
    "janus_pro_1b": [*TINY, "+model.spec.image_size=64"],
}
# in random networks drafts of a tree are nearly equally likely, and rounding decides
OF_LAYOUTS = ("ar", "eagle tree=chain depth=3", "sjd window=6")
PROMPTS = ["3", "7"]
"""Texts, and classes."""
AGREE = 0.9
"""Share of the tokens that must be equal: one that rounding changes, changes all that follow."""


def parts(model: str, method: str) -> Parts:
    options = ["device=cuda", "dtype=float32", "top_k=10", f"model={model}"]
    return Parts.of(composed(*options, *LAYOUTS.get(model, ()), *f"method={method}".split()))


@cache
def targets(model: str) -> list[Any]:
    """An eager and a compiled one."""
    both: list[Any] = [parts(model, "ar").target() for _ in range(2)]
    for target in both:
        target.pack()
    both[1].compile()
    return both


@pytest.mark.parametrize(
    ("model", "method"),
    [
        *(("shapes", method) for method in [*METHODS, "eagle tree=mc_sim_7b_63"]),
        *((model, method) for model in LAYOUTS for method in OF_LAYOUTS),
    ],
)
def test_compiled_rounds_emit_the_tokens_of_eager_ones(model: str, method: str) -> None:
    """In two batches: the second one replays the first's graphs."""
    found = []
    for target in targets(model):
        own = parts(model, method)
        decoding = own.method(target, own.rule())
        batches = [
            decoding.decode(target, RandomStreams(seed, PROMPTS, "cuda"), PROMPTS).tokens.cpu()
            for seed in range(2)
        ]
        found.append(torch.cat(batches))
    eager, compiled = found
    assert (eager == compiled).double().mean() >= AGREE
