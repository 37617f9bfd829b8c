"""Any Hugging Face-style causal network as a `Target`: prefill, scoring a draft tree in one forward
pass, keeping the accepted path.

Shapes: B prompts, R rows (B, or 2B under guidance: conditional rows first), T prefix tokens, N
drafted nodes, V vocabulary, H hidden size.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.probabilities import Sampling, greedy
from tempera.decoding.trees import Tree
from tempera.errors import TemperaError
from tempera.runtime.network_identity import identity_of
from tempera.targets.compiled import StepFunction, compile_step, cuda_graphed
from tempera.targets.kv_cache import RoundMask, RowCache
from tempera.targets.masks import causal_mask
from tempera.targets.network import TargetNetwork
from tempera.targets.prompt_state import Conditioner, PromptConditioner

ROOM = 64
"""Drafted tokens that a compiled target's cache has room for at least: plain decoding and a method
share the cache, and so what was recorded with it.
"""


class TransformerTarget:
    """A transformer being accelerated.

    Args:
        network: the transformer.
        conditioner: turns prompts into the network's condition.
        sampling: from logits to the distribution that is sampled.
        grid: rows and columns of the image-token grid; the network's own unless given.
        token_ids: the network's id of each of our V tokens, int64 [V], for a network whose
            vocabulary holds more than image tokens.
        token_bias: added to the logits of our V tokens, float [V]: a large negative number for a
            token that only forced positions have.
        forced: token that position i of the image must have, int64 [length], -1 where it is free
            (ends of lines).
        identity: names the weights; a hash of them unless given.
        granularity: keys are offered to attention in multiples of this, as far as rows may have
            come. At least the whole image: constant shapes.

    Attributes:
        lengths: image tokens that each row has emitted, int64 [B].
        prefix_embeds: [R, T, H], and prefix_hidden: their hidden states but the last's, [R, T − 1,
            H]. keep: bool [R, T], False on padding.
        root_embeds: embedding of the last token of each row, which the next forward pass begins
            with, [R, 1, H].
        compiled: whether the steps of a round are, see `compile`.
        reach: image tokens that the row furthest ahead may have emitted, known without asking the
            device: exact on the CPU, elsewhere as many as the rounds so far could emit.
    """

    def __init__(
        self,
        network: TargetNetwork,
        conditioner: Conditioner,
        sampling: Sampling,
        *,
        grid: tuple[int, int] | None = None,
        token_ids: Tensor | None = None,
        token_bias: Tensor | None = None,
        forced: Tensor | None = None,
        identity: str | None = None,
        granularity: int = 32,
    ) -> None:
        self.network, self.conditioner, self.sampling, self.granularity = (
            network.eval(),
            PromptConditioner(conditioner),
            sampling,
            granularity,
        )
        _store_by_column(network)
        self.grid: tuple[int, int] = tuple(network.config.grid if grid is None else grid)
        self.length = self.grid[0] * self.grid[1]
        head = network.lm_head.weight
        self.device, self.dtype, self.hidden_size = head.device, head.dtype, head.shape[1]
        self._ids = None if token_ids is None else token_ids.to(self.device)
        self._head = head.detach() if self._ids is None else head.detach()[self._ids]
        self._head_bias = _summed(
            _picked(getattr(network.lm_head, "bias", None), self._ids), token_bias, head
        )
        self.vocab_size = self._head.shape[0]
        self._forced = None if forced is None else self._checked(forced)
        self.reach = 0
        self.compiled = False
        self._block, self._pass, self._law = _block, self._forward, self._sampled
        if identity is not None:
            self.identity = identity

    @property
    def sampling(self) -> Sampling:
        """From logits to the distribution that is sampled; may be replaced between images."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._sampling, self._after_guidance = sampling, replace(sampling, guidance=1.0)

    @cached_property
    def identity(self) -> str:
        """Short name of the network's weights (`identity_of`)."""
        return identity_of(self.network)

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """See `interfaces.ImageModel.encoded`."""
        return self.conditioner.encoded(prompts)

    def compile(self) -> None:
        """Compile the forward pass and the distribution of all later rounds; a draft that is built
        on this target after it follows.

        Every pass is then offered the whole cache: a compiled step is made for one number of keys,
        and anew where a longer prompt takes a larger cache. Prefixes are passed as before.
        """
        self.compiled = True
        self._block, self._pass, self._law = (
            compile_step(_block),
            cuda_graphed(self._forward, self.device),
            self.step(self._sampled),
        )

    def step(self, function: StepFunction) -> StepFunction:
        """A step of a round as it is run here: the function itself or, of a compiled target,
        compiled.
        """
        return cuda_graphed(compile_step(function), self.device) if self.compiled else function

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of our tokens, int64 [B, ...] -> [R, ..., H]: under guidance the same for both
        rows of a prompt.
        """
        embeds: Tensor = self.network.embed_tokens(
            tokens if self._ids is None else self._ids[tokens]
        )
        return torch.cat([embeds, embeds]) if self.sampling.guided else embeds

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """Logits over our V tokens, [..., H] -> [..., V]."""
        return nn.functional.linear(hidden, self._head, self._head_bias)

    def distribution(
        self, hidden: Tensor, ahead: Tensor, sampling: Sampling | None = None
    ) -> Tensor:
        """What is sampled after hidden states that stand `ahead` ([M], or [B, M]) tokens beyond
        each row's root: [R, M, H] -> [B, M, V].

        Guidance l = u + s(c − u) is linear, and so is the head: it is applied to the hidden states,
        before the head, for half the work. After it comes what the target's own sampling does, or
        what another `sampling` does, whose guidance does not count.
        """
        forced = None
        if self._forced is not None:
            forced = self._forced[(self.lengths[:, None] + ahead).clamp_(max=self.length - 1)]
        after_guidance = (
            self._after_guidance if sampling is None else replace(sampling, guidance=1.0)
        )
        return self._law(hidden, forced, self.sampling.guidance, after_guidance)

    def _sampled(
        self, hidden: Tensor, forced: Tensor | None, guidance: float, after: Sampling
    ) -> Tensor:
        """The part of `distribution` that is computed: guidance (1 is none), head, and the sampling
        after them.
        """
        if guidance != 1:
            conditional, unconditional = hidden.chunk(2)
            hidden = torch.lerp(unconditional, conditional, guidance)
        return after.distribution(self.lm_logits(hidden), forced)

    @torch.inference_mode()
    def begin(self, prompts: list[str], nodes: int) -> None:
        """Run the prefix but its last token, which is the first root. See
        `interfaces.Target.begin`.

        Raises:
            TemperaError: no prompts, or a prompt padded on the right.
        """
        if not prompts:
            raise TemperaError("there are no prompts to generate: give at least one.")
        condition, keep = (part.to(self.device) for part in self.conditioner(prompts))
        if not bool(keep[:, -1].all()):
            raise TemperaError(
                "a prompt's last condition token is padding, but decoding starts from it: pad "
                "prompts on the left."
            )
        rows = self.sampling.rows
        self.rows, self.prefix, self.nodes = rows * len(prompts), keep.shape[1], nodes
        drop = torch.arange(self.rows, device=self.device) >= len(prompts)
        condition = condition.repeat(rows, *[1] * (condition.dim() - 1))
        self.prefix_embeds, self.keep = conditioned(
            self.network, condition, keep.repeat(rows, 1), drop
        )
        self._allocate(len(prompts), nodes)
        self.prefix_hidden = self._prefill()
        self.root_embeds = self.prefix_embeds[:, -1:]

    @torch.inference_mode()
    def score(self, draft: Draft) -> Scores:
        """One forward pass over the root and all nodes; p float32 [B, 1 + N, V], hidden [R, 1 + N,
        H]. See `interfaces.Target.score`.
        """
        layout = self._layout_of(draft.tree)
        slots = self.root_slots[:, None]
        visible = self.visible(layout.width)
        self.cache.place(slots + layout.offsets, visible)
        mask = layout.mask.at(self.root_slots, visible)
        if self.padding is not None:
            mask += self.padding[..., :visible]
        embeds = (
            torch.cat([self.root_embeds, self.embed(draft.tokens)], 1)
            if draft.tree.nodes
            else self.root_embeds
        )
        hidden = self.run(embeds, mask, (slots + layout.depths).clamp_(max=self.last_slot))
        if self.sampling.temperature == 0:
            soft = self.distribution(hidden, layout.ahead, self.sampling.untempered)
            return Scores(greedy(soft), hidden, soft)
        return Scores(self.distribution(hidden, layout.ahead), hidden)

    @torch.inference_mode()
    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """Advance each row by `emitted`; compact an accepted tree path; the drawn token becomes the
        root. See `interfaces.Target.commit`.
        """
        if draft.tree.nodes and not draft.tree.is_chain:
            first = self.root_slots[:, None] + 1
            path = verdict.path.clamp(min=0).repeat(self.sampling.rows, 1)
            self.cache.compact(
                first + path, first + torch.arange(path.shape[1], device=self.device)
            )
        self.advance(verdict, emitted)

    @torch.inference_mode()
    def advance(self, verdict: Verdict, emitted: Tensor) -> None:
        """The part of `commit` that leaves the cache alone: advance each row by `emitted`; the
        drawn token becomes the root.
        """
        self.lengths += emitted
        self.root_slots.view(self.sampling.rows, -1).add_(emitted)
        self.root_embeds = self.embed(verdict.next_token[:, None])
        self.reach = (
            min(self.length, self.reach + verdict.tokens.shape[1])
            if self._host is None
            else int(self._host.max())
        )

    def visible(self, width: int, cache: RowCache | None = None) -> int:
        """Keys to offer a pass that writes `width` slots from each row's root on, into the own
        cache or another one of the same rows: a multiple of the granularity, within the capacity;
        all of it where the steps are compiled.
        """
        needed = self.prefix - 1 + self.reach + width
        capacity = self.cache.capacity if cache is None else cache.capacity
        return (
            capacity
            if self.compiled
            else min(capacity, -(-needed // self.granularity) * self.granularity)
        )

    def capacity(self, nodes: int) -> int:
        """Entries of a cache that holds a whole image and `nodes` drafted tokens beyond it."""
        room = max(nodes, ROOM) if self.compiled else nodes
        return -(-(self.last_slot + 2 + room) // self.granularity) * self.granularity

    def _allocate(self, batch: int, nodes: int) -> None:
        """Slots, lengths and a cache for this batch; an earlier cache of the same shape is used
        again.
        """
        self.last_slot = self.prefix + self.length - 1
        capacity = self.capacity(nodes)
        model = self.network.model
        heads, head_dim, layers = attention_shape(model.config)
        old = getattr(self, "cache", None)
        if old is None or (old.rows, old.capacity) != (self.rows, capacity):
            self.cache = RowCache(
                layers, self.rows, heads, head_dim, capacity, dtype=self.dtype, device=self.device
            )
            self._layouts: dict[int, tuple[Tree, _TreeLayout]] = {}
            if self.compiled:  # what is recorded writes into the cache that it was recorded with
                self._pass = cuda_graphed(self._forward, self.device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._host = (
            self.lengths.numpy() if self.device.type == "cpu" else None
        )  # shares memory: no read from a device
        self.root_slots = torch.full(
            (self.rows,), self.prefix - 1, dtype=torch.int64, device=self.device
        )
        self.reach = 0
        self.padding = padding_mask(self.keep, capacity, self.dtype)

    def _prefill(self) -> Tensor:
        """Run all prefix tokens but the last -> their hidden states [R, T − 1, H]."""
        embeds = self.prefix_embeds[:, :-1]
        if not embeds.shape[1]:
            return embeds
        positions = torch.arange(embeds.shape[1], device=self.device).expand(self.rows, -1)
        self.cache.place(positions, embeds.shape[1])
        return self._layers(
            _block, embeds, causal_mask(self.keep[:, :-1], embeds.shape[1], self.dtype), positions
        )

    def run(self, embeds: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """A forward pass of embeddings [R, M, H] at positions int64 [R, M] (or [M]), as the cache
        was `place`d -> hidden states [R, M, H].

        `mask` is additive, [R, 1, M, keys].
        """
        return self._pass(embeds, mask, positions, self.cache.where)

    def _forward(self, embeds: Tensor, mask: Tensor, positions: Tensor, where: Tensor) -> Tensor:
        """The part of `run` that is computed; `where` is the cache's."""
        self.cache.where = where
        return self._layers(self._block, embeds, mask, positions)

    def _layers(
        self, block: StepFunction, embeds: Tensor, mask: Tensor, positions: Tensor
    ) -> Tensor:
        model, hidden = self.network.model, embeds
        cos, sin = model.rotary_emb(embeds, positions)
        for layer, entries in zip(model.layers, self.cache.layers, strict=True):
            hidden = block(layer, entries, hidden, mask, positions, cos, sin)
        out: Tensor = model.norm(hidden)
        return out

    def _layout_of(self, tree: Tree) -> "_TreeLayout":
        """The tree's constants; a static tree's are made once per cache."""
        tree = tree.to(self.device)
        if tree.per_row:
            return _TreeLayout(tree, self.cache.capacity, self.sampling.rows, self.dtype)
        if id(tree) not in self._layouts:
            self._layouts[id(tree)] = tree, _TreeLayout(tree, self.cache.capacity, 1, self.dtype)
        return self._layouts[id(tree)][1]

    def _checked(self, forced: Tensor) -> Tensor:
        if forced.shape != (self.length,):
            raise TemperaError(
                f"{tuple(forced.shape)} forced positions do not fit an image of {self.length} "
                "tokens: give one entry a token."
            )
        return forced.to(self.device)


def _block(
    layer: Any,
    entries: Any,
    hidden: Tensor,
    mask: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """One layer of a Hugging Face decoder with its layer of the cache, as the decoder's `forward`
    calls it; compiled, one for all.
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


def conditioned(
    network: TargetNetwork, condition: Tensor, keep: Tensor, drop: Tensor
) -> tuple[Tensor, Tensor]:
    """What stands before the images.

    Args:
        condition: what the network's `embed_prefix` takes, rows first.
        keep: False on the prompts' padding, bool [R, T].
        drop: rows that are null-conditioned, bool [R].

    Returns:
        embeddings [R, T, H] in the network's type, and keep with the padding of null-conditioned
        rows their own.
    """
    embeds: Tensor = network.embed_prefix(condition, drop).to(network.lm_head.weight.dtype)
    return embeds, network.keep_prefix(condition, keep, drop)


class _TreeLayout:
    """Constants of a tree inside a round: slots and depths of the root (0) and the nodes, per
    prompt (`ahead`) and per network row (`depths`), and the mask among them.
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
        visible[..., 0] = True
        visible[..., 1:, 1:] = tree.ancestors
        self.ahead, self.depths = depths, depths.repeat(copies, 1) if tree.per_row else depths
        self.mask = RoundMask(
            visible.repeat(copies, 1, 1) if tree.per_row else visible, capacity, dtype
        )


def _store_by_column(network: TargetNetwork) -> None:
    """On a CPU, store the linear layers' weights column by column: a product of a few rows is then
    up to twice as fast.
    """
    for module in network.modules():
        plain = (
            isinstance(module, nn.Linear) and type(module.weight) is nn.Parameter
        )  # not one that is split among processes
        if plain and module.weight.device.type == "cpu" and module.weight.is_contiguous():
            module.weight.data = module.weight.data.t().contiguous().t()


def attention_shape(config: Any) -> tuple[int, int, int]:
    """Key/value heads, head size and layers that a Hugging Face configuration describes."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, head_dim, config.num_hidden_layers


def padding_mask(keep: Tensor, capacity: int, dtype: torch.dtype) -> Tensor | None:
    """What hides padded prefix tokens from later queries, additive, [R, 1, 1, S]; none where
    nothing is padded.
    """
    if bool(keep.all()):
        return None
    padding = torch.zeros(len(keep), capacity, dtype=dtype, device=keep.device)
    padding[:, : keep.shape[1]].masked_fill_(~keep, torch.finfo(dtype).min)
    return padding[:, None, None]


def _picked(bias: Tensor | None, ids: Tensor | None) -> Tensor | None:
    return bias if bias is None or ids is None else bias.detach()[ids]


def _summed(bias: Tensor | None, more: Tensor | None, like: Tensor) -> Tensor | None:
    if more is None:
        return bias
    more = more.to(like)
    return more if bias is None else bias + more
