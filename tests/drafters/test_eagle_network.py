import json
import sys
from dataclasses import asdict, replace

import pytest
import tiny_networks
import torch
from safetensors.torch import save_file
from tiny_networks import GRID, PREFIX, VOCAB, TextLlama, lively, llamagen, tiny_eagle, tiny_target

from tempera.drafters import eagle_fused
from tempera.drafters.draft_network import torch_dtype
from tempera.drafters.eagle_fused import FastEagle, inputs
from tempera.drafters.eagle_network import EagleModel, eagle_network, shifted
from tempera.errors import TemperaError
from tempera.targets.cache import KVCache, SlotMask
from tempera.targets.masks import causal_mask


def sequence(eagle: EagleModel, rows: int = 3, length: int = 9):
    generator = torch.Generator().manual_seed(0)
    embeds, hidden = torch.randn(2, rows, length, eagle.config.hidden_size, generator=generator)
    keep = torch.arange(PREFIX) >= torch.arange(rows)[:, None]
    return (
        embeds,
        hidden,
        causal_mask(keep, length, torch.float32),
        torch.arange(length).expand(rows, -1),
    )


def families():
    return {"llamagen": llamagen(), "llama": lively(TextLlama())}


def test_it_reads_no_later_token_and_trains():
    eagle = tiny_eagle(tiny_target())
    embeds, hidden, mask, positions = sequence(eagle)
    predicted = eagle(embeds, hidden, mask, positions)
    assert predicted.shape == hidden.shape
    embeds[:, 6:], hidden[:, 6:] = 0, 1
    torch.testing.assert_close(eagle(embeds, hidden, mask, positions)[:, :6], predicted[:, :6])
    predicted.square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in eagle.parameters()
    )


def test_features_of_every_layer_have_a_root_mean_square_of_one():
    embeds, last = torch.randn(2, 2, 3, 4)
    early, late = 5 * torch.randn(2, 3, 4), torch.zeros(2, 3, 4)
    read = inputs(embeds, torch.cat([last, early, late], -1))
    size = early.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(read, torch.cat([embeds, last, early / size, late], -1))
    assert inputs(embeds, last).equal(torch.cat([embeds, last], -1))


def test_a_draft_computes_in_the_dtype_that_is_named():
    assert torch_dtype(None) is None
    for name in ("float32", "bfloat16", "float16"):
        assert torch_dtype(name) is getattr(torch, name)


def test_training_starts_from_random_weights_or_from_a_draft(monkeypatch):
    target, trained = tiny_target(), tiny_eagle(tiny_target())
    monkeypatch.setattr(EagleModel, "from_pretrained", {"draft": trained}.__getitem__)
    assert eagle_network(target, "tiny", "draft") is trained
    fresh = eagle_network(target, "tiny", features=[1])
    assert fresh.config.model == "tiny" and fresh.config.features == (1,)


def test_a_draft_is_one_layer_and_one_projection():
    target = tiny_target()
    eagle = tiny_eagle(target)
    layer = sum(parameter.numel() for parameter in target.network.model.layers[0].parameters())
    assert sum(parameter.numel() for parameter in eagle.parameters()) == layer + 2 * 16 * 16 + 16
    assert type(eagle.layer) is type(target.network.model.layers[0]) and type(eagle.rotary) is type(
        target.network.model.rotary_emb
    )


@pytest.mark.parametrize("family", ["llamagen", "llama"])
@pytest.mark.parametrize("joined", [True, False])
def test_drafting_computes_what_training_computes(family, joined, monkeypatch):
    network = families()[family]
    eagle = lively(EagleModel.of(network, "tiny"), 1)
    if not joined:
        monkeypatch.setattr(eagle_fused, "merge", lambda layer: False)
    fast = FastEagle(eagle, torch.device("cpu"), torch.float32)
    embeds, hidden, mask, positions = sequence(eagle)
    heads = eagle.layer.self_attn.k_proj.out_features // eagle.layer.self_attn.head_dim
    cache = KVCache(
        1,
        3,
        heads,
        eagle.layer.self_attn.head_dim,
        16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        expected = eagle(embeds, hidden, mask, positions)
        cache.place(positions[:, :5], 5)
        first = fast(
            embeds[:, :5],
            hidden[:, :5],
            mask[:, :, :5, :5],
            fast.rotation(hidden, positions[:, :5]),
            cache,
        )
        cache.place(positions[:, 5:], 9)
        second = fast(
            embeds[:, 5:],
            hidden[:, 5:],
            mask[:, :, 5:],
            fast.rotation(hidden, positions[:, 5:]),
            cache,
        )
    torch.testing.assert_close(torch.cat([first, second], 1), expected, atol=1e-5, rtol=1e-4)


def test_drafting_has_its_own_copy_of_the_weights():
    eagle = tiny_eagle(tiny_target()).train()
    fast = FastEagle(eagle, torch.device("cpu"), torch.bfloat16)
    assert (
        eagle.training
        and eagle.fc.weight.dtype == torch.float32
        and fast._fc(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    )


def test_a_float16_draft_has_its_weights_rounded_and_computes_in_float32_on_a_cpu():
    eagle = tiny_eagle(tiny_target())
    fast = FastEagle(eagle, torch.device("cpu"), torch.float16)
    found = fast._fc(torch.eye(32)) - fast._fc(torch.zeros(1, 32))
    rounded = eagle.fc.weight.half().float().t()
    assert not torch.equal(rounded, eagle.fc.weight.t())
    torch.testing.assert_close(found, rounded, atol=1e-6, rtol=0)


def test_masks_hide_all_padding_in_bfloat16():
    mask = SlotMask(torch.ones(2, 2, dtype=torch.bool).tril(), 8, torch.bfloat16).at(
        torch.tensor([3]), 8
    )
    assert mask.dtype == torch.bfloat16 and mask[0, 0].softmax(-1)[0].count_nonzero() == 4


def test_shifted_hidden_states_are_zero_before_the_first_real_token():
    hidden = torch.ones(2, 6, 3)
    keep = torch.tensor([[False, True, True, True], [True, True, True, True]])
    assert shifted(hidden, keep)[..., 0].tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]
    assert shifted(hidden[:, :3], keep)[..., 0].tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("family", ["llamagen", "llama"])
def test_a_saved_draft_loads_unchanged(tmp_path, family, monkeypatch):
    monkeypatch.setitem(sys.modules, "tempera.targets.text_llama", tiny_networks)
    eagle = lively(EagleModel.of(families()[family], "tiny", features=(1,)), 1)
    eagle.save_pretrained(tmp_path / "draft")
    eagle.save_pretrained(tmp_path / "draft")
    assert sorted(file.name for file in (tmp_path / "draft").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    again = EagleModel.from_pretrained(tmp_path / "draft")
    assert json.loads(json.dumps(asdict(again.config))) == json.loads(
        json.dumps(asdict(eagle.config) | {"network": again.config.network})
    )
    assert again.features == eagle.features == (1,)
    assert all(
        torch.equal(a, b) for a, b in zip(eagle.parameters(), again.parameters(), strict=True)
    )
    assert torch.equal(eagle.eval()(*sequence(eagle)), again.eval()(*sequence(eagle)))


def test_the_configuration_records_the_target(tmp_path):
    target = tiny_target()
    tiny_eagle(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {
        name: config[name] for name in ("hidden_size", "vocab_size", "target", "model", "family")
    } == {
        "hidden_size": 16,
        "vocab_size": VOCAB,
        "target": target.identity,
        "model": "tiny",
        "family": "llamagen",
    }
    assert config["network"]["grid"] == list(GRID)


def test_a_draft_of_another_target_is_refused():
    target = tiny_target()
    eagle = tiny_eagle(target)
    eagle.check(target)
    for network, what in (
        (llamagen(hidden_size=8), "hidden size 8"),
        (llamagen(seed=1), "with weights"),
        (llamagen(), None),
    ):
        other = EagleModel.of(network, "other")
        if what is None:
            other.check(target)
            continue
        with pytest.raises(TemperaError, match=what):
            other.check(target)
    with pytest.raises(TemperaError, match=r"made for tiny, has vocabulary 12, the target 11"):
        EagleModel(replace(eagle.config, vocab_size=12)).check(target)


def test_unreadable_drafts_are_reported_in_one_sentence(tmp_path):
    def refuses(what, path=tmp_path / "draft"):
        with pytest.raises(TemperaError, match=what):
            EagleModel.from_pretrained(path)

    eagle = tiny_eagle(tiny_target())
    refuses("there is no directory")
    refuses("is a pickle, which can run code", tmp_path / "draft.pt")
    weights, config = tmp_path / "draft" / "model.safetensors", tmp_path / "draft" / "config.json"
    eagle.save_pretrained(tmp_path / "draft")
    whole, text = weights.read_bytes(), config.read_text()
    for length in (0, 5, 200, len(whole) - 1):
        weights.write_bytes(whole[:length])
        refuses("is truncated or no safetensors file")
    torch.save(eagle.state_dict(), weights)
    refuses("is a pickle by its content")
    weights.unlink()
    refuses("holds no model.safetensors")
    torch.save(eagle.state_dict(), weights.with_name("pytorch_model.bin"))
    refuses(r"holds a pickle \(pytorch_model.bin\) where model.safetensors is expected")
    save_file({**eagle.state_dict(), "fc.bias": torch.zeros(3)}, weights)
    refuses(r"does not fit .*config.json \(first at fc.bias\)")
    save_file({"surplus": torch.zeros(3), **eagle.state_dict()}, weights)
    refuses("first at surplus")
    weights.write_bytes(whole)
    EagleModel.from_pretrained(str(tmp_path / "draft"))
    config.write_text(text[:-10])
    refuses("is not valid JSON")
    config.write_text(json.dumps({"hidden_size": 16}))
    refuses(r"does not describe a draft of the kind eagle")
    config.write_text(json.dumps({**json.loads(text), "network": {"hidden_size": 16}}))
    refuses(r"does not describe a draft of the kind eagle")
    config.write_text(json.dumps({**json.loads(text), "family": "mamba"}))
    refuses("no EAGLE draft for networks of the family 'mamba'")
    config.unlink()
    refuses("config.json")
