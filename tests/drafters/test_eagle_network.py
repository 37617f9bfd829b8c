import json
from dataclasses import replace

import pytest
import torch
from tiny_networks import PREFIX, lively, llamagen, text_target, tiny_eagle, tiny_target

from tempera.decoding.probabilities import Sampling
from tempera.drafters.draft_files import check_target, read_draft, save_draft
from tempera.drafters.eagle_network import EagleModel, eagle_network
from tempera.errors import TemperaError
from tempera.targets.masks import causal_mask
from tempera.targets.rotary import Rotary


def sequence(eagle: EagleModel, rows: int = 3, length: int = 9):
    generator = torch.Generator().manual_seed(0)
    width = eagle.config.layer_sizes.width
    embeds = torch.randn(rows, length, width, generator=generator)
    hidden = torch.randn(rows, length, (1 + len(eagle.features)) * width, generator=generator)
    keep = torch.arange(PREFIX) >= torch.arange(rows)[:, None]
    mask = causal_mask(keep, length, torch.float32)
    rotation = Rotary(eagle.layer.self_attn.head_dim, 100.0).table(length, PREFIX, mask.device)
    return embeds, hidden, mask, rotation[:, None]


NETWORKS = {"llamagen": llamagen, "emu3": lambda: text_target(Sampling(2.0)).network}


def test_training_starts_from_random_weights_or_from_a_draft(tmp_path):
    target = tiny_target()
    draft, start = tiny_eagle(target), eagle_network
    save_draft(draft, tmp_path)
    again, fresh = start(target, "tiny", str(tmp_path)), start(target, "tiny", features=[1])
    assert all(again.state_dict()[name].equal(x) for name, x in draft.state_dict().items())
    assert (again.features, fresh.features, fresh.config.model) == ((), (1,), "tiny")
    assert not fresh.layers[0].mlp.down_proj.weight.equal(draft.layers[0].mlp.down_proj.weight)


@pytest.mark.parametrize("family", NETWORKS)
def test_a_saved_draft_loads_unchanged(tmp_path, family):
    eagle = lively(EagleModel.of(NETWORKS[family](), "tiny", features=(1,)), 1)
    for _ in range(2):
        save_draft(eagle, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = read_draft(EagleModel, tmp_path)
    assert again.features == eagle.features == (1,)
    assert torch.equal(eagle.eval()(*sequence(eagle)), again.eval()(*sequence(eagle)))


def test_a_draft_of_another_target_is_refused():
    target = tiny_target()
    eagle = tiny_eagle(target)
    check_target(eagle, target)
    for other, what in (
        (EagleModel.of(llamagen(hidden_size=8), "other"), "hidden size 8"),
        (EagleModel.of(llamagen(seed=1), "other"), "with weights"),
        (
            EagleModel(replace(eagle.config, vocab_size=12)),
            "has vocabulary 12, but the",
        ),
    ):
        with pytest.raises(TemperaError, match=what):
            check_target(other, target)


def test_unreadable_drafts_are_reported_in_one_sentence(tmp_path):
    eagle = tiny_eagle(tiny_target())
    save_draft(eagle, tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()

    def refuses(what, path=tmp_path):
        with pytest.raises(TemperaError, match=what):
            read_draft(EagleModel, path)

    refuses("there is no directory", tmp_path / "none")
    weights.unlink()
    refuses("contains no model.safetensors")
    weights.write_bytes(whole)
    values = json.loads(text)
    for content, what in (
        (text[:-10], "is not valid JSON"),
        (json.dumps(values | {"layer_sizes": {"width": 16}}), "does not describe a draft of"),
        (
            json.dumps(values | {"family": "mamba"}),
            r"type eagle \(it has no field family",
        ),
    ):
        config.write_text(content)
        refuses(what)
    earlier = {name: value for name, value in values.items() if name != "layer_sizes"}
    config.write_text(json.dumps(earlier | {"family": "llamagen", "network": {}}))
    model = values["model"]
    refuses(
        f"has no layer_sizes: train the draft again.*model={model} draft=eagle training.steps=1 "
    )
