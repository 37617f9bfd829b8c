"""The data that training and preparation read, downloaded to this machine."""

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.data.captions import CheckedCaptions
from tempera.data.sources import Source


def build_source(cfg: DictConfig) -> Source:
    """The option `source`, not downloaded yet. Entries whose captions the model cannot use are
    broken.
    """
    source: Source = instantiate(cfg.source)
    captions = build.build_captions(cfg)
    return source if captions is None else CheckedCaptions(source, captions)
