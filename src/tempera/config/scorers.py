"""`metrics`, `torchmetrics`, `scores` and `against`: what scores a run's pictures."""

from omegaconf import DictConfig, OmegaConf

from tempera.config.instantiate import Part, fitting, instantiate, part
from tempera.metrics.evaluators import Evaluator
from tempera.metrics.scores import GivenScores
from tempera.metrics.torch_metrics import Kind, TorchMetric, TorchMetrics


def build_scorers(cfg: DictConfig, scores: str | None, against: str | None) -> list[Evaluator]:
    """The scorers that a configuration names; nothing is read.

    Args:
        cfg: with the groups `metrics` and `torchmetrics`.
        scores: a file of scores that another program computed.
        against: the run whose pictures those of `torchmetrics` are compared with.
    """
    scorers: list[Evaluator] = [instantiate(cfg.metrics)]
    named = cfg.get("torchmetrics") or {}
    if named or against is not None:
        metrics = {}
        for name in map(str, named):
            key = f"torchmetrics.{name}"
            kind = fitting(OmegaConf.select(cfg, f"{key}.kind"), Kind, f"{key}.kind")
            metric: Part[object] = part(OmegaConf.select(cfg, f"{key}.metric"))
            metrics[name] = TorchMetric(kind, metric.partial())  # its network is read in its turn
        scorers.append(TorchMetrics(metrics, against))
    if scores is not None:
        scorers.append(GivenScores(scores))
    return scorers
