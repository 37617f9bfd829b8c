"""The draft of EAGLE-3 (Li et al. 2025, arXiv 2503.01840) as the library `speculators` 0.9 has it:
one layer of Llama's kind, whatever the target's, that reads the normed embedding of token t beside
the normed state before it. The state is made of the inputs of K layers of the target, or it is the
draft's own, normed (`norm_output` there, EAGLE 3.1). The target's head reads it.

Shapes: R rows, S sequence, H hidden size, K features.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from tempera.drafters.draft_files import builder_of, draft_to_train
from tempera.drafters.draft_network import DraftConfig, DraftNetwork
from tempera.drafters.eagle import EagleDraft
from tempera.errors import TemperaError
from tempera.runtime.files import read_json, sha256_file
from tempera.runtime.network_directory import CONFIG, WEIGHTS
from tempera.runtime.pretrained import on_meta
from tempera.runtime.tensor_files import fill, read_tensors, renamed
from tempera.targets.attention import SharedMask
from tempera.targets.cache import Keys, KVCache
from tempera.targets.decoder_layer import DecoderLayer, LayerSizes, start_small
from tempera.targets.network import TargetNetwork
from tempera.targets.products import RMSNorm
from tempera.targets.transformer import TransformerTarget

NAMES = {r"^layer\.": "layers.0."}
"""Our names of tensors, and those of `speculators`."""
HEAD, EMBEDDING, TO_DRAFT, TO_TARGET = "lm_head.weight", "embed_tokens.weight", "t2d", "d2t"
WAYS = {
    "speculators_model_type": "eagle3",
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": True,
    "norm_output": True,
}
"""What the library's configuration says of such a draft."""


class Eagle3Layer(DecoderLayer):
    """A decoder layer of Llama's kind, whose attention reads an embedding beside a state."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        self.hidden_norm = RMSNorm(sizes.width, sizes.eps)
        merged = self.self_attn.qkv
        self.self_attn.qkv = nn.Linear(2 * sizes.width, merged.out_features, bias=False)

    def attending(
        self,
        embeds: Tensor,
        x: Tensor,
        mask: Tensor | SharedMask,
        rotation: Tensor,
        cache: Keys | None,
    ) -> Tensor:
        """Embeddings and states [R, S, H] -> [R, S, H]; see `DecoderLayer.forward`."""
        both = torch.cat([self.input_layernorm(embeds), self.hidden_norm(x)], -1)
        x = x + self.self_attn(both, mask, rotation, cache)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class Eagle3Model(DraftNetwork):
    """fc on the normed inputs of K layers, one layer, and a norm."""

    draft_model = EagleDraft
    drafter = "eagle3"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        sizes = layer_of(config.layer_sizes)
        count, width = len(config.features), sizes.width
        self.fc = nn.Linear(count * width, width, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(width, sizes.eps) for _ in config.features)
        self.layer = Eagle3Layer(sizes)
        self.norm = RMSNorm(width, sizes.eps)
        start_small(self)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The decoder layer."""
        return (self.layer,)

    @override
    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        mask: Tensor | SharedMask,
        rotation: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """See `DraftNetwork.forward`. Of states with features these alone are read."""
        x = self.layer.attending(embeds, self._state(hidden), mask, rotation, cache)
        out: Tensor = self.norm(x)
        return out

    def _state(self, hidden: Tensor) -> Tensor:
        """The state before each token: of the target's layers, or the draft's own, whose features
        are zero or missing.
        """
        width = self.config.layer_sizes.width
        own, features = hidden[..., :width], hidden[..., width:]
        if not features.shape[-1]:
            return own
        parts = features.split(width, -1)
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        read: Tensor = self.fc(torch.cat(normed, -1))
        return torch.where(features.any(-1, keepdim=True), read, own)

    @override
    @classmethod
    def of(
        cls,
        network: TargetNetwork,
        model: str,
        vocab_size: int | None = None,
        identity: str | None = None,
        features: tuple[int, ...] = (),
        **sizes: Any,
    ) -> Self:
        """See `DraftNetwork.of`; without `features` they are the layers that the public code reads:
        the third, the middle one, and the third before the last.
        """
        if not features:
            layers = len(network.model.layers)
            usual = (2, layers // 2, layers - 3)
            features = tuple(sorted({min(max(layer, 0), layers - 1) for layer in usual}))
        return super().of(network, model, vocab_size, identity, features, **sizes)

    @override
    @classmethod
    def of_other_layout(cls, directory: Path, target: TransformerTarget) -> "Eagle3Model | None":
        """A draft of the `speculators` library.

        Raises:
            TemperaError: its architecture is another, or it was made for another target.
        """
        stated: dict[str, Any] = read_json(directory / CONFIG)
        if "speculators_model_type" not in stated:
            return None
        wanted = {**WAYS, "transformer_layer_config": layer_config(target)}
        _check_stated(directory, stated, wanted)
        features = tuple(stated["eagle_aux_hidden_state_layer_ids"])
        tensors = read_tensors(directory / WEIGHTS)
        _check_head(directory, tensors, target)
        for name in (HEAD, EMBEDDING, TO_DRAFT, TO_TARGET):
            tensors.pop(name, None)
        network, vocab = target.network, target.vocab_size
        draft = on_meta(lambda: cls.of(network, str(directory), vocab, target.identity, features))
        fill(draft, renamed(tensors, {r"^layers\.0\.": "layer."}), directory / WEIGHTS)
        draft.identity = sha256_file(directory / WEIGHTS)[:16]
        return draft


def layer_of(sizes: LayerSizes) -> LayerSizes:
    """A layer of Llama's kind of a target's sizes."""
    return replace(
        sizes,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        head_norm="none",
        four_norms=False,
    )


def layer_config(target: TransformerTarget) -> dict[str, Any]:
    """What a `LlamaConfig` says of the draft's layer for a target.

    Raises:
        TemperaError: the target's positions have no place in it.
    """
    config, spec = target.network.config, target.network.spec
    rope = getattr(config, "rope_parameters", None)
    if spec is None or spec.preview is not None or spec.pictures or "mrope_section" in (rope or {}):
        raise TemperaError(
            "the speculators format only supports one-dimensional positions, but this target's "
            "have rows and columns: its drafts cannot be read or written in this format."
        )
    sizes = target.network.model.sizes
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.eps,
        "rope_parameters": dict(rope or {}),
    }


def _check_stated(directory: Path, stated: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise TemperaError for a configuration that says something else."""
    for name, value in wanted.items():
        found = stated.get(name, False if value is False else None)
        if isinstance(value, dict):
            _check_stated(directory, found if isinstance(found, dict) else {}, value)
        elif found != value:
            raise TemperaError(
                f"the draft in {directory} has {name}={json.dumps(found)}, but this target and "
                f"tempera's EAGLE-3 need {json.dumps(value)}: give another draft."
            )


@torch.no_grad()
def _check_head(directory: Path, tensors: dict[str, Tensor], target: TransformerTarget) -> None:
    """Raise TemperaError for a draft with other tokens, or with a head of its own."""
    ids, order = ids_of(target)
    if not torch.equal(tensors[TO_DRAFT].nonzero().flatten(), ids):
        raise TemperaError(
            f"the draft in {directory} drafts tokens that are not this target's: give a draft for "
            "this target."
        )
    width = target.head.hidden_size
    probe = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    ours = target.head.lm_logits(probe.to(target.device, target.dtype))[:, order].cpu().float()
    theirs = probe @ tensors[HEAD].float().T
    drawn = ours > ours.min()  # others are forbidden
    if not torch.allclose(ours[drawn], theirs[drawn], rtol=0.05, atol=0.05 * theirs.std().item()):
        raise TemperaError(
            f"the draft in {directory} has its own head, but tempera's drafts use the target's: "
            "give a draft written by tempera."
        )


def ids_of(target: TransformerTarget) -> tuple[Tensor, Tensor]:
    """The network's ids of a target's tokens in ascending order, int64 [V]; and the target's tokens
    in this order.
    """
    spec = target.network.spec
    assert spec is not None
    ids, order = spec.token_ids.sort()
    return ids, order


def eagle3_network(
    target: Any,
    model: str,
    start: str | None = None,
    features: Sequence[int] = (),
) -> Eagle3Model:
    """`draft=eagle3`: see `draft_to_train` and, for `features`, `Eagle3Model.of`."""
    return draft_to_train(Eagle3Model, target, model, start, features)


build_eagle3 = builder_of(Eagle3Model)
"""The drafter of a trained draft, in our layout or that of `speculators`: see
`draft_files.builder_of`.
"""
