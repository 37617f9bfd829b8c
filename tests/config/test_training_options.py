"""Every option that docs/training.md names is taken by a training of a published model: a dry run
with it says what would be done.
"""

import itertools
import re
from pathlib import Path

import pytest
from cases import slow_but
from markdown_pages import text_of
from omegaconf import OmegaConf
from paths import ROOT

from tempera.commands.train import main
from tempera.config.compose import composed, written
from tempera.errors import TemperaError

PAGE = ROOT / "docs" / "training.md"
PUBLISHED = ["model=llamagen_b_c2i", "weights=random", "tracking=none", "device=cpu"]
ELSEWHERE = (
    *("model", "method", "drafter", "stages", "start", "push_to_hub"),
    *("source.limit", "training.mixed_precision"),
)
"""Options of other scripts, of places that a test lacks, and what is told apart."""

BESIDE = {"train_data=shards": "train_data.path=shards", "draft.above": "draft=medusa"}
"""What an option needs."""


def lines() -> list[str]:
    """The options of each row of the tables, with their defaults, and each option with a value in
    the text.
    """
    text = text_of(PAGE).partition("## On several GPUs")[0]
    given = re.findall(r"`((?:[a-z_.]+=[^\s`]+ ?)+)`", text)
    found = [one for one in given if not one.startswith(ELSEWHERE) and not re.search("[A-Z]", one)]
    usual = composed("train_draft", PUBLISHED)
    for row in re.findall(r"(?m)^\| (`.*?) \|", text.partition("## The recipe")[2]):
        names = [name for name in re.findall("`([^`]+)`", row) if name not in ELSEWHERE]
        values = {name: OmegaConf.select(usual, name) for name in names}
        values = {name: value for name, value in values.items() if value is not None}
        if values:
            found.append(" ".join(itertools.starmap(written, values.items())))
    return list(dict.fromkeys(found))


LINES = [*lines(), "draft=medusa"]
QUICK = ("draft=parallel", "draft=medusa", "loss=acceptance", "draft.features=[2,4,5]")


def dry_run(*options: str) -> dict[str, float]:
    return main(composed("train_draft", [*PUBLISHED, *options, "dry_run=true"], "."))


def test_the_page_names_options() -> None:
    assert len(LINES) > 20 and {"draft=parallel", "loss=acceptance"} <= {*LINES}, LINES


@pytest.mark.parametrize("line", slow_but(LINES, *QUICK))
def test_a_published_model_takes_an_option_of_the_page(line: str) -> None:
    beside = [option for part, option in BESIDE.items() if line.startswith(part)]
    assert dry_run(*line.split(), *beside)["memory"] > 0


def test_a_loss_of_ones_own_is_taken(tmp_path: Path) -> None:
    (tmp_path / "codes").mkdir()
    own = "tempera.training.losses.AcceptanceLoss"
    assert dry_run("loss=acceptance", f"loss._target_={own}", "loss.eta=1.0")["memory"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("draft=parallel training.ttt_steps=7", "training.ttt_steps=7"),
        ("draft=medusa training.ttt_steps=7", "training.ttt_steps=7"),
        ("draft=parallel training.cfg_dropout=0.9", "training.cfg_dropout=0.9"),
        ("loss=acceptance training.cfg_dropout=0.9", "training.cfg_dropout=0.9"),
        ("draft=parallel training.cross_entropy=5", "cross_entropy"),
        ("loss=acceptance training.cross_entropy=5", "cross_entropy"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(options: str, named: str) -> None:
    with pytest.raises(TemperaError, match=re.escape(named)):
        dry_run(*options.split())
