"""Published weights: find the files, check them, and fill a network without a second copy in
memory.

`weights` is a local file, a local directory, the id of a hub repository (`owner/name`, or
`owner/name@revision`), or `random`. Files are read without running code from them, and
memory-mapped: a network is built on the meta device and takes the mapped tensors as they are. Data
is loaded only when the network moves to a device, parameter by parameter.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError
from tempera.runtime.distributed import started_as_main
from tempera.runtime.files import read_json, reason
from tempera.runtime.hub import Repository
from tempera.runtime.network_directory import NetworkType
from tempera.runtime.tensor_files import fill, read_tensors

log = logging.getLogger("tempera")
RANDOM = "random"
"""The value of `weights` that asks for an untrained network, to measure speed and memory."""

Taken = list[dict[str, Any]]
"""What no file of weights states and no tensor shows: each with the `source` and `values`."""
_NOTED: ContextVar[list["PretrainedFiles"] | None] = ContextVar("noted", default=None)
_TAKEN: ContextVar[Taken | None] = ContextVar("taken", default=None)


@contextmanager
def recording_taken() -> Iterator[Taken]:
    """Record, inside the `with` block, what networks take from their presets because their files
    neither state nor show it.
    """
    taken: Taken = []
    token = _TAKEN.set(taken)
    try:
        yield taken
    finally:
        _TAKEN.reset(token)


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


def note(files: "PretrainedFiles") -> bool:
    """List the files inside `sizes_only`, where nothing is loaded; whether this is there."""
    if (noted := _NOTED.get()) is not None and not files.random:
        noted.append(files)
    return noted is not None


MOST_LAYERS = 1000
_ONLY = MappingProxyType(
    {
        "hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "rope_type": "default",
        "use_sliding_window": False,
    }
)
"""Of decoders."""


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

    @property
    def are_published(self) -> bool:
        """Whether these are the weights that the preset describes, and not a user's own."""
        return self.weights.partition("@")[0] == self.hub

    def find(self) -> list[Path]:
        """Find the local files; if `weights` is a hub id, download them first.

        Raises:
            TemperaError: the location does not exist or a file is missing; says how to get it.
        """
        path = Path(self.weights).expanduser()
        if path.is_file():
            return _parts(path) if path.name.endswith(".index.json") else [path]
        if (repository := self._repository) is not None:
            path = repository.snapshot(self._patterns())
        for name in self.files:
            if (path / name).is_file():
                return [path / name]
            if (path / f"{name}.index.json").is_file():
                return _parts(path / f"{name}.index.json")
        wanted = re.sub(r"\.safetensors$", "*.safetensors*", self.files[0])  # or its parts
        command = Repository(self.hub).command([wanted], "DIR")
        raise TemperaError(
            f"{path} contains no {self.files[0]}: get it with `{command}` and give weights=DIR"
        )

    def stated(
        self, defaults: Mapping[str, Any], kind: str, only: Mapping[str, Any] = _ONLY
    ) -> dict[str, Any]:
        """The sizes and options of a network: those that `config.json` beside its weights states,
        else the defaults.

        Args:
            defaults: by their names in `config.json`, `rope_theta` among them.
            kind: what the file's `model_type` starts with, in lower case, if it has one.
            only: what it may state of options that no tensor shows, and that the network lacks.

        Raises:
            TemperaError: the file states a network that would load with other logits: of another
                kind, or with an activation, a rotary embedding or a window of attention that is
                not supported.
        """
        if self.random:
            return dict(defaults)
        path = self._config()
        if path is None or not path.is_file():
            _take(self.weights, {**defaults, **only})
            return dict(defaults)
        content: dict[str, Any] = read_json(path)

        def part(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
            found = (values[name] for name in names if isinstance(values.get(name), dict))
            return next(filter(None, found), {})

        text = part(content, "text_config") or content
        rope = part(text, "rope_parameters", "rope_scaling")
        stated = {**rope, **text, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
        if not str(content.get("model_type", kind)).lower().startswith(kind):
            raise _unsupported(path, "model_type", content["model_type"], kind)
        for name, value in only.items():
            if name not in defaults and stated.get(name, value) != value:
                raise _unsupported(path, name, stated[name], value)
        sizes = dict(defaults)
        for name in sizes.keys() & {name for name, value in stated.items() if value is not None}:
            value, usual = stated[name], type(sizes[name])  # no default: a whole number
            kinds = {float: (float, int), type(None): (int,)}.get(usual, (usual,))
            most = MOST_LAYERS if name.endswith("layers") else 1e9
            if type(value) not in kinds or (type(value) in (int, float) and not 0 < value < most):
                raise _unsupported(path, name, value, f"a number like {sizes[name]}")
            sizes[name] = float(value) if usual is float else value
        if not self.are_published:
            _take(str(path), {name: sizes[name] for name in sizes if stated.get(name) is None})
        return sizes

    @property
    def _repository(self) -> Repository | None:
        return None if Path(self.weights).expanduser().exists() else Repository.named(self.weights)

    def _config(self) -> Path | None:
        """`config.json`, fetched from the hub if need be; None if it cannot be had."""
        if (repository := self._repository) is None:
            path = Path(self.weights).expanduser()
            return (path / self._sizes_file) if path.is_dir() else path.parent / "config.json"
        try:
            return repository.file(self._sizes_file)
        except TemperaError:
            return None

    @property
    def _sizes_file(self) -> str:
        """`config.json`: in the directory where a pipeline of Hugging Face keeps one part, else at
        the top.
        """
        folder, _, name = self.files[0].rpartition("/")
        return f"{folder}/config.json" if name == "model.safetensors" and folder else "config.json"

    def check(self) -> None:
        """Raise TemperaError unless they are here or can be downloaded; see `Repository.check`."""
        if self._repository is None:
            self.find()
        else:
            self._repository.check(self._patterns())

    def to_download(self) -> int:
        """Bytes that the hub's cache lacks; needs the network unless there are none.

        Raises:
            TemperaError: they cannot be had.
        """
        repository = None if self.random else self._repository
        return repository.to_download(self._patterns()) if repository else 0

    def _patterns(self) -> list[str]:
        sharded = [name for name in self.files if name.endswith((".safetensors", ".bin"))]
        indices = [f"{name}.index.json" for name in sharded]
        shards = [re.sub(r"(\.\w+)$", r"-*\1", name) for name in sharded]
        return [*dict.fromkeys([*self.files, *indices, *shards, self._sizes_file])]


def _take(source: str, values: Mapping[str, Any]) -> None:
    """Tell and record the preset's values that a file does not state."""
    if not values or are_sizes_enough():
        return
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    told = f"{source} does not state these values, so the preset's are used: {shown}"
    log.info(told)
    if started_as_main():
        print(told)
    if (taken := _TAKEN.get()) is not None:
        taken.append({"source": source, "values": dict(values)})


def _unsupported(path: Path, name: str, value: object, only: object) -> TemperaError:
    return TemperaError(
        f"{path} states {name}={value}, but only {only} is supported: give the weights of another "
        "model."
    )


def _parts(index: Path) -> list[Path]:
    """The files that an index names; refuse if one is missing."""
    listed = read_json(index).get("weight_map")
    names = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
    parts = [index.parent / Path(name).name for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not names:
        lacks = (
            f"does not contain {missing[0]}, which {index.name} lists"
            if missing
            else "lists no files"
        )
        raise TemperaError(f"{index.parent if missing else index} {lacks}: download it again.")
    return parts


def load_pretrained(
    make: Callable[[], NetworkType],
    files: PretrainedFiles,
    translate: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    ignore: Sequence[str] = (),
    untold: Mapping[str, Any] = MappingProxyType({}),
) -> NetworkType:
    """Build a network and load published or random weights; the result is frozen.

    Args:
        make: builds the network; called on the meta device.
        files: location of the weights.
        translate: tensors by name, from the published layout to the network's.
        device, dtype: device and dtype of random weights; published weights stay on the CPU in the
            dtype of their files.
        ignore: prefixes of names in the files that do not belong to this network.
        untold: what the network takes from its preset and no tensor shows, such as the number of
            heads; told and recorded for a user's own weights.

    Raises:
        TemperaError: the weights cannot be found or read, or belong to another network.
    """
    try:
        network = on_meta(make)
    except TemperaError:
        raise
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as problem:
        raise TemperaError(
            f"{files.weights} states sizes that no network can have ({reason(problem)}): give the "
            "weights of another model."
        ) from problem
    if note(files):
        return network.to(dtype).eval().requires_grad_(False)
    if files.random:
        randomise(network, device or torch.device("cpu"), dtype)
        return network
    found = files.find()
    if not files.are_published:
        _take(files.weights, untold)
    state: dict[str, Tensor] = {}
    for path in found:
        if started_as_main():
            blob = path.resolve().name  # the hub's cache names files by their SHA-256
            digest = f", sha256 {blob}" if re.fullmatch(r"[0-9a-f]{64}", blob) else ""
            print(f"weights: {path}, {path.stat().st_size / 1e9:.2f} GB{digest}")
        state |= read_tensors(path, skip_objects=True)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(tuple(ignore))}
    fill(network, translate(state) if translate else state, found[0])
    return network.eval().requires_grad_(False)


def on_meta(make: Callable[[], NetworkType]) -> NetworkType:
    """Build a network on the meta device: it has shapes but no memory."""
    with torch.device("meta"):
        return make()


def randomise(network: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Initialise a network on the meta device with random weights on `device` in `dtype`: norms 1,
    biases 0, all others N(0, 0.02²).
    """
    network.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            if tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(0, 0.02, generator=generator)
            else:
                tensor.fill_(1.0 if name.endswith(("weight", "running_var")) else 0.0)
    network.eval().requires_grad_(False)
