"""EAGLE-1 as a draft model: it grows a static tree level by level on its own predicted hidden states.

Shapes: B prompts, R rows (2B under guidance), P inner nodes of a level, L depth, V vocabulary, H hidden size.
"""

import torch
from torch import Tensor

from tempera.cache import RoundMask, RowCache
from tempera.drafters.static import StaticTreeDrafter
from tempera.eagle_model import EagleModel, FastEagle, shifted
from tempera.targets.adapter import TransformerTarget
from tempera.targets.llamagen import causal_mask
from tempera.trees import Level, Tree
from tempera.types import Draft, Scores, Verdict


class EagleDraft:
    """Draft distributions of an `EagleModel` beside its target, for chains and static trees.

    The hidden states of accepted tokens come true with the target's forward pass. `observe` keeps them, and the next round's first
    forward pass reruns all pairs of the accepted tokens at once (depth + 1 of them, padded per row); the predicted ones in the cache are
    overwritten. Under guidance there are two rows per prompt, combined by the target's own sampling.

    Args:
        model: the draft network.
        target: the target, begun before this.

    Raises:
        TemperaError: the draft does not belong to the target.
    """

    def __init__(self, model: EagleModel, target: TransformerTarget) -> None:
        model.check(target)
        self.model = FastEagle(model, target.device, target.dtype)
        self.target = target

    @torch.inference_mode()
    def begin(self, prompts: list[str]) -> None:
        """Run the pairs of the prefix; the target has begun with the same prompts."""
        target = self.target
        self._allocate()
        positions = torch.arange(target.prefix, device=target.device).expand(target.rows, -1)
        self.cache.place(positions, target.prefix)
        mask = causal_mask(target.keep, target.prefix, target.dtype)
        hidden = shifted(target.prefix_hidden, target.keep)
        rotation = self.model.rotation(hidden, positions)
        self._above = self.model(target.prefix_embeds, hidden, mask, rotation, self.cache)[:, -1:]
        self._true: tuple[Tensor, Tensor, Tensor] | None = None

    @torch.inference_mode()
    def roots(self) -> Tensor:
        """The draft's distribution after each row's root, float32 [B, V]."""
        self._first = self.target.root_slots + 1
        if self._true is None:
            self._rotation = self._rotate(self._first[:, None] + self._ahead)
        else:
            self._above = self._replay(*self._true)
            self._true = None
        return self.target.distribution(self._above, self._zero)[:, 0]

    @torch.inference_mode()
    def expand(self, tokens: Tensor, level: Level) -> Tensor:
        """The draft's distributions after the inner nodes of a level, whose tokens are `tokens` int64 [B, P]: float32 [B, P, V]."""
        target, layout = self.target, self._layout_of(level)
        above = self._above if layout.parents is None else self._above.index_select(1, layout.parents)
        reach = target.visible(1 + layout.width)
        self.cache.place(self._first[:, None] + layout.offsets, reach)
        mask = self._padded(layout.mask.at(self._first, reach))
        rotation = [part[:, level.depth - 1 : level.depth] for part in self._rotation]
        self._above = self.model(target.embed(tokens), above, mask, (rotation[0], rotation[1]), self.cache)
        return target.distribution(self._above, layout.ahead)

    @torch.inference_mode()
    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Keep the emitted tokens and the target's hidden states before them, for the next round."""
        hidden = scores.hidden
        if not draft.tree.is_chain:
            path = (1 + verdict.path).repeat(self.target.sampling.rows, 1)
            index = torch.cat([torch.zeros_like(path[:, :1]), path], 1)
            hidden = hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        self._true = verdict.tokens, hidden, emitted

    def _replay(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> Tensor:
        """Run the pairs of the last round's tokens with their true hidden states -> the prediction at each row's root, [R, 1, H].

        Rotates at once for these and for the levels to come.
        """
        target, count = self.target, tokens.shape[1]
        steps, causal = self._steps(count)
        emitted = emitted.repeat(target.sampling.rows)
        start = self._first - emitted
        slots = start[:, None] + steps
        cos, sin = self._rotate(torch.cat([slots, self._first[:, None] + self._ahead], 1))
        self._rotation = cos[:, count:], sin[:, count:]
        reach = target.visible(1 + count)
        self.cache.place(slots, reach)
        mask = self._padded(causal.at(start, reach))
        predicted = self.model(target.embed(tokens), hidden, mask, (cos[:, :count], sin[:, :count]), self.cache)
        last = (emitted - 1).clamp_(min=0)[:, None, None]
        return predicted.gather(1, last.expand(-1, -1, predicted.shape[-1]))

    def _rotate(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.rotation(self._above, slots.clamp_(max=self.target.last_slot))

    def _padded(self, mask: Tensor) -> Tensor:
        return mask if self.target.padding is None else mask.add_(self.target.padding[..., : mask.shape[-1]])

    def _steps(self, count: int) -> tuple[Tensor, RoundMask]:
        """0 … count − 1, and the causal mask among them, made once."""
        if count not in self._step:
            visible = torch.ones(count, count, dtype=torch.bool, device=self.target.device).tril()
            steps = torch.arange(count, device=self.target.device)
            self._step[count] = steps, RoundMask(visible, self.cache.capacity, self.target.dtype)
        return self._step[count]

    def _allocate(self) -> None:
        """A cache of one layer for the target's rows; an earlier one of the same shape is used again."""
        target = self.target
        capacity = target.cache.capacity
        old = getattr(self, "cache", None)
        if old is None or (old.rows, old.capacity) != (target.rows, capacity):
            heads, head_dim = target.cache.storage.shape[-2:]
            self.cache = RowCache(1, target.rows, heads, head_dim, capacity, dtype=target.dtype, device=target.device)
            self._step: dict[int, tuple[Tensor, RoundMask]] = {}
            self._layouts: dict[int, tuple[Level, _Layout]] = {}
            self._zero = torch.zeros(1, dtype=torch.int64, device=target.device)
        self._ahead = torch.arange(max(1, target.nodes), device=target.device)

    def _layout_of(self, level: Level) -> "_Layout":
        if id(level) not in self._layouts:
            self._layouts[id(level)] = level, _Layout(level, self.cache.capacity, self.target.dtype)
        return self._layouts[id(level)][1]


def build(path: str, target: TransformerTarget, tree: Tree) -> StaticTreeDrafter:
    """The EAGLE drafter of a trained draft.

    Args:
        path: directory with `config.json` and `model.safetensors`.
        target: the target it was trained for.
        tree: static tree drafted every round.

    Raises:
        TemperaError: the directory holds no sound draft, or one for another target.
    """
    return StaticTreeDrafter(EagleDraft(EagleModel.from_pretrained(path), target), tree)


class _Layout:
    """Constants of a level: slots of its inner nodes beyond the root's, what they see, and which predictions they start from."""

    def __init__(self, level: Level, capacity: int, dtype: torch.dtype) -> None:
        count, self.width = level.ancestors.shape
        device = level.inner.device
        self.offsets = torch.arange(self.width - count, self.width, device=device)
        self.ahead = torch.full((count,), level.depth, dtype=torch.int64, device=device)
        self.parents = None if count == 1 and self.width == level.depth else level.inner_parents
        self.mask = RoundMask(level.ancestors, capacity, dtype)
