"""The EAGLE draft (Li et al. 2024, EAGLE-1): one decoder layer that predicts the target's next
hidden state.

At step t it reads the pair (embedding of token t, the target's hidden state at token t − 1) and
predicts the hidden state at token t, which the target's own head turns into the distribution of
token t + 1.

Shapes: R rows, S sequence, T prefix tokens, H hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.decoding.interfaces import drafts
from tempera.drafters.draft_files import (
    DraftDtype,
    builder_of,
    draft_to_decode,
    draft_to_train,
    torch_dtype,
)
from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.eagle_layout import is_llamagen, read_public
from tempera.runtime.files import read_json, sha256_file
from tempera.runtime.network_directory import CONFIG
from tempera.runtime.pretrained import on_meta
from tempera.runtime.tensor_files import fill
from tempera.targets.decoder_layer import start_small
from tempera.targets.transformer import TransformerTarget


class EagleModel(DraftNetwork):
    """The projection and one decoder layer.

    Attributes:
        is_public: whether EAGLE's or LANTERN's code has trained it. Such a draft has no step at the
            first prefix token, which no hidden state precedes.
        reads_captions: whether it reads caption tokens. LANTERN's of LlamaGen read every one,
            padding too, as code 0.
    """

    draft_model = EagleDraft

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        (self.layer,) = self.make_layers(1)
        self.is_public = False
        self.reads_captions = True
        start_small(self)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The decoder layer."""
        return (self.layer,)

    @override
    @classmethod
    def of_other_layout(cls, directory: Path, target: TransformerTarget) -> "EagleModel | None":
        """The draft that EAGLE's or LANTERN's code wrote; see `eagle_layout`."""
        if "target" in read_json(directory / CONFIG):
            return None
        public = read_public(directory, target)

        def make() -> EagleModel:
            """The network of these sizes, with embeddings of its own."""
            made = cls.of(target.network, str(directory), target.vocab_size, target.identity)
            made.is_public = True
            made.reads_captions = not is_llamagen(target.network)
            sizes = target.network.config
            made.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
            layer: Any = made.layer
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.eps = public.eps
            if "layer.input_layernorm.weight" not in public.tensors:
                layer.input_layernorm = nn.Identity()
            if "fc.bias" not in public.tensors:
                made.fc.register_parameter("bias", None)
            return made

        draft = on_meta(make)
        fill(draft, public.tensors, public.file)
        draft.identity = sha256_file(public.file)[:16]
        return draft

    @override
    def prefix(self, embeds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `DraftNetwork.prefix`."""
        if not self.is_public:
            return embeds, mask, mask
        if not self.reads_captions and self.embed_tokens is not None:
            mask = torch.ones_like(mask)
            embeds = self.embed_tokens(torch.zeros_like(mask, dtype=torch.int64))
        return embeds, mask, nn.functional.pad(mask[:, :-1], (1, 0), value=False)


def eagle_network(
    target: Any, model: str, start: str | None = None, features: Sequence[int] = ()
) -> EagleModel:
    """`draft=eagle`: see `draft_to_train`."""
    return draft_to_train(EagleModel, target, model, start, features)


build_eagle = builder_of(EagleModel)
"""The EAGLE drafter of a trained draft, in our layout or the public one: see
`draft_files.builder_of`.
"""


@drafts(lambda depth, nodes, **_: min(depth, nodes))
def build_eagle2(
    path: str,
    target: TransformerTarget,
    branches: int = 10,
    depth: int = 5,
    nodes: int = 59,
    dtype: DraftDtype | None = None,
) -> DynamicTreeDrafter:
    """The EAGLE-2 drafter of a trained EAGLE draft. See `dynamic_tree.DynamicTreeDrafter` and
    `build_eagle`.

    Raises:
        TemperaError: it is no valid draft, or one for another target, or the tree is impossible.
    """
    network = draft_to_decode(EagleModel, path, target)
    model = EagleDraft(network, target, torch_dtype(dtype), ranks=True)
    return DynamicTreeDrafter(model, target.vocab_size, branches, depth, nodes)
