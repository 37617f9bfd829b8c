"""Work that would never end, or fill the memory before it begins, is refused at once."""

from pathlib import Path
from typing import Any

import pytest

from tempera.commands import evaluate, train
from tempera.config.compose import composed, in_one_sentence
from tempera.errors import TemperaError

HUGE = "100000000000"
QUIET = ["metrics=none", "tracking=none", "speed.prompts=0"]
LINES: list[tuple[Any, str, list[str], str]] = [
    (evaluate, "eval", [f"data.limit={HUGE}"], "data.limit=100000000000"),
    (evaluate, "eval", ["model=llamagen_b_c2i", "weights=random", "dry_run=true",
                        f"data.per_class={HUGE}"], "per_class=100000000000"),
    (evaluate, "eval", ["method=eagle", "depth=400"],
     "depth=400 drafts more tokens than an image .* has"),
    (evaluate, "eval", ["model=lumina", "method=ar", "image_size=256"],
     "images of 512, 768, 1024 pixels, not"),
    (train, "train_draft", ["draft=medusa", "draft.length=99", "tracking=none"],
     "length=99 is too large: give 32 or fewer"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "config", "options", "told"), LINES, ids=str)
def test_endless_work_is_refused(
    script: Any, config: str, options: list[str], told: str, tmp_path: Path
) -> None:
    given = [*(QUIET if config == "eval" else []), *options]
    with pytest.raises(TemperaError, match=told) as refused, in_one_sentence(config, given):
        script.main(composed(config, given, tmp_path))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("*.parquet"))
