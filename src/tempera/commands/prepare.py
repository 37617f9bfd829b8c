"""`tempera-prepare`: captions and images to shards of codes."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from tempera.commands.sources import build_source, fetch
from tempera.config import build
from tempera.config.compose import pasted
from tempera.config.instantiate import from_options
from tempera.data.estimate import Estimate
from tempera.data.shards import Manifest
from tempera.runtime.cost import check_disks
from tempera.runtime.distributed import Processes
from tempera.runtime.installation import command
from tempera.runtime.units import amount


def main(cfg: DictConfig) -> dict[str, int]:
    """Encode the source, or what is left of it, and return the counts; with dry_run, only estimate
    time and disk space.
    """
    build.check_discrete(cfg, f"`{command('prepare')}` encodes images as discrete tokens")
    processes = Processes(cpu=build.parse_device(cfg.device).type == "cpu")
    source = build_source(cfg)
    if cfg.dry_run and (stored := source.to_store()):
        return _not_fetched(stored, processes.is_main)
    fetch(source, processes)
    encoder = build.build_encoder(cfg)
    directory = Path(str(cfg.directory))
    parts: dict[str, Any] = {"source": source, "encoder": encoder, "directory": directory}
    if cfg.dry_run:
        return _estimated(cfg, parts) if processes.is_main else {}
    with tqdm(desc="encode", unit="image", mininterval=1, disable=not processes.is_main) as bar:
        parts |= {
            "report": bar.write if processes.is_main else _nothing,
            "bar": bar,
            "processes": processes,
        }
        manifest: Manifest = from_options(cfg, "tempera.data.prepare.prepare", **parts)
    if processes.is_main:
        print(
            f"{manifest.count} images in {len(manifest.shards)} shards, {manifest.broken_count} "
            f"broken entries: {directory}"
        )
        print(
            f"train on them: {command('train')} model={cfg.model.name} train_data=shards "
            f"{pasted('train_data.path', directory)}"
        )
    return {"count": manifest.count, "broken": manifest.broken_count}


def _estimated(cfg: DictConfig, parts: dict[str, Any]) -> dict[str, int]:
    """Print an estimate."""
    found: Estimate = from_options(cfg, "tempera.data.estimate.estimate", **parts)
    print(f"dry run, nothing is written in {parts['directory']}\n{found}")
    return {"done": found.done, "sampled": found.sampled}


def _not_fetched(stored: dict[Path, int], tell: bool) -> dict[str, int]:
    """Print the disk space of what is to be downloaded before a sample can be encoded."""
    for place, size in stored.items() if tell else ():
        print(f"dry run, nothing is downloaded\ndisk: about {amount(size)} in {place}")
        print("time: not measured, as the images are not on this machine")
    check_disks(stored)
    return {"done": 0, "sampled": 0}


def _nothing(line: str) -> None:
    """Ignore the line; only the main process prints it."""
