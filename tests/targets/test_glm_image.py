"""GLM-Image as transformers saves it, against transformers; its prompts; and its pictures, against
diffusers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import composed, tiny_glm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tempera.config.parts import Parts
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.jacobi import sjd
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.targets.family import load_network
from tempera.targets.glm_image import (
    GLM_IMAGE,
    GlmDecoder,
    GlmDecoderConfig,
    glm_image,
    load_glm_decoder,
)
from tempera.targets.prompt_encoder import PADDING, load_prompts
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget

SIZES = {
    "vocab_size": 1,
    "vision_vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1.0,
    "rope_theta": 1.0,
    "partial_rotary_factor": 1.0,
    "mrope_section": [1],
}
"""Overridden by the file's own."""


def test_greedy_images_are_those_of_generate(tmp_path: Path) -> None:
    """Preview and image, from prompts of different lengths, drafted by SJD."""
    model = tiny_glm()
    model.save_pretrained(tmp_path / "vision_language_encoder")
    spec = ModelSpec(4, 6, 24, 0, ("{text}", 24), (), 512, preview=(2, 2))
    files = ["vision_language_encoder/model.safetensors"]
    network = load_network(GLM_IMAGE, spec, str(tmp_path), files, "hub", SIZES)
    ids = torch.tensor([[PADDING, PADDING, 40, 41, 24], [50, 51, 52, 53, 24]])
    condition = ids[:, None].expand(-1, 2, -1)
    target = TransformerTarget(
        network, lambda _: (condition, ids != PADDING), Sampling(1.0, temperature=0.0)
    )
    assert (target.length, target.grid) == (28, (4, 6))
    prompts = ["a", "b"]
    streams = RandomStreams(0, prompts)
    tokens = decode(target, sjd(target, window=6), Exact(), streams, prompts).tokens
    expected = model.generate(
        input_ids=ids.clamp(min=0),
        attention_mask=(ids != PADDING).long(),
        image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 2]] * 2),
        images_per_sample=torch.tensor([2, 2]),
        max_new_tokens=28,
        min_new_tokens=28,
        suppress_tokens=list(range(24, 32)),
    )
    assert len(expected[:, 5:].unique()) > 3
    assert torch.equal(tokens, expected[:, 5:])


def test_prompts_are_those_of_the_processor(tmp_path: Path) -> None:
    words = ["<unk>", "<sop>", "<eop>", "<user>", "a", "cat", "2", "3", "13", "19"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(words[:4])
    (tmp_path / "processor").mkdir()
    tokenizer.save(str(tmp_path / "processor/tokenizer.json"))
    template = tmp_path / "processor/chat_template.jinja"
    template.write_text("{% for turn in messages %}<user>{{ turn.content[0].text }}{% endfor %}")
    place = [str(tmp_path), ["processor/tokenizer.json"], "hub"]
    spec = glm_image(64, 96)
    encoder = load_prompts(spec, *place, template=["processor/chat_template.jinja"])  # type: ignore[arg-type]
    ids, _ = encoder.encode(["a cat"])
    assert ids[0, 0].tolist() == [3, 4, 5, 1, 6, 7, 2, 1, 8, 9, 2, 16384]
    template.write_text("{{ nothing }}")
    with pytest.raises(TemperaError, match="does not keep the text of a prompt"):
        load_prompts(spec, *place, template=["processor/chat_template.jinja"])  # type: ignore[arg-type]


def test_published_sizes() -> None:
    with Parts.of(composed("model=glm_image")).sized() as (sized, files):
        target: Any = sized.target()
        sized.tokenizer()
    assert target.length == 256 + 1024 and target.sampling.rows == 1
    weights = sum(weight.numel() for weight in target.network.parameters())
    assert round(weights / 1e9, 1) == 8.9
    names = {name for file in files for name in file.files}
    assert {"vision_language_encoder/model.safetensors", "processor/tokenizer.json"} < names


def test_guidance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemperaError, match="is not guided: give guidance=1"):
        Parts.of(composed("model=glm_image", "weights=random", "guidance=3", *tiny())).target()


def tiny() -> list[str]:
    """Options of a random network."""
    sizes = {"vocab_size": 16400, "vision_vocab_size": 16400, "hidden_size": 32}
    sizes |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1}
    rope = ["model.network.sizes.mrope_section=[1,1,2]"]
    return [*rope, *(f"model.network.sizes.{name}={size}" for name, size in sizes.items())]


class Recorded:
    """A pipeline that keeps what it was called with."""

    def __init__(self) -> None:
        self.transformer, self.text_encoder, self.vae = (torch.nn.Linear(1, 1) for _ in range(3))

    def __call__(self, **given: Any) -> Any:
        self.given = given
        grey = torch.full((len(given["prompt"]), given["height"], given["width"], 3), 0.5)
        return type("Output", (), {"images": grey.numpy()})


def test_the_decoder_gets_the_prompts_and_finer_codes() -> None:
    pipeline = Recorded()
    decoder = GlmDecoder(pipeline, GlmDecoderConfig(24, steps=7))
    codes = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    pictures = decoder.decode_codes(codes, ["a cat", "a dog"])
    assert pictures.shape == (2, 3, 64, 64) and not pictures.any()
    given = pipeline.given
    assert given["prompt"] == ["a cat", "a dog"] and given["num_inference_steps"] == 7
    first = [1, 1, 2, 2, 1, 1, 2, 2, 3, 3, 4, 4, 3, 3, 4, 4]
    assert given["prior_token_ids"][0].tolist() == first
    seeds = [generator.initial_seed() for generator in given["generator"]]
    decoder.decode_codes(codes[1:], ["a dog"])
    assert pipeline.given["generator"][0].initial_seed() == seeds[1] != seeds[0]


def test_files_that_are_no_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    with pytest.raises(
        TemperaError, match=r"contains no model_index.json: get the pipeline with `hf"
    ):
        load_glm_decoder(str(tmp_path), "zai-org/GLM-Image")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(TemperaError, match="is not GLM-Image's pipeline"):
        load_glm_decoder(str(tmp_path), "zai-org/GLM-Image")


def tiny_pipeline() -> Any:
    """diffusers' pipeline without its autoregressive part."""
    diffusers = pytest.importorskip("diffusers")
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    text = T5EncoderModel(T5Config(**sizes, vocab_size=384)).eval()
    transformer = diffusers.GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=24,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=[32] * 4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=1,
        latent_channels=4,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return diffusers.GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=None,
        text_encoder=text,
        vision_language_encoder=None,
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def test_the_parts_that_make_pictures_are_read_in_the_dtype_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in float32, cast later, would take twice the memory."""
    tiny_pipeline().to(torch.bfloat16).save_pretrained(tmp_path)
    kind = type(tiny_pipeline())
    read, found = kind.from_pretrained, set[torch.dtype]()

    def from_pretrained(*args: Any, **options: Any) -> Any:
        pipeline = read(*args, **options)
        for part in (pipeline.transformer, pipeline.text_encoder, pipeline.vae):
            found.update(weight.dtype for weight in part.parameters())
        return pipeline

    monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    place = f"model.tokenizer_weights={tmp_path}"
    Parts.of(composed("model=glm_image", "dtype=bfloat16", place)).image_decoder()
    assert found == {torch.bfloat16}
    found.clear()
    Parts.of(composed("model=glm_image", "dtype=float32", place)).image_decoder()
    assert found == {torch.float32}


@pytest.mark.slow
def test_pictures_are_those_of_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny pipeline, saved and loaded, against its own call."""
    pipeline = tiny_pipeline()
    pipeline.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["transformer"]
    decoder = load_glm_decoder(str(tmp_path), "hub", steps=2, codes=24)
    codes = torch.randint(24, (1, 2, 2), generator=torch.Generator().manual_seed(0))
    found = decoder.decode_codes(codes, ["a cat"])
    assert found.shape == (1, 3, 64, 64) and found.std() > 0
    again = decoder.decode_codes(codes, ["a cat"])
    assert torch.equal(found, again)
    monkeypatch.setattr("tempera.targets.glm_image._seed", lambda codes: 7)
    own = pipeline(
        prompt=["a cat"],
        height=64,
        width=64,
        prior_token_ids=torch.kron(codes, torch.ones(1, 2, 2, dtype=torch.int64)).flatten(1),
        num_inference_steps=2,
        guidance_scale=1.5,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
    ).images
    seeded = decoder.decode_codes(codes, ["a cat"])
    torch.testing.assert_close((seeded[0] + 1) / 2, torch.from_numpy(own[0]).permute(2, 0, 1))
    assert not torch.equal(found, seeded)
    assert not torch.equal(found, decoder.decode_codes(codes, ["a 'dog'"]))
