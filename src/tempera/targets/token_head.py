"""The two ends of a target: tokens to embeddings, and hidden states to the sampling distribution.

Shapes: B prompts, R rows (B, or 2B under guidance: conditional rows first), M positions, V
vocabulary of the target, H hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tempera.decoding.probabilities import Sampling
from tempera.targets.few_rows import product
from tempera.targets.network import TargetNetwork
from tempera.targets.packed_linear import PackedLinear

FORBIDDEN = -1e4
"""Logit of a forbidden token in training: −∞ would give NaN in a loss that multiplies it by 0. What
tokens are drawn from has −∞, which no temperature makes possible.
"""


class TokenHead:
    """Embedding, head and sampling of a target.

    Args:
        network: the network that has the embedding and the head.
        sampling: guidance, temperature, top-k and top-p; may be replaced between images.
        length: tokens of an image.

    Attributes:
        linear: the head over the codes, without a copy of the network's weights. A line end has no
            row: it is forced or forbidden, whatever its logit.
        forced: the forced token of each position, such as the end of a line, int64 [length], −1
            where the position is free; None if none is forced. A token that is forced somewhere is
            drawn nowhere else.
    """

    def __init__(self, network: TargetNetwork, sampling: Sampling, length: int) -> None:
        weight = network.lm_head.weight
        bias = network.lm_head.bias
        spec = network.spec
        ids, forced = (None, None) if spec is None else (spec.token_ids, spec.forced)
        self._ids = None if ids is None else ids.to(weight.device)
        if spec is not None:  # the codes follow each other, so their rows are a view
            codes = slice(spec.first_code, spec.first_code + spec.codes)
            weight = weight[codes]
            bias = None if bias is None else bias[codes]
        self.linear = PackedLinear(weight, bias)
        self._linears = {weight.dtype: self.linear}
        self._embed = network.embed_tokens
        self._network = network
        self.forced = None if forced is None else forced.to(weight.device)
        self.hidden_size: int = weight.shape[1]
        self._line_ends = 0 if ids is None else len(ids) - len(weight)
        self.vocab_size: int = len(weight) + self._line_ends
        self.length = length
        self.sampling = sampling

    def pack(self) -> None:
        """Pack the weight (`packed_linear`), in place of the network's own head."""
        dtype = self.linear.weight.dtype
        self.linear = self.linear.to_dtype(dtype, self.sampling.rows)
        self._linears[dtype] = self.linear
        self._network.lm_head = self.linear

    def copy_to(self, dtype: torch.dtype) -> None:
        """Keep a copy of the weight in another dtype, for hidden states of that dtype: those of a
        draft that computes in it.
        """
        if dtype not in self._linears:
            self._linears[dtype] = self.linear.to_dtype(dtype, self.sampling.rows)

    def embed(self, tokens: Tensor, table: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Embed tokens, int64 [B, ...] -> [R, ..., H]; with guidance both rows of a prompt get the
        same embeddings. `table` replaces the network's embedding of its ids.
        """
        embeds = (table or self._embed)(tokens if self._ids is None else self._ids[tokens])
        return torch.cat([embeds, embeds]) if self.sampling.guided else embeds

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the V tokens, [..., H] -> [..., V]. Features behind the H numbers of a hidden
        state (`forward.ModelRunner.capture_hidden_states`) are not read.
        """
        linear = self._linear_of(hidden)
        logits: Tensor = linear(hidden[..., : self.hidden_size])
        return self._with_line_ends(logits, FORBIDDEN)

    def directions(self, vectors: Tensor) -> Tensor:
        """What adding vectors to hidden states adds to the logits, [..., H] -> [..., V]: the head
        without its bias.
        """
        logits: Tensor = self._linear_of(vectors)(vectors)
        if self.linear.bias is not None:
            logits = logits - self.linear.bias
        return self._with_line_ends(logits, 0.0)

    def guided_logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states after guidance, [R, M, H] -> [B, M, V]; −∞ of line ends.

        Guidance l = u + s(c − u) and the head are both linear. Guidance is therefore applied to the
        hidden states, and the head runs on half the rows.
        """
        linear = self._linear_of(hidden)
        last = hidden[..., : self.hidden_size]
        if self.sampling.guided:
            conditional, unconditional = last.chunk(2)
            last = torch.lerp(unconditional, conditional, self.sampling.guidance)
        return self._with_line_ends(product(linear, last), -torch.inf)

    def _with_line_ends(self, logits: Tensor, value: float) -> Tensor:
        """[..., V - line ends] -> [..., V]; padding would copy logits without line ends, too."""
        if not self._line_ends:
            return logits
        return nn.functional.pad(logits, (0, self._line_ends), value=value)

    def distribution(
        self, hidden: Tensor, lengths: Tensor, ahead: Tensor | int, sampling: Sampling | None = None
    ) -> Tensor:
        """The distributions that hidden states predict, [R, M, H] -> float32 [B, M, V].

        Args:
            hidden: hidden states after the final norm, [R, M, H].
            lengths: image tokens up to each row's root, int64 [B].
            ahead: distance of each state from the root in tokens, int64 [M] or [B, M]; or a number
                for all.
            sampling: used instead of the target's, except for its guidance.
        """
        return self.distribution_of(self.guided_logits(hidden), lengths, ahead, sampling)

    def distribution_of(
        self, logits: Tensor, lengths: Tensor, ahead: Tensor | int, sampling: Sampling | None = None
    ) -> Tensor:
        """Like `distribution`, from logits after guidance, [B, M, V]."""
        forced = None
        if self.forced is not None:
            forced = self.forced[(lengths[:, None] + ahead).clamp_(max=self.length - 1)]
        return (sampling or self.sampling).of_guided(logits, forced)

    def _linear_of(self, hidden: Tensor) -> PackedLinear:
        return self._linears.get(hidden.dtype, self.linear)
