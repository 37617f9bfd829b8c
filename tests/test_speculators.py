"""Drafts in the format of the `speculators` library. What its own classes make of them is in the
last test, which needs the library (0.9.0; it is not among the test requirements, as it wants an
older transformers): `pip install speculators==0.9.0`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from held_models import Held, chameleon, emu3, glm_image, janus
from markdown_pages import blocks
from paths import ROOT
from safetensors.torch import load_file, save_file

import tempera
from tempera import TemperaError
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle3 import Eagle3Model
from tempera.wrapped.ids import generate_ids
from tempera.wrapped.speculators import export_draft

SHAPES = {
    "d2t": [13],
    "fc.weight": [32, 64],
    "fc_norm.0.weight": [32],
    "fc_norm.1.weight": [32],
    "layers.0.hidden_norm.weight": [32],
    "layers.0.input_layernorm.weight": [32],
    "layers.0.mlp.down_proj.weight": [32, 48],
    "layers.0.mlp.gate_proj.weight": [48, 32],
    "layers.0.mlp.up_proj.weight": [48, 32],
    "layers.0.post_attention_layernorm.weight": [32],
    "layers.0.self_attn.k_proj.weight": [16, 64],
    "layers.0.self_attn.o_proj.weight": [32, 32],
    "layers.0.self_attn.q_proj.weight": [32, 64],
    "layers.0.self_attn.v_proj.weight": [16, 64],
    "lm_head.weight": [13, 32],
    "norm.weight": [32],
    "t2d": [40],
}
"""Tensors that `Eagle3DraftModel` of speculators 0.9.0 reads for such sizes, but for the embedding
and what it takes from the target.
"""


def trained(held: Held, place: Path, kind: type[Any] = Eagle3Model) -> Path:
    """A draft in our layout, with weights that count."""
    fast = held.accelerated("ar")
    torch.manual_seed(4)
    network = kind.of(fast.pipeline.target.network, "tiny", fast.pipeline.target.vocab_size, "x")
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape) / 3 + (weight.dim() == 1))
    save_draft(network, place)
    return place


def exported(held: Held, tmp_path: Path, verifier: str = "owner/name") -> Path:
    draft = trained(held, tmp_path / "draft")
    export_draft(draft, held.accelerated("ar"), tmp_path / "speculator", verifier)
    return tmp_path / "speculator"


def test_names_and_shapes_are_those_that_the_library_reads(tmp_path: Path) -> None:
    place = exported(emu3(), tmp_path)
    tensors = load_file(place / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    ids = tensors["t2d"].nonzero().flatten()
    assert ids.tolist() == [20, *range(24, 36)]
    assert torch.equal(torch.arange(13) + tensors["d2t"], ids)
    config = json.loads((place / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/name"


def test_the_code_of_the_page_exports_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model in place of the published one."""
    held = emu3()
    monkeypatch.chdir(tmp_path)
    trained(held, Path("outputs/train_draft/emu3-eagle3/draft"))
    fast = held.accelerated("ar")
    monkeypatch.setattr(tempera, "accelerate", lambda *_: fast)
    (code,) = blocks(ROOT / "docs" / "training.md", "python")
    exec(compile(code, "docs/training.md", "exec"), {"model": held.model, "processor": None})
    assert "BAAI/Emu3-Gen-hf" in Path("speculator/config.json").read_text()
    assert load_file("speculator/model.safetensors").keys() == SHAPES.keys()


@pytest.mark.parametrize("make", [emu3, chameleon])
def test_a_draft_that_came_back_drafts_the_same(make: Any, tmp_path: Path) -> None:
    held = make()
    place = exported(held, tmp_path)

    def made(path: Path) -> Any:
        fast = held.accelerated("eagle", drafter="eagle3", draft=path)
        drafter = fast.pipeline.method.drafter
        return generate_ids(fast, **held.ids), drafter.model.run.network.state_dict()

    (ours, first), (theirs, second) = made(tmp_path / "draft"), made(place)
    assert torch.equal(ours, held.greedy()) and torch.equal(theirs, ours)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_the_format_cannot_say(tmp_path: Path) -> None:
    for held, sentence in (
        (glm_image(), "only supports one-dimensional positions"),
        (janus(), "embeds the codes of images separately"),
    ):
        with pytest.raises(TemperaError, match=sentence):
            exported(held, tmp_path / sentence[:5])
    held = emu3()
    with pytest.raises(TemperaError, match="the model that tempera.accelerate returned"):
        export_draft(tmp_path, tempera.load(method="ar"), tmp_path / "out", "owner/name")
    with pytest.raises(TemperaError, match="has vocabulary 11, but the target has 13"):
        draft = trained(chameleon(), tmp_path / "other")
        export_draft(draft, held.accelerated("ar"), tmp_path / "out", "owner/name")


def test_drafts_that_do_not_fit(tmp_path: Path) -> None:
    held = emu3()
    place = exported(held, tmp_path)
    config, weights = place / "config.json", place / "model.safetensors"
    text, tensors = config.read_text(), load_file(weights)

    def refused(sentence: str) -> None:
        with pytest.raises(TemperaError, match=sentence):
            held.accelerated("eagle", drafter="eagle3", draft=place)
        config.write_text(text)
        save_file(tensors, weights)

    config.write_text(text.replace('"norm_output": true', '"norm_output": false'))
    refused("norm_output=false, .*need true")
    config.write_text(text.replace('"eagle3"', '"dflash"'))
    refused('speculators_model_type="dflash"')
    config.write_text(text.replace('"num_attention_heads": 4', '"num_attention_heads": 8'))
    refused("num_attention_heads=8, .*need 4")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 2}, weights)
    refused("has its own head")
    save_file({**tensors, "t2d": ~tensors["t2d"]}, weights)
    refused("drafts tokens that are not")


def test_the_library_computes_the_same(tmp_path: Path) -> None:
    """A forward pass over a sequence, and one step behind it on its own states."""
    pytest.importorskip("speculators")
    from speculators.model import SpeculatorModel  # type: ignore[import-not-found]

    held, count = emu3(), 128  # its attention wants a multiple of 128
    held.model.save_pretrained(tmp_path / "target")
    place = exported(held, tmp_path, str(tmp_path / "target"))
    theirs = SpeculatorModel.from_pretrained(place)
    states: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda *call: states.append(call[2]))
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(24, 36, (1, count), generator=random)
    features = torch.randn(1, count, 64, generator=random)
    with torch.no_grad():
        theirs(features, ids, torch.zeros(1, count, dtype=torch.int64), ttt_steps=2)

    fast = held.accelerated("eagle", drafter="eagle3", draft=place)
    draft = fast.pipeline.method.drafter.model.run.network
    later = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    embeds = held.model.get_input_embeddings()(torch.cat([ids, later], 1))
    turns = fast.pipeline.target.network.model.rotary.table(count + 1, 1, torch.device("cpu"))
    turns = torch.cat([turns[:, :count], turns[:, 1:]], 1)[:, None]
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    seen = (
        torch.cat([causal, torch.zeros_like(causal)], 1),
        torch.cat([causal, causal & causal.T], 1),
    )
    mask = torch.zeros(1, 1, 2 * count, 2 * count).masked_fill_(~torch.cat(seen), -1e9)
    read = torch.cat([torch.zeros(1, count, 32), features], -1)
    with torch.no_grad():
        one = draft(embeds[:, :count], read, mask[..., :count, :count], turns[:, :, :count])
        own = torch.cat([one, torch.zeros_like(features)], -1)
        two = draft(embeds, torch.cat([read, own], 1), mask, turns)
        ours = (two @ held.model.lm_head.weight[[20, *range(24, 36)]].T).split(count, 1)
    for mine, logits in zip(ours, states, strict=True):
        torch.testing.assert_close(mine[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-3)
    assert states[0].std() > 0.1
