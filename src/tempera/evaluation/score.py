"""Score the pictures of a run directory. It needs the pictures and their texts alone: no model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tempera.data.prompts import Prompt
from tempera.errors import TemperaError
from tempera.metrics.evaluators import Evaluator, Networks, Pictures
from tempera.metrics.quality import quality, reference_features, score_pictures
from tempera.metrics.table import Metric
from tempera.runtime.files import read_json, write_json
from tempera.runtime.image_files import picture_path, read_picture
from tempera.runtime.row_store import Numbers, Row, Store, read_table, write_table

SCORES = "scores"
"""Where a run directory keeps scores: a directory for each scorer, named by its identity."""
SUMMARY = "summary/metrics.json"
VALUES = "summary/values.parquet"


@dataclass(frozen=True)
class Pictured:
    """Pictures with their prompts, as a run directory holds them.

    Attributes:
        directory: of the run.
        made_by: what its parts carry.
        prompts: of the pictures.
    """

    directory: Path
    made_by: str
    prompts: Sequence[Prompt]

    def picture(self, prompt: Prompt) -> Pictures:
        """A prompt's picture, uint8 [3, h, w]."""
        return read_picture(picture_path(self.directory, prompt.id), self.made_by)

    def check(self) -> None:
        """Raise TemperaError unless every prompt has a picture."""
        missing = [
            prompt.id
            for prompt in self.prompts
            if not picture_path(self.directory, prompt.id).is_file()
        ]
        if missing:
            raise TemperaError(
                f"{self.directory} has no pictures for {len(missing)} of {len(self.prompts)} "
                f"prompts, such as {missing[0]}: run the command that made the others again."
            )


@dataclass
class Scored:
    """What scorers say of pictures.

    Attributes:
        metrics: intervals by key, as JSON has them.
        scorers: by metric, what measured it: the identities of its networks and, for a distance, of
            the real pictures.
        described: entries of the table of metrics for those that it lacks.
        values: each prompt's scores by its id, with pseudo-values of metrics of the whole set.
    """

    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    scorers: dict[str, list[str]] = field(default_factory=dict)
    described: dict[str, Metric] = field(default_factory=dict)
    values: dict[str, Row] = field(default_factory=dict)


def score(pictured: Pictured, scorers: Sequence[Evaluator], device: torch.device) -> None:
    """Score the pictures that lack scores, and keep what each scorer says of all of them.

    Raises:
        TemperaError: a picture is missing or is another one than was made, or a scorer cannot score
            it; scores that were made before stay.
    """
    for scorer in scorers:
        for networks in scorer.load(device):
            _score(pictured, scorer, networks, device)


def _score(pictured: Pictured, scorer: Evaluator, networks: Networks, device: torch.device) -> None:
    """Score by one group of networks."""
    identity = networks.identity or scorer.identity
    folder = pictured.directory / SCORES / identity
    store = Store(folder, pictured.made_by, {"features": Numbers(needed=False)})
    prompts = pictured.prompts
    found = score_pictures(networks, prompts, pictured.picture, store)
    rows = [found[prompt.id] for prompt in prompts]
    reference = None
    if networks.features is not None:
        edge = pictured.picture(prompts[0]).shape[-1]
        reference = reference_features(scorer, networks, edge)
    metrics = quality(rows, networks, reference, scorer.resamples, device, scorer.metrics)
    values = [{name: row[name] for name in row if name != "features"} for row in rows]
    for key, interval in metrics.items():
        if interval.pseudovalues is not None:
            for row, value in zip(values, interval.pseudovalues.tolist(), strict=True):
                row[key] = value
    write_table(folder / VALUES, values, pictured.made_by)
    summary = {
        "order": 1 + max(orders(pictured.directory).values(), default=0),
        "metrics": {key: interval.as_dict() for key, interval in metrics.items()},
        "scorers": _measured_by(networks, scorer, list(metrics)),
        "described": [asdict(metric) for metric in scorer.metrics if metric.key in metrics],
    }
    write_json(folder / SUMMARY, summary)


def _measured_by(
    networks: Networks, scorer: Evaluator, keys: Sequence[str]
) -> dict[str, list[str]]:
    """By metric, what measured it; nothing of scores that were computed elsewhere."""
    if not networks.sees:
        return {}
    own = networks.identity or scorer.identity
    return {key: [own, scorer.identity] if key in networks.distances else [own] for key in keys}


def scored(directory: Path, made_by: str, ids: Sequence[str]) -> Scored:
    """What the directory's scorers say of these prompts: of a score that several have, what was
    computed last. Scorers that know other prompts are left out.
    """
    result = Scored()
    known = orders(directory)
    for path in sorted(known, key=lambda path: (known[path], path.stat().st_mtime_ns)):
        rows = read_table(path.parents[1] / VALUES, {"id": None}, identity=made_by)
        if {row["id"] for row in rows} != set(ids):
            continue
        content: Any = read_json(path)
        for name in rows[0]:  # of an earlier file of scores, whose values are replaced
            result.metrics.pop(name, None)
        result.metrics |= content["metrics"]
        result.scorers |= content["scorers"]
        result.described |= {one["key"]: _metric(one) for one in content["described"]}
        for row in rows:
            result.values.setdefault(row["id"], {}).update(row)
    return result


def orders(directory: Path) -> dict[Path, int]:
    """The summaries in a run directory with their order; 0 of all that an earlier version wrote,
    which only the times of their files tell apart. A copied directory has other times.
    """
    found = {}
    for path in directory.glob(f"{SCORES}/*/{SUMMARY}"):
        content: Any = read_json(path)
        found[path] = int(content.get("order", 0))
    return found


def _metric(entry: Mapping[str, Any]) -> Metric:
    return Metric(**{**entry, "scores": tuple(entry["scores"])})
