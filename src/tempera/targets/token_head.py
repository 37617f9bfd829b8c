"""The two ends of a network, in the target's tokens: from tokens to embeddings, and from hidden
states to the distribution that is sampled.

Shapes: B prompts, R rows (B, or 2B under guidance: conditional rows first), M positions, V
vocabulary of the target, H hidden size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tempera.decoding.probabilities import Sampling
from tempera.errors import TemperaError
from tempera.targets.compiled import StepFunction
from tempera.targets.network import TargetNetwork


class TokenHead:
    """Embedding, head and sampling of a target.

    Args:
        network: whose embeddings and head they are.
        sampling: from logits to the distribution that is sampled.
        length: tokens of an image.
        token_ids: the network's id of each of the target's V tokens, int64 [V]; needed if the
            network's vocabulary holds more than image tokens.
        token_bias: added to the logits of the V tokens, float [V]: a large negative number for a
            token that occurs in forced positions only.
        forced: the token that position i of the image must have, int64 [length], -1 where it is
            free (ends of lines).

    Raises:
        TemperaError: `forced` does not have one entry per token.
    """

    def __init__(
        self,
        network: TargetNetwork,
        sampling: Sampling,
        length: int,
        token_ids: Tensor | None = None,
        token_bias: Tensor | None = None,
        forced: Tensor | None = None,
    ) -> None:
        if forced is not None and forced.shape != (length,):
            raise TemperaError(
                f"{tuple(forced.shape)} forced positions do not fit an image of {length} tokens: "
                "give one entry per token."
            )
        weight: Tensor = network.lm_head.weight.detach()
        bias: Tensor | None = network.lm_head.bias
        self._ids = None if token_ids is None else token_ids.to(weight.device)
        if self._ids is not None:
            weight, bias = weight[self._ids], None if bias is None else bias.detach()[self._ids]
        if token_bias is not None:
            token_bias = token_bias.to(weight)
            bias = token_bias if bias is None else bias + token_bias
        self._weight, self._bias = weight, bias
        self._embed = network.embed_tokens
        self.forced = None if forced is None else forced.to(weight.device)
        self._law: StepFunction = self._sampled
        self.vocab_size, self.hidden_size = weight.shape
        self.length, self.sampling = length, sampling

    @property
    def sampling(self) -> Sampling:
        """From logits to the distribution that is sampled; may be replaced between images."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._sampling, self._after_guidance = sampling, replace(sampling, guidance=1.0)

    def compile(self, step: Callable[[StepFunction], StepFunction]) -> None:
        """Let `step` compile the distribution of all later calls."""
        self._law = step(self._sampled)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens, int64 [B, ...] -> [R, ..., H]: under guidance the same for both
        rows of a prompt.
        """
        embeds = self._embed(tokens if self._ids is None else self._ids[tokens])
        return torch.cat([embeds, embeds]) if self.sampling.guided else embeds

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the V tokens, [..., H] -> [..., V]."""
        return nn.functional.linear(hidden, self._weight, self._bias)

    def distribution(
        self, hidden: Tensor, lengths: Tensor, ahead: Tensor, sampling: Sampling | None = None
    ) -> Tensor:
        """What is sampled after hidden states: [R, M, H] -> float32 [B, M, V].

        Guidance l = u + s(c − u) is linear, and so is the head: it is applied to the hidden states,
        before the head, for half the work.

        Args:
            hidden: the hidden states.
            lengths: image tokens of each row up to its root, int64 [B].
            ahead: how far beyond the root each state stands, int64 [M] or [B, M].
            sampling: replaces the target's own, except for its guidance.
        """
        forced = None
        if self.forced is not None:
            forced = self.forced[(lengths[:, None] + ahead).clamp_(max=self.length - 1)]
        after_guidance = (
            self._after_guidance if sampling is None else replace(sampling, guidance=1.0)
        )
        return self._law(hidden, forced, self.sampling.guidance, after_guidance)

    def _sampled(
        self, hidden: Tensor, forced: Tensor | None, guidance: float, after: Sampling
    ) -> Tensor:
        """The step of `distribution` that can be compiled: guidance (1 for none), head, and the
        sampling `after` them.
        """
        if guidance != 1:
            conditional, unconditional = hidden.chunk(2)
            hidden = torch.lerp(unconditional, conditional, guidance)
        return after.distribution(self.lm_logits(hidden), forced)
