"""Checks that every drafter passes."""

from collections.abc import Callable
from itertools import pairwise

import torch
from host_reads import HostReads
from tiny_networks import LENGTH, PROMPTS, check_q, random_rounds
from torch import Tensor

from tempera.decoding.interfaces import Drafter, Rule
from tempera.decoding.loop import Output, decode
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.none import NoDraft
from tempera.rules.standard import Exact
from tempera.targets.transformer import TransformerTarget


@torch.no_grad()
def check_bookkeeping(
    target: TransformerTarget,
    drafter: Drafter,
    prompts: list[str],
    predicted: Callable[[Tensor, int, list[int]], Tensor],
    forced: Tensor | None = None,
) -> None:
    """Random rounds to the end: every q of a static tree equals the one computed from scratch.

    predicted: image int64 [n] of a row, the row, drafted tokens behind it → the hidden state that
    the draft predicts there, [R of one prompt, H].
    """
    generator = torch.Generator().manual_seed(1)
    for draft, images in random_rounds(target, drafter, prompts, generator):
        for row, image in enumerate(images):

            def law(path: list[int], row: int = row, image: Tensor = image) -> Tensor:
                hidden = predicted(image, row, path)[:, None]
                place = None if forced is None else forced[len(image) + len(path)][None, None]
                return target.sampling.distribution(target.head.lm_logits(hidden), place)[0, 0]

            check_q(draft, row, law, target.length - len(image) - 1)


def check_greedy(target: TransformerTarget, drafter: Drafter) -> tuple[Output, Output]:
    """At temperature 0 the images are those of plain autoregression; returns its output and the
    drafter's.
    """
    plain, drafted = (
        decode(target, one, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
        for one in (NoDraft(), drafter)
    )
    assert torch.equal(plain.tokens, drafted.tokens)
    assert len(plain.tokens.unique()) > 3
    return plain, drafted


def check_batch(target: TransformerTarget, drafter: Drafter, rule: Rule) -> None:
    """A batch gives the same images as single prompts, in as many rounds."""

    def generate(prompts: list[str]) -> tuple[Tensor, Tensor]:
        output = decode(target, drafter, rule, RandomStreams(0, prompts), prompts)
        return output.tokens, output.trace.rounds

    tokens, rounds = generate(PROMPTS)
    assert tokens.shape == (4, LENGTH) and len(set(rounds.tolist())) > 1
    for row, prompt in enumerate(PROMPTS):
        alone = generate([prompt])
        assert torch.equal(alone[0][0], tokens[row]) and alone[1][0] == rounds[row]


def check_one_read(target: TransformerTarget, drafter: Drafter) -> None:
    """A round reads from the device once."""
    decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)  # makes what is made once
    counts: list[int] = []
    with HostReads() as reads:
        decode(
            target,
            drafter,
            Exact(),
            RandomStreams(1, PROMPTS),
            PROMPTS,
            observe=lambda *_: counts.append(reads.count.total()),
        )
    assert {after - before for before, after in pairwise(counts)} == {1}
