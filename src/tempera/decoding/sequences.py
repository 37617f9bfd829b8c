"""The images of a batch while they are decoded. Loops append to them, drafters read them."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tempera.decoding.compiled import Buffers
from tempera.errors import TemperaError

OF_NETWORK = (
    "the {} gave NaN or infinity for prompt '{{}}'; check its weights and the guidance, and try "
    "dtype=float32"
)
FAULTS = (
    OF_NETWORK.format("target"),
    OF_NETWORK.format("draft"),
    "the rule gave prompt '{}' no next token: its distribution has NaN, a negative number or no "
    "mass, or its node is not in the draft; check its residual, and the draft's q",
)
"""What may break a row."""


def version(tensor: Tensor) -> int:
    """How often a tensor has been written; in inference mode PyTorch does not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Report:
    """What the host is to know of a round, on its way there.

    Args:
        counts: tokens of each row, and what is broken, int64 [1 + F, B].
        most: tokens that a row may have got.
    """

    def __init__(self, counts: Tensor, most: int) -> None:
        self.most = most
        self._arrived: torch.cuda.Event | None = None
        if not counts.is_cuda:
            self._counts = counts.clone()
        else:
            self._counts = counts.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[list[int]]:
        """Wait for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: list[list[int]] = self._counts.tolist()
        return rows


class Sequences:
    """The images of a batch as far as they are decoded, in buffers that rounds write in place. Rows
    advance and finish independently, and take other images when they have finished.

    Args:
        rows: B. All rows are idle until `begin`.
        length: T, tokens of an image.
        depth: L, most tokens that a round drafts in a row.
        device: of the buffers.
        channels: D of continuous tokens; None for tokens that are ids.
        buffers: where the tensors lie; by default in new ones.

    Attributes:
        tokens: int64 [B, T + 1 + L], or float32 [B, T + 1 + L, D], in the order of decoding;
            undefined from each row's length on. The last 1 + L columns are for tokens past the
            image.
        lengths: number of tokens of each row, int64 [B]; T of an idle one.
        emitted: how many of them the last round emitted, int64 [B]; 0 before the first round.
        columns: what is recorded of each token, by name, [B, T + 1 + L] each; see `record`.
        prompts: which prompt each row decodes, counted from 0; None for an idle row.
        ids: the names of these prompts, or of the last ones.
        rounds: number of rounds so far.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        depth: int,
        device: torch.device,
        channels: int | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.prompts: list[int | None] = [None] * rows
        self.ids = [""] * rows
        self.length = length
        self.depth = depth
        self.device = device
        self.buffers = buffers or Buffers()
        self._shape = rows, length + 1 + depth
        of_tokens = torch.int64 if channels is None else torch.float32
        shape = self._shape if channels is None else (*self._shape, channels)
        self.tokens = self.buffers.zeros("tokens", shape, of_tokens, device)
        self.lengths = self.buffers.zeros("lengths", (rows,), torch.int64, device).fill_(length)
        self.emitted = self.buffers.zeros("emitted", (rows,), torch.int64, device)
        self.columns = self.buffers.tables.setdefault(self._shape, {})
        self.rounds = 0
        self._ahead = self.buffers.zeros("ahead", self._shape[1:], torch.int64, device)
        self._ahead += torch.arange(self._shape[1], device=device)
        self._counts = [length] * rows
        self._grown = [0] * rows
        self._known = 0
        self._slots = self.lengths.unsqueeze(1)
        self._unread = deque[_Report]()  # of the last rounds
        self._versions = self._now()

    def begin(self, rows: Sequence[int], prompts: Sequence[int], ids: Sequence[str]) -> None:
        """Rows begin the images of prompts, given by their numbers and names."""
        _ = self.counts  # of the rows' images before
        for row, prompt, name in zip(rows, prompts, ids, strict=True):
            self.prompts[row] = prompt
            self.ids[row] = name
            self._counts[row] = 0
        index = torch.tensor(rows, device=self.device)
        self.lengths[index] = 0
        self.emitted[index] = 0
        self._versions = self._now()

    def release(self) -> list[int]:
        """Make the `finished` rows idle; returns them."""
        finished = self.finished
        for row in finished:
            self.prompts[row] = None
        return finished

    @property
    def counts(self) -> list[int]:
        """`lengths` on the host, which waits for the last round.

        Raises:
            TemperaError: target or draft gave NaN or infinity for a row that was not complete, or
                the rule no distribution.
        """
        self._read(0)
        return self._counts

    def _read(self, later: int) -> None:
        """Read the reports of all rounds but the last `later`."""
        while len(self._unread) > later:
            counts, *broken = self._unread.popleft().read()
            self._grown = [now - then for now, then in zip(counts, self._counts, strict=True)]
            self._counts = counts
            self._known += sum(self._grown)
            self._check(broken)

    @property
    def grown(self) -> list[int]:
        """`emitted` on the host, as `counts`."""
        _ = self.counts  # reads the round's report
        return self._grown

    @property
    def live(self) -> list[int]:
        """The rows that are not idle."""
        return [row for row, prompt in enumerate(self.prompts) if prompt is not None]

    @property
    def finished(self) -> list[int]:
        """The rows whose images the last round completed. The host waits for the round before, and
        for this one where it may have completed an image: elsewhere the next round is given to the
        device while this one runs.

        Raises:
            TemperaError: as `counts`, at the latest when the image is complete.
        """
        self._read(1)
        coming = sum(report.most for report in self._unread)
        longest = max((self._counts[row] for row in self.live), default=0)
        if longest + coming < self.length:
            return []
        return [row for row in self.live if self.counts[row] >= self.length]

    def prompts_of(self, rows: list[int]) -> list[int]:
        """`prompts` of rows that are not idle."""
        return [prompt for row in rows if (prompt := self.prompts[row]) is not None]

    @property
    def longest(self) -> int:
        """Tokens of the longest row that is not idle; 0 if all are."""
        return max((self.counts[row] for row in self.live), default=0)

    @property
    def written(self) -> int:
        """Tokens of all rows together."""
        return sum(self.counts)

    @property
    def known(self) -> int:
        """How many tokens of all its images the host has read of."""
        return self._known

    @property
    def complete(self) -> bool:
        """Whether all images are."""
        return min(self.counts) >= self.length

    def record(self, values: Mapping[str, Tensor]) -> None:
        """Write values of the last round's first M places into `columns` by name, [B, M] each.
        Those from `emitted` on are written again by later rounds.
        """
        for name, of_round in values.items():
            if name not in self.columns:
                like = self._shape, of_round.dtype, self.device
                self.columns[name] = self.buffers.zeros(f"column {name}", *like)
            self.columns[name].scatter_(1, self._slots[:, : of_round.shape[1]], of_round)

    def recorded(self, names: Iterable[str], rows: Tensor) -> dict[str, Tensor]:
        """A copy of some columns, of some rows, int64 [M]: [M, T] each."""
        return {name: self.columns[name][rows, : self.length] for name in names}

    def check(self) -> None:
        """Raise TemperaError if anything but `append` has written the images."""
        if self._versions != self._now():
            raise TemperaError(
                "a drafter, a rule or a watcher changed the images in place (`sequences.tokens` "
                "or `sequences.lengths`), which it may only read: change a copy instead"
            )

    def append(self, tokens: Tensor, counts: Tensor, broken: Tensor) -> Tensor:
        """Add a round on the device; then `tell` the host.

        Args:
            tokens: each row's new tokens, [B, M] or [B, M, D]; M ≤ 1 + L, or no row is so near its
                end.
            counts: how many of them a row gets, int64 [B], unless its image ends before.
            broken: in which rows the target and the draft gave NaN or infinity, and the rule no
                distribution: the first F of `FAULTS`, bool [F, B].

        Returns:
            what the host is to know, int64 [1 + F, B].
        """
        self._slots = slots = self.lengths.unsqueeze(1) + self._ahead[: tokens.shape[1]]
        # later rounds overwrite what is not emitted
        along = slots if tokens.dim() == 2 else slots.unsqueeze(-1).expand_as(tokens)
        self.tokens.scatter_(1, along, tokens)
        self.emitted.copy_(torch.minimum(counts, self.length - self.lengths))
        self.lengths += self.emitted
        return torch.cat([self.lengths.unsqueeze(0), broken])

    def tell(self, report: Tensor, most: int) -> None:
        """Send the host what `append` returned of a round of at most so many tokens a row."""
        self._unread.append(_Report(report, most))
        self.rounds += 1
        self._versions = self._now()

    def _now(self) -> tuple[int, int]:
        """How often the images have been written."""
        return version(self.tokens), version(self.lengths)

    def _check(self, broken: list[list[int]]) -> None:
        """Raise TemperaError if something broke a row that has grown."""
        for fault, rows in zip(FAULTS, broken, strict=False):
            for name, is_broken, grew in zip(self.ids, rows, self._grown, strict=True):
                if is_broken and grew:
                    raise TemperaError(fault.format(name))
