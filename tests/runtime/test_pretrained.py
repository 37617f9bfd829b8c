"""Published weights: found, refused in one sentence, mapped rather than copied; every key of the
real layouts is used.
"""

import argparse
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from paths import SUPPORT
from safetensors.torch import load_file, save_file
from tiny_targets import (
    HEADS,
    composed,
    write_llamagen_classes,
    write_llamagen_text,
    write_lumina,
)
from torch import nn

from tempera.commands import evaluate
from tempera.config.parts import Parts
from tempera.continuous.mar import MARConfig
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime.files import read_json
from tempera.runtime.network_directory import parse_sizes, read_network, write_network
from tempera.runtime.network_identity import identity_of
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained, on_meta, recording_taken
from tempera.runtime.tensor_files import fill, read_tensors
from tempera.targets.llamagen import SIZES, LlamaGen, from_meta, llamagen_config

LAYOUTS = json.loads((SUPPORT / "official_layouts.json").read_text())


def shapes(layout: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return {name: torch.empty(shape) for name, shape in layout.items()}


# The real layouts, on the meta device


def test_every_key_of_the_real_layouts_is_consumed_and_none_is_missing() -> None:
    config = llamagen_config("XL", 256, caption_dim=2048)
    state = from_meta(shapes(LAYOUTS["llamagen_gpt_xl_t2i"]), config.num_attention_heads)
    for make, official, size in (
        (lambda: LlamaGen(config), state, 777923840),
        (lambda: VQModel(VQConfig()), shapes(LAYOUTS["llamagen_vq16"]), 71948939),
    ):
        network: Any = on_meta(make)
        fill(network, official, "it")
        assert sum(tensor.numel() for tensor in network.state_dict().values()) == size


@pytest.mark.parametrize(
    ("size", "millions"),
    slow_but([("B", 111), ("L", 343), ("XL", 775), ("XXL", 1411), ("3B", 3101)], ("B", 111)),
)
def test_the_class_conditional_sizes_are_the_published_ones(size: Any, millions: int) -> None:
    network = on_meta(lambda: LlamaGen(llamagen_config(size, 384, num_classes=1000)))
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert size in SIZES


# Loading


def test_tensors_are_mapped_and_none_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "0" * 64  # the hub's cache names a file by its SHA-256
    save_file({"weight": torch.randn(3, 3), "bias": torch.randn(3)}, tmp_path / digest)
    (tmp_path / "w.safetensors").symlink_to(tmp_path / digest)
    files = PretrainedFiles(str(tmp_path), ["w.safetensors"], "a/b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "_apply", lambda *_: pytest.fail("moved"))
        layer = load_pretrained(lambda: nn.Linear(3, 3), files)
    assert f"0.00 GB, sha256 {digest}" in capsys.readouterr().out
    assert layer.weight.equal(load_file(tmp_path / "w.safetensors")["weight"])
    assert not layer.weight.requires_grad and not layer.training
    state = read_tensors(tmp_path / "w.safetensors")
    meta = on_meta(lambda: nn.Linear(3, 3))
    fill(meta, state, "it")
    assert meta.weight.data_ptr() == state["weight"].data_ptr()
    real = nn.Linear(3, 3).half()
    fill(real, state, "it")  # keeps its dtype
    assert real.weight.dtype == torch.float16 and real.weight.equal(state["weight"].half())


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_llamagen_text, write_lumina])
def test_a_network_in_half_precision_keeps_its_identity(write: Any, tmp_path: Path) -> None:
    options = write(tmp_path)
    single, half, stored = (
        Parts.of(composed(*options, f"dtype={dtype}")).target()
        for dtype in ("float32", "bfloat16", "float16")
    )
    assert single.identity == half.identity == identity_of(half.network)  # type: ignore[attr-defined]
    assert stored.identity == single.identity  # type: ignore[attr-defined]
    for weight in stored.network.parameters():  # type: ignore[attr-defined]
        assert weight.dtype == torch.float32 and torch.equal(weight, weight.half().float())
    random = Parts.of(composed(*options, "model.weights=random")).target()
    assert random.identity != single.identity  # type: ignore[attr-defined]


# What is refused


def test_sizes_of_no_network() -> None:
    for make in (lambda: nn.Linear(-1, 1), lambda: nn.Linear(1 // 0, 1)):
        with pytest.raises(TemperaError, match="states sizes that no network can have"):
            load_pretrained(make, PretrainedFiles("random", [], "a/b"))


def refusal(options: list[str], *more: str) -> str:
    with pytest.raises(TemperaError) as problem:
        Parts.of(composed(*options, *more)).target()
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.slow
def test_missing_weights_say_which_file_and_how_to_get_it(tmp_path: Path) -> None:
    message = refusal(["model=llamagen_xl_stage1", f"model.weights={tmp_path}"])
    assert (
        f"{tmp_path} contains no t2i_XL_stage1_256.pt: get it with `hf download "
        'peizesun/llamagen_t2i --include "t2i_XL_stage1_256.pt"' in message
    )
    message = refusal(["model=llamagen_b_c2i", "model.weights=/absent/c2i.pt"])
    assert "/absent/c2i.pt contains no c2i_B_384.pt: get it with `hf download" in message
    message = refusal(["model=emu3"])  # the tests are offline
    assert message.startswith("BAAI/Emu3-Gen is not in the hub's cache, and the hub")
    assert "`hf download BAAI/Emu3-Gen --include" in message


QUICK = ["prompt='3'", "metrics=none", "speed.prompts=0", "tracking=none", "method=ar"]
SIZES_OF = {"hidden_size": 8, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4}


def stated(directory: Path, content: object) -> dict[str, Any]:
    (directory / "w.pt").touch()
    (directory / "config.json").write_text(json.dumps(content))
    return PretrainedFiles(str(directory), ["w.pt"], "a/b").stated(SIZES_OF, "chameleon")


def test_what_no_file_states_is_told_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recording_taken() as taken:
        stated(tmp_path, {"hidden_size": 16, "rope_theta": 5.0})
        (tmp_path / "config.json").unlink()
        PretrainedFiles(str(tmp_path), ["w.pt"], "a/b").stated({"hidden_size": 8}, "chameleon")
    decoders = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "rope_type": "default"}
    decoders |= {"use_sliding_window": False}
    assert [one["source"] for one in taken] == [str(tmp_path / "config.json"), str(tmp_path)]
    assert taken[0]["values"] == {"num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    assert taken[1]["values"] == {"hidden_size": 8, **decoders}
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("so the preset's are used: num_hidden_layers=2, rms_norm_eps=1e-05")
    assert "hidden_act=silu" in second


def test_a_run_with_weights_in_a_file_records_what_was_taken(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    options = [*write_llamagen_classes(tmp_path), *QUICK, f"directory={directory}"]
    evaluate.main(composed(*options))
    content: Any = read_json(directory / "run.json")
    (taken,) = content["taken"]  # the tokenizer's weights are random
    assert taken["source"] == str(tmp_path / "c2i_B_384.pt")
    values = taken["values"]
    assert values["num_attention_heads"] == HEADS and values["rope_base"] == 10_000


def test_sizes_are_those_of_the_config_beside_the_weights(tmp_path: Path) -> None:
    assert stated(tmp_path, {}) == SIZES_OF
    text = {"hidden_size": 16, "rms_norm_eps": 1, "rope_scaling": None, "hidden_act": "silu"}
    expected = {**SIZES_OF, "hidden_size": 16, "rms_norm_eps": 1}
    assert stated(tmp_path, {"model_type": "Chameleon_xllmx", **text}) == expected
    more = {"text_config": {**text, "rope_parameters": {"rope_theta": 5.0}, "vocab_size": None}}
    assert stated(tmp_path, more) == {**expected, "rope_theta": 5.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear, but only default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, but only 1.0 is supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu, but only silu is supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True, but only False is supported"),
        ({"model_type": "llama"}, "model_type=llama, but only chameleon is supported"),
        ({"rope_theta": [1]}, r"rope_theta=\[1\]"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000, but only a number like 2"),
    ],
)
def test_variants_that_would_load_with_other_logits_are_refused(
    content: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TemperaError, match=words):
        stated(tmp_path, content)


@pytest.mark.slow
def test_variants_of_chameleon(tmp_path: Path) -> None:
    options = write_lumina(tmp_path)
    for content, words in (
        ({"swin_norm": True}, "Chameleon with swin_norm"),
        (
            {"model_parallel_size": HEADS * 2},
            "self_attn.k_norm.weight is made of 1 partitions, but",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert words in refusal(options)


def test_partial_weights_say_what_is_missing(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    files = PretrainedFiles(str(tmp_path), ["model.safetensors"], "a/b")
    for parts in ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, {}, ["model-1"]):
        index.write_text(json.dumps({"weight_map": parts}))
        with pytest.raises(
            TemperaError, match=f"{tmp_path}.* (does not contain model-1|lists no files)"
        ):
            files.find()
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors", "b": "b"}}))
    for name in ("model.safetensors", "b"):
        (tmp_path / name).touch()
    assert PretrainedFiles(str(index), [], "a/b").find() == [
        tmp_path / name for name in ("model.safetensors", "b")
    ]  # never outside of its directory


class Evil:
    """Prints when a file that holds it is unpickled."""

    def __reduce__(self) -> tuple[Any, Any]:
        return print, ("run",)


WEIGHTS = {"a": torch.ones(9), "tied": torch.ones(2, dtype=torch.bfloat16)}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("entry", ["state_dict", "model", None])
def test_of_a_trainers_checkpoint_the_tensors_are_read_and_nothing_runs(
    entry: str | None, zipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "vqgan.ckpt"
    callbacks = {Evil: Evil(), "args": argparse.Namespace(lr=1), "best": [torch.ones(1), {1, 2}]}
    content = (
        {**WEIGHTS, "callbacks": callbacks} if entry is None else {entry: WEIGHTS, **callbacks}
    )
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    found = read_tensors(file, skip_objects=True)
    torch.testing.assert_close(found, WEIGHTS)
    with pytest.raises(TemperaError, match=f"{file} .*holds more than tensors"):
        read_tensors(file)
    assert "run\n" not in capsys.readouterr().out


def saved(content: object) -> bytes:
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


def program() -> bytes:
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pt", saved(WEIGHTS)[:500], "is truncated"),
        ("a.pt", saved([1, 2]), "contains no named tensors"),
        ("a.pt", pickle.dumps(Evil()), "is truncated or not a file of weights"),
        ("a.pt", program(), "is truncated .*it is a TorchScript program"),
        ("a.safetensors", b"rubbish", "is truncated"),
        ("a.safetensors", saved(WEIGHTS), "is truncated"),
    ],
)
def test_what_are_no_weights(
    name: str, content: bytes, words: str, skip: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TemperaError, match=f"{name} {words}") as refused:
        read_tensors(tmp_path / name, skip)
    assert "\n" not in str(refused.value)


ONES, BIAS = torch.ones(2, 2), torch.zeros(2)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": ONES}, r"1 of 2 tensors differ; bias is missing"),
        ({"weight": ONES, "bias": BIAS, "more": 1 + BIAS}, "more is unknown"),
        ({"weight": ONES[:1], "bias": BIAS}, r"weight is \(1, 2\), not \(2, 2\)"),
        *(
            ({"weight": ONES.to(getattr(torch, kind)), "bias": BIAS}, f"holds weight as {kind}:")
            for kind in ("int8", "complex64", "float8_e4m3fn", "float8_e5m2")
        ),
        ({"weight": ONES * torch.inf, "bias": BIAS}, "holds infinite numbers or NaN in weight"),
        ({"weight": ONES, "bias": BIAS * torch.nan}, "holds infinite numbers or NaN in bias"),
        ({"weight": 0 * ONES, "bias": BIAS}, "are all zero"),
    ],
)
def test_weights_of_another_network_or_none(
    state: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    write_network(tmp_path, state, {})
    with pytest.raises(TemperaError, match=words):
        read_network(tmp_path, lambda _: nn.Linear(2, 2))
    with pytest.raises(TemperaError, match=words):
        fill(on_meta(lambda: nn.Linear(2, 2)), state, "a.pt")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"grid": [4, 4], "width": "8"}, "width=8: Input should be a valid integer"),
        ({"grid": [4, 4], "width": 8.5}, "width=8.5: "),
        ({"grid": [4], "width": 8}, "grid.1 is missing"),
        ({"grid": [4, 4], "wide": 8}, "it has no field wide"),
    ],
)
def test_the_types_of_a_config_are_checked(values: dict[str, Any], words: str) -> None:
    assert parse_sizes(MARConfig, {"grid": [2, 3], "mlp_ratio": 4}).grid == (2, 3)
    with pytest.raises(ValueError, match=words):
        parse_sizes(MARConfig, values)
