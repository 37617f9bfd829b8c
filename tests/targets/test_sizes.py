"""The sizes of published models."""

import pytest
from tiny_targets import composed

from tempera.errors import TemperaError
from tempera.runtime.pretrained import PretrainedFiles
from tempera.targets.emu3 import SIZES
from tempera.targets.shared_vocabulary import stated_sizes

RANDOM = PretrainedFiles("random", ["model.safetensors"], "a/b")


def test_given_sizes_replace_the_published_ones():
    found = stated_sizes(RANDOM, "emu3", SIZES, {"hidden_size": 64, "num_key_value_heads": 2})
    assert (found["hidden_size"], found["num_hidden_layers"]) == (64, 32)
    assert found["rope_parameters"]["rope_theta"] == 1e6 and found["num_key_value_heads"] == 2
    plain = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    assert stated_sizes(RANDOM, "emu3", plain)["num_key_value_heads"] == 32
    with pytest.raises(TemperaError, match="has no size hidden_sise"):
        stated_sizes(RANDOM, "emu3", SIZES, {"hidden_sise": 64})


@pytest.mark.parametrize("size", [512, 768, 1024])
def test_lumina_reads_the_text_tokenizer_where_it_is(size):
    model = composed("model=lumina", f"image_size={size}").model
    assert model.weights == f"Alpha-VLLM/Lumina-mGPT-7B-{size}"
    assert model.prompt_weights == model.text_encoder.weights == model.text_encoder.hub
    assert model.prompt_weights == "Alpha-VLLM/Lumina-mGPT-7B-768"
