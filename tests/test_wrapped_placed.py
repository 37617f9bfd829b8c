"""tempera.accelerate of models that accelerate has spread or offloaded, and of quantised ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from held_models import TEXT, Held, emu3, janus

from tempera import TemperaError
from tempera.wrapped.ids import generate_ids


def placed(model: Any, on_disk: tuple[str, ...], folder: Path) -> None:
    """As transformers' `device_map` does it: some parts on the disk, the others on the CPU."""
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children()}
    places |= {name: "cpu" for name, _ in model.named_children() if name != "model"}
    assert set(on_disk) <= set(places)
    accelerate.dispatch_model(
        model,
        places | dict.fromkeys(on_disk, "disk"),
        main_device="cpu",
        offload_dir=str(folder),
        force_hooks=True,
    )


@pytest.mark.parametrize("make", [emu3, janus])
@pytest.mark.parametrize(
    ("offload", "sentence"),
    [
        (
            lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
            "decoder are on meta: put it, with the embedding and the head, on one device",
        ),
        (
            lambda model, folder: accelerate.disk_offload(model, str(folder), "cpu"),
            "decoder are on meta: put it, with the embedding and the head, on one device",
        ),
        (
            lambda model, folder: placed(model, ("lm_head",), folder),
            "decoder are on cpu, meta: put it, with the embedding and the head, on one device",
        ),
        (
            lambda model, folder: accelerate.cpu_offload_with_hook(model, "cpu"),
            "has a replaced forward method",
        ),
    ],
    ids=["cpu", "disk", "head", "whole"],
)
def test_an_offloaded_decoder_is_refused(
    make: Callable[[], Held],
    offload: Callable[[Any, Path], object],
    sentence: str,
    tmp_path: Path,
) -> None:
    held = make()
    if make is janus and "cpu, meta" in sentence:
        offload = lambda model, folder: placed(model, ("model.generation_head",), folder)  # noqa: E731
    offload(held.model, tmp_path)
    with pytest.raises(TemperaError, match=sentence):
        held.accelerated()


@pytest.mark.parametrize(
    ("make", "parts"),
    [(emu3, ("model.vqmodel",)), (janus, ("model.vqmodel", "model.vision_model"))],
)
def test_other_parts_may_be_elsewhere(
    make: Callable[[], Held], parts: tuple[str, ...], tmp_path: Path
) -> None:
    """Images and their pictures are the same."""
    held = make()
    expected = held.greedy()
    processor = held.processor()
    before = held.accelerated(processor=processor).generate("a cat").pixels
    placed(held.model, parts, tmp_path)
    fast = held.accelerated(processor=processor)
    assert torch.equal(generate_ids(fast, **held.ids), expected)
    assert torch.equal(fast.generate("a cat").pixels, before)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8", "outliers"])
def test_bitsandbytes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library is installed (0.50.2 was): its layers on a CPU."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    monkeypatch.setitem(TEXT, "hidden_size", 128)  # its blocks have 64 numbers
    monkeypatch.setitem(TEXT, "intermediate_size", 256)
    held = emu3()
    held.model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"llm_int8_skip_modules": ["lm_head", "vqmodel"]}
    if kind in ("nf4", "fp4"):
        options |= {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
        options |= {"bnb_4bit_compute_dtype": torch.float32}
    else:
        options |= {"load_in_8bit": True, "llm_int8_threshold": 6.0 * (kind == "outliers")}
    config = BitsAndBytesConfig(**options)
    model = type(held.model).from_pretrained(
        tmp_path, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    held = replace(held, model=model.eval())
    if kind == "outliers":
        with pytest.raises(TemperaError, match="quantised so that a token depends on the others"):
            held.accelerated()
        return
    expected = model.generate(**held.inputs, max_new_tokens=18)[:, 5:-3]
    assert len(expected.unique()) > 3
    assert torch.equal(generate_ids(held.accelerated(), **held.ids), expected)
