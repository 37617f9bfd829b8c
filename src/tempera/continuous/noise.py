"""Normal draws that belong to a prompt, for tokens that are vectors."""

import torch
from torch import Tensor

from tempera.decoding.random_streams import RandomStreams, key, uniforms

_TOKEN, _ROUND = 1 << 26, 1 << 36
"""Counters set aside for the trials of one token of a round, and of one round (1,024 tokens)."""


class Noise:
    """Standard normal and uniform draws of a batch, and trials whose number may differ from row to
    row.

    What every row draws in a round comes from its stream in turn. Trials of a residual have a
    second stream, indexed by round and trial, so that a row's trials do not depend on how many the
    other rows needed.

    Args:
        streams: one stream a row.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._keys = torch.tensor(
            [key(streams.seed, f"{name}/trials") for name in streams.ids],
            dtype=torch.int64,
            device=streams.device,
        )
        self._round = 0

    @property
    def batch(self) -> int:
        """B."""
        return len(self._keys)

    def next_round(self) -> None:
        """Leave the trials of this round behind."""
        self._round += 1

    def uniform(self, *shape: int) -> Tensor:
        """float32 [B, *shape] in [0, 1)."""
        count = int(torch.Size(shape).numel())
        return self._streams.next(count).reshape(-1, *shape)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal draws, float32 [B, *shape]."""
        return normal_of(self.uniform(*shape))

    def trials(self, tokens: Tensor, places: int, first: int, count: int, width: int) -> Tensor:
        """Uniform draws of trials `first` … `first + count − 1` of some tokens of a round.

        Args:
            tokens: token m of row b, of `places` tokens a row, is number b · places + m; int64 [R].
            places: see above.
            first: number of the first trial.
            count: K.
            width: draws a trial, W.

        Returns:
            float32 [R, K, W].
        """
        start = self._round * _ROUND + tokens % places * _TOKEN + first * width + 1
        counters = start.unsqueeze(1) + torch.arange(count * width, device=self._keys.device)
        return uniforms(self._keys[tokens // places].unsqueeze(1), counters).reshape(
            -1, count, width
        )


def normal_of(uniform: Tensor) -> Tensor:
    """Standard normal draws by inversion of uniform ones (multiples of 2⁻²⁴ in [0, 1)); beyond ±5.4
    there are none, as for any generator of 24 bits.
    """
    draws: Tensor = torch.special.ndtri(uniform.double() + 2.0**-25)
    return draws.float()
