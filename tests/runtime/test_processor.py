from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import composed

from tempera.config.parts import Parts
from tempera.errors import TemperaError
from tempera.runtime import processor
from tempera.runtime.processor import (
    arithmetic,
    computes_bfloat16,
    draft_dtype,
    name_of,
    parse_device,
    parse_dtype,
    tell_device,
    tell_slow_bfloat16,
)


def test_float16_is_computed_in_float32_on_a_cpu_alone() -> None:
    cpu = torch.device("cpu")
    assert arithmetic(torch.float16, cpu) is torch.float32
    assert arithmetic(torch.bfloat16, cpu) is torch.bfloat16
    assert arithmetic(torch.float16, torch.device("cuda")) is torch.float16


@pytest.mark.parametrize(
    ("machine", "onednn", "bf16", "amx", "computes"),
    [
        ("x86_64", True, True, False, True),
        ("AMD64", True, False, True, True),
        ("x86_64", True, False, False, False),  # AVX-512 alone: oneDNN emulates it
        ("x86_64", False, False, False, False),
        ("aarch64", True, False, False, True),
        ("aarch64", False, False, False, False),
    ],
)
def test_bfloat16_is_computed_where_the_processor_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    onednn: bool,
    bf16: bool,
    amx: bool,
    computes: bool,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert computes_bfloat16(torch.device("cpu")) is computes
    assert computes_bfloat16(torch.device("meta"))


@pytest.mark.parametrize("units", [True, False])
def test_a_gpu_that_emulates_bfloat16_does_not_compute_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], units: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or units,
    )
    assert computes_bfloat16(torch.device("cuda")) is units
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    tell_device()
    assert "device=auto is cuda: Tesla T4" in capsys.readouterr().out
    tell_slow_bfloat16("one", "other", torch.device("cuda"))
    assert capsys.readouterr().out.count("on this GPU") == (not units)
    assert parse_dtype("auto", torch.device("cuda")) == (torch.bfloat16 if units else torch.float32)


@pytest.mark.parametrize(
    ("built", "visible", "why"),
    [
        ("13.0", None, "driver too old for CUDA 13.0"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES hides it"),
        (None, None, "is built without CUDA"),
    ],
)
def test_why_a_gpu_is_not_used_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    built: str | None,
    visible: str | None,
    why: str,
) -> None:
    monkeypatch.setattr(processor, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tell_device()
    assert why in capsys.readouterr().out


def test_several_processes_do_not_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TemperaError, match="give device=cuda"):
        parse_device("cuda:0")


@pytest.mark.parametrize("model", ["shapes", "shapes_mar"])
def test_pictures_are_made_in_bfloat16_with_the_model(model: str) -> None:
    decoders = [
        Parts.of(composed(f"model={model}", "device=cpu", f"dtype={dtype}")).image_decoder()
        for dtype in ("bfloat16", "float16")
    ]
    codes = torch.zeros(1, 12, 12, dtype=torch.int64)
    if model == "shapes_mar":
        config = decoders[0].config
        codes = torch.zeros(1, 12, 12, config.networks.z_channels * config.patch**2)
    half, whole = (decoder.decode_codes(codes) for decoder in decoders)
    assert (half.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(half.float(), whole, rtol=0, atol=0.03)


@pytest.mark.parametrize(("threads", "told"), [(1, "1 thread"), (11, "11 threads")])
def test_a_cpu_is_told_by_its_processor_and_threads(
    threads: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timings of two processors are kept apart by it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    name = name_of(torch.device("cpu"))
    assert name.startswith("cpu ") and name.endswith(f", {told}")
    assert len(name) > len(f"cpu , {told}")


@pytest.mark.parametrize(
    ("target", "fast", "draft"),
    [
        (torch.float32, True, torch.bfloat16),
        (torch.float32, False, torch.float32),
        (torch.float16, True, torch.float16),
        (torch.bfloat16, False, torch.bfloat16),
    ],
    ids=str,
)
def test_a_draft_is_in_bfloat16_where_that_is_fast(
    target: torch.dtype, fast: bool, draft: torch.dtype
) -> None:
    assert draft_dtype(target, fast) == draft


@pytest.mark.parametrize("fast", [True, False])
def test_runs_record_the_dtype_that_their_draft_has(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "computes_bfloat16", lambda device: fast)
    given = ["method=eagle", "drafter.dtype=auto", "dtype=float32", "device=cpu"]
    parts = Parts.of(composed(*given))
    drafter: Any = parts.drafter(parts.target())
    assert drafter.model.run.dtype == (torch.bfloat16 if fast else torch.float32)
    name = "bfloat16" if fast else "float32"
    assert parts.settings({}, diagnostics=True)["drafter.dtype"] == name
