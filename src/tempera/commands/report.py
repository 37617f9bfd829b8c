"""`tempera-report`: compare runs in tables, Pareto plots and pictures."""

from pathlib import Path

from omegaconf import DictConfig, ListConfig


def main(cfg: DictConfig) -> list[Path]:
    """Write the report, print the paths of its files and return them; or tell its runs."""
    from tempera.reporting.baseline import compare  # pandas, Altair and matplotlib take seconds
    from tempera.reporting.collect import collect, find_runs
    from tempera.reporting.report import write_report

    baseline = None if cfg.baseline is None else str(cfg.baseline)
    sources = list(cfg.runs) if isinstance(cfg.runs, ListConfig) else [cfg.runs]
    finished, unfinished, again = find_runs(map(str, sources))
    runs, damaged = collect(finished)
    compare(runs, baseline)
    output = Path(str(cfg.output))
    files = []
    if cfg.dry_run:
        names = ", ".join(run.name for run in runs)
        print(f"to do: report on {len(runs)} finished runs in {output}: {names}")
        print("time: seconds")
    else:
        files = write_report(runs, output, unfinished, damaged, baseline)
    doubles = [f"{name} is the same run as {run}" for name, run in again.items()]
    for problem in [*damaged, *(f"{run} is unfinished" for run in unfinished), *doubles]:
        print(f"left out: {problem}")
    for file in files:
        print(file)
    if cfg.publish and not cfg.dry_run:
        from tempera.reporting.wandb_report import publish

        print(publish(runs, output, str(cfg.project), cfg.entity, baseline))
    return files
