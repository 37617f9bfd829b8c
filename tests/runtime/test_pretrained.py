"""Published weights: found, refused in one sentence, mapped rather than copied; every key of the
real layouts is used.
"""

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from cases import slow_rows_but
from paths import SUPPORT
from safetensors.torch import save_file
from tiny_targets import (
    DIM,
    HEADS,
    INNER,
    LAYERS,
    composed,
    huggingface_state,
    llamagen_state,
    meta_state,
    save_shards,
    write_llamagen_text,
    write_lumina,
)
from torch import nn

from tempera.config.build import build_target, build_tokenizer
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.runtime import pretrained
from tempera.runtime.files import sha256_file
from tempera.runtime.network_directory import read_network, write_network
from tempera.runtime.network_identity import identity_of
from tempera.runtime.pretrained import (
    PretrainedFiles,
    checksum,
    fill,
    on_meta,
    randomise,
    read,
)
from tempera.targets.llamagen import SIZES, LlamaGen, from_official, llamagen_config, to_official

LAYOUTS = json.loads((SUPPORT / "official_layouts.json").read_text())


def shapes(layout: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return {name: torch.empty(shape) for name, shape in layout.items()}


# The real layouts, on the meta device


def test_every_key_of_the_real_xl_is_consumed_and_none_is_missing() -> None:
    official = shapes(LAYOUTS["llamagen_gpt_xl_t2i"])
    config = llamagen_config("XL", 256, caption_dim=2048)
    network: Any = on_meta(lambda: LlamaGen(config))
    fill(network, from_official(official, config.num_attention_heads), "the XL")
    assert sum(tensor.numel() for tensor in network.state_dict().values()) == 777923840
    back = to_official(network.state_dict(), config.num_attention_heads)
    assert {name: tensor.shape for name, tensor in back.items()} == {
        name: tensor.shape for name, tensor in official.items()
    }


def test_every_key_of_the_real_image_tokenizer_is_consumed_and_none_is_missing() -> None:
    vq = on_meta(lambda: VQModel(VQConfig()))
    fill(vq, shapes(LAYOUTS["llamagen_vq16"]), "the VQ")
    assert sum(tensor.numel() for tensor in vq.state_dict().values()) == 71948939


@pytest.mark.parametrize(
    ("size", "millions"),
    slow_rows_but([("B", 111), ("L", 343), ("XL", 775), ("XXL", 1411), ("3B", 3101)], ("B", 111)),
)
def test_the_class_conditional_sizes_are_the_published_ones(size: Any, millions: int) -> None:
    network = on_meta(lambda: LlamaGen(llamagen_config(size, 384, num_classes=1000)))
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert size in SIZES


# Loading


def test_tensors_are_mapped_and_none_is_copied(tmp_path: Path) -> None:
    save_shards({"weight": torch.randn(3, 3), "bias": torch.randn(3)}, tmp_path)
    state = read(PretrainedFiles(str(tmp_path), ["model.safetensors"], "a/b").find())
    layer = on_meta(lambda: nn.Linear(3, 3))
    fill(layer, state, "it")
    assert layer.weight.data_ptr() == state["weight"].data_ptr()
    assert not layer.weight.requires_grad
    torch.save(
        {
            "module": {"weight": torch.ones(3, 3), "bias": torch.zeros(3)},
            "args": argparse.Namespace(lr=1),
        },
        tmp_path / "it.pt",
    )
    assert torch.equal(read([tmp_path / "it.pt"])["weight"], torch.ones(3, 3))
    torch.save({"weight": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read([tmp_path / "old.pt"])["weight"], torch.ones(3))


def test_the_checksum_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    read([tmp_path / "a.safetensors"])
    assert f"sha256 {sha256_file(tmp_path / 'a.safetensors')}" in capsys.readouterr().out
    digest = "0" * 64  # the hub's cache names a file by its checksum
    (tmp_path / "a.safetensors").rename(tmp_path / digest)
    (tmp_path / "b.safetensors").symlink_to(tmp_path / digest)
    read([tmp_path / "b.safetensors"])
    assert f"sha256 {digest}" in capsys.readouterr().out


def test_a_file_is_hashed_again_only_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "w.pt").write_bytes(b"one")
    digest = checksum(tmp_path / "w.pt")
    assert digest == sha256_file(tmp_path / "w.pt")
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "sha256_file", None)
        assert checksum(tmp_path / "w.pt") == digest
    (tmp_path / "w.pt").write_bytes(b"others")
    assert checksum(tmp_path / "w.pt") == sha256_file(tmp_path / "w.pt") != digest
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path / "w.pt"))  # cannot be written
    assert checksum(tmp_path / "w.pt") == sha256_file(tmp_path / "w.pt")


def test_a_hub_id_is_downloaded_unless_it_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot(repo: str, allow_patterns: list[str], revision: str | None, **_: Any) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "w.pt").touch()
    assert PretrainedFiles("owner/name", ["w.pt"], "owner/name").find() == [tmp_path / "w.pt"]
    assert asked == [("owner/name", None, ["w.pt", "w.pt.index.json", "w-*.pt", "config.json"])]
    assert PretrainedFiles(str(tmp_path), ["w.pt"], "owner/name").find() == [tmp_path / "w.pt"]
    assert len(asked) == 1
    PretrainedFiles("owner/name@v2", ["w.pt"], "owner/name").find()
    assert asked[1][:2] == ("owner/name", "v2")


def test_random_weights_have_the_usual_initial_values() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(50, 50), nn.BatchNorm1d(7)

    network: Any = on_meta(Net)
    randomise(network, torch.device("cpu"), torch.bfloat16)
    assert network.linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (
        network.linear.bias.abs().max() == 0
        and network.norm.weight.min() == 1
        and network.norm.running_var.min() == 1
    )
    assert network.linear.weight.dtype == torch.bfloat16
    again: Any = on_meta(Net)
    randomise(again, torch.device("cpu"), torch.bfloat16)
    assert identity_hash(network) == identity_hash(again)


def identity_hash(module: nn.Module) -> list[float]:
    return [float(tensor.double().sum()) for tensor in module.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_llamagen_text, write_lumina])
def test_a_network_in_half_precision_keeps_its_identity(write: Any, tmp_path: Path) -> None:
    options = write(tmp_path)
    single, half, stored = (
        build_target(composed(*options, f"dtype={dtype}"))
        for dtype in ("float32", "bfloat16", "float16")
    )
    assert single.identity == half.identity == identity_of(half.network)  # type: ignore[attr-defined]
    assert stored.identity == single.identity  # type: ignore[attr-defined]
    for weight in stored.network.parameters():  # type: ignore[attr-defined]
        assert weight.dtype == torch.float32 and torch.equal(weight, weight.half().float())
    random = build_target(composed(*options, "model.weights=random"))
    assert random.identity != single.identity  # type: ignore[attr-defined]


# What is refused


@pytest.fixture
def lumina(tmp_path: Path) -> tuple[Path, list[str]]:
    return tmp_path, write_lumina(tmp_path)


def refusal(options: list[str], *more: str) -> str:
    with pytest.raises(TemperaError) as problem:
        build_target(composed(*options, *more))
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.slow
def test_missing_weights_say_which_file_and_how_to_get_it(tmp_path: Path) -> None:
    message = refusal(["model=llamagen_xl_stage1", f"model.weights={tmp_path}"])
    assert (
        f"{tmp_path} holds no t2i_XL_stage1_256.pt: get it with `hf download "
        'peizesun/llamagen_t2i --include "t2i_XL_stage1_256.pt"' in message
    )
    message = refusal(["model=llamagen_b_c2i", "model.weights=/absent/c2i.pt"])
    assert "/absent/c2i.pt does not exist: give the file c2i_B_384.pt, a directory" in message
    message = refusal(["model=emu3"])  # the tests are offline
    assert message.startswith("BAAI/Emu3-Gen is not in the hub's cache, and the hub")
    wanted = '`hf download BAAI/Emu3-Gen --include "model*.safetensors*" --local-dir DIR` and give'
    assert wanted in message


def test_companion_files_are_searched_beside_the_weights(tmp_path: Path) -> None:
    options = [
        option
        for option in write_llamagen_text(tmp_path)
        if "tokenizer_weights" not in option and "model.weights" not in option
    ]
    with pytest.raises(
        TemperaError,
        match=rf"{tmp_path} holds no vq_ds16_t2i.pt: .* weights=DIR",
    ):
        build_tokenizer(composed(*options, f"model.weights={tmp_path / 't2i_XL_stage1_256.pt'}"))


def stating(directory: Path, **more: Any) -> None:
    """A config.json as Lumina-mGPT's, of the tiny sizes."""
    content = {
        "model_type": "chameleon",
        "vocab_size": 8832,
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-3,
        "rope_theta": 500.0,
        "rope_scaling": None,
        "swin_norm": False,
        **more,
    }
    (directory / "config.json").write_text(json.dumps(content))


def test_sizes_are_those_of_the_config_beside_the_weights(lumina: tuple[Path, list[str]]) -> None:
    directory, options = lumina
    stating(directory)
    plain = [option for option in options if not option.startswith("+model.network.")]
    network = build_target(composed(*plain)).network  # type: ignore[attr-defined]
    assert network.config.hidden_size == DIM and len(network.model.layers) == LAYERS
    assert network.config.rms_norm_eps == 1e-3
    assert network.config.rope_parameters["rope_theta"] == 500.0


@pytest.mark.slow
def test_variants_that_would_load_with_other_logits_are_refused(
    lumina: tuple[Path, list[str]],
) -> None:
    directory, options = lumina
    stating(directory, swin_norm=True)
    assert f"{directory} is a Chameleon with swin_norm" in refusal(options)
    stating(directory, rope_scaling={"type": "linear", "factor": 2.0})
    assert "states a scaled rotary embedding" in refusal(options)
    stating(directory, partial_rotary_factor=0.5)
    assert "states partial_rotary_factor=0.5, and only 1.0 is supported" in refusal(options)
    stating(directory, hidden_act="gelu")
    assert "states hidden_act=gelu, and only silu is supported" in refusal(options)
    stating(directory, model_type="llama")
    assert "config.json states model_type=llama, which is no chameleon" in refusal(options)
    stating(directory, model_parallel_size=HEADS * 2)
    assert (
        "self_attn.k_norm.weight is made of 1 partitions, but config.json states "
        f"model_parallel_size={HEADS * 2}: download both" in refusal(options)
    )
    for variant in ({"model_type": "chameleon_xllmx"}, {"model_parallel_size": 1}):
        stating(directory, hidden_act="silu", **variant)
        build_target(composed(*options))


def test_partial_weights_say_what_is_missing(lumina: tuple[Path, list[str]]) -> None:
    directory, options = lumina
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert (
        f"{directory} is partial, 1 of its 2 parts are missing, first "
        "model-00002-of-00002.safetensors" in refusal(options)
    )
    save_file(
        {
            name: t
            for name, t in huggingface_state(8832, norms=True).items()
            if "layers.1" not in name
        },
        directory / "model.safetensors",
    )
    assert (
        "lacks 13 of 29 tensors, first model.layers.1.self_attn.q_proj.weight: download it again"
        in refusal(options)
    )


@pytest.mark.slow
def test_errors_tell_wrong_files_apart(lumina: tuple[Path, list[str]]) -> None:
    directory, options = lumina
    file = directory / "model.safetensors"
    save_file(llamagen_state(24, caption=8), file)
    assert f"{file} is in another layout (it holds cls_embedding." in refusal(options)
    save_file(huggingface_state(9000, norms=True), file)
    assert (
        f"{file} is of another size (model.embed_tokens.weight is (9000, 16), this model's is "
        "(8832, 16))" in refusal(options)
    )
    save_file(huggingface_state(8832, norms=True) | {"model.more": torch.zeros(1)}, file)
    assert "holds 1 tensors that this model lacks, first model.more" in refusal(options)
    file.write_bytes(b"rubbish")
    assert f"{file} is cut off or no safetensors file" in refusal(options)


class Evil:
    def __reduce__(self) -> tuple[Any, Any]:
        return print, ("run",)


@pytest.mark.slow
def test_a_pickle_that_could_run_code_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_llamagen_text(tmp_path)
    file = tmp_path / "t2i_XL_stage1_256.pt"
    torch.save({"model": llamagen_state(24, caption=8), "callback": Evil()}, file)
    assert f"{file} holds more than tensors" in refusal(options)
    file.write_bytes(pickle.dumps(Evil()))
    assert f"{file} holds more than tensors" in refusal(options)
    assert "run\n" not in capsys.readouterr().out
    torch.save({"model": llamagen_state(24, caption=8)}, file)
    file.write_bytes(file.read_bytes()[:500])
    assert f"{file} is cut off" in refusal(options)
    torch.save([1, 2], file)
    assert f"{file} holds no named tensors" in refusal(options)


def test_meta_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(meta_state(8832), tmp_path / "t2i_XL_stage1_256.pt")
    assert (
        "is in another layout (it holds model.layers.0.attention.wq.weight, not null_caption)"
        in refusal(write_options(tmp_path))
    )


def write_options(directory: Path) -> list[str]:
    other = directory / "other"
    other.mkdir()
    return [option.replace(str(other), str(directory)) for option in write_llamagen_text(other)]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            ["model=llamagen_b_c2i", "image_size=100"],
            "image_size=100 does not divide into 16-pixel patches: give a multiple of 16",
        ),
        (
            ["model=lumina", "image_size=500"],
            "height=500 does not divide into 32-pixel patches: give a multiple of 32",
        ),
        (
            ["model=emu3", "image_size=721"],
            "height=721 does not divide into 8-pixel patches: give a multiple of 8",
        ),
        (
            ["model=llamagen_b_c2i", "image_size=many"],
            "`image_size=many` is not possible",
        ),
    ],
)
def test_impossible_sizes(choice: list[str], message: str) -> None:
    assert message in refusal([*choice, "model.weights=random"])


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(2, 2, dtype=torch.int8), "holds weight as int8: give weights in floating"),
        (torch.ones(2, 2, dtype=torch.int32), "holds weight as int32"),
        (torch.ones(2, 2, dtype=torch.complex64), "holds weight as complex64"),
        (torch.full((2, 2), float("inf")), "holds infinite numbers or NaN in weight"),
        (torch.full((2, 2), float("nan")), "holds infinite numbers or NaN in weight"),
        (torch.zeros(2, 2), "are all zero"),
    ],
)
@pytest.mark.parametrize("kind", ["published", "directory"])
def test_weights_that_mean_nothing_are_refused(
    kind: str, weight: torch.Tensor, words: str, tmp_path: Path
) -> None:
    state = {"weight": weight, "bias": torch.zeros(2)}
    with pytest.raises(TemperaError, match=words):
        if kind == "published":
            fill(on_meta(lambda: torch.nn.Linear(2, 2)), state, "a.pt")
        else:
            write_network(tmp_path, state, {})
            read_network(tmp_path, lambda _: torch.nn.Linear(2, 2), "a layer", "train one")
