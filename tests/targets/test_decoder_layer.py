"""Our decoder layer computes what Hugging Face's layers compute, forwards and backwards, from the
same names of weights.
"""

import importlib
from typing import Any

import pytest
import torch
import transformers
from tiny_networks import PROMPTS, captions, lively, llamagen, tiny_eagle
from torch import Tensor, nn

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.standard import Exact
from tempera.runtime.network_identity import identity_of
from tempera.targets.cache import KVCache
from tempera.targets.decoder_layer import DecoderLayer, LayerSizes
from tempera.targets.masks import causal_mask
from tempera.targets.packed_linear import pack
from tempera.targets.rotary import Rotary
from tempera.targets.transformer import TransformerTarget

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": ROPE,
    "attn_implementation": "sdpa",
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, {}),
    "Chameleon": (
        "ChameleonConfig",
        {"num_key_value_heads": 4, "vocabulary_map": {}},
        {"head_norm": "layer"},
    ),
    "Emu3": ("Emu3TextConfig", {"attention_dropout": 0.0}, {}),
    "Qwen2": ("Qwen2Config", {}, {"qkv_bias": True}),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}, {"head_norm": "rms"}),
}
"""Each family's configuration, its sizes, and the options of our layer."""


def layers_of(family: str) -> tuple[nn.Module, DecoderLayer]:
    """A layer of transformers, and ours with its weights."""
    name, changes, options = FAMILIES[family]
    config = getattr(transformers, name)(**{**SIZES, **changes})
    module = importlib.import_module(
        f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    )
    theirs = lively(getattr(module, f"{family}DecoderLayer")(config, layer_idx=0), 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    ours = DecoderLayer(LayerSizes.of(config, **options)).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def by_hugging_face(layer: nn.Module, x: Tensor, mask: Tensor, rotation: Tensor) -> Tensor:
    cos, signed = rotation
    half = signed.shape[-1] // 2
    sin = torch.cat([-signed[..., :half], signed[..., half:]], -1)
    out = layer(x, attention_mask=mask, position_embeddings=(cos, sin))
    return out if isinstance(out, Tensor) else out[0]


def inputs(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nine tokens of two rows, the first of which is padded."""
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    keep = torch.tensor([[False, True, True], [True, True, True]])
    rotation = Rotary(head_dim, 10000.0).table(9, 3, x.device)[:, None]
    return x, causal_mask(keep, 9, x.dtype), rotation


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_hugging_faces_layer(family):
    theirs, ours = layers_of(family)
    x, mask, rotation = inputs(ours.self_attn.head_dim)
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    results = []
    for layer, run in ((theirs, by_hugging_face), (ours, DecoderLayer.__call__)):
        read = x.clone().requires_grad_()
        out = run(layer, read, mask, rotation)
        (out * weights).sum().backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(parameter.grad)  # the state dict names them as files do
        results.append({"output": out.detach(), "input": read.grad, **layer.state_dict()})
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)


def in_two_passes(layer: DecoderLayer, head_size: int) -> Tensor:
    """The layer over nine tokens, five and then four through a cache of two rows."""
    x, mask, rotation = inputs(layer.self_attn.head_dim)
    cache = KVCache(1, layer.self_attn.kv_heads, head_size, dtype=x.dtype, device=x.device)
    cache.begin(2, 16)
    out = []
    for first, last in ((0, 5), (5, 9)):
        cache.write(torch.arange(first, last).expand(2, -1), last)
        tokens, turns = x[:, first:last], rotation[:, :, first:last]
        out.append(layer(tokens, mask[:, :, first:last, :last], turns, cache))
    return torch.cat(out, 1)


@pytest.mark.parametrize(("family", "head_size"), [("Llama", 16), ("Chameleon", 8), ("Qwen3", 16)])
@torch.no_grad()
def test_a_cache_in_what_cuda_computes_fast_gives_the_same_hidden_states(
    family, head_size, monkeypatch
):
    """With a mask, grouped keys and odd head sizes fall to the math kernel there."""
    theirs, ours = layers_of(family)
    expected = by_hugging_face(theirs, *inputs(ours.self_attn.head_dim))
    inner = nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        assert "enable_gqa" not in options and query.shape[1] == key.shape[1] == value.shape[1]
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == head_size
        return inner(query, key, value, **options)

    pack(ours, least_rows=2)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    torch.testing.assert_close(in_two_passes(ours, head_size), expected, atol=2e-5, rtol=1e-4)


def test_four_norms_are_those_of_glm():
    from transformers.models.glm4.modeling_glm4 import Glm4DecoderLayer

    config = transformers.Glm4Config(**SIZES, head_dim=8, attention_bias=True)
    theirs = lively(Glm4DecoderLayer(config, layer_idx=0), 3)
    ours = DecoderLayer(LayerSizes.of(config, output_bias=False, four_norms=True)).eval()
    state = theirs.state_dict()
    gate_up = state.pop("mlp.gate_up_proj.weight").chunk(2)
    state |= dict(zip(("mlp.gate_proj.weight", "mlp.up_proj.weight"), gate_up, strict=True))
    ours.load_state_dict(state)
    x, mask, _ = inputs(8)
    unturned = torch.stack([torch.ones(1, 9, 8), torch.zeros(1, 9, 8)])  # their pairs differ
    expected = by_hugging_face(theirs, x, mask, unturned)
    torch.testing.assert_close(ours(x, mask, unturned), expected, atol=1e-5, rtol=1e-5)


def test_a_part_that_a_file_lacks_is_missed_by_its_own_name():
    ours = layers_of("Llama")[1]
    state = ours.state_dict()
    del state["self_attn.k_proj.weight"]
    missing = ours.load_state_dict(state, strict=False).missing_keys
    assert missing == ["self_attn.qkv.weight"]


def test_a_target_packed_twice_decodes_the_same_images_with_its_identity_and_no_more_weights():
    sampling, tree = Sampling(3.0, temperature=2.0, top_k=7), Tree.from_paths([[0], [1], [0, 0]])
    images = []
    for times in (0, 2):
        network = llamagen()
        target = TransformerTarget(network, captions, sampling, granularity=4)
        size, identity = target.weight_bytes, identity_of(network)
        for _ in range(times):
            target.pack()
        assert (target.weight_bytes, target.identity) == (size, identity)
        drafter = StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), tree)
        streams = RandomStreams(0, PROMPTS)
        images.append(decode(target, drafter, Exact(), streams, PROMPTS).tokens)
    layers = sum(parameter.nbytes for parameter in llamagen().model.layers.parameters())
    assert size == layers + network.model.norm.weight.nbytes + 11 * 16 * 4
    assert not any(isinstance(module, nn.Linear) for module in network.model.modules())
    assert torch.equal(*images)
