"""Published weights: find the files, check them, and fill a network without a second copy in
memory.

`weights` is a local file, a local directory, the id of a hub repository (`owner/name`, or
`owner/name@revision`), or `random`. Files are read with `weights_only` and memory-mapped: a network
is built on the meta device and takes the mapped tensors as they are. Data is loaded only when the
network moves to a device, parameter by parameter.
"""

import argparse
import hashlib
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tempera.errors import MissingWeights, TemperaError
from tempera.runtime.convert_checkpoint import named_tensors, refuse_programs
from tempera.runtime.distributed import started_as_main
from tempera.runtime.files import (
    cache_directory,
    check_readable,
    read_json,
    reason,
    sha256_file,
    write_text,
)
from tempera.runtime.hub import CannotReach, Repository
from tempera.runtime.network_directory import NetworkType, check_values

RANDOM = "random"
"""The value of `weights` that asks for an untrained network, to measure speed and memory."""

_NOTED: ContextVar[list["PretrainedFiles"] | None] = ContextVar("noted", default=None)


@contextmanager
def sizes_only() -> Iterator[list["PretrainedFiles"]]:
    """Inside the `with` block networks are built on the meta device, with sizes and without data;
    their files are neither read nor downloaded, but listed.
    """
    noted: list[PretrainedFiles] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def are_sizes_enough() -> bool:
    """Whether this is inside `sizes_only`."""
    return _NOTED.get() is not None


@runtime_checkable
class HasTables(Protocol):
    """A module with tables that are not part of weight files, such as rotary angles."""

    def reset_tables(self, device: torch.device) -> None:
        """Compute the tables on a device."""


_ONLY = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
"""Options of `config.json` that no tensor shows, and that the networks do not have."""


@dataclass(frozen=True)
class PretrainedFiles:
    """The location of a network's published weights.

    Attributes:
        weights: local file or directory, hub id (`owner/name`, or `owner/name@revision`), or
            `random`.
        files: possible names of the weight file, the usual one first. Weights in several parts have
            Hugging Face's `NAME.index.json` instead.
        hub: the repository that publishes the weights.
    """

    weights: str
    files: Sequence[str]
    hub: str

    @property
    def random(self) -> bool:
        """Whether to use random weights instead of files."""
        return self.weights == RANDOM

    def find(self) -> list[Path]:
        """Find the local files; if `weights` is a hub id, download them first.

        Raises:
            MissingWeights: the location does not exist or a file is missing; says how to get it.
            TemperaError: a part of the weights is missing.
        """
        place = Path(self.weights).expanduser()
        if place.is_file():
            return _parts(place) if place.name.endswith(".index.json") else [place]
        if not place.exists():
            place = self._download()
        for name in self.files:
            if (place / name).is_file():
                return [place / name]
            if (place / f"{name}.index.json").is_file():
                return _parts(place / f"{name}.index.json")
        raise self._missing(f"{place} holds no {self.files[0]}:")

    def stated(self, defaults: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """The sizes and options of a network: those that `config.json` beside its weights states,
        else the defaults.

        Args:
            defaults: by their names in `config.json`, `rope_theta` among them.
            kind: what the file's `model_type` starts with, in lower case, if it has one.

        Raises:
            TemperaError: the file states a network that would load with other logits: of another
                kind, or with an activation or a rotary embedding that is not supported.
        """
        if self.random:
            return dict(defaults)
        place = self._config() if are_sizes_enough() else self.find()[0].parent / "config.json"
        if place is None or not place.is_file():
            return dict(defaults)
        content: dict[str, Any] = read_json(place)
        text: dict[str, Any] = content.get("text_config") or content
        found = str(content.get("model_type", kind))
        if not found.lower().startswith(kind):
            raise TemperaError(
                f"{place} states model_type={found}, which is no {kind}: give the weights of "
                "another model."
            )
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise TemperaError(
                f"{place} states a scaled rotary embedding ({rope}), which is not supported: give "
                "the weights of another model."
            )
        stated = {**rope, **text}
        for name, value in _ONLY.items():
            if stated.get(name, value) != value:
                raise TemperaError(
                    f"{place} states {name}={stated[name]}, and only {value} is supported: give "
                    "the weights of another model."
                )
        return {name: stated.get(name, default) for name, default in defaults.items()}

    def _config(self) -> Path | None:
        """`config.json`, fetched from the hub if need be; None if it cannot be had."""
        place = Path(self.weights).expanduser()
        if place.exists():
            return (place if place.is_dir() else place.parent) / "config.json"
        try:
            return self._repository().file("config.json")
        except TemperaError:
            return None

    def _repository(self) -> Repository:
        name, _, revision = self.weights.partition("@")
        return Repository(name, revision=revision or None)

    def to_download(self) -> int:
        """Bytes that the hub's cache lacks; needs the network unless there are none.

        Raises:
            TemperaError: they cannot be had.
        """
        if self.random or Path(self.weights).expanduser().exists():
            return 0
        return self._repository().to_download(self._patterns())

    def _patterns(self) -> list[str]:
        return [
            pattern
            for name in self.files
            for pattern in (name, f"{name}.index.json", re.sub(r"(\.\w+)$", r"-*\1", name))
        ] + ["config.json"]

    def _missing(self, problem: str) -> MissingWeights:
        """The error to raise; its command also fetches weights in several parts."""
        wanted = re.sub(r"\.safetensors$", "*.safetensors*", self.files[0])
        return MissingWeights(problem, Repository(self.hub).command([wanted], "DIR"))

    def _download(self) -> Path:
        """Download the required files of the hub repository; return their directory."""
        name = self._repository().id
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
            raise self._missing(
                f"{self.weights} does not exist: give the file {self.files[0]}, a directory that "
                "holds it, or a hub id (owner/name, or owner/name@revision);"
            )
        try:
            return self._repository().snapshot(self._patterns())
        except CannotReach as problem:
            raise self._missing(
                f"{self.weights} is not in the hub's cache, and the hub cannot be reached "
                f"({problem.reason}): go online, or, on a machine that is,"
            ) from None


def _parts(index: Path) -> list[Path]:
    """The files that an index names; refuse if one is missing."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(part, str) for part in listed.values()):
        raise TemperaError(f"{index} names no parts of weights (weight_map): download it again.")
    names = sorted(set(listed.values()))
    if any(Path(name).name != name for name in names):
        raise TemperaError(f"{index} names parts in other directories: download it again.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise TemperaError(
            f"{index.parent} is partial, {len(missing)} of its {len(names)} parts are missing, "
            f"first {missing[0]}: download it again."
        )
    return [index.parent / name for name in names]


def read(files: Sequence[Path]) -> dict[str, Tensor]:
    """Memory-map all tensors of safetensors or PyTorch files, by name. The main process prints each
    file's SHA-256.

    Raises:
        TemperaError: a file has another format, is truncated, or contains objects that would run
            code when loaded.
    """
    tensors: dict[str, Tensor] = {}
    for path in files:
        if started_as_main():
            print(f"weights: {path}, {path.stat().st_size / 1e9:.2f} GB, sha256 {checksum(path)}")
        tensors.update(read_tensors(path))
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors or PyTorch file, mapped, with their names.

    Raises:
        TemperaError: as `read`.
    """
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)


def checksum(path: Path) -> str:
    """SHA-256 of a file. Files in the hub's cache are named by it and need not be read; for others
    it is cached by path, size and modification time.
    """
    place = path.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", place.name):
        return place.name
    stat = place.stat()
    key = hashlib.sha256(f"{place} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    known = cache_directory() / "checksums" / key
    with suppress(OSError):
        return known.read_text(encoding="ascii")
    digest = sha256_file(place)
    with suppress(TemperaError):  # without a writable cache nothing is cached
        write_text(known, digest)
    return digest


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    check_readable(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except SafetensorError as problem:
        raise TemperaError(
            f"{path} is cut off or no safetensors file ({problem}): download it again."
        ) from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Tensors of a PyTorch file, taken from the `model`, `module` or `state_dict` entry that
    trainers write; averaged weights are preferred.
    """
    refuse_programs(path)
    try:
        # LlamaGen's trainer saves its options with the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as problem:
                if "mmap" not in str(problem):
                    raise
                # the old format, without zip, cannot be mapped
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise TemperaError(
            f"{path} holds more than tensors or is no PyTorch file, and reading it could run "
            "code: copy its tensors with `python -m tempera.runtime.convert_checkpoint "
            f"{path} {path.with_suffix('.safetensors')}` and give that file, or download it again."
        ) from None
    except (RuntimeError, EOFError, LookupError, struct.error) as problem:
        raise TemperaError(
            f"{path} is cut off or no PyTorch file ({reason(problem)}): download it again."
        ) from None
    return named_tensors(loaded, path)


def load_pretrained(
    make: Callable[[], NetworkType],
    files: PretrainedFiles,
    translate: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    ignore: Sequence[str] = (),
) -> NetworkType:
    """Build a network and load published or random weights; the result is frozen.

    Args:
        make: builds the network; called on the meta device.
        files: location of the weights.
        translate: tensors by name, from the published layout to the network's.
        device, dtype: device and dtype of random weights; published weights stay on the CPU in the
            dtype of their files.
        ignore: prefixes of names in the files that do not belong to this network.

    Raises:
        TemperaError: the weights cannot be found or read, or belong to another network.
    """
    network = on_meta(make)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(files)
        return network.to(dtype).eval().requires_grad_(False)
    if files.random:
        randomise(network, device or torch.device("cpu"), dtype)
        return network
    found = files.find()
    state = read(found)
    fill(network, translate(state) if translate else state, str(found[0]), ignore)
    return network


def on_meta(make: Callable[[], NetworkType]) -> NetworkType:
    """Build a network on the meta device: it has shapes but no memory."""
    with torch.device("meta"):
        return make()


def fill(
    network: nn.Module, state: Mapping[str, Tensor], source: str, ignore: Sequence[str] = ()
) -> None:
    """Assign the tensors of `state` to a network on the meta device, without a copy, and freeze it.

    Args:
        network: the network.
        state: tensors in the network's layout.
        source: what errors call `state`.
        ignore: prefixes of names that do not belong to this network.

    Raises:
        TemperaError: the layout or a size differs, or tensors are missing or left over.
    """
    state = {name: tensor for name, tensor in state.items() if not name.startswith(tuple(ignore))}
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    common = [name for name in expected if name in state]
    missing, left = (
        [name for name in expected if name not in state],
        [name for name in state if name not in expected],
    )
    if missing and left:
        raise TemperaError(
            f"{source} is in another layout (it holds {left[0]}, not {missing[0]}): give the "
            "file as it was published."
        )
    for name in common:
        if state[name].shape != expected[name]:
            raise TemperaError(
                f"{source} is of another size ({name} is {tuple(state[name].shape)}, this "
                f"model's is {tuple(expected[name])}): choose the model that it belongs to, or "
                "another file."
            )
    if missing:
        raise TemperaError(
            f"{source} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}: "
            "download it again."
        )
    if left:
        raise TemperaError(
            f"{source} holds {len(left)} tensors that this model lacks, first {left[0]}: "
            "choose the model that they belong to."
        )
    check_values(network.state_dict(), state, source)
    network.load_state_dict(state, assign=True)
    _finish(network, torch.device("cpu"))


def randomise(network: nn.Module, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
    """Initialise a network on the meta device with random weights on `device` in `dtype`: norms 1,
    biases 0, all others N(0, 0.02²).
    """
    network.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            if tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(0, 0.02, generator=generator)
            else:
                tensor.fill_(1.0 if name.endswith(("weight", "running_var")) else 0.0)
    _finish(network, device)


def _finish(network: nn.Module, device: torch.device) -> None:
    """Compute the buffers that are not part of the files, and freeze the network."""
    for module in network.modules():
        if isinstance(module, HasTables):
            module.reset_tables(device)
    network.eval().requires_grad_(False)
