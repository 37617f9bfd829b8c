"""Forward passes of a network over the rows of a batch, with a KV cache.

Shapes: R rows (B prompts, or 2B rows under guidance), T prefix tokens, M tokens of a pass, H
hidden size; E = H unless further hidden states are
captured.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tempera.decoding.compiled import Captured, persistent
from tempera.decoding.interfaces import NeedsNewBatch
from tempera.decoding.trees import Block
from tempera.errors import TemperaError
from tempera.targets import attention
from tempera.targets.cache import KVCache, Layout, head_size
from tempera.targets.decoder_layer import LayerSizes
from tempera.targets.masks import causal_mask
from tempera.targets.network import TargetNetwork
from tempera.targets.packed_linear import pack
from tempera.targets.prompt_state import Prefix, PromptState

ROOM = 64
"""Least number of drafted tokens that the cache of a compiled session has room for. Plain decoding
and a method then share one cache and what is compiled for it.
"""
LAYOUTS = 64
"""Most layouts that a cache keeps."""


class ModelRunner:
    """A network with its cache. `begin` starts a batch, or rows of it. Then `run` runs the network
    on each row's root and a draft tree below it, or on other tokens behind it.

    Args:
        network: the transformer.
        granularity: the number of keys that attention loads is rounded up to a multiple of this; by
            default see `granularity_on`.

    Attributes:
        prompt: the position of each row; set by `begin`.
        prefix: of the rows that began last; set by `begin`.
        prefix_hidden: its hidden states but for those of the last token, [R', T − 1, E]; set by
            `begin`.
        aux_layers: layers whose inputs follow every hidden state, see `capture_hidden_states`.
        cache: the KV cache.
        turns: the batch's `rotary.Rotary.table`, over all slots of its caches, [1, 2, slots, D];
            or one for each row, where pictures among the condition tokens make them differ.
        packed: whether the weights of the decoder layers are packed.
        compiled: whether rounds are compiled.
    """

    prompt: PromptState
    prefix: Prefix
    prefix_hidden: Tensor
    turns: Tensor

    def __init__(self, network: TargetNetwork, granularity: int | None = None) -> None:
        self.network = network.eval()
        norm: Tensor = next(network.model.norm.parameters())
        self.device: torch.device = norm.device
        self.dtype: torch.dtype = norm.dtype
        self.granularity = granularity or granularity_on(self.device)
        sizes: LayerSizes = network.model.sizes
        self._head_dim = sizes.head_dim
        self._heads = sizes.heads
        self._kv_heads = sizes.kv_heads
        self.packed = self.compiled = False
        self.aux_layers: tuple[int, ...] = ()
        self._lengths = self._root_slots = self._turns = torch.empty(0)
        self._root = Block.in_a_row(torch.ones(1, 1, dtype=torch.bool, device=self.device))
        self.cache = self.new_cache(len(network.model.layers))

    def pack(self, least_rows: int) -> None:
        """Pack the weights of the decoder layers, see `packed_linear.PackedLinear`. The network
        then serves decoding alone: its weights can no longer be trained or saved.
        """
        for layer in self.network.model.layers:
            pack(layer, least_rows)
        self.packed = True
        self.cache = self.new_cache(self.cache.layers)

    def compile(self) -> None:
        """Make rounds that can be compiled: attention then loads the whole cache, or of each row
        what it has reached. The prefix pass is not compiled; on a GPU, that of prompts which begin
        in a running batch is captured.
        """
        self.compiled = True
        self.cache = self.new_cache(self.cache.layers)

    def capture_hidden_states(self, layers: tuple[int, ...]) -> None:
        """From the next batch on, append the inputs of these layers to the hidden states: E =
        (1 + number of layers)·H.

        Raises:
            TemperaError: the network has no such layer, or other layers are captured already.
        """
        check_layers(self.network, layers)
        if self.aux_layers not in ((), layers):
            raise TemperaError(
                f"a draft reads layers {list(self.aux_layers)} of this target already: build "
                f"another target for the draft that reads {list(layers)}."
            )
        self.aux_layers = layers

    def new_cache(self, layers: int, dtype: torch.dtype | None = None) -> KVCache:
        """A cache for keys and values of the network's heads, by default in its dtype."""
        dtype = dtype or self.dtype
        size = head_size(self._head_dim, dtype, self.device) if self.packed else self._head_dim
        return KVCache(layers, self._kv_heads, size, dtype=dtype, device=self.device)

    def begin(
        self, prefix: Prefix, copies: int, length: int, nodes: int, prompts: Tensor | None
    ) -> None:
        """Start a batch, or prompts of the running one: run all prefix tokens but the last.

        Args:
            prefix: of the rows that begin.
            copies: rows per prompt.
            length: tokens of an image.
            nodes: most drafted tokens of a round.
            prompts: which of the batch begin, int64 [M]; None starts a new batch.

        Raises:
            NeedsNewBatch: the prefix is longer than the running batch's.
        """
        if prompts is None:
            rows, longest = prefix.mask.shape
            prompt = PromptState(rows, longest, copies, length, self.device)
            prompt.lengths = self._lengths = persistent(self._lengths, prompt.lengths)
            prompt.root_slots = self._root_slots = persistent(self._root_slots, prompt.root_slots)
            self.prompt = prompt
            self._captured = Captured()  # buffers may get other addresses
            self.turns = torch.empty(1, 2, 0, self._head_dim)
        else:
            if prefix.mask.shape[1] > self.prompt.prefix:
                raise NeedsNewBatch
            self.prompt.restart(prompts)
            began = self.prompt.rows_of(prompts)
            prefix = replace(prefix, rows=began).padded(self.prompt.prefix)
            if prefix.positions is not None:
                persistent(self.turns, self._table(prefix, self.turns.shape[2]), began)
        self.prefix = prefix
        self.begin_cache(self.cache, nodes, prefix.mask)
        embeds = prefix.embeds[:, :-1]
        if not embeds.shape[1]:
            self.prefix_hidden = embeds.repeat(1, 1, 1 + len(self.aux_layers))
            return
        if prefix.rows is not None and self.compiled:
            given = embeds, prefix.mask, prefix.rows
            self.prefix_hidden = self._captured(self._run_prefix, *given)
        else:
            self.prefix_hidden = self._run_prefix(embeds, prefix.mask, prefix.rows)

    def _run_prefix(self, embeds: Tensor, mask: Tensor, rows: Tensor | None) -> Tensor:
        """Run all prefix tokens but the last, of some rows or of all: their hidden states,
        [R', T − 1, E].
        """
        prepared = self.prepare_prefix(embeds.shape[1], self.cache, mask, rows)
        return self._run(embeds, *prepared)

    def begin_cache(self, cache: KVCache, nodes: int, mask: Tensor) -> None:
        """Start the rows of `prefix` in a cache, with room for a whole image and `nodes` drafted
        tokens beyond it. Later tokens attend to the prefix tokens in `mask`, bool [R', T].
        """
        if self.prefix.rows is None:
            cache.begin(self.prompt.rows, self.capacity(nodes))
            cache.room = 2 + nodes  # the root, all nodes, and the token after them
        self._begin_padding(cache, mask)
        if cache.capacity > self.turns.shape[2]:
            table = self._table(self.prefix, cache.capacity)
            self.turns = self._turns = persistent(self._turns, table)

    def _table(self, prefix: Prefix, count: int) -> Tensor:
        """The rotary embedding at so many slots, [1 or R', 2, slots, D]; see `turns`."""
        rotary = self.network.model.rotary
        if prefix.positions is not None:
            tables: Tensor = rotary.tables(count, prefix.positions)
            return tables
        table: Tensor = rotary.table(count, self.prompt.prefix, self.device)
        return table[None]

    def turns_at(self, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The rotary embedding at slots of some rows, by default all, int64 [R', M] -> [2, R', M,
        D].
        """
        if len(self.turns) == 1:
            return self.turns[0][:, slots]
        whose = torch.arange(self.prompt.rows, device=self.device) if rows is None else rows
        return self.turns[whose[:, None], :, slots].movedim(2, 0)

    def _begin_padding(self, cache: KVCache, mask: Tensor) -> None:
        """Hide the prefix tokens that are not in `mask`, bool [R', T], from later tokens."""
        needed = self.compiled or not bool(mask.all())  # one graph for batches with and without
        rows = self.prefix.rows
        if rows is None and not needed:
            cache.padding = None
        elif needed or cache.padding is not None:
            buffer = torch.empty(0) if cache.padding is None else cache.padding
            if rows is not None and cache.padding is None:
                none = mask.new_ones(self.prompt.rows, 1)
                buffer = self.prompt.padding(none, cache.capacity, cache.dtype)
            padding = self.prompt.padding(mask, cache.capacity, cache.dtype)
            cache.padding = persistent(buffer, padding, rows)

    def prepare_prefix(
        self, count: int, cache: KVCache, mask: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Place the first `count` tokens of the rows that begin, int64 [R'] or None for all, in a
        cache; returns their mask [R', 1, count, count], which hides prefix tokens that are not in
        `mask`, and their rotation [2, R', count, D].
        """
        positions = torch.arange(count, device=self.device).expand(len(mask), -1)
        cache.write(positions, count, rows)
        rotation = self.turns_at(positions, rows).to(cache.dtype)
        return causal_mask(mask[:, :count], count, cache.dtype), rotation

    def layout_of(self, block: Block, cache: KVCache | None = None) -> Layout:
        """The layout of a block in a cache, by default the session's. What does not differ by row
        is computed once per cache.
        """
        cache = self.cache if cache is None else cache
        if block.per_row:
            return Layout(block, cache, self.prompt.copies)
        if block not in cache.layouts:
            if len(cache.layouts) == LAYOUTS:  # a drafter may make a new tree in every round
                cache.layouts.clear()
            cache.layouts[block] = Layout(block, cache, 1)
        return cache.layouts[block]

    def prepare(
        self,
        layout: Layout,
        start: Tensor | None = None,
        cache: KVCache | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Place the tokens of a round's pass in a cache.

        Args:
            layout: their layout.
            start: slot of each row that it begins at, int64 [R]; by default the root's.
            cache: by default the session's.
            rows: which rows the pass has, int64 [R']; by default all, R.

        Returns:
            their additive mask [R, 1, M, keys], and their rotation (see `rotary.rotate`), [2, R, M,
            D], in the cache's dtype.
        """
        prompt = self.prompt
        cache = self.cache if cache is None else cache
        start = self.roots(rows) if start is None else start
        kv_length = self.kv_length(cache)
        mask = layout.mask(start, kv_length)
        skips = attention.skips(mask, self._heads, cache.shape)
        reached = start + layout.width if skips else None
        cache.write(start[:, None] + layout.offsets, kv_length, rows, reached)
        if cache.padding is not None:
            padding = cache.padding[..., :kv_length]
            mask += padding if rows is None else padding[rows]
        ahead = prompt.by_row(layout.ahead) if layout.ahead.dim() == 2 else layout.ahead
        return mask, self.turns_at(start[:, None] + ahead, rows).to(cache.dtype)

    def run(self, embeds: Tensor, layout: Layout, start: Tensor | None = None) -> Tensor:
        """Run the network on the tokens of a layout; for `start` see `prepare`.

        Args:
            embeds: their embeddings, [R, M, H].

        Returns:
            hidden states [R, M, E].
        """
        return self._run(embeds, *self.prepare(layout, start))

    def roots(self, rows: Tensor | None = None) -> Tensor:
        """Slots of the roots of some rows, by default all, int64 [R]."""
        slots = self.prompt.root_slots
        return slots if rows is None else slots[rows]

    def run_root(self) -> Tensor:
        """Run the last prefix tokens of the rows that began last: hidden states [R', 1, E]."""
        prepared = self.prepare(self.layout_of(self._root), rows=self.prefix.rows)
        return self._run(self.prefix.embeds[:, -1:], *prepared)

    def compact(self, path: Tensor) -> None:
        """Move the cache entries of an accepted path right behind each row's root.

        Args:
            path: accepted nodes, int64 [B, L], padded with −1; the entries moved for padding lie
                beyond the row's length.
        """
        first = self.prompt.root_slots[:, None] + 1
        nodes = self.prompt.by_row(path.clamp(min=0))
        self.cache.compact(first + nodes, first + torch.arange(nodes.shape[1], device=self.device))

    def kv_length(self, cache: KVCache | None = None) -> int:
        """Most keys that the passes of a round load from a cache, by default the session's: if
        compiled, all; else those that the longest row can reach, rounded up, so that rounds
        differ in it only now and then.
        """
        cache = self.cache if cache is None else cache
        if self.compiled:
            return cache.capacity
        needed = self.prompt.prefix - 1 + self.prompt.longest + cache.room
        return min(cache.capacity, self._rounded(needed))

    def capacity(self, nodes: int) -> int:
        """Slots needed for a whole image and `nodes` drafted tokens beyond it."""
        room = max(nodes, ROOM) if self.compiled else nodes
        return self._rounded(self.prompt.prefix + self.prompt.length + 1 + room)

    def _rounded(self, keys: int) -> int:
        """Rounded up to a multiple of the granularity."""
        return -(-keys // self.granularity) * self.granularity

    def _run(self, embeds: Tensor, mask: Tensor, rotation: Tensor) -> Tensor:
        hidden: Tensor = self.network.model(embeds, mask, rotation, self.cache, self.aux_layers)
        return hidden


def granularity_on(device: torch.device) -> int:
    """32, and 256 on CUDA, where kernels are planned anew for each number of keys."""
    return 256 if device.type == "cuda" else 32


def check_layers(network: TargetNetwork, layers: tuple[int, ...]) -> None:
    """Raise TemperaError if the network has no such layers."""
    count = len(network.model.layers)
    if not all(0 <= layer < count for layer in layers):
        raise TemperaError(
            f"the target does not have all of the layers {list(layers)}: give numbers from 0 to "
            f"{count - 1}."
        )
