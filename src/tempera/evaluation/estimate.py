"""Memory of an evaluation, from a rehearsal of one batch without data."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tempera.continuous.loop import Context, Decoding, Speculative
from tempera.continuous.target import MARTarget
from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import ImageModel
from tempera.evaluation.pipeline import Pipeline
from tempera.runtime.cost import Cost
from tempera.runtime.rehearsal import META, Meter, Rehearsal


def estimate(
    make: Callable[[], Pipeline],
    prompts: Sequence[Prompt],
    batch_size: int,
    diagnostics: bool,
) -> Cost:
    """Rehearse a batch: its prompts, one round, and its pictures. A rule's tables and the
    networks of metrics are not counted, nor the memory of rounds that are recorded on a CPU, less
    than a round takes.

    Args:
        make: builds the pipeline with networks on the meta device.
        prompts: of the whole run.
        batch_size: prompts decoded together.
        diagnostics: see `tempera.decoding.loop.decode`.

    Returns:
        the cost, without its download.
    """
    batch = prompts[:batch_size]
    with Meter() as meter, torch.inference_mode():
        pipeline = make()
        weights, target = meter.live, pipeline.target
        with Rehearsal(len(batch) * target.length):
            cache = _decoded(pipeline, batch, diagnostics)
            tokens = blank_tokens(target, len(batch)).to(META)
            height, width = pipeline.decoded(tokens).shape[-2:]
        del tokens
    return Cost(
        f"{len(prompts):,} images of {height}×{width} pixels, {target.length:,} tokens each, "
        f"{len(batch)} at a time",
        weights,
        cache,
        meter.peak,
        written=len(prompts) * (3 * height * width + 64 * target.length),
        download=None,
    )


def blank_tokens(target: ImageModel, count: int) -> Tensor:
    """Tokens of this many blank images, int64 [count, T], or float32 [count, T, D] for a model of
    continuous tokens.
    """
    if isinstance(target, MARTarget):
        return torch.zeros(count, target.length, target.channels)
    return torch.zeros(count, target.length, dtype=torch.int64)


def _decoded(pipeline: Pipeline, batch: Sequence[Prompt], diagnostics: bool) -> int:
    """Decode one round; returns the bytes of the KV cache, which a model of continuous tokens does
    not have.
    """
    target, method = pipeline.target, pipeline.method
    if isinstance(method, Decoding):
        assert isinstance(target, MARTarget)
        target.begin([prompt.text for prompt in batch])
        _score_whole_images(target, method, len(batch))
        return 0
    pipeline.tokens(batch, diagnostics=diagnostics)
    return int(target.session.cache.nbytes())  # type: ignore[attr-defined]


def _score_whole_images(target: MARTarget, method: Decoding, batch: int) -> None:
    """The target's largest pass: whole images but one token, for each context of a round."""
    sees = isinstance(method, Speculative) and method.rule.sees_drafts
    contexts = 1 + method.depth(target.length) if sees else 1  # type: ignore[union-attr]
    rows = torch.arange(batch, device=target.device).repeat(contexts)
    tokens = blank_tokens(target, len(rows)).to(target.device)
    known = torch.full_like(rows, target.length - 1)
    order = torch.zeros_like(tokens[..., 0], dtype=torch.int64)
    context = Context(rows, tokens, order, known, target.length - 1)
    target.conditions(context, known.unsqueeze(1), known.unsqueeze(1) + 1)
