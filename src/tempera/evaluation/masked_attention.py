"""SJD-PAC's Figure 4: how much does a token still matter to the distribution some tokens later?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.loop import Output
from tempera.decoding.probabilities import total_variation
from tempera.decoding.random_streams import RandomStreams
from tempera.evaluation.pipeline import Method
from tempera.targets.transformer import TransformerTarget
from tempera.training.teacher_forcing import teach


@dataclass(frozen=True)
class Masking(Method):
    """A method whose TV(p, q) compares the target with itself: p is its distribution after a token,
    and q that of a query which cannot read the cache entry `masked` tokens before it (SJD-PAC,
    §4.2). The entries between keep what they have read of the masked token.

    Args:
        masked: d, distance of the masked token from the query's, at least 1.
    """

    masked: int

    def decode(
        self,
        target: Any,
        streams: RandomStreams,
        prompts: Sequence[str],
        *,
        diagnostics: bool = False,
        **options: Any,
    ) -> Output:
        """See `Method`; `diagnostics` costs one pass over two copies of each image."""
        output = super().decode(target, streams, prompts, diagnostics=diagnostics, **options)
        if not diagnostics:
            return output
        tv = masked_distances(target, list(prompts), output.tokens, self.masked)
        return replace(output, trace=replace(output.trace, tv=tv))


@torch.inference_mode()
def masked_distances(
    target: TransformerTarget, prompts: list[str], tokens: Tensor, masked: int
) -> Tensor:
    """TV between the distributions of every token with and without the cache entry `masked` before
    that of the query, in one pass: behind the image comes a copy of it, whose queries read the
    first copy's entries but one, and themselves.

    Args:
        target: the target.
        prompts: B of them.
        tokens: the images, int64 [B, T].
        masked: d, at least 1.

    Returns:
        float32 [B, T]; NaN for the first 1 + d tokens, before which no image token is d away.
    """
    rows = target.sampling.rows
    count = tokens.shape[1]
    drop = torch.arange(rows * len(prompts)) >= len(prompts)
    lesson = teach(target, prompts * rows, tokens.repeat(rows, 1), drop)
    image = lesson.mask  # added to the attention's scores: 0, or `closed` where nothing is read
    closed = torch.finfo(image.dtype).min
    everything = torch.ones(image.shape[-2:], dtype=torch.bool, device=image.device)
    itself = everything.tril().triu()
    hidden_entry = everything.tril(-masked).triu(-masked)
    nothing = torch.full_like(image, closed)
    # the copy's queries read the image without themselves and the hidden entry, and themselves
    of_image = image.masked_fill(itself | hidden_entry, closed)
    of_copy = nothing.masked_fill(itself, 0.0)
    mask = torch.cat(
        [torch.cat([image, nothing], dim=-1), torch.cat([of_image, of_copy], dim=-1)], dim=-2
    )
    copies = target.network.model(
        lesson.embeds.repeat(1, 2, 1), mask, lesson.rotation.repeat(1, 1, 2, 1).to(target.dtype)
    )
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=target.device)
    ahead = torch.arange(count, device=target.device)
    p = target.head.distribution(lesson.hidden[:, -count:], lengths, ahead)
    q = target.head.distribution(copies[:, -count:], lengths, ahead)
    tv = total_variation(p, q)
    tv[:, : 1 + masked] = torch.nan
    return tv
