"""The two ends of a target: tokens to embeddings, and hidden states to the sampling distribution.

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
from tempera.targets.frozen_linear import FrozenLinear, freeze
from tempera.targets.network import TargetNetwork


class TokenHead:
    """Embedding, head and sampling of a target.

    Args:
        network: the network that has the embedding and the head.
        sampling: guidance, temperature, top-k and top-p.
        length: tokens of an image.
        token_ids: the network's id of each target token, int64 [V]; needed if the network's
            vocabulary contains other tokens too.
        token_bias: added to the logits of the V tokens, float [V]: a large negative number for a
            token that occurs only in forced positions.
        forced: the forced token of each position, such as the end of a line, int64 [length]; −1
            where the position is free.

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
        self._network, self._weight, self._bias = network, weight, bias
        self._linear: FrozenLinear | None = None
        self._copies: dict[torch.dtype, FrozenLinear] = {}
        self._dtype, self._compiled = weight.dtype, False
        self._embed = network.embed_tokens
        self.forced = None if forced is None else forced.to(weight.device)
        self._law: StepFunction = self._sampled
        self._guided: StepFunction = self._after_guiding
        self._drawn: StepFunction = Sampling.distribution
        self.vocab_size, self.hidden_size = weight.shape
        self.length, self.sampling = length, sampling

    @property
    def sampling(self) -> Sampling:
        """Guidance, temperature, top-k and top-p; may be replaced between images."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._sampling, self._after_guidance = sampling, replace(sampling, guidance=1.0)

    def parameters(self) -> list[Tensor]:
        """The head's weight, and its bias if it has one."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def freeze(self) -> None:
        """Store the weight for products with few rows, in place of the network's own head."""
        self._linear = self._network.lm_head = freeze(self._weight, self._bias)
        del self._weight

    def copy_to(self, dtype: torch.dtype) -> None:
        """Keep a copy of the weight in another dtype, for hidden states of that dtype: those of a
        draft that computes in it.
        """
        if dtype not in self._copies and dtype != self._dtype:
            copy = (self._linear or freeze(self._weight, self._bias)).in_dtype(dtype)
            self._copies[dtype] = copy.as_columns() if self._compiled else copy

    def compile(self, step: Callable[[StepFunction], StepFunction]) -> None:
        """Use `step` to compile the distributions of all later calls; before any `copy_to`."""
        self._compiled = True
        if self._linear is not None:
            self._linear = self._network.lm_head = self._linear.as_columns()
        self._law, self._guided, self._drawn = (
            step(part) for part in (self._sampled, self._after_guiding, Sampling.distribution)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, int64 [B, ...] -> [R, ..., H]; with guidance both rows of a prompt get the
        same embeddings.
        """
        embeds = self._embed(tokens if self._ids is None else self._ids[tokens])
        return torch.cat([embeds, embeds]) if self.sampling.guided else embeds

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the V tokens, [..., H] -> [..., V]. Features behind the H numbers of a hidden
        state (`Session.watch`) are not read.
        """
        hidden = hidden[..., : self.hidden_size]
        linear = self._copies.get(hidden.dtype, self._linear)
        if linear is not None:
            return linear(hidden)  # type: ignore[no-any-return]
        return nn.functional.linear(hidden, self._weight, self._bias)

    def directions(self, vectors: Tensor) -> Tensor:
        """What adding vectors to hidden states adds to the logits, [..., H] -> [..., V]: the head
        without its bias.
        """
        logits = self.lm_logits(vectors)
        return logits if self._bias is None else logits - self._bias

    def distribution(
        self, hidden: Tensor, lengths: Tensor, ahead: Tensor, sampling: Sampling | None = None
    ) -> Tensor:
        """The distributions that hidden states predict, [R, M, H] -> float32 [B, M, V].

        Guidance l = u + s(c − u) and the head are both linear. Guidance is therefore applied to the
        hidden states, and the head runs on half the rows.

        Args:
            hidden: hidden states after the final norm, [R, M, H].
            lengths: image tokens up to each row's root, int64 [B].
            ahead: distance of each state from the root in tokens, int64 [M] or [B, M].
            sampling: used instead of the target's, except for its guidance.
        """
        forced = self._forced_at(lengths, ahead)
        return self._law(hidden, forced, self.sampling.guidance, self._after(sampling))

    def guided_logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states after guidance, [R, M, H] -> [B, M, V]."""
        return self._guided(hidden, self.sampling.guidance)

    def distribution_of(
        self, logits: Tensor, lengths: Tensor, ahead: Tensor, sampling: Sampling | None = None
    ) -> Tensor:
        """Like `distribution`, from logits after guidance, [B, M, V]."""
        return self._drawn(self._after(sampling), logits, self._forced_at(lengths, ahead))

    def _after(self, sampling: Sampling | None) -> Sampling:
        """What follows guidance: the target's sampling, or another one."""
        return self._after_guidance if sampling is None else replace(sampling, guidance=1.0)

    def _forced_at(self, lengths: Tensor, ahead: Tensor) -> Tensor | None:
        """The forced tokens `ahead` of the roots, -1 where a position is free, int64 [B, M]."""
        if self.forced is None:
            return None
        return self.forced[(lengths[:, None] + ahead).clamp_(max=self.length - 1)]

    def _sampled(
        self, hidden: Tensor, forced: Tensor | None, guidance: float, after: Sampling
    ) -> Tensor:
        """The part of `distribution` that can be compiled: guidance (1 for none), head, then the
        sampling `after`.
        """
        return after.distribution(self._after_guiding(hidden, guidance), forced)

    def _after_guiding(self, hidden: Tensor, guidance: float) -> Tensor:
        """The part of `guided_logits` that can be compiled."""
        if guidance != 1:
            conditional, unconditional = hidden[..., : self.hidden_size].chunk(2)
            hidden = torch.lerp(unconditional, conditional, guidance)
        return self.lm_logits(hidden)
