"""Rounds of all methods on every family, on PyTorch's meta device in place of a GPU. Its tensors
cannot be mixed with the host's or copied to the host, so a round that runs stays on the device, and
what the host reads can be counted: one read per round is allowed.
"""

from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
from markdown_pages import blocks
from paths import ROOT
from tiny_targets import DISTINCT, FAMILIES, METHODS, composed, method_options
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tempera.config.parts import META, Parts
from tempera.decoding import loop
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.independent import IndependentDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.codebook_neighbours import Neighbours
from tempera.rules.neighbourhood import GSD, Lantern, LanternPP
from tempera.rules.standard import Exact

EVERYWHERE = ("ar", "eagle tree", "eagle2", "sjd_pac")
"""Methods that run on every family: no draft, a static tree, a dynamic one, Jacobi's."""
ROUNDS = 3
"""The third is like all that follow: nothing is made for the first time."""


class Reads(TorchFunctionMode):
    """Answers what the host reads of tensors on the device: truth values with True, and numbers
    and lists with those given, in turn.
    """

    NAMES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")

    def __init__(self, numbers: list[Any]) -> None:
        super().__init__()
        self.numbers, self.seen = numbers, list[str]()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.NAMES and isinstance(args[0], Tensor) and args[0].is_meta:
            self.seen.append(name)
            return name == "__bool__" or self.numbers.pop(0)
        return function(*args, **(kwargs or {}))


class Copies(TorchDispatchMode):
    """Keeps the copies from the host to the device; those to the host fail."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            parts = [*tree_leaves((args, kwargs)), *tree_leaves(result)]
            if len({part.is_meta for part in parts if isinstance(part, Tensor)}) > 1:
                self.seen.append(name)
        return result


class Marked:
    """A drafter that marks where rounds begin, in what was read and copied."""

    def __init__(self, drafter: Any, reads: Reads, copies: Copies) -> None:
        self.drafter, self.reads, self.copies = drafter, reads, copies
        self.marks: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    @property
    def tree(self) -> Any:
        return self.drafter.tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        self.drafter.tree = tree

    def propose(self, images: Any, uniforms: Tensor) -> Any:
        self.marks.append((len(self.reads.seen), len(self.copies.seen)))
        return self.drafter.propose(images, uniforms)


def report(rows: int, tokens: int) -> list[list[int]]:
    """What the host reads after a round: rows' lengths, and whether target or draft gave NaN."""
    return [[tokens] * rows, [0] * rows, [0] * rows]


COUNTING = Lantern, LanternPP, GSD
"""Rules whose diagnostics read how many tokens can be rejected."""


def rounds(target: Any, drafter: Any, rule: Any, prompts: list[str]) -> tuple[list[int], int]:
    """Decode ROUNDS rounds -> the reads of each, and the copies of the last but one; the last one
    completes the images, which are taken out of their rows. What the first round of a batch reads
    for its checks is left out: here tensors have no values.
    """
    lengths = *range(1, ROUNDS - 1), target.length - 1, target.length
    numbers = [report(len(prompts), tokens) for tokens in lengths]
    unchecked = patch.multiple(loop, check_draft=DEFAULT, check_scores=DEFAULT)
    with unchecked, Copies() as copies, Reads(numbers) as reads:
        marked: Any = Marked(drafter, reads, copies)
        streams = RandomStreams(0, prompts, META)
        diagnostics = not isinstance(rule, COUNTING)
        decode(target, marked, rule, streams, prompts, diagnostics=diagnostics)
    starts = [read for read, _ in marked.marks]
    ends = [*starts[1:], len(reads.seen)]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    return counts, marked.marks[-1][1] - marked.marks[-2][1]


def neighbours(codebook: Any, count: int) -> Neighbours:
    near = (torch.arange(count)[:, None] + torch.arange(5)) % count
    return Neighbours(near, "l2", "0")


def independent(sized: Parts, target: Any) -> StaticTreeDrafter:
    """A second model of the family as the draft."""
    draft: Any = sized.target()
    draft.pack()
    return StaticTreeDrafter(IndependentDraft(draft, target), Tree.chain(3))


def test_a_tree_of_ones_own_follows_the_images_to_their_device() -> None:
    """The drafter of docs/decode.md, word by word."""
    page: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "decode.md", "python")[0], page)
    target = page["Bigram"]()
    target.table = target.table.to(META)

    def begin(prompts: list[str], nodes: int, rows: Tensor | None) -> None:
        target.root = torch.full((len(prompts), 1), 8, device=META)

    target.begin = begin
    drafter = page["Unigram"](target.table.mean(0))
    reads, copies = rounds(target, drafter, Exact(), ["a", "b"])
    assert reads == [1] * ROUNDS and copies == 0 and drafter.tree.parents.device == META


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_a_round_stays_on_the_device_and_is_read_once(name: str, tmp_path: Path) -> None:
    options = FAMILIES[name].write(tmp_path)
    prompts, found = list(FAMILIES[name].prompts), {}
    methods = METHODS if name == "llamagen_text" else EVERYWHERE
    with Parts.of(composed(*options)).sized() as (sized, _):
        target: Any = sized.target()
        target.pack()
        for method in methods:
            cfg = composed(*method_options(method))
            alone = method == "independent"
            if "neighbours" in cfg:
                near = {"_target_": f"{__name__}.neighbours", "count": target.vocab_size}
                cfg.neighbours = near
            drafter = independent(sized, target) if alone else Parts.of(cfg).drafter(target)
            rule = Parts.of(cfg).rule()
            found[method] = rounds(target, drafter, rule, prompts)
    assert found == dict.fromkeys(methods, ([1] * ROUNDS, 0))
