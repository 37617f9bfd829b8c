"""`dry_run=true`: what a run would do, download and hold in memory. Nothing is read or allocated:
the networks have sizes and no data.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from omegaconf import DictConfig
from rich.filesize import decimal
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from tempera.config import build
from tempera.config.build import AnyTarget
from tempera.config.instantiate import instantiate
from tempera.continuous.target import MARTarget
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Evaluator
from tempera.runtime.hub import CannotReach, together
from tempera.runtime.pretrained import PretrainedFiles
from tempera.runtime.processor import Place
from tempera.targets.prompt_state import PromptState
from tempera.targets.transformer import TransformerTarget
from tempera.training.recipe import Recipe

T = TypeVar("T")

FOREIGN = {"torch", "numpy", "transformers", *sys.stdlib_module_names}
"""Packages whose objects hold no networks of a run."""
CAPTION = "0"
"""Stands for the captions of training images: a text, and a class number."""


Memory = dict[str, int]
"""Bytes of the parts that grow with the model and the batch: weights of all networks, KV cache,
float32 logits of root and drafted tokens, the widest layer of the image decoder, and in training
gradients and optimiser with averages and the saved copy of the draft. Buffers inside kernels, the
allocator's rounding, the CUDA context and the activations of training come on top.
"""


def dry_evaluation(
    cfg: DictConfig, place: Place, prompts: Sequence[str], evaluator: Evaluator
) -> dict[str, float]:
    """Print what an evaluation takes; returns the bytes of `memory`, and those to `download` if the
    hub can be reached.
    """
    if not {"neighbours", "statistics"} & set(cfg):  # made of files that are not read here
        build.build_rule(cfg)
    batch = list(prompts[: build.batch_size(cfg)])
    with build.without_weights(cfg) as (sized, files):
        target = build.build_fast_target(sized)
        memory = decoding_memory(target, sized, batch)
    images = "1 image" if len(prompts) == 1 else f"{len(prompts):,} images"
    work = f"{images} of {target.length:,} tokens, {len(batch)} at a time"
    return _shown(work, place, memory, to_download(files, evaluator))


def decoding_memory(target: AnyTarget, cfg: DictConfig, prompts: list[str]) -> Memory:
    """What decoding a batch takes, by a target and a configuration of `without_weights`."""
    drafter = build.build_drafter(cfg, target)
    decoder = build.build_image_decoder(cfg)
    shape = (1, *target.grid, *([target.channels] if isinstance(target, MARTarget) else []))
    kind = torch.float32 if isinstance(target, MARTarget) else torch.int64
    layers: list[int] = [0]

    def note(_: nn.Module, inputs: object, output: object) -> None:
        tensors = tree_leaves((inputs, output))
        layers.append(sum(part.nbytes for part in tensors if isinstance(part, torch.Tensor)))

    with torch.inference_mode():
        cache = logits = 0
        if isinstance(target, TransformerTarget):
            cache, logits = _batch(target, prompts, drafter.nodes)
        watched = register_module_forward_hook(note)
        try:
            decoder.decode_codes(torch.zeros(shape, dtype=kind, device=build.META))
        finally:
            watched.remove()
    weights = size_of(*networks(target), *networks(drafter), decoder)
    return {"weights": weights, "KV cache": cache, "logits": logits, "image decoder": max(layers)}


def _batch(target: TransformerTarget, prompts: list[str], nodes: int) -> tuple[int, int]:
    """Bytes of the KV cache and of the logits of a batch of discrete tokens."""
    copies = target.sampling.rows
    session = target.session
    keep = target.conditioner(prompts)[1].to("meta").repeat(copies, 1)
    session.prompt = PromptState(torch.empty(0), keep, copies, target.length)
    session.cache.begin(len(keep), session.capacity(nodes))
    return session.cache.nbytes(), 4 * len(keep) * (1 + nodes) * target.vocab_size


def dry_training(cfg: DictConfig, place: Place, recipe: Recipe) -> dict[str, float]:
    """Print what a training takes in each process that holds the target as a whole; see
    `dry_evaluation`.
    """
    drawn = cfg.train_data.batch_size if cfg.train_data.get("draws") else 1
    captions = [CAPTION] * max(drawn, recipe.decodes)
    with build.without_weights(cfg) as (sized, files):
        target = build.build_discrete_target(sized)
        with target.device:
            draft = instantiate(sized.draft, target=target, model=cfg.model.name)
        nets = [*networks(target), build.build_tokenizer(sized), draft]
        with torch.inference_mode():
            cache, logits = _batch(target, captions, recipe.depth)
    work = _training(cfg, recipe, target.length)
    copies = 5 if recipe.ema else 4
    logits = max(logits, 4 * recipe.logit_chunk * target.vocab_size)
    memory = {"weights": size_of(*nets), "KV cache": cache, "logits": logits}
    memory["gradients and optimiser"] = copies * size_of(draft)
    return _shown(work, place, memory, to_download(files))


def _training(cfg: DictConfig, recipe: Recipe, tokens: int) -> str:
    """What a training does: `20 epochs of 30,000 images, 2,304 tokens each, 16 at a time`."""
    if cfg.steps:
        return f"{cfg.steps:,} steps of {recipe.batch_size} images, {tokens:,} tokens each"
    images = "all images" if cfg.limit is None else f"{cfg.limit:,} images"
    return (
        f"{cfg.epochs:g} epochs of {images}, {tokens:,} tokens each, {recipe.batch_size} at a time"
    )


def _shown(work: str, place: Place, memory: Memory, download: int | None) -> dict[str, float]:
    print(f"to do: {work}\nto download: {downloads(download)}")
    # the image decoder works when the logits are gone
    total = sum(memory.values()) - min(memory["logits"], memory.get("image decoder", 0))
    parts = ", ".join(f"{name} {decimal(size)}" for name, size in memory.items() if size)
    print(f"memory: about {decimal(total)} ({parts}) in {place.dtype_name} on {place.device}")
    found = {"memory": float(total)}
    if download is not None:
        found["download"] = float(download)
    return found


def to_download(files: Sequence[PretrainedFiles], evaluator: Evaluator | None = None) -> int | None:
    """Bytes of these files and of a run's metrics that this machine lacks; None if the hub cannot
    be reached.

    Raises:
        TemperaError: the hub refuses one.
    """
    different = {(network.weights, *network.files): network for network in files}
    try:
        missing = sum(network.to_download() for network in different.values())
        return missing + (evaluator.to_download() if evaluator else 0)
    except CannotReach:
        return None


def read_with_files(
    cfg: DictConfig, make: Callable[[DictConfig], object], read: Callable[[], T]
) -> T:
    """Read what a run needs beside its networks, and check that the files of these can be had, so
    that it does not stop after hours of downloads. A dry run reports downloads by itself.

    Args:
        cfg: the composed configuration.
        make: builds the networks.
        read: reads the rest.

    Raises:
        TemperaError: names all files that cannot be had.
    """
    if cfg.dry_run or cfg.family.toy:
        return read()
    problems: list[TemperaError] = []
    try:
        found = read()
    except CannotReach as problem:
        problems.append(problem)
    with build.without_weights(cfg) as (sized, files):
        make(sized)
    for network in files:
        try:
            network.check(cached=any(isinstance(problem, CannotReach) for problem in problems))
        except TemperaError as problem:
            problems.append(problem)
    if problems:
        raise together(problems)
    return found


def downloads(missing: int | None) -> str:
    """What `to_download` found, for people."""
    if missing is None:
        return "unknown, as the hub cannot be reached"
    return decimal(missing) if missing else "nothing"


def networks(thing: object, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The networks among the attributes of tempera's objects, and of those of a user's package."""
    seen = set() if seen is None else seen
    thing = getattr(thing, "__self__", thing)  # a network's method
    if isinstance(thing, nn.Module):
        yield thing
    elif id(thing) not in seen and type(thing).__module__.partition(".")[0] not in FOREIGN:
        seen.add(id(thing))
        for value in getattr(thing, "__dict__", {}).values():
            yield from networks(value, seen)


def size_of(*modules: nn.Module) -> int:
    """Bytes of the networks' tensors; shared ones count once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
