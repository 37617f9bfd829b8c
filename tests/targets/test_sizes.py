"""Where published models lie."""

import pytest
from tiny_targets import composed


@pytest.mark.parametrize("size", [512, 768, 1024])
def test_lumina_reads_the_text_tokenizer_where_it_is(size):
    model = composed("model=lumina", f"image_size={size}").model
    assert model.weights == f"Alpha-VLLM/Lumina-mGPT-7B-{size}"
    assert model.prompt_weights == model.text_encoder.weights == model.text_encoder.hub
    assert model.prompt_weights == "Alpha-VLLM/Lumina-mGPT-7B-768"
