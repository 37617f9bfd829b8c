"""`tempera-report`: compare runs in tables, Pareto plots and pictures."""

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from tempera.reporting.collect import collect, find_runs


def main(cfg: DictConfig) -> list[Path]:
    """Write the report, print the paths of its files and return them."""
    baseline = None if cfg.baseline is None else str(cfg.baseline)
    runs = list(cfg.runs) if isinstance(cfg.runs, ListConfig) else [cfg.runs]
    finished, unfinished = find_runs(map(str, runs))
    from tempera.reporting.report import write_report  # torch and matplotlib take seconds

    rows, damaged = collect(finished, baseline)
    output = Path(str(cfg.output))
    files = write_report(rows, output, unfinished, damaged, baseline)
    for problem in [*damaged, *(f"{run} is unfinished" for run in unfinished)]:
        print(f"left out: {problem}")
    for file in files:
        print(file)
    if cfg.publish:
        from tempera.reporting.wandb_report import publish

        print(publish(rows, output, str(cfg.project), cfg.entity))
    return files
