"""`tempera-prepare`: captions and images to shards of codes."""

import time
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from tempera.commands.costs import downloads, read_with_files, to_download
from tempera.config import build
from tempera.config.compose import pasted
from tempera.config.instantiate import Part, from_options, part
from tempera.config.tracking import Tracking
from tempera.data.entries import Source, shown
from tempera.data.prepare import prepare
from tempera.data.shards import MANIFEST, Manifest
from tempera.runtime.distributed import Processes
from tempera.runtime.installation import command
from tempera.runtime.processor import parse_device


@dataclass(frozen=True)
class Checked:
    """Work whose options are right and whose source can be read, before weights are read.

    Attributes:
        source: captions and images.
        processes: share the work.
        directory: of the shards.
        tracking: where the counts go.
        model: the model's name.
    """

    source: Source
    processes: Processes
    directory: Path
    tracking: Tracking
    model: str

    @property
    def entries_read(self) -> int:
        """Entries of the source that are in the shards already."""
        known = (self.directory / MANIFEST).is_file()
        return Manifest.load(self.directory).next if known else 0


def main(cfg: DictConfig) -> None:
    """Encode the source, or what is left of it; with dry_run, tell what that would be."""
    checked = _check(cfg)
    if cfg.dry_run:
        _dry_run(cfg, checked)
        return
    checked.source.fetch(checked.processes)
    before = checked.entries_read
    encoder = build.build_encoder(cfg)
    began = time.monotonic()
    manifest = from_options(
        cfg,
        prepare,
        source=checked.source,
        encoder=encoder,
        captions=build.build_captions(cfg),
        directory=checked.directory,
        processes=checked.processes,
    )
    if checked.processes.is_main:
        _show(manifest, checked)
        _track(manifest, checked, manifest.next - before, time.monotonic() - began)


def _check(cfg: DictConfig) -> Checked:
    tracking = Tracking.of(cfg, "prepare")
    build.check_discrete(cfg, f"`{command('prepare')}` encodes images as discrete tokens")
    device = parse_device(cfg.device, dry=cfg.dry_run)
    processes = Processes(cpu=device.type == "cpu")
    source: Part[Source] = part(cfg.source)
    return Checked(
        source=read_with_files(cfg, build.build_encoder, source.make),
        processes=processes,
        directory=Path(str(cfg.directory)),
        tracking=tracking,
        model=cfg.model.name,
    )


def _show(manifest: Manifest, checked: Checked) -> None:
    """Print what the shards hold, and how to train on them."""
    print(
        f"{manifest.count} images in {len(manifest.shards)} shards, {manifest.broken_count} "
        f"broken entries: {checked.directory}"
    )
    if manifest.left_out:
        print(f"left out: {shown(manifest.left_out)}")
    print(
        f"train on them: {command('train')} model={checked.model} train_data=shards "
        f"{pasted('train_data.path', checked.directory)}"
    )


def _track(manifest: Manifest, checked: Checked, read: int, seconds: float) -> None:
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
    checked.tracking.record(checked.directory, values, files=[checked.directory / MANIFEST])


def _dry_run(cfg: DictConfig, checked: Checked) -> None:
    """Print what would be encoded, and downloaded for it."""
    if not checked.processes.is_main:
        return
    with build.without_weights(cfg) as (sized, files):
        build.build_encoder(sized)
    missing = to_download(files)
    limit = "all" if cfg.limit is None else f"at most {cfg.limit:,}"
    print(f"to do: {limit} entries of the source to shards in {checked.directory}")
    print(f"to download: {downloads(missing)}, and what the source lacks on this machine")
