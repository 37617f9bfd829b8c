"""What every test starts from: a fixed seed, no network, no W&B account, and neither Hydra nor its
logging left over from the test before.
"""

import functools
import gc
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import omegaconf
import pytest
import torch

os.environ.update(  # before the imports below, which read it
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true"
)

import tempera.config.resolvers
import tempera.config.search

TESTS = Path(__file__).parent
LONG = {
    *("test_preemption", "test_real_path", "test_generated_code", "test_several_processes"),
    *("test_commands", "test_report", "test_extending", "test_training_scripts"),
}
"""Files with few tests, of which each takes long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/docs carries the marker `docs`."""
    for item in items:
        if item.path.is_relative_to(TESTS / "docs"):
            item.add_marker(pytest.mark.docs)


def pytest_configure(config: pytest.Config) -> None:
    """Let `--dist loadfile` take the files in the order below, not by their number of tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with the files whose few tests take long, then with those of many: else one worker
    waits for the other at the end. Leave what imports and collection made out of garbage
    collections: it stays to the end, and going through it was a good part of the 9% of the time
    that they took in three files measured.
    """
    count = Counter(item.path for item in session.items)
    session.items.sort(key=lambda item: (item.path.stem not in LONG, -count[item.path]))
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what carries the marker `gpu` on a machine without one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and a CUDA build of PyTorch")


def once(load: Callable[..., Any]) -> Callable[..., Any]:
    """A source of Hydra's that reads a file again where it has changed."""
    found: dict[Any, bytes] = {}

    def loaded(self: Any, config_path: str) -> Any:
        path = Path(self.path, self._normalize_file_name(config_path))
        state = path.stat() if path.is_file() else None  # of Hydra's own package
        key = self.provider, path, state and (state.st_mtime_ns, state.st_size)
        if key not in found:
            found[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(found[key])  # quicker than a deep copy

    return loaded


@pytest.fixture(autouse=True, scope="session")
def _composes_quickly() -> Iterator[None]:
    """Hydra reads each file once, and OmegaConf parses each text once: composing a run takes half
    as long.
    """
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # registers the sources
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("file", "pkg"):
            source = SourcesRegistry.instance().types[kind]
            patch.setattr(source, "load_config", once(source.load_config))
        for module in (omegaconf.base, omegaconf._utils):
            patch.setattr(module, "parse", functools.cache(module.parse))
        yield


@pytest.fixture(autouse=True)
def _clean_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    torch.manual_seed(0)
    GlobalHydra.instance().clear()
    tempera.config.search.SHIPPED.use()  # not the configurations of the test before
    HydraConfig.instance().cfg = None
    monkeypatch.setenv("WANDB_DIR", str(tmp_path_factory.getbasetemp()))
    monkeypatch.setenv("TEMPERA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    for handler in logging.root.handlers[:]:  # Hydra's, which write to this test's closed streams
        if type(handler) in (logging.StreamHandler, logging.FileHandler):
            logging.root.removeHandler(handler)
            handler.close()


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a run, which take a second, are empty files."""
    for name in ("grid", "acceptance"):
        monkeypatch.setattr(f"tempera.reporting.figures.{name}", lambda path, *_: path.touch())
