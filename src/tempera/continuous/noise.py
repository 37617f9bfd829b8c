"""Normal and uniform draws from each prompt's random stream, for continuous tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tempera.decoding.random_streams import Draws, RandomStreams, key, uniforms

_TOKEN = 1 << 26
"""Counters reserved for the trials of one token."""
_ROUND = 1 << 36
"""Counters reserved for the trials of one round: of 1,024 tokens."""


class Noise:
    """Standard normal and uniform draws of a batch, and trials, whose number may differ by row.

    Draws that every row needs come from its stream in sequence. Trials of the residual sampler come
    from a second stream, indexed by round and trial, so a row's trials do not depend on the number
    that other rows need.

    Args:
        streams: one stream per prompt.
        rows: B.
    """

    def __init__(self, streams: RandomStreams, rows: int) -> None:
        self._draws = Draws(streams, rows)
        self._trials = torch.tensor(
            [key(seed, f"{name}/trials") for seed, name in streams.named],
            dtype=torch.int64,
            device=streams.device,
        )
        self._keys = self._trials.new_zeros(rows)
        self._rounds = self._trials.new_zeros(rows)

    def begin(self, prompts: Sequence[int], count: int, rows: Tensor | None = None) -> Tensor:
        """Begin the streams of prompts: `Draws.begin`."""
        if rows is None:
            rows = torch.arange(len(prompts), device=self._keys.device)
        self._keys[rows] = self._trials[torch.tensor(prompts, device=rows.device)]
        self._rounds[rows] = 0
        return self._draws.begin(prompts, count, rows)

    @property
    def batch(self) -> int:
        """B."""
        return len(self._keys)

    def next_round(self) -> None:
        """Advance the trials to the next round."""
        self._rounds += 1

    def uniform(self, *shape: int) -> Tensor:
        """float64 [B, *shape] in [0, 1)."""
        count = int(torch.Size(shape).numel())
        return self._draws.next(count).reshape(-1, *shape)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal draws, float32 [B, *shape]."""
        return normal_of(self.uniform(*shape))

    def trials(
        self, tokens: Tensor, tokens_per_row: int, first: int, count: int, width: int
    ) -> Tensor:
        """Uniform draws of trials `first` … `first + count − 1` of some tokens of a round.

        Args:
            tokens: numbers b · `tokens_per_row` + m of tokens m of rows b, int64 [R].
            tokens_per_row: tokens per row.
            first: number of the first trial.
            count: K.
            width: draws per trial, W.

        Returns:
            float64 [R, K, W].
        """
        rows = tokens // tokens_per_row
        start = self._rounds[rows] * _ROUND + tokens % tokens_per_row * _TOKEN + first * width + 1
        counters = start.unsqueeze(1) + torch.arange(count * width, device=self._keys.device)
        keys = self._keys[rows].unsqueeze(1)
        return uniforms(keys, counters).reshape(-1, count, width)


def normal_of(uniform: Tensor) -> Tensor:
    """Standard normal draws, float32, by inversion of uniform ones (float64, multiples of 2⁻⁵³ in
    [0, 1)). They lie within ±8.3, as for any generator of 53 bits.
    """
    draws: Tensor = torch.special.ndtri(uniform.clamp(min=2.0**-54))
    return draws.float()
