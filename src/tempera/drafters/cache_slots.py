"""Cache slots and attention masks of a draft network.

A round starts by rerunning the tokens that the last round emitted, in one pass (`decided`). This
overwrites the cache entries of the old draft, so nothing is moved or rolled back. It also runs
accepted tokens that the draft network has not run yet, such as a leaf. The tree then grows level by
level (`level`) in the slots after the root.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, E inner nodes of all levels
so far.
"""

import torch
from torch import Tensor

from tempera.decoding.trees import Frontier
from tempera.targets.cache import KVCache, SlotMask
from tempera.targets.forward import Session


class Places:
    """Slots and masks of a draft network's forward passes.

    Args:
        session: the session that defines prefix and roots: the target's, or that of an independent
            draft model.
        dtype: of the masks; by default the session's.

    Attributes:
        first: the slot after each row's root, int64 [R].
    """

    def __init__(self, session: Session, dtype: torch.dtype | None = None) -> None:
        self.session, self.dtype = session, dtype or session.dtype
        self._cache: KVCache | None = None

    def begin(self, cache: KVCache) -> None:
        """Start a batch that writes into `cache`; call it after the session's `begin`."""
        if cache is not self._cache:
            self._cache = cache
            self._steps: dict[int, tuple[Tensor, SlotMask]] = {}
            self._layouts: dict[int, tuple[Frontier, SlotLayout]] = {}
        self._padding = self.session.prompt.padding(cache.capacity, self.dtype)

    def start(self) -> None:
        """Start a round."""
        self.first = self.session.prompt.root_slots + 1

    def decided(self, count: int, emitted: Tensor) -> tuple[Tensor, Tensor]:
        """Place the tokens of the last round, the last valid one of which is the root.

        Args:
            count: tokens of each row, padding included.
            emitted: number of valid tokens, int64 [B].

        Returns:
            slots int64 [R, count], additive mask [R, 1, count, keys].
        """
        steps, causal = self._steps_of(count)
        start = self.first - self.session.prompt.by_row(emitted)
        return self._place(start, start[:, None] + steps, causal)

    def level(self, layout: "SlotLayout") -> Tensor:
        """Place the inner nodes of a level; returns their additive mask [R, 1, P, keys]."""
        return self._place(self.first, self.first[:, None] + layout.offsets, layout.mask)[1]

    def layout_of(self, level: Frontier) -> "SlotLayout":
        """The level's `SlotLayout`; for a static tree it is computed once per cache."""
        assert self._cache is not None
        arguments = self._cache.capacity, self.session.prompt.copies, self.dtype
        if level.per_row:
            return SlotLayout(level, *arguments)
        if id(level) not in self._layouts:
            self._layouts[id(level)] = level, SlotLayout(level, *arguments)
        return self._layouts[id(level)][1]

    def _place(self, start: Tensor, slots: Tensor, visible: SlotMask) -> tuple[Tensor, Tensor]:
        """Place `slots` in the cache; returns them and the mask, whose window begins at `start`
        [R].
        """
        assert self._cache is not None
        kv_length = self.session.kv_length(self._cache)
        self._cache.place(slots, kv_length)
        mask = visible.at(start, kv_length)
        return slots, mask if self._padding is None else mask.add_(self._padding[..., :kv_length])

    def _steps_of(self, count: int) -> tuple[Tensor, SlotMask]:
        """0 … count − 1, and the causal mask among them; computed once per cache."""
        assert self._cache is not None
        if count not in self._steps:
            steps = torch.arange(count, device=self.session.device)
            causal = torch.ones(count, count, dtype=torch.bool, device=self.session.device).tril()
            self._steps[count] = steps, SlotMask(causal, self._cache.capacity, self.dtype)
        return self._steps[count]


class SlotLayout:
    """Constants of a level.

    Attributes:
        width: E.
        offsets: slots of the inner nodes, counted from the first one after the root, int64 [P].
        ahead: their distance from the root in tokens, int64 [P].
        parents: index of each node's parent in the level above, int64 [P] or [R, P]; None if all
            levels have one node.
        mask: which nodes of this and of earlier levels they attend to.
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
        self.mask = SlotMask(ancestors, capacity, dtype)


def last_emitted(hidden: Tensor, emitted: Tensor, count: int = 1) -> Tensor:
    """The outputs at each row's root, and behind it, of a pass over `decided` tokens.

    Args:
        hidden: the output of the pass, [R, decided, H].
        emitted: number of valid tokens, int64 [B].
        count: number of outputs, the root's included.

    Returns:
        [R, count, H].
    """
    last = torch.cat([(emitted - 1).clamp(min=0)] * (len(hidden) // len(emitted)))
    places = last[:, None] + torch.arange(count, device=hidden.device)
    return hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
