"""Where a draft network's tokens stand in its cache from round to round, and what they see.

A round begins with the tokens that the last one emitted (`decided`). They are run once more, in one
pass, now that it is known which they are: what the cache held of the drafts is overwritten, so that
nothing has to be moved or rolled back, and an accepted token that the draft had not run itself, the
last one of a branch, is run with the others. Then comes the tree, level by level, in the slots
beyond the root.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, E inner nodes of all levels
so far.
"""

import torch
from torch import Tensor

from tempera.decoding.trees import Frontier
from tempera.targets.kv_cache import RoundMask, RowCache
from tempera.targets.session import Session


class Places:
    """Slots and masks of a draft network's forward passes.

    Args:
        session: whose prefix and roots count: the target's, or the draft's own if it is a whole
            model.

    Attributes:
        first: the slot after each row's root, int64 [R].
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._cache: RowCache | None = None

    def begin(self, cache: RowCache) -> None:
        """Start new rows that write into `cache`, after the session's own `begin`."""
        if cache is not self._cache:
            self._cache = cache
            self._steps: dict[int, tuple[Tensor, RoundMask]] = {}
            self._layouts: dict[int, tuple[Frontier, SlotLayout]] = {}
        self._padding = self.session.prompt.padding(cache.capacity, self.session.dtype)

    def start(self) -> None:
        """Start a round."""
        self.first = self.session.prompt.root_slots + 1

    def decided(self, count: int, emitted: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and mask of the last round's `count` tokens a row, of which the first `emitted` [B]
        count and end at the root.

        Returns:
            slots int64 [R, count], additive mask [R, 1, count, keys].
        """
        steps, causal = self._steps_of(count)
        start = self.first - emitted.repeat(self.session.prompt.copies)
        return self._place(start, start[:, None] + steps, causal, 1 + count)

    def level(self, layout: "SlotLayout") -> Tensor:
        """Additive mask of the inner nodes of a level, [R, 1, P, keys]."""
        _, mask = self._place(
            self.first, self.first[:, None] + layout.offsets, layout.mask, 1 + layout.width
        )
        return mask

    def layout_of(self, level: Frontier) -> "SlotLayout":
        """The level's constants; a static tree's are made once per cache."""
        assert self._cache is not None
        arguments = self._cache.capacity, self.session.prompt.copies, self.session.dtype
        if level.per_row:
            return SlotLayout(level, *arguments)
        if id(level) not in self._layouts:
            self._layouts[id(level)] = level, SlotLayout(level, *arguments)
        return self._layouts[id(level)][1]

    def _place(
        self, start: Tensor, slots: Tensor, visible: RoundMask, width: int
    ) -> tuple[Tensor, Tensor]:
        """Tell the cache; `visible` begins at slots `start` [R]."""
        assert self._cache is not None
        reach = self.session.visible(width, self._cache)
        self._cache.place(slots, reach)
        mask = visible.at(start, reach)
        return slots, mask if self._padding is None else mask.add_(self._padding[..., :reach])

    def _steps_of(self, count: int) -> tuple[Tensor, RoundMask]:
        """0 … count − 1, and the causal mask among them, made once per cache."""
        assert self._cache is not None
        if count not in self._steps:
            steps = torch.arange(count, device=self.session.device)
            causal = torch.ones(count, count, dtype=torch.bool, device=self.session.device).tril()
            self._steps[count] = steps, RoundMask(causal, self._cache.capacity, self.session.dtype)
        return self._steps[count]


class SlotLayout:
    """Constants of a level.

    Attributes:
        width: E.
        offsets: slots of the inner nodes beyond the root's, int64 [P].
        ahead: tokens that they stand beyond the root, int64 [P].
        parents: place of each one's parent in the level above, int64 [P] or [R, P]; none where all
            levels have one node.
        mask: what they see of each other and of the levels above.
    """

    def __init__(self, level: Frontier, capacity: int, copies: int, dtype: torch.dtype) -> None:
        count, self.width = level.ancestors.shape[-2:]
        device = level.ancestors.device
        self.offsets = torch.arange(self.width - count, self.width, device=device)
        self.ahead = torch.full((count,), level.depth, dtype=torch.int64, device=device)
        parents, ancestors = level.inner_parents, level.ancestors
        if level.per_row:
            parents, ancestors = parents.repeat(copies, 1), ancestors.repeat(copies, 1, 1)
        self.parents = None if count == 1 and self.width == level.depth else parents
        self.mask = RoundMask(ancestors, capacity, dtype)


def last_emitted(hidden: Tensor, emitted: Tensor) -> Tensor:
    """Of what a pass over `decided` tokens gives, [R, count, H], the entry at each row's root, [R,
    1, H]; emitted int64 [B].
    """
    last = (emitted - 1).clamp(min=0).repeat(len(hidden) // len(emitted))
    return hidden.gather(1, last[:, None, None].expand(-1, -1, hidden.shape[-1]))
