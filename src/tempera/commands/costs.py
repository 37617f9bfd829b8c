"""`dry_run=true`: what a run would do, download and hold in memory, also without a network. Nothing
is read or allocated: the networks have sizes and no data.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import constants
from rich.filesize import decimal
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from tempera.config.instantiate import Part
from tempera.config.parts import META, AnyTarget, AnyTokenizer, Parts
from tempera.continuous.target import MARTarget
from tempera.data.prompts import Prompt
from tempera.drafters.draft_network import DraftNetwork
from tempera.errors import TemperaError
from tempera.image_tokenizers.cosmos import UntrainedDecoder
from tempera.metrics.evaluators import Evaluator
from tempera.metrics.torch_metrics import TorchMetrics
from tempera.runtime.files import free_at
from tempera.runtime.hub import CannotReach, together
from tempera.runtime.pretrained import PretrainedFiles
from tempera.runtime.processor import Placement
from tempera.runtime.quantised import stored_bytes
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
    parts: Parts,
    read: Callable[[], list[Prompt]],
    limit: int | None,
    scorers: Sequence[Evaluator],
) -> dict[str, float]:
    """Print what an evaluation takes; see `dry_decoding`.

    Args:
        parts: model and method.
        read: reads the prompts; without a network, captions stand for them.
        limit: how many there are then; None: as many as the set has.
        scorers: may have files to download.
    """
    if not parts.reads_files:  # that are not read here
        parts.rule()
    unread: list[CannotReach] = []
    try:
        prompts = [prompt.text for prompt in read()]
        limit = len(prompts)
    except CannotReach as problem:
        unread.append(problem)
        prompts = [CAPTION] * parts.batch_size
    batch = prompts[: min(parts.batch_size, limit or parts.batch_size)]
    images = "all images" if limit is None else "1 image" if limit == 1 else f"{limit:,} images"
    work = f"{images} of {{tokens}} tokens, {len(batch)} at a time"
    return dry_decoding(parts, batch, work, scorers=scorers, unread=unread)


def dry_decoding(
    parts: Parts,
    batch: list[str],
    work: str,
    *,
    scorers: Sequence[Evaluator] = (),
    unread: Sequence[CannotReach] = (),
    pictures: bool = True,
    checks_draft: bool = True,
) -> dict[str, float]:
    """Print what decoding a batch takes; returns the bytes of `memory`, and those to `download` if
    the hub can be reached.

    Args:
        parts: model and method.
        batch: the prompts.
        work: what is to be done, with `{tokens}` in place of the tokens of an image.
        scorers: may have files to download.
        unread: what else cannot be downloaded.
        pictures: whether pictures are made.
        checks_draft: whether to tell that the draft is missing.
    """
    with parts.sized() as (sized, files):
        target = sized.fast_target()
        memory = decoding_memory(target, sized, batch, pictures=pictures)
        unweighed = _unweighed(sized.image_decoder()) if pictures else []
    work = work.format(tokens=f"{target.length:,}")
    checks = [partial(parts.check_draft, of_the_hub=False)] if checks_draft else []
    problems = list(_refusals(checks, parts.model, scorers))
    found = _shown(work, parts.placement, memory, files, () if problems else scorers, unread)
    for what in unweighed:
        print(f"memory of {what} is not included, because a dry run cannot estimate it")
    for problem in problems:
        print(f"the run would stop: {problem}")
    return found


def _refusals(
    checks: Sequence[Callable[[], None]], model: str, scorers: Sequence[Evaluator]
) -> Iterator[TemperaError]:
    """What a run refuses that a dry run answers: by `checks`, and metrics that it lacks."""
    checked = [scorer for scorer in scorers if not isinstance(scorer, TorchMetrics)]
    own: list[Callable[[], None]] = [partial(scorer.check, model) for scorer in checked]
    for check in (*checks, *own):
        try:
            check()
        except TemperaError as problem:
            yield problem


def decoding_memory(
    target: AnyTarget, sized: Parts, prompts: list[str], *, pictures: bool = True
) -> Memory:
    """What decoding a batch takes, by a target of `sized`, the parts without data."""
    drafter = sized.drafter(target)
    decoders = [sized.image_decoder()] if pictures else []
    cache = logits = 0
    if isinstance(target, TransformerTarget):
        with torch.inference_mode():
            cache, logits = _batch(target, prompts, drafter.nodes)
    return {
        "weights": size_of(*networks(target), *networks(drafter), *decoders),
        "KV cache": cache,
        "logits": logits,
        "image decoder": max((_widest(decoder, target) for decoder in decoders), default=0),
    }


def _unweighed(decoder: AnyTokenizer) -> list[str]:
    """What the parts of an image decoder stand for."""
    parts = (part for part in decoder.modules() if isinstance(part, UntrainedDecoder))
    return [part.instead_of for part in parts if part.instead_of]


def _widest(decoder: AnyTokenizer, target: AnyTarget) -> int:
    """Bytes that the widest layer of an image decoder reads and writes, for one image."""
    shape = (1, *target.grid, *([target.channels] if isinstance(target, MARTarget) else []))
    kind = torch.float32 if isinstance(target, MARTarget) else torch.int64
    layers: list[int] = [0]

    def note(_: nn.Module, inputs: object, output: object) -> None:
        tensors = tree_leaves((inputs, output))
        layers.append(sum(part.nbytes for part in tensors if isinstance(part, torch.Tensor)))

    watched = register_module_forward_hook(note)
    try:
        with torch.inference_mode():
            images = decoder.decode_codes(torch.zeros(shape, dtype=kind, device=META))
    finally:
        watched.remove()
    return max(images.nbytes, *layers)


def _batch(target: TransformerTarget, prompts: list[str], nodes: int) -> tuple[int, int]:
    """Bytes of the KV cache and of the logits of a batch of discrete tokens."""
    copies = target.sampling.rows
    runner = target.runner
    mask = target.conditioner(prompts)[1].to("meta").repeat(copies, 1)
    runner.prompt = PromptState(len(mask), mask.shape[1], copies, target.length, mask.device)
    runner.cache.begin(len(mask), runner.capacity(nodes))
    return runner.cache.nbytes(), 4 * len(mask) * (1 + nodes) * target.vocab_size


def dry_training(
    parts: Parts, draft: Part[DraftNetwork], recipe: Recipe, drawn: int, work: str
) -> dict[str, float]:
    """Print what a training takes in each process that holds the target as a whole; see
    `dry_evaluation`.

    Args:
        parts: the model.
        draft: makes the network to train.
        recipe: the recipe.
        drawn: images that the target draws at a time.
        work: what is to be done, with `{tokens}` in place of the tokens of an image.
    """
    captions = [CAPTION] * max(drawn, recipe.decodes)
    with parts.sized() as (sized, files):
        target = sized.discrete_target()
        with target.device:
            network = draft.make(target=target, model=parts.model)
        nets = [*networks(target), sized.tokenizer(), network]
        with torch.inference_mode():
            cache, logits = _batch(target, captions, recipe.depth)
    work = work.format(tokens=f"{target.length:,}")
    copies = 5 if recipe.ema else 4
    logits = max(logits, 4 * recipe.logit_chunk * target.vocab_size)
    memory = {"weights": size_of(*nets), "KV cache": cache, "logits": logits}
    memory["gradients and optimiser"] = copies * size_of(network)
    return _shown(work, parts.placement, memory, files)


def _shown(
    work: str,
    placement: Placement,
    memory: Memory,
    files: Sequence[PretrainedFiles],
    scorers: Sequence[Evaluator] = (),
    unread: Sequence[CannotReach] = (),
) -> dict[str, float]:
    print(f"to do: {work}")
    download = to_download(files, scorers, unread)
    # the image decoder works when the logits are gone
    total = sum(memory.values()) - min(memory["logits"], memory.get("image decoder", 0))
    parts = ", ".join(f"{name} {decimal(size)}" for name, size in memory.items() if size)
    print(
        f"memory: about {decimal(total)} ({parts}) in {placement.dtype_name} on {placement.device}"
    )
    found = {"memory": float(total)}
    if download is not None:
        found["download"] = float(download)
    return found


def to_download(
    files: Sequence[PretrainedFiles],
    scorers: Sequence[Evaluator] = (),
    unread: Sequence[CannotReach] = (),
) -> int | None:
    """Print what this machine lacks of these files and of a run's metrics: its bytes beside the
    free disk, or, if the hub cannot be reached, the commands that download it.

    Args:
        files: of the networks.
        scorers: may have files, too.
        unread: what else cannot be downloaded.

    Returns:
        The bytes; None if the hub cannot be reached.

    Raises:
        TemperaError: the hub refuses one.
    """
    different = {(network.weights, *network.files): network for network in files}
    lacks = [network.to_download for network in different.values()]
    lacks += [scorer.to_download for scorer in scorers]
    missing = 0
    problems: list[TemperaError] = list(unread)
    for lack in lacks:
        try:
            missing += lack()
        except CannotReach as problem:
            problems.append(problem)
    if problems:
        print(f"to download: unknown, because {together(problems)}")
        return None
    cache = Path(constants.HF_HUB_CACHE)
    free = f", of {decimal(free_at(cache))} free at {cache}" if missing else ""
    print(f"to download: {decimal(missing) if missing else 'nothing'}{free}")
    return missing


def read_with_files(
    parts: Parts,
    make: Callable[[Parts], object],
    read: Callable[[], T],
    checks: Sequence[Callable[[], None]] = (),
) -> T:
    """Read what a run needs beside its networks, and check that the files of these can be had, so
    that it does not stop after hours of downloads.

    Args:
        parts: whose files they are.
        make: builds the networks, of parts without data.
        read: reads the rest.
        checks: raise TemperaError for further files.

    Raises:
        TemperaError: names all files that cannot be had.
    """
    with parts.sized() as (sized, files):
        make(sized)
    problems: list[TemperaError] = []
    try:
        found = read()
    except TemperaError as problem:
        problems.append(problem)
    for check in (*(network.check for network in files), *checks):
        try:
            check()
        except TemperaError as problem:
            problems.append(problem)
    if problems:
        raise together(problems)
    return found


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
    return sum({id(tensor): stored_bytes(tensor) for tensor in tensors}.values())
