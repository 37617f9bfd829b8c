"""What training and preparation read, all of it on this machine."""

from omegaconf import DictConfig

from tempera.config import build
from tempera.config.instantiate import instantiate
from tempera.data.captions import CheckedCaptions
from tempera.data.sources import Source
from tempera.runtime.distributed import Processes


def fetched(cfg: DictConfig, processes: Processes) -> Source:
    """`source`, once what it reads has been downloaded; captions that the model cannot use are
    broken entries of it.
    """
    source: Source = instantiate(cfg.source)
    captions = build.build_captions(cfg)
    source.fetch(processes)
    return source if captions is None else CheckedCaptions(source, captions)
