"""`tempera-prepare`: captions and images to shards of codes."""

import time
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from tempera.commands.costs import downloads, read_with_files, to_download
from tempera.config import build
from tempera.config.compose import pasted
from tempera.config.instantiate import from_options, instantiate, parsed
from tempera.data.entries import Source, shown
from tempera.data.prepare import prepare
from tempera.data.shards import MANIFEST, Manifest
from tempera.runtime.distributed import Processes
from tempera.runtime.installation import command


def main(cfg: DictConfig) -> dict[str, int]:
    """Encode the source, or what is left of it, and return the counts; with dry_run, tell what that
    would be.
    """
    parsed(cfg.tracking)
    build.check_discrete(cfg, f"`{command('prepare')}` encodes images as discrete tokens")
    device = build.parse_device(cfg.device, dry=cfg.dry_run)
    processes = Processes(cpu=device.type == "cpu")
    source: Source = read_with_files(cfg, build.build_encoder, partial(instantiate, cfg.source))
    if cfg.dry_run:
        return _told(cfg) if processes.is_main else {}
    source.fetch(processes)
    encoder = build.build_encoder(cfg)
    directory = Path(str(cfg.directory))
    parts = {"source": source, "encoder": encoder, "directory": directory, "processes": processes}
    known = (directory / MANIFEST).is_file()
    before, began = Manifest.load(directory).next if known else 0, time.monotonic()
    manifest = from_options(cfg, prepare, captions=build.build_captions(cfg), **parts)
    if processes.is_main:
        print(
            f"{manifest.count} images in {len(manifest.shards)} shards, {manifest.broken_count} "
            f"broken entries: {directory}"
        )
        if manifest.left_out:
            print(f"left out: {shown(manifest.left_out)}")
        print(
            f"train on them: {command('train')} model={cfg.model.name} train_data=shards "
            f"{pasted('train_data.path', directory)}"
        )
        if made := manifest.next - before:
            values = {"images": manifest.count, "broken": manifest.broken_count, "read": made}
            values |= {f"left_out/{kind}": parts for kind, parts in manifest.left_out.items()}
            seconds = time.monotonic() - began
            build.track(
                cfg, directory, "prepare",
                values | {"seconds": seconds, "read_per_second": made / seconds},
                files=[directory / MANIFEST],
            )  # fmt: skip
    return {"count": manifest.count, "broken": manifest.broken_count}


def _told(cfg: DictConfig) -> dict[str, int]:
    """Print what would be encoded, and downloaded for it."""
    with build.without_weights(cfg) as (sized, files):
        build.build_encoder(sized)
    missing = to_download(files)
    limit = "all" if cfg.limit is None else f"at most {cfg.limit:,}"
    print(f"to do: {limit} entries of the source to shards in {cfg.directory}")
    print(f"to download: {downloads(missing)}, and what the source lacks on this machine")
    return {} if missing is None else {"download": missing}
