"""Captions and images to shards of codes; the options are in conf/prepare.yaml."""

from pathlib import Path

from omegaconf import DictConfig
from tqdm import tqdm

from tempera import config
from tempera.training.shards import Manifest


@config.script("prepare")
def main(cfg: DictConfig) -> dict[str, int]:
    """Encode the source, or the rest of it, and count what there is."""
    source = config.instantiate(cfg.source)
    encoder = config.instantiate(cfg.encoder, target=config.build_target(cfg), tokenizer=config.build_tokenizer(cfg))
    directory = Path(cfg.directory)
    with tqdm(desc="encode", unit="image", mininterval=1) as bar:
        parts = {"source": source, "encoder": encoder, "directory": directory, "report": bar.write, "progress": bar.update}
        manifest: Manifest = config.from_options(cfg, "tempera.training.prepare.prepare", **parts)
    print(f"{manifest.count} images in {len(manifest.shards)} shards, {manifest.broken_count} broken entries: {directory}")
    print(f"train on them: python train_draft/main.py model={cfg.model.name} train_data=shards train_data.path={directory}")
    return {"count": manifest.count, "broken": manifest.broken_count}


if __name__ == "__main__":
    main()
