"""A layer with merged projections computes what Hugging Face's layer computes."""

import copy

import pytest
import torch
from tiny_networks import PROMPTS, captions, lively, llamagen, tiny_eagle
from torch import nn
from transformers import LlamaConfig

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.rules.standard import Exact
from tempera.runtime import huggingface
from tempera.runtime.network_identity import identity_of
from tempera.targets.cache import KVCache
from tempera.targets.masks import causal_mask
from tempera.targets.merged_layer import MergedAttention, merge
from tempera.targets.rotary import Rotary
from tempera.targets.transformer import TransformerTarget

SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attn_implementation": "sdpa",
}


def layer_of(family: str) -> nn.Module:
    """A decoder layer with norms that do something; Llama's and Emu3's share keys among heads."""
    if family == "chameleon":
        config = huggingface.ChameleonConfig(**SIZES, num_key_value_heads=4, vocabulary_map={})
        layer = huggingface.ChameleonDecoderLayer(config, layer_idx=0)
    elif family == "emu3":
        config = huggingface.Emu3TextConfig(**SIZES, num_key_value_heads=2)
        layer = huggingface.Emu3DecoderLayer(config, layer_idx=0)
    else:
        config = LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=family == "biases")
        layer = huggingface.LlamaDecoderLayer(config, layer_idx=0)
    lively(layer, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or name.endswith("bias"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return layer.eval()


def in_two_passes(layer: nn.Module, x: torch.Tensor, head_size: int = 8) -> torch.Tensor:
    """The layer over nine tokens, five and then four through a cache of two rows."""
    kv_heads = 4 if isinstance(layer, huggingface.ChameleonDecoderLayer) else 2
    mask = causal_mask(torch.ones(2, 9, dtype=torch.bool), 9, x.dtype)
    cache = KVCache(1, kv_heads, head_size, dtype=x.dtype, device=x.device)
    cache.begin(2, 16)
    out = []
    for first, last in ((0, 5), (5, 9)):
        positions = torch.arange(first, last).expand(2, -1)
        cache.place(positions, last)
        tokens = x[:, first:last]
        result = layer(
            tokens,
            attention_mask=mask[:, :, first:last, :last],
            position_embeddings=Rotary(8, 10000.0)(tokens, positions),
            past_key_values=cache,
            use_cache=True,
        )
        out.append(result if isinstance(result, torch.Tensor) else result[0])
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", ["llama", "biases", "emu3", "chameleon"])
@torch.no_grad()
def test_the_same_hidden_states(family):
    layer, x = layer_of(family), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    expected = in_two_passes(layer, x)
    assert merge(layer) and isinstance(layer.self_attn, MergedAttention)
    torch.testing.assert_close(in_two_passes(layer, x), expected, atol=2e-5, rtol=1e-4)
    assert merge(layer)  # once more changes nothing
    torch.testing.assert_close(in_two_passes(layer, x), expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_no_further_from_the_truth_in_bfloat16_than_the_layer_itself():
    layer, x = layer_of("emu3"), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    half, y = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    truth = in_two_passes(copy.deepcopy(half).float(), y.float())
    plain = (in_two_passes(half, y).float() - truth).square().mean()
    assert merge(half)
    assert (in_two_passes(half, y).float() - truth).square().mean() < 2 * plain


@pytest.mark.parametrize("head_size", [8, 16])
@torch.no_grad()
def test_attention_asks_for_nothing_that_cuda_computes_slowly(head_size, monkeypatch):
    """With a mask, grouped keys and odd head sizes fall to the math kernel there."""
    layer, x = layer_of("emu3"), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    expected, inner = in_two_passes(layer, x), nn.functional.scaled_dot_product_attention
    assert merge(layer)

    def spy(query, key, value, **options):
        assert "enable_gqa" not in options and query.shape[1] == key.shape[1] == value.shape[1]
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == head_size
        return inner(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    torch.testing.assert_close(in_two_passes(layer, x, head_size), expected, atol=2e-5, rtol=1e-4)


def test_a_target_fused_twice_decodes_the_same_images_with_its_identity_and_no_more_weights():
    sampling, tree = Sampling(3.0, temperature=2.0, top_k=7), Tree.from_paths([[0], [1], [0, 0]])
    images, found = [], []
    for times in (0, 2):
        network = llamagen()
        target = TransformerTarget(network, captions, sampling, granularity=4)
        size, identity = target.weight_bytes, identity_of(network)
        for _ in range(times):
            target.fuse()
        assert (target.weight_bytes, target.identity) == (size, identity)
        score = target.score
        target.score = lambda draft, score=score: found.append(score(draft)) or found[-1]
        drafter = StaticTreeDrafter(EagleDraft(tiny_eagle(target), target), tree)
        streams = RandomStreams(0, PROMPTS)
        images.append(decode(target, drafter, Exact(), streams, PROMPTS).tokens)
    layers = sum(parameter.nbytes for parameter in llamagen().model.layers.parameters())
    assert size == layers + network.model.norm.weight.nbytes + 11 * 16 * 4
    assert target.fused and not any(isinstance(one, nn.Linear) for one in network.model.modules())
    assert not isinstance(network.lm_head, nn.Linear)
    assert torch.equal(*images)
    plain, fused = found[: len(found) // 2], found[len(found) // 2 :]
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(other.p, one.p, atol=1e-5, rtol=1e-3)


def test_a_network_of_other_layers_stays_as_it_is():
    layer, network = nn.Linear(2, 2), llamagen()
    assert not merge(layer) and not hasattr(layer, "mlp")
    network.model.layers[1] = nn.Identity()
    target = TransformerTarget(network, captions, Sampling())
    target.fuse()
    assert not target.fused
