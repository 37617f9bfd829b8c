"""Random numbers that depend on the prompt, not on the batch.

Every row has a counter-based stream keyed by (seed, prompt id), so an image does not depend on
batch size, order, sharding or resumption. The generator is SplitMix64 (Steele, Lea and Flood,
2014): draw number c of a stream with key s is mix(s + c·γ).
"""

import hashlib
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from tempera.errors import TemperaError

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BLOCK = 4096
"""Number of draws computed in advance over all rows, so that small batches do not compute them in
every round.
"""


class RandomStreams:
    """One stream of uniform draws per prompt.

    Args:
        seed: shared by all prompts, or one per prompt; NumPy's and torch's whole numbers are the
            same.
        ids: prompt ids; two prompts with the same id and seed get the same draws, so one of the two
            must differ.
        device: device of the draws.

    Attributes:
        named: seed and id of every prompt.
        keys: of the streams, int64 [N].
    """

    def __init__(
        self,
        seed: int | Sequence[int],
        ids: list[str],
        device: torch.device | str = "cpu",
    ) -> None:
        each: Any = [seed] * len(ids) if isinstance(seed, Integral) else seed
        seeds = [index(number) for number in each]
        self.named = list(zip(seeds, ids, strict=True))
        if len(set(self.named)) != len(ids):
            raise TemperaError(
                "two prompts share an id and a seed, so they would get the same random draws; give "
                "every prompt its own id"
            )
        self.ids = ids
        self.keys = torch.tensor(
            [key(*stream) for stream in self.named], dtype=torch.int64, device=device
        )
        self.device = self.keys.device

    def check(self, prompts: Sequence[str]) -> None:
        """Raise TemperaError unless there are prompts, and one stream for each."""
        if not prompts:
            raise TemperaError("there are no prompts to generate: give at least one.")
        if len(prompts) != len(self.ids):
            raise TemperaError(
                f"there are {len(prompts)} prompts but {len(self.ids)} random streams; give one "
                "prompt id per prompt"
            )


class Draws:
    """The draws of the rows of a batch, each from the stream of the prompt that it decodes.

    Args:
        streams: of all prompts.
        rows: B.
    """

    def __init__(self, streams: RandomStreams, rows: int) -> None:
        self.streams = streams
        device = streams.device
        self._keys = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counters = torch.zeros(rows, dtype=torch.int64, device=device)
        self._block = torch.empty(0, rows, dtype=torch.float64, device=device)

    def begin(self, prompts: Sequence[int], count: int, rows: Tensor | None = None) -> Tensor:
        """Begin the streams of prompts.

        Args:
            prompts: M of them, by their numbers.
            count: draws to take now.
            rows: the rows that they are for, int64 [M]; by default all.

        Returns:
            the first `count` draws of these rows, float64 [M, count].
        """
        device = self._keys.device
        if rows is None:
            rows = torch.arange(len(prompts), device=device)
        keys = self.streams.keys[torch.tensor(prompts, device=device)]
        self._keys[rows] = keys
        ahead = len(self._block)
        first = uniforms(keys, torch.arange(1, 1 + count + ahead, device=device).unsqueeze(1))
        self._block[:, rows] = first[count:]
        self._counters[rows] = count + ahead
        return first[:count].T

    def next(self, count: int) -> Tensor:
        """The next `count` draws of every row, float64 [B, count], multiples of 2⁻⁵³ in [0, 1).

        Their strides are always 1 and B, since a draw of all rows lies in one piece: compiled
        rounds are made for given strides.
        """
        if count > len(self._block):
            more = max(count - len(self._block), _BLOCK // len(self._keys))
            counters = self._counters + torch.arange(
                1, 1 + more, device=self._keys.device
            ).unsqueeze(1)
            drawn = uniforms(self._keys, counters)
            self._block = torch.cat([self._block, drawn])
            self._counters += more
        draws, self._block = self._block[:count], self._block[count:]
        return draws.T


def key(seed: int, name: str) -> int:
    """Signed 64-bit key of the stream of prompt `name` under `seed`: the head of
    SHA-256("seed/name").
    """
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True
    )


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Draws number `counters` of the streams `keys`: int64 tensors that broadcast -> float64,
    multiples of 2⁻⁵³ in [0, 1). In float32 the largest ones would be 1.
    """
    bits = keys + counters * _signed(_GAMMA)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
    return unit(bits ^ _shift_right(bits, 31))


def unit(bits: Tensor) -> Tensor:
    """The first 53 of 64 random bits as a number in [0, 1): int64 -> float64."""
    return _shift_right(bits, 11).double() * 2.0**-53


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch's shift of int64 keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)
