"""A layer with joined operations computes what Hugging Face's layer computes."""

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
from tempera.targets import fast_layer, session
from tempera.targets.fast_layer import (
    FastLayer,
    FastNorm,
    attend,
    attend_by_products,
    turned,
)
from tempera.targets.frozen_linear import FrozenLinear, HalfLinear
from tempera.targets.kv_cache import RowCache
from tempera.targets.masks import causal_mask
from tempera.targets.rotary import Rotary
from tempera.targets.transformer import TransformerTarget

SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-3,
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
        layer = huggingface.LlamaDecoderLayer(
            LlamaConfig(**SIZES, num_key_value_heads=2), layer_idx=0
        )
    lively(layer, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return layer.eval()


def in_two_passes(layer: nn.Module, x: torch.Tensor, fast: bool) -> torch.Tensor:
    """The layer over nine tokens, five and then four through a cache of two rows."""
    attention = layer.self_attn
    heads, size = attention.k_proj.out_features // attention.head_dim, attention.head_dim
    rotary = Rotary(size, 10000.0)
    mask = causal_mask(torch.ones(2, 9, dtype=torch.bool), 9, x.dtype)
    cache = RowCache(1, 2, heads, size, 16, dtype=x.dtype, device=x.device)
    joined, out = FastLayer(layer), []
    for first, last in ((0, 5), (5, 9)):
        positions = torch.arange(first, last).expand(2, -1)
        cache.place(positions, last)
        tokens, seen = x[:, first:last], mask[:, :, first:last, :last]
        rotation = rotary(tokens, positions)
        if fast:
            out.append(joined(tokens, seen, turned(*rotation), cache.layer(0)))
        else:
            result = layer(
                tokens,
                attention_mask=seen,
                position_embeddings=rotation,
                past_key_values=cache,
                use_cache=True,
            )
            out.append(result if isinstance(result, torch.Tensor) else result[0])
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", ["llama", "emu3", "chameleon"])
@torch.no_grad()
def test_the_same_hidden_states_in_float32(family):
    layer, x = layer_of(family), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    assert FastLayer.fits(layer)
    expected = in_two_passes(layer, x, fast=False)
    torch.testing.assert_close(in_two_passes(layer, x, fast=True), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "emu3", "chameleon"])
@torch.no_grad()
def test_weights_that_float16_has_are_kept_in_it(family):
    layer = layer_of(family).half().float()
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    kinds = {type(one) for one in FastLayer(layer).modules() if isinstance(one, FrozenLinear)}
    assert kinds == {HalfLinear}
    expected = in_two_passes(layer, x, fast=False)
    torch.testing.assert_close(in_two_passes(layer, x, fast=True), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("family", ["llama", "emu3", "chameleon"])
@torch.no_grad()
def test_no_further_from_the_truth_in_bfloat16_than_the_layer_itself(
    family, multiplies, monkeypatch
):
    monkeypatch.setattr(fast_layer, "computes_bfloat16", lambda device: multiplies)
    layer, x = layer_of(family), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    half, y = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    truth = in_two_passes(copy.deepcopy(half).float(), y.float(), fast=False)
    plain, fast = (
        (in_two_passes(half, y, fast=fast).float() - truth).square().mean().sqrt()
        for fast in (False, True)
    )
    assert fast < 1.5 * plain


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_by_products_is_attention(groups):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 8, generator=random)
    # as in the cache: the heads of a token are adjacent, and there are more tokens than are seen
    keys, values = torch.randn(2, 2, 9, 4 // groups, 8, generator=random)[:, :, :7].transpose(2, 3)
    hidden = torch.ones(3, 7).triu(5) > 0
    mask = torch.randn(2, 1, 3, 7, generator=random).masked_fill_(hidden, -1e9)
    expected = attend(query, keys, values, mask, 0.7)
    torch.testing.assert_close(attend_by_products(query, keys, values, mask, 0.7), expected)


@pytest.mark.parametrize("multiplies", [True, False])
def test_products_attend_only_in_bfloat16_on_processors_that_multiply_it(multiplies, monkeypatch):
    monkeypatch.setattr(fast_layer, "computes_bfloat16", lambda device: multiplies)
    layer = layer_of("llama")
    assert FastLayer(layer)._attend is attend
    half = FastLayer(layer.bfloat16())
    assert half._attend is (attend_by_products if multiplies else attend)
    assert FastLayer(layer.to("meta"))._attend is attend


def test_layers_with_biases_or_of_other_classes_are_left_alone():
    layer = layer_of("llama")
    layer.mlp.down_proj.bias = nn.Parameter(torch.zeros(32))
    assert not FastLayer.fits(layer)
    assert not FastLayer.fits(nn.Linear(2, 2))


@torch.no_grad()
def test_a_norm_and_the_projection_it_is_folded_into():
    norm, x = layer_of("llama").input_layernorm, 1e-2 * torch.randn(3, 32)
    projection = torch.randn(5, 32)
    fast = FastNorm(norm, projection)
    assert fast.folds
    expected = norm(x) @ projection.t()
    torch.testing.assert_close(fast(x) @ fast.fold(projection).t(), expected)
    half = FastNorm(copy.deepcopy(norm).bfloat16(), projection.bfloat16())
    torch.testing.assert_close(half.fold(projection), projection)
    close = {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(half(x.bfloat16()), norm(x).bfloat16(), **close)


def decoded(fuse: bool, tree: Tree) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a tiny target with a draft decodes, and the target's distributions in every round."""
    sampling = Sampling(3.0, temperature=2.0, top_k=7)
    target = TransformerTarget(llamagen(), captions, sampling, granularity=4)
    if fuse:
        target.fuse()
    draft = EagleDraft(tiny_eagle(target), target)
    score, laws = target.score, []

    def scored(proposal):
        scores = score(proposal)
        laws.append(scores.p)
        return scores

    target.score = scored
    streams = RandomStreams(0, PROMPTS)
    images = decode(target, StaticTreeDrafter(draft, tree), Exact(), streams, PROMPTS)
    return images.tokens, laws


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.from_paths([[0], [1], [0, 0], [1, 0]])])
def test_a_fused_target_decodes_the_same_images(tree):
    (plain, laws), (fused, others) = decoded(False, tree), decoded(True, tree)
    assert torch.equal(fused, plain)
    for law, other in zip(laws, others, strict=True):
        torch.testing.assert_close(other, law, atol=1e-5, rtol=1e-3)


def test_a_fused_target_keeps_its_identity_and_no_second_copy_of_its_weights():
    network = llamagen()
    identity, layers = (
        identity_of(network),
        sum(p.nbytes for p in network.model.layers.parameters()),
    )
    target = TransformerTarget(network, captions, Sampling())
    size = target.weight_bytes
    assert size == layers + network.model.norm.weight.nbytes + network.lm_head.weight.nbytes
    target.fuse()
    assert target.fused and target.identity == identity and target.weight_bytes == size
    assert all(isinstance(layer, FastLayer) for layer in network.model.layers)
    assert not list(network.model.layers.parameters()) and not list(network.lm_head.parameters())


def test_a_network_of_other_layers_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(session.FastLayer, "fits", lambda layer: False)
    target = TransformerTarget(llamagen(), captions, Sampling())
    target.fuse()
    assert not target.fused and list(target.network.model.layers.parameters())
