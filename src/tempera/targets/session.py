"""Forward passes of a network over the rows of a batch, with a KV cache.

Shapes: R rows (B prompts, or 2B rows under guidance), T prefix tokens, M tokens of a pass, N nodes
of a draft tree, S capacity of the cache, H hidden size; E = H unless layers are watched.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.targets.compiled import StepFunction, compile_step, cuda_graphed
from tempera.targets.kv_cache import RoundMask, RowCache
from tempera.targets.masks import causal_mask
from tempera.targets.merged_layer import merge
from tempera.targets.network import TargetNetwork
from tempera.targets.prompt_state import PromptState

ROOM = 64
"""Least number of drafted tokens that the cache of a compiled session has room for. Plain decoding
and a method then share one cache and the CUDA graphs that write into it.
"""

THIRDS = 3
"""Parts of an image by which the keys of a compiled pass grow."""


class Session:
    """A network with its cache. `begin` starts a batch. Then `score` runs the network on each row's
    root and a draft tree below it, and `run` on any tokens.

    Args:
        network: the transformer.
        granularity: the number of keys that attention loads is rounded up to a multiple of this. A
            value of at least the image's length makes shapes constant.

    Attributes:
        prompt: the batch's prompts and the position of each row.
        watched: layers whose inputs follow every hidden state, see `watch`.
        prefix_hidden: hidden states of all prefix tokens but the last, [R, T − 1, E].
        cache: the batch's KV cache; the next batch takes it if it has room enough.
        fused: whether the projections of the decoder layers are merged.
        compiled: whether the steps of a round are compiled.
    """

    prompt: PromptState
    prefix_hidden: Tensor
    cache: RowCache
    _padding: Tensor | None

    def __init__(self, network: TargetNetwork, granularity: int = 32) -> None:
        self.network, self.granularity = network.eval(), granularity
        head = network.lm_head.weight
        self.device: torch.device = head.device
        self.dtype: torch.dtype = head.dtype
        attention = network.model.layers[0].self_attn
        self._head_dim = attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self.fused = self.compiled = False
        self.watched: tuple[int, ...] = ()
        self._block: StepFunction = _decoder_layer
        self._pass: StepFunction = self._forward
        self._shape: tuple[int, int] | None = None

    def fuse(self) -> None:
        """Merge the projections of the decoder layers, if these are of a known class. The network
        then serves decoding alone: its weights can no longer be trained or saved.
        """
        merged = [merge(layer) for layer in self.network.model.layers]
        self.fused = all(merged)

    def compile(self) -> None:
        """Compile the forward pass of all later rounds.

        A compiled step is specific to the number of keys, so attention loads the prefix and one,
        two or three thirds of an image; it is recompiled when a longer prompt needs more. The
        prefix pass is not compiled.
        """
        self.compiled = True
        self._block = compile_step(_decoder_layer)
        self._pass = cuda_graphed(self._forward, self.device)

    def watch(self, layers: tuple[int, ...]) -> None:
        """From the next batch on, append the inputs of these layers to the hidden states: E =
        (1 + number of layers)·H.

        Raises:
            TemperaError: the network has no such layer, or other layers are watched already.
        """
        check_layers(self.network, layers)
        if self.watched not in ((), layers):
            raise TemperaError(
                f"a draft reads layers {list(self.watched)} of this target already: build another "
                f"target for the draft that reads {list(layers)}."
            )
        if self.watched != layers:
            self.watched, self._shape = layers, None

    def step(self, function: StepFunction) -> StepFunction:
        """The function as a step of a round, compiled if the session is compiled."""
        return cuda_graphed(compile_step(function), self.device) if self.compiled else function

    def begin(self, prompt: PromptState, nodes: int) -> None:
        """Start a batch: run all prefix tokens but the last.

        Args:
            prompt: the batch.
            nodes: most drafted tokens of a round.
        """
        self.prompt = prompt
        self._room = 2 + nodes  # the root, all nodes, and the token after them
        self._allocate(self.capacity(nodes))
        embeds = prompt.embeds[:, :-1]
        count = embeds.shape[1]
        if not count:
            self.prefix_hidden = embeds.repeat(1, 1, 1 + len(self.watched))
            return
        positions = torch.arange(count, device=self.device).expand(prompt.rows, -1)
        self.cache.place(positions, count)
        mask = causal_mask(prompt.keep[:, :-1], count, self.dtype)
        self.prefix_hidden = self._layers(_decoder_layer, embeds, mask, positions)

    def score(self, embeds: Tensor, layout: "TreeLayout") -> Tensor:
        """Run the network on each row's root and the draft tree below it.

        Args:
            embeds: embeddings of root and nodes, [R, 1 + N, H].
            layout: the tree's `layout_of`.

        Returns:
            hidden states [R, 1 + N, E].
        """
        prompt = self.prompt
        slots = prompt.root_slots[:, None]
        visible = self.visible()
        self.cache.place(slots + layout.offsets, visible)
        mask = layout.mask.at(prompt.root_slots, visible)
        if self._padding is not None:
            mask += self._padding[..., :visible]
        return self.run(embeds, mask, (slots + layout.depths).clamp_(max=prompt.last))

    def run(self, embeds: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Run the network on any tokens; call `cache.place` first.

        Args:
            embeds: embeddings [R, M, H].
            mask: additive, [R, 1, M, keys].
            positions: int64 [R, M] or [M].

        Returns:
            hidden states [R, M, E].
        """
        return self._pass(embeds, mask, positions, self.cache.where)

    def carried(self) -> tuple[Tensor, ...]:
        """The batch's position, and the mask of the prompts' padding, if any; see
        `interfaces.RoundState`.
        """
        return *self.prompt.carried(), *(() if self._padding is None else (self._padding,))

    def carry(self, tensors: Sequence[Tensor]) -> None:
        """See `interfaces.RoundState`."""
        count = len(self.prompt.carried())
        self.prompt.carry(tensors[:count])
        self._padding = tensors[count] if len(tensors) > count else None

    def expect(self, longest: int) -> Hashable:
        """Depend on the cache, the prefix and the number of keys; see `interfaces.RoundState`."""
        self.prompt.reach = longest
        return self.cache, self.prompt.prefix, self.visible()

    def compact(self, path: Tensor) -> None:
        """Move the cache entries of an accepted path right behind each row's root.

        Args:
            path: accepted nodes, int64 [B, L], padded with −1; the entries moved for padding lie
                beyond the row's length.
        """
        first = self.prompt.root_slots[:, None] + 1
        nodes = self.prompt.by_row(path.clamp(min=0))
        self.cache.compact(first + nodes, first + torch.arange(nodes.shape[1], device=self.device))

    def layout_of(self, tree: Tree) -> "TreeLayout":
        """The tree's `TreeLayout`; for a static tree it is computed once per cache."""
        tree = tree.to(self.device)
        if tree.per_row:
            return TreeLayout(tree, self.cache.capacity, self.prompt.copies, self.dtype)
        if id(tree) not in self._layouts:
            self._layouts[id(tree)] = tree, TreeLayout(tree, self.cache.capacity, 1, self.dtype)
        return self._layouts[id(tree)][1]

    def visible(self, cache: RowCache | None = None) -> int:
        """Number of keys that every pass of a round loads, so that rounds differ in it only now and
        then: a multiple of the granularity, at most the capacity.

        Args:
            cache: another cache of the same rows, such as a draft's; by default the session's.
        """
        capacity = self.cache.capacity if cache is None else cache.capacity
        if self.compiled:
            return min(capacity, self._keys() + self._rounded(self._room))
        return min(capacity, self._rounded(self.prompt.prefix - 1 + self.prompt.reach + self._room))

    def _keys(self) -> int:
        """Number of keys before the root that a compiled pass loads: those of the prefix and of one
        or more thirds of an image, so that the number changes twice in an image.
        """
        third = -(-self.prompt.length // THIRDS)
        reach = min(self.prompt.length, -(-max(1, self.prompt.reach) // third) * third)
        return self._rounded(self.prompt.prefix - 1) + self._rounded(reach)

    def _rounded(self, keys: int) -> int:
        """Rounded up to a multiple of the granularity."""
        return -(-keys // self.granularity) * self.granularity

    def capacity(self, nodes: int) -> int:
        """Slots needed for a whole image and `nodes` drafted tokens beyond it."""
        room = max(nodes, ROOM) if self.compiled else nodes
        return self._rounded(self.prompt.last_slot + 2 + room)

    def new_cache(self, layers: int, capacity: int, dtype: torch.dtype | None = None) -> RowCache:
        """A new cache for the batch's rows and the network's heads, by default in its dtype."""
        return RowCache(
            layers,
            self.prompt.rows,
            self._kv_heads,
            self._head_dim,
            capacity,
            dtype=dtype or self.dtype,
            device=self.device,
        )

    def _allocate(self, capacity: int) -> None:
        """Set `cache` for this batch. The last one is kept if it has as many rows and room enough:
        what was recorded with it then serves again, when plain decoding and a method take turns.
        Otherwise it is freed first.
        """
        rows, room = self._shape or (0, 0)
        if rows != self.prompt.rows or room < capacity:
            if self._shape is not None:
                self._shape = None  # until there is a new cache, for which memory may not suffice
                self.cache.release()
            self.cache = self.new_cache(len(self.network.model.layers), capacity)
            self._shape = self.prompt.rows, capacity
            self._layouts: dict[int, tuple[Tree, TreeLayout]] = {}
            if self.compiled:  # a CUDA graph writes into the cache that it was captured with
                self._pass = cuda_graphed(self._forward, self.device)
        self._padding = self.prompt.padding(self.cache.capacity, self.dtype)

    def _forward(self, embeds: Tensor, mask: Tensor, positions: Tensor, where: Tensor) -> Tensor:
        """The part of `run` that can be compiled; `where` is the cache's."""
        self.cache.where = where
        return self._layers(self._block, embeds, mask, positions)

    def _layers(
        self, block: StepFunction, embeds: Tensor, mask: Tensor, positions: Tensor
    ) -> Tensor:
        model, hidden, inputs = self.network.model, embeds, list[Tensor]()
        cos, sin = model.rotary_emb(embeds, positions)
        for layer, entries in zip(model.layers, self.cache.layers, strict=True):
            inputs.append(hidden)
            hidden = block(layer, entries, hidden, mask, positions, cos, sin)
        out: Tensor = model.norm(hidden)
        if self.watched:
            out = torch.cat([out, *(inputs[layer] for layer in self.watched)], -1)
        return out


def check_layers(network: TargetNetwork, layers: tuple[int, ...]) -> None:
    """Raise TemperaError if the network has no such layers."""
    count = len(network.model.layers)
    if not all(0 <= layer < count for layer in layers):
        raise TemperaError(
            f"the features of layers {list(layers)} are not there: give numbers from 0 to "
            f"{count - 1}."
        )


class TreeLayout:
    """Constants of a draft tree in a round. Node 0 is the root.

    Attributes:
        width: 1 + N.
        offsets: slots of root and nodes relative to the root's, int64 [1 + N].
        ahead: depths of root and nodes, int64 [1 + N], or [B, 1 + N] for a tree per row.
        depths: the same for R rows.
        mask: which nodes each node attends to: itself, its ancestors and the root.
    """

    def __init__(self, tree: Tree, capacity: int, copies: int, dtype: torch.dtype) -> None:
        lead = tree.parents.shape[:-1]
        device = tree.parents.device
        self.width = 1 + tree.nodes
        self.offsets = torch.arange(self.width, device=device)
        depths = torch.cat(
            [torch.zeros(*lead, 1, dtype=torch.int64, device=device), tree.depths], -1
        )
        visible = torch.zeros(*lead, self.width, self.width, dtype=torch.bool, device=device)
        visible[..., 0].fill_(True)
        visible[..., 1:, 1:] = tree.ancestors
        self.ahead, self.depths = depths, depths.repeat(copies, 1) if tree.per_row else depths
        self.mask = RoundMask(
            visible.repeat(copies, 1, 1) if tree.per_row else visible, capacity, dtype
        )


def _decoder_layer(
    layer: Any,
    entries: Any,
    hidden: Tensor,
    mask: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Run one Hugging Face decoder layer with its cache layer, as the decoder's `forward` does.
    Compiled once for all layers.
    """
    out: Tensor | tuple[Tensor, ...] = layer(
        hidden,
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=(cos, sin),
        past_key_values=entries,
        use_cache=True,
    )
    return out if isinstance(out, Tensor) else out[0]
