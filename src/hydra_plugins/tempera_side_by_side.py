"""A Hydra launcher: the jobs of a sweep side by side, with one progress line for all of them.

It is hydra-joblib-launcher's, whose processes get one thread per core and job; see
`conf/launcher/joblib.yaml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_joblib_launcher.config import JobLibLauncherConf
from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher
from omegaconf import DictConfig, OmegaConf


@dataclass
class SideBySideConf(JobLibLauncherConf):  # type: ignore[misc]
    """`hydra.launcher` under `override /hydra/launcher: side_by_side`; the options are joblib's."""

    _target_: str = "hydra_plugins.tempera_side_by_side.SideBySide"


class SideBySide(JoblibLauncher):  # type: ignore[misc]
    """joblib's launcher, watched."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs; see `hydra.plugins.launcher.Launcher`."""
        from tempera.evaluation.progress import SweepProgress, only_line

        jobs = [self._composed(job, initial_job_idx + n) for n, job in enumerate(job_overrides)]
        with SweepProgress(jobs), only_line():
            done: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
        return done

    def _composed(self, overrides: Sequence[str], number: int) -> tuple[Path, int | None, int]:
        """A job's run directory, its images and its timed prompts."""
        assert self.hydra_context is not None and self.config is not None
        cfg: DictConfig = self.hydra_context.config_loader.load_sweep_config(
            self.config, list(overrides)
        )
        OmegaConf.set_struct(cfg.hydra, False)
        cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(cfg)
        directory = Path(str(cfg.hydra.sweep.dir)) / str(cfg.hydra.sweep.subdir)
        HydraConfig.instance().cfg = before
        images = 1 if cfg.get("prompt") is not None else cfg.get("limit")
        return directory, images, int(OmegaConf.select(cfg, "speed.prompts", default=0))


ConfigStore.instance().store(
    group="hydra/launcher", name="side_by_side", node=SideBySideConf, provider="tempera"
)
