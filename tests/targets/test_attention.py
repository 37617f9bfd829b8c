"""A packed layer computes what Hugging Face's layer computes."""

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
from tempera.targets import attention
from tempera.targets.cache import KVCache
from tempera.targets.masks import causal_mask
from tempera.targets.packed_linear import pack
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
KV_HEADS = {"llama": 2, "chameleon": 4}


def layer_of(family: str) -> nn.Module:
    """A decoder layer; Llama's shares keys among heads."""
    sizes = {**SIZES, "num_key_value_heads": KV_HEADS[family]}
    if family == "chameleon":
        config = huggingface.ChameleonConfig(**sizes, vocabulary_map={})
        return lively(huggingface.ChameleonDecoderLayer(config, layer_idx=0), 3)
    config = LlamaConfig(**sizes, attention_bias=True)
    return lively(huggingface.LlamaDecoderLayer(config, layer_idx=0), 3)


def in_two_passes(
    layer: nn.Module, x: torch.Tensor, kv_heads: int, head_size: int = 8
) -> torch.Tensor:
    """The layer over nine tokens, five and then four through a cache of two rows."""
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
            position_embeddings=Rotary(LlamaConfig(**SIZES))(tokens, positions),
            past_key_values=cache,
            use_cache=True,
        )
        out.append(result if isinstance(result, torch.Tensor) else result[0])
    return torch.cat(out, 1)


@pytest.mark.parametrize(("family", "head_size"), [("llama", 16), ("chameleon", 8)])
@torch.no_grad()
def test_the_same_hidden_states_by_what_cuda_computes_fast(family, head_size, monkeypatch):
    """With a mask, grouped keys and odd head sizes fall to the math kernel there."""
    layer, x = layer_of(family), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    expected = in_two_passes(layer, x, KV_HEADS[family])
    inner = nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        assert "enable_gqa" not in options and query.shape[1] == key.shape[1] == value.shape[1]
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == head_size
        return inner(query, key, value, **options)

    pack(layer)
    attention.use(layer.self_attn)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    found = in_two_passes(layer, x, KV_HEADS[family], head_size)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


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
    assert not any(isinstance(one, nn.Linear) for one in network.model.modules())
    assert torch.equal(*images)
