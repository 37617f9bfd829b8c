"""What every test starts from: a fixed seed, no network, no W&B account, and no Hydra left over
from the test before.
"""

import os

import pytest
import torch

import tempera.runtime.huggingface  # noqa: F401  before any test imports transformers itself

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true"
)


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    from hydra.core.global_hydra import GlobalHydra

    torch.manual_seed(0)
    GlobalHydra.instance().clear()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path_factory.getbasetemp()))
