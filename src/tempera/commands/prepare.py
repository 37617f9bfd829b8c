"""`tempera-prepare`: captions and images to shards of codes."""

import time
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from pydantic import PositiveInt

from tempera.commands.costs import read_with_files, to_download
from tempera.config.compose import pasted
from tempera.config.instantiate import Part, fitting, from_options, options_of, part
from tempera.config.parts import Parts, check_discrete
from tempera.config.tracking import Tracking
from tempera.data.encoders import CodeEncoder
from tempera.data.entries import Source, shown
from tempera.data.prepare import prepare
from tempera.data.shards import MANIFEST, Manifest
from tempera.runtime.distributed import Processes
from tempera.runtime.hub import CannotReach
from tempera.runtime.installation import command


@dataclass(frozen=True)
class Options:
    """What this command reads itself; conf/prepare.yaml says what each is."""

    directory: Path
    dry_run: bool


def main(cfg: DictConfig) -> None:
    """Encode the source, or what is left of it; with dry_run, tell what that would be."""
    options, shards = read_options(cfg)
    tracking = Tracking.of(cfg, "prepare")
    parts = Parts.of(cfg)
    source_part: Part[Source] = part(cfg.source)
    encoder: Part[CodeEncoder] = part(cfg.encoder)
    directory = options.directory
    processes = Processes(cpu=parts.placement.device.type == "cpu")
    if options.dry_run:
        if processes.is_main:
            _tell(directory, shards.options["limit"], source_part, parts, encoder)
        return

    def networks(sized: Parts) -> None:
        sized.code_encoder(encoder)

    source = (
        source_part.make() if cfg.family.toy else read_with_files(parts, networks, source_part.make)
    )
    source.fetch(processes)
    before = Manifest.load(directory).next if (directory / MANIFEST).is_file() else 0
    code_encoder = parts.code_encoder(encoder)
    began = time.monotonic()
    manifest = shards.make(
        source=source,
        encoder=code_encoder,
        captions=parts.captions(),
        processes=processes,
    )
    if processes.is_main:
        _show(manifest, directory, parts.model)
        seconds = time.monotonic() - began
        _track(manifest, directory, tracking, manifest.next - before, seconds)


def read_options(cfg: DictConfig) -> tuple[Options, Part[Manifest]]:
    """What this command reads itself, and what writes the shards, which takes the objects yet; a
    sweep reads it of all jobs before the first begins.
    """
    check_discrete(cfg, f"`{command('prepare')}` encodes images as discrete tokens")
    shards = options_of(cfg, prepare, without=("source", "encoder"))
    limit = fitting(cfg.source.limit, PositiveInt | None, "source.limit")
    return from_options(cfg, Options), shards.having(limit=limit)


def _show(manifest: Manifest, directory: Path, model: str) -> None:
    """Print what the shards hold, and how to train on them."""
    print(
        f"{manifest.count} images in {len(manifest.shards)} shards, {manifest.broken_count} "
        f"broken entries: {directory}"
    )
    if manifest.left_out:
        print(f"left out: {shown(manifest.left_out)}")
    print(
        f"train on them: {command('train')} model={model} train_data=shards "
        f"{pasted('train_data.path', directory)}"
    )


def _track(
    manifest: Manifest, directory: Path, tracking: Tracking, read: int, seconds: float
) -> None:
    """Send the counts to the tracker, if this run read entries."""
    if not read:
        return
    values = {
        "images": manifest.count,
        "broken": manifest.broken_count,
        "read": read,
        "seconds": seconds,
        "read_per_second": read / seconds,
    }
    values |= {f"left_out/{kind}": count for kind, count in manifest.left_out.items()}
    tracking.record(directory, values, files=[directory / MANIFEST])


def _tell(
    directory: Path,
    limit: int | None,
    source: Part[Source],
    parts: Parts,
    encoder: Part[CodeEncoder],
) -> None:
    """Print what would be encoded, and downloaded for it."""
    unread: list[CannotReach] = []
    try:
        source.make()
    except CannotReach as problem:
        unread.append(problem)
    with parts.sized() as (sized, files):
        sized.code_encoder(encoder)
    entries = "all" if limit is None else f"at most {limit:,}"
    print(f"to do: encode {entries} entries of the source into shards in {directory}")
    to_download(files, unread=unread)
    print("plus the source's files that are not on this machine yet")
