"""Forward passes of a network over the rows of a batch, with a KV cache.

Shapes: R rows (B prompts, or 2B rows under guidance), T prefix tokens, M tokens of a pass, N nodes
of a draft tree, S capacity of the cache, H hidden size; E = H unless further hidden states are
captured.
"""

from typing import Any

import torch
from torch import Tensor

from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.targets.cache import KVCache, SlotMask, head_size
from tempera.targets.compiled import StepFunction, compile_step
from tempera.targets.masks import causal_mask
from tempera.targets.merged_layer import merge
from tempera.targets.network import TargetNetwork
from tempera.targets.prompt_state import PromptState

ROOM = 64
"""Least number of drafted tokens that the cache of a compiled session has room for. Plain decoding
and a method then share one cache and what is compiled for it.
"""


class Session:
    """A network with its cache. `begin` starts a batch. Then `score` runs the network on each row's
    root and a draft tree below it, and `run` on any tokens.

    Args:
        network: the transformer.
        granularity: the number of keys that attention loads is rounded up to a multiple of this; by
            default 32, and 256 on CUDA, where kernels are planned anew for each number.

    Attributes:
        prompt: the batch's prompts and the position of each row.
        aux_layers: layers whose inputs follow every hidden state, see `capture_hidden_states`.
        prefix_hidden: hidden states of all prefix tokens but the last, [R, T − 1, E].
        cache: the batch's KV cache; the next batch takes it if it has room enough.
        fused: whether the projections of the decoder layers are merged.
        compiled: whether the steps of a round are compiled.
    """

    prompt: PromptState
    prefix_hidden: Tensor
    cache: KVCache
    _padding: Tensor | None

    def __init__(self, network: TargetNetwork, granularity: int | None = None) -> None:
        self.network = network.eval()
        head = network.lm_head.weight
        self.device: torch.device = head.device
        self.dtype: torch.dtype = head.dtype
        self.granularity = granularity or (256 if self.device.type == "cuda" else 32)
        attention = network.model.layers[0].self_attn
        self._head_dim = attention.head_dim
        self._kv_heads = attention.k_proj.out_features // attention.head_dim
        self.fused = self.compiled = False
        self.aux_layers: tuple[int, ...] = ()
        self._pass: StepFunction = _run_layers
        self._shape: tuple[int, int] | None = None

    def fuse(self) -> None:
        """Merge the projections of the decoder layers, if these are of a known class. The network
        then serves decoding alone: its weights can no longer be trained or saved.
        """
        merged = [merge(layer) for layer in self.network.model.layers]
        self.fused, self._shape = all(merged), None

    def compile(self) -> None:
        """Compile the pass of all later rounds, once for each shape of a batch. Attention then
        loads the whole cache. The prefix pass is not compiled.
        """
        self.compiled, self._shape, self._pass = True, None, compile_step(_run_layers)

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

    def step(self, function: StepFunction) -> StepFunction:
        """The function as a step of a round, compiled if the session is compiled."""
        return compile_step(function) if self.compiled else function

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
            self.prefix_hidden = embeds.repeat(1, 1, 1 + len(self.aux_layers))
            return
        positions = torch.arange(count, device=self.device).expand(prompt.rows, -1)
        self.cache.place(positions, count)
        mask = causal_mask(prompt.keep[:, :-1], count, self.dtype)
        self.prefix_hidden = self._run(_run_layers, embeds, mask, positions)

    def score(self, embeds: Tensor, layout: "TreeLayout") -> Tensor:
        """Run the network on each row's root and the draft tree below it.

        Args:
            embeds: embeddings of root and nodes, [R, 1 + N, H].
            layout: the tree's `layout_of`.

        Returns:
            hidden states [R, 1 + N, E].
        """
        prompt, kv_length = self.prompt, self.kv_length()
        slots = prompt.root_slots[:, None]
        self.cache.place(slots + layout.offsets, kv_length)
        mask = layout.mask.at(prompt.root_slots, kv_length)
        if self._padding is not None:
            mask += self._padding[..., :kv_length]
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
        return self._run(self._pass, embeds, mask, positions)

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

    def kv_length(self, cache: KVCache | None = None) -> int:
        """Number of keys that every pass of a round loads: if compiled, all; else those that the
        longest row can reach, rounded up, so that rounds differ in it only now and then.

        Args:
            cache: another cache of the same rows, such as a draft's; by default the session's.
        """
        capacity = self.cache.capacity if cache is None else cache.capacity
        if self.compiled:
            return capacity
        needed = self.prompt.prefix - 1 + self.prompt.longest + self._room
        return min(capacity, self._rounded(needed))

    def capacity(self, nodes: int) -> int:
        """Slots needed for a whole image and `nodes` drafted tokens beyond it."""
        room = max(nodes, ROOM) if self.compiled else nodes
        return self._rounded(self.prompt.last_slot + 2 + room)

    def new_cache(self, layers: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """A new cache for the batch's rows and the network's heads, by default in its dtype."""
        dtype = dtype or self.dtype
        size = head_size(self._head_dim, dtype, self.device) if self.fused else self._head_dim
        shape = layers, self.prompt.rows, self._kv_heads, size, capacity
        cache = KVCache(*shape, dtype=dtype, device=self.device)
        if self.compiled:  # CUDA graphs write into it
            for entries in cache.entries:
                torch._dynamo.mark_static_address(entries)
        return cache

    def _rounded(self, keys: int) -> int:
        """Rounded up to a multiple of the granularity."""
        return -(-keys // self.granularity) * self.granularity

    def _allocate(self, capacity: int) -> None:
        """Set `cache` for this batch. The last one is kept if it has as many rows and room enough,
        so that plain decoding and a method can take turns; otherwise it is freed first.
        """
        rows, room = self._shape or (0, 0)
        if rows != self.prompt.rows or room < capacity:
            self._shape = None  # until there is a new cache, for which memory may not suffice
            self.__dict__.pop("cache", None)
            self.cache = self.new_cache(len(self.network.model.layers), capacity)
            self._shape = self.prompt.rows, capacity
            self._layouts: dict[int, tuple[Tree, TreeLayout]] = {}
        else:
            self.cache.reset()
        self._padding = self.prompt.padding(self.cache.capacity, self.dtype)

    def _run(self, run: StepFunction, embeds: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inputs = embeds, mask, positions, self.cache.write_index
        return run(self.network.model, self.cache, self.aux_layers, *inputs)


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
        offsets: slots of root and nodes relative to the root's, int64 [1 + N].
        ahead: depths of root and nodes, int64 [1 + N], or [B, 1 + N] for a tree per row.
        depths: the same for R rows.
        mask: which nodes each node attends to: itself, its ancestors and the root.
    """

    def __init__(self, tree: Tree, capacity: int, copies: int, dtype: torch.dtype) -> None:
        width, pad = 1 + tree.nodes, torch.nn.functional.pad
        self.offsets = torch.arange(width, device=tree.parents.device)
        visible = pad(tree.ancestors, (1, 0, 1, 0))
        visible[..., 0] = True
        self.ahead = self.depths = pad(tree.depths, (1, 0))
        if tree.per_row:
            self.depths, visible = self.depths.repeat(copies, 1), visible.repeat(copies, 1, 1)
        self.mask = SlotMask(visible, capacity, dtype)


def _run_layers(
    model: Any,
    cache: KVCache,
    aux_layers: tuple[int, ...],
    embeds: Tensor,
    mask: Tensor,
    positions: Tensor,
    write_index: Tensor,
) -> Tensor:
    """A Hugging Face decoder's layers and norm, as its `forward` runs them. `write_index` is the
    cache's: an argument, so that a compiled pass does not take it for a constant.
    """
    cache.write_index = write_index
    inputs: list[Tensor] = []
    hidden = embeds
    rotation = model.rotary_emb(embeds, positions)
    for layer in model.layers:
        inputs.append(hidden)
        out = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotation,
            past_key_values=cache,
            use_cache=True,
        )
        hidden = out if isinstance(out, Tensor) else out[0]
    normed: Tensor = model.norm(hidden)
    aux = [inputs[layer] for layer in aux_layers]
    return torch.cat([normed, *aux], -1) if aux else normed
