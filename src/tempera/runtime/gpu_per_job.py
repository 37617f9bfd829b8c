"""A Hydra callback for jobs side by side: each computes on a GPU of its own (`launcher=joblib`)."""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO, Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class GPUPerJob(Callback):
    """Take the first GPU that no other job of this user has taken, until the job ends; nothing with
    one GPU, or where `device` names it. Used in `hydra.callbacks`.
    """

    def __init__(self) -> None:
        self.lock: IO[str] | None = None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the GPU the current one of the job's process."""
        import torch

        count = torch.cuda.device_count()
        if count < 2 or config.device not in ("auto", "cuda"):
            return
        torch.cuda.set_device(self._taken(count))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Leave the GPU to the next job."""
        if self.lock is not None:
            self.lock.close()

    def _taken(self, count: int) -> int:
        """The number of the GPU; a shared one if others than this sweep's jobs have taken all."""
        for number in range(count):
            name = f"tempera-{os.getuid()}-gpu-{number}.lock"
            lock = Path(tempfile.gettempdir(), name).open("w", encoding="utf-8")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            self.lock = lock
            return number
        return os.getpid() % count
