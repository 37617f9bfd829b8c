"""Drafts in EAGLE-1's public layout: what they draft equals a forward pass written here, from the
file on, and other files are refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import Hub
from reference_transformer import grid_turns, layer, line_turns
from safetensors.torch import save_file
from tiny_networks import (
    GRID,
    PREFIX,
    PROMPTS,
    TREE,
    VOCAB,
    check_q,
    full_hidden,
    random_rounds,
    text_target,
    tiny_eagle,
    tiny_target,
)
from tiny_targets import HUGGING_FACE
from torch import Tensor
from torch.nn.functional import embedding, linear

from tempera.decoding.probabilities import Sampling
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle_layout import INPUTS
from tempera.drafters.eagle_network import build_eagle, build_eagle2
from tempera.drafters.parallel_network import build_parallel
from tempera.errors import TemperaError
from tempera.targets.chameleon import CHAMELEON

WIDTH, HEADS, SIZE, INNER, FIRST, IDS = 16, 2, 8, 24, 4, 20
EPSILON = 0.3
"""Large enough to tell it from the target's."""


def target_of(family: str) -> Any:
    if family == "llamagen":
        return tiny_target(Sampling(3.0, 2.0))
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "swin_norm": False}
    return text_target(Sampling(3.0, 2.0), family=CHAMELEON, model_parallel_size=None, **sizes)


def published(
    family: str, directory: Path, target: Any, file: str = "pytorch_model.bin", **stated: Any
) -> dict[str, Tensor]:
    """The tensors of a draft, which are written to a directory as EAGLE's code saves them. Text is
    embedded as by the target, LlamaGen's codes otherwise.
    """
    llamagen, generator = family == "llamagen", torch.Generator().manual_seed(7)
    shapes = {
        "embed_tokens.weight": (VOCAB if llamagen else IDS, WIDTH),
        "fc.weight": (WIDTH, 2 * WIDTH),
        **{f"layers.0.mlp.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": (WIDTH, INNER),
        "layers.0.post_attention_layernorm.weight": (WIDTH,),
        **{f"layers.0.self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"},
    }
    norms = (f"layers.0.self_attn.{one}_norm.{kind}" for one in "qk" for kind in ("weight", "bias"))
    if llamagen:
        shapes["fc.bias"] = (WIDTH,)
    else:
        shapes |= {
            "layers.0.input_layernorm.weight": (WIDTH,),
            **dict.fromkeys(norms, (HEADS, SIZE)),
        }
    tensors = {name: torch.randn(s, generator=generator) / 3 for name, s in shapes.items()}
    if not llamagen:
        tensors["embed_tokens.weight"] = target.network.model.embed_tokens.weight.detach().clone()
    directory.mkdir(exist_ok=True)
    (torch.save if file.endswith(".bin") else save_file)(tensors, directory / file)
    config = {"num_attention_heads": HEADS, "rms_norm_eps": EPSILON, "rope_scaling": None}
    config |= {"model_type": "llama" if llamagen else family, **stated}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def reference(
    family: str, draft: dict[str, Tensor], ids: Tensor, hidden: Tensor, first: int
) -> Tensor:
    """The public code's forward pass over pairs of ids and the hidden states before them, [S] and
    [S, H] → [S, H]; the first of an image is pair `first`.
    """
    x = torch.cat([embedding(ids, draft["embed_tokens.weight"]), hidden], -1)
    x = linear(x, draft["fc.weight"], draft.get("fc.bias")).double()
    roles, llamagen = HUGGING_FACE.roles.items(), family == "llamagen"
    names = ((role, f"layers.0.{name}") for role, name in roles)
    weights = {role: draft[name] for role, name in names if name in draft}
    turns = grid_turns(first, len(x), SIZE, GRID[1]) if llamagen else line_turns(len(x), SIZE)
    return layer(x, weights, (HEADS, HEADS), turns, llamagen, EPSILON).float()


def drafted(
    family: str, draft: dict[str, Tensor], target: Any, prompt: str, image: Tensor, path: list[int]
) -> Tensor:
    """What the public code predicts behind image ‖ path, [R of one prompt, H]: captions are code 0
    in LlamaGen, padding and all; other prompts are their ids.
    """
    condition, keep = target.conditioner([prompt])
    rows = []
    for drop, hidden in enumerate(full_hidden(target, [prompt], [image])[0]):
        if family == "llamagen":
            ids, states = torch.zeros(PREFIX - 1, dtype=torch.int64), hidden
            image_ids = torch.tensor([*image.tolist(), *path], dtype=torch.int64)
        else:
            seen = target.network.embed_prefix(condition, keep, torch.tensor([bool(drop)]))[1][0]
            ids = condition[0, drop][seen][1:]
            states = torch.cat([hidden[: len(seen)][seen], hidden[len(seen) :]])
            image_ids = FIRST + torch.tensor([*image.tolist(), *path], dtype=torch.int64)
        first, ids = len(ids), torch.cat([ids, image_ids])
        states = states[: first + len(image)]
        while True:
            out = reference(family, draft, ids[: len(states)], states, first)[-1]
            if len(states) == len(ids):
                break
            states = torch.cat([states, out[None]])
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("family", "file"), [("llamagen", "pytorch_model.bin"), ("chameleon", "model.safetensors")]
)
@torch.no_grad()
def test_it_drafts_what_the_public_code_predicts(family, file, tmp_path):
    target, prompts = target_of(family), PROMPTS[1:4:2]
    draft = published(family, tmp_path, target, file)
    drafter = build_eagle(str(tmp_path), target, TREE)
    rounds = random_rounds(target, drafter, prompts, torch.Generator().manual_seed(1))
    for proposed, images in rounds:
        for row, image in enumerate(images):

            def law(path, row=row, image=image):
                hidden = drafted(family, draft, target, prompts[row], image, path)[:, None]
                return target.sampling.distribution(target.head.lm_logits(hidden))[0, 0]

            check_q(proposed, row, law, target.length - len(image) - 1)


class Payload:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ({"num_attention_heads": 4}, "num_attention_heads=4, but the target has 2"),
        ({"rope_theta": 1e6}, "rope_theta=1000000.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ({"model_type": "chameleon"}, "model_type=chameleon"),
        ({"input_type": "t2i"}, "input_type=t2i"),
    ],
)
def test_a_draft_of_another_target_is_refused(stated, word, tmp_path, monkeypatch):
    target = target_of("llamagen")
    monkeypatch.setitem(INPUTS, target.length, "t2i2")
    published("llamagen", tmp_path, target, **stated)
    with pytest.raises(TemperaError, match=word):
        build_eagle2(str(tmp_path), target)


def test_other_files_are_refused_and_nothing_is_unpickled(tmp_path):
    target = target_of("llamagen")
    tensors = published("llamagen", tmp_path, target)
    with pytest.raises(TemperaError, match="a draft of type parallel|model.safetensors"):
        build_parallel(str(tmp_path), target, TREE)
    for changed, word in (
        ({**tensors, "fc.weight": Payload()}, "more than tensors"),
        ({**tensors, "norm.weight": torch.ones(WIDTH)}, "norm.weight"),
        ({**tensors, "embed_tokens.weight": torch.ones(7, WIDTH)}, "embed_tokens.weight"),
    ):
        torch.save(changed, tmp_path / "pytorch_model.bin")
        with pytest.raises(TemperaError, match=word):
            build_eagle(str(tmp_path), target, TREE)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(TemperaError, match="contains no model.safetensors"):
        build_eagle(str(tmp_path), target, TREE)


def test_drafts_of_either_layout_come_from_the_hub(tmp_path, monkeypatch):
    target = target_of("llamagen")
    published("llamagen", tmp_path / "public", target)
    save_draft(tiny_eagle(target), tmp_path / "ours")
    with Hub(tmp_path / "cache") as hub:
        hub.here(monkeypatch)
        for name in ("public", "ours"):
            hub.add_directory(f"owner/{name}", tmp_path / name, revision="v1")
            for build in (build_eagle, lambda *given: build_eagle2(*given[:2], 3, 3, 8)):
                drafter = build(f"owner/{name}@v1", target, TREE)
                local = build(str(tmp_path / name), target, TREE)
                assert drafter.identity == local.identity is not None
        assert len(hub.downloads()) == len({*hub.downloads()}) + 1 == 4  # config.json of both
        with pytest.raises(TemperaError, match="owner/none .* does not exist or is private"):
            build_eagle("owner/none", target, TREE)
