"""The `Target` for any causal network in Hugging Face's style.

It has three parts, each in its own file: the prompts and the position of each image
(`prompt_state`), the forward passes with their cache (`forward`), and embedding, head and sampling
(`token_head`). Drafts use the parts that they need.

Shapes: B prompts, R rows (B, or 2B under guidance: conditional rows first), T prefix tokens, N
drafted nodes, V vocabulary, H hidden size.
"""

import math
from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch import Tensor

from tempera.decoding.compiled import persistent
from tempera.decoding.interfaces import Draft, Scores, Verdict
from tempera.decoding.probabilities import Sampling, greedy
from tempera.errors import TemperaError
from tempera.runtime.network_identity import identity_of
from tempera.runtime.quantised import stored_bytes
from tempera.targets.forward import ModelRunner
from tempera.targets.network import TargetNetwork
from tempera.targets.prompt_state import Conditioner, Prefix, PromptConditioner
from tempera.targets.token_head import TokenHead


class TransformerTarget:
    """A transformer target. Implements `interfaces.Target`.

    Args:
        network: the transformer.
        conditioner: turns prompts into the network's condition.
        sampling: guidance, temperature, top-k and top-p.
        identity: names the weights; by default a hash of them.
        granularity: see `forward.ModelRunner`.
        head: by default that of the network.

    Attributes:
        conditioner: the conditioner; inside `encoded` it reuses its result.
        weight_bytes: size of the weights that a pass reads: all but the embedding tables.
        runner: the forward passes and their cache; `runner.prompt` is the batch's state.
        head: embedding, head and sampling.
    """

    def __init__(
        self,
        network: TargetNetwork,
        conditioner: Conditioner,
        sampling: Sampling,
        *,
        identity: str | None = None,
        granularity: int | None = None,
        head: TokenHead | None = None,
    ) -> None:
        self.network = network
        self.grid: tuple[int, int] = tuple((network.spec or network.config).grid)
        self.length = math.prod(self.grid) if network.spec is None else network.spec.length
        self.conditioner = PromptConditioner(conditioner)
        self.runner = ModelRunner(network, granularity)
        self._root = torch.empty(0)  # embedding of each row's root, [R, 1, H]
        self._check_guidance(sampling)
        self.head = head or TokenHead(network, sampling, self.length)
        self.vocab_size = self.head.vocab_size
        self.device = self.runner.device
        self.dtype = self.runner.dtype
        decoder = network.model
        head_weights = self.head.linear.buffers()
        read = *decoder.layers.parameters(), *decoder.norm.parameters(), *head_weights
        self.weight_bytes = sum(map(stored_bytes, read))
        if identity is not None:
            self.identity = identity

    @property
    def sampling(self) -> Sampling:
        """Guidance, temperature, top-k and top-p; may be replaced between images."""
        return self.head.sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._check_guidance(sampling)
        self.head.sampling = sampling

    def _check_guidance(self, sampling: Sampling) -> None:
        """Raise TemperaError for guidance of a model that has no unconditional row."""
        spec = self.network.spec
        unguided = spec is not None and spec.prompt and not (spec.null or spec.null_filling)
        if sampling.guided and unguided:
            raise TemperaError(
                f"guidance={sampling.guidance} is not possible, because this model is not guided: "
                "give guidance=1",
                option="guidance",
            )

    @cached_property
    def identity(self) -> str:
        """Short hash of the network's weights (`identity_of`)."""
        return identity_of(self.network)

    def pack(self) -> None:
        """Make decoding faster at the expense of everything else: pack weights (`packed_linear`).
        They are replaced; the network can no longer be trained or saved.
        """
        if self.runner.packed:
            return
        _ = self.identity  # of the weights as they are now
        self.runner.pack(self.sampling.rows)
        self.head.pack()

    @property
    def compiled(self) -> bool:
        """Whether rounds are compiled."""
        return self.runner.compiled

    def compile(self) -> None:
        """Let the loop compile all later rounds; see `decoding.compiled`. Build drafts after it."""
        self.runner.compile()

    def encoded(self, prompts: list[str]) -> AbstractContextManager[None]:
        """See `interfaces.ImageModel.encoded`."""
        return self.conditioner.encoded(prompts)

    def begin(self, prompts: list[str], nodes: int, rows: Tensor | None = None) -> None:
        """Run the prefix except its last token, which is the first root. See
        `interfaces.Target.begin`.

        Raises:
            TemperaError: a prompt is padded on the right.
            NeedsNewBatch: a prompt is longer than those that the running batch began with.
        """
        condition, mask = (part.to(self.device) for part in self.conditioner(prompts))
        if not bool(mask[:, -1].all()):
            raise TemperaError(
                "a prompt's last condition token is padding, but decoding starts from it: pad "
                "prompts on the left."
            )
        copies = self.sampling.rows
        drop = torch.arange(copies * len(prompts), device=self.device) >= len(prompts)
        condition = condition.repeat(copies, *[1] * (condition.dim() - 1))
        embedded = self.network.embed_prefix(condition, mask.repeat(copies, 1), drop)
        prefix = Prefix(*embedded, positions=self.positions(condition))
        self.runner.begin(prefix, copies, self.length, nodes, rows)
        self._root = persistent(self._root, prefix.embeds[:, -1:], self.runner.prefix.rows)

    def positions(self, condition: Tensor) -> Tensor | None:
        """Of condition tokens: see `prompt_state.Prefix`."""
        return None

    def score(self, draft: Draft, longest: int) -> Scores:
        """Score the root and all nodes in one forward pass: p float32 [B, 1 + N, V], hidden states
        [R, 1 + N, H]. See `interfaces.Target.score`.
        """
        self.runner.prompt.longest = longest
        embeds = torch.cat([self._root, self.head.embed(draft.tokens)], 1)
        layout = self.runner.layout_of(draft.tree.block)
        hidden = self.runner.run(embeds, layout)
        lengths = self.runner.prompt.lengths
        if self.sampling.greedy:
            soft = self.head.distribution(hidden, lengths, layout.ahead, self.sampling.untempered)
            return Scores(greedy(soft), hidden, soft)
        return Scores(self.head.distribution(hidden, lengths, layout.ahead), hidden)

    def commit(self, draft: Draft, verdict: Verdict, emitted: Tensor) -> None:
        """Compact the accepted path of a tree, advance each row by `emitted`, and make the drawn
        token the root. See `interfaces.Target.commit`.
        """
        if not draft.tree.is_chain:
            self.runner.compact(verdict.path)
        longest = self.runner.prompt.longest + verdict.tokens.shape[1]
        self.advance(verdict.next_token, emitted, longest)

    def advance(self, root: Tensor, emitted: Tensor, longest: int) -> None:
        """Advance each row and leave the cache as it is.

        Args:
            root: each row's new root token, int64 [B].
            emitted: number of tokens to advance by, int64 [B].
            longest: upper bound of the tokens that any row has then.
        """
        self.runner.prompt.advance(emitted, longest)
        self._root.copy_(self.head.embed(root[:, None]))
