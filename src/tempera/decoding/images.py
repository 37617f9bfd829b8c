"""The images of a batch while they are decoded. Loops append to them, drafters read them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tempera.errors import TemperaError


class Images:
    """The images of a batch as far as they are decoded, in buffers that rounds write in place. Rows
    advance and finish independently.

    Args:
        ids: the names of the B prompts.
        length: T, tokens of an image.
        depth: L, most tokens that a round drafts in a row.
        device: of the buffers.
        columns: what is recorded of every token, by name, with its dtype.
        channels: D of continuous tokens; None for tokens that are ids.

    Attributes:
        tokens: int64 [B, T + 1 + L], or float32 [B, T + 1 + L, D], in the order of decoding;
            undefined from each row's length on. The last 1 + L columns are for tokens past the
            image.
        lengths: number of tokens of each row, int64 [B].
        emitted: how many of them the last round emitted, int64 [B]; 0 before the first round.
        counts: `lengths` on the host, as of the last `read`.
        rounds: number of rounds so far.
    """

    def __init__(
        self,
        ids: list[str],
        length: int,
        depth: int,
        device: torch.device,
        columns: Mapping[str, torch.dtype],
        channels: int | None = None,
    ) -> None:
        self.ids = ids
        self.length = length
        self.depth = depth
        self.device = device
        shape = len(ids), length + 1 + depth
        if channels is None:
            self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        else:
            self.tokens = torch.zeros(*shape, channels, device=device)
        self.lengths = torch.zeros(len(ids), dtype=torch.int64, device=device)
        self.emitted = torch.zeros_like(self.lengths)
        self.counts = [0] * len(ids)
        self.rounds = 0
        self._columns = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, dtype in columns.items()
        }
        self._ahead = torch.arange(shape[1], device=device)
        self._report = self.lengths.unsqueeze(0)  # of the last round; the host reads it
        self._blamed: list[str] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.counts)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row."""
        return min(self.counts)

    @property
    def written(self) -> int:
        """Tokens of all rows together."""
        return sum(self.counts)

    @property
    def complete(self) -> bool:
        """Whether all images are."""
        return self.shortest >= self.length

    def last(self, count: int) -> Tensor:
        """The tokens that the last round emitted, int64 [B, count]; undefined behind them."""
        slots = (self.lengths - self.emitted).unsqueeze(1) + self._ahead[:count]
        return self.tokens.gather(1, slots)

    def append(
        self,
        tokens: Tensor,
        counts: Tensor,
        columns: Mapping[str, Tensor],
        broken: Mapping[str, Tensor],
    ) -> Tensor:
        """Add a round.

        Args:
            tokens: each row's new tokens, [B, M] or [B, M, D]; M ≤ 1 + L, or no row is so near its
                end.
            counts: how many of them a row gets, int64 [B], unless its image ends before.
            columns: what is recorded of them, [B, M] each.
            broken: for the target and the draft, in which rows it gave NaN or infinity, bool [B].

        Returns:
            how many tokens each row emits, int64 [B].
        """
        slots = self.lengths.unsqueeze(1) + self._ahead[: tokens.shape[1]]
        # later rounds overwrite what is not emitted
        along = slots if tokens.dim() == 2 else slots.unsqueeze(-1).expand_as(tokens)
        self.tokens.scatter_(1, along, tokens)
        for name, values in columns.items():
            self._columns[name].scatter_(1, slots, values)
        torch.minimum(counts, self.length - self.lengths, out=self.emitted)
        self.lengths += self.emitted
        self._blamed = list(broken)
        faults = [rows * self.emitted for rows in broken.values()]  # 0 where a row was complete
        self._report = torch.stack([self.lengths, *faults])
        return self.emitted

    def read(self) -> None:
        """Read from the device how far the images are: the round's only host read.

        Raises:
            TemperaError: target or draft gave NaN or infinity for a row that was not complete.
        """
        self.counts, *broken = self._report.tolist()
        for who, rows in zip(self._blamed, broken, strict=True):
            if any(rows):
                first = next(index for index, tokens in enumerate(rows) if tokens)
                raise TemperaError(
                    f"the {who} gave NaN or infinity for prompt '{self.ids[first]}'; check its "
                    "weights and the guidance, and try dtype=float32"
                )
        self.rounds += 1

    def columns(self) -> dict[str, Tensor]:
        """What is recorded of the tokens, [B, T] each."""
        return {name: column[:, : self.length] for name, column in self._columns.items()}
