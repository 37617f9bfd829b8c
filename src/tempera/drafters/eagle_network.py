"""The EAGLE draft (Li et al. 2024, EAGLE-1): one decoder layer that predicts the target's next
hidden state.

At step t it reads the pair (embedding of token t, the target's hidden state at token t − 1) and
predicts the hidden state at token t, which the target's own head turns into the distribution of
token t + 1.

Shapes: R rows, S sequence, T prefix tokens, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_files import draft_to_train
from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.eagle import EagleDraft
from tempera.targets.decoder_layer import start_small


class EagleModel(DraftNetwork):
    """The projection and one decoder layer.

    Attributes:
        is_public: whether EAGLE's or LANTERN's code has trained it. Such a draft has no step at the
            first prefix token, which no hidden state precedes.
        reads_captions: whether it reads caption tokens. LANTERN's of LlamaGen read every one,
            padding too, as code 0.
    """

    draft_model = EagleDraft

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        (self.layer,) = self.make_layers(1)
        self.is_public = False
        self.reads_captions = True
        start_small(self)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The decoder layer."""
        return (self.layer,)

    @override
    def prefix(self, embeds: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DraftNetwork.prefix`."""
        if not self.is_public:
            return embeds, keep, keep
        if not self.reads_captions and self.embed_tokens is not None:
            keep = torch.ones_like(keep)
            embeds = self.embed_tokens(torch.zeros_like(keep, dtype=torch.int64))
        return embeds, keep, nn.functional.pad(keep[:, :-1], (1, 0), value=False)


def eagle_network(
    target: Any, model: str, start: str | None = None, features: Sequence[int] = ()
) -> EagleModel:
    """`draft=eagle`: see `draft_to_train`."""
    return draft_to_train(EagleModel, target, model, start, features)
