"""The data that training and preparation read, downloaded to this machine."""

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.data.captions import CheckedCaptions
from tempera.data.sources import Source
from tempera.runtime.distributed import Processes


def fetched(cfg: DictConfig, processes: Processes) -> Source:
    """The option `source`, after downloading what it reads. Entries whose captions the model cannot
    use are broken.
    """
    source: Source = instantiate(cfg.source)
    captions = build.build_captions(cfg)
    source.fetch(processes)
    return source if captions is None else CheckedCaptions(source, captions)
