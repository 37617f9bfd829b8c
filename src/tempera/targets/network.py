"""The interface that a network offers to `TransformerTarget` and to drafts of its architecture.

Shapes: R rows, T condition tokens, S sequence, H hidden size.
"""

from typing import Any, Protocol, Self

from torch import Tensor

from tempera.targets.token_format import ModelSpec


class TargetNetwork(Protocol):
    """A causal transformer over tokens. It hides all that is specific to a family of models."""

    config: Any
    """Its sizes, named as in Hugging Face configurations."""
    model: Any
    """The decoder, called as `decoder_layer.Decoder`; it has `layers` and their `sizes`, `norm` and
    `rotary`."""
    lm_head: Any
    """From hidden states to logits; a linear layer until the target is packed."""
    spec: ModelSpec | None
    """The format of its sequences, if it has other tokens than the codes of an image. If None,
    `config.grid` is the grid of an image.
    """

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed ids of the network's vocabulary, int64 [...] -> [..., H]."""

    def embed_prefix(self, condition: Tensor, mask: Tensor, drop: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the condition tokens.

        Args:
            condition: output of the family's `Conditioner`, [R, ...].
            mask: False on the prompts' padding, bool [R, T].
            drop: null-conditioned rows, bool [R].

        Returns:
            embeddings [R, T, H] in the network's dtype, and keep, bool [R, T], where the null
            condition may be padded differently.
        """

    def eval(self) -> Self:
        """See `torch.nn.Module.eval`."""
