"""A whole run of every kind of grid, on tiny models with random weights, and its report; other
families: test_real_path.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_targets import FAMILIES, composed

from tempera.commands.evaluate import main as evaluate
from tempera.reporting.collect import read_run
from tempera.reporting.console import headline
from tempera.reporting.report import write_report

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
GLM = {**SIZES, "intermediate_size": 32, "num_hidden_layers": 1, "mrope_section": "[2,3,3]"}
GLM |= {"vision_vocab_size": 32}
EMU = {**SIZES, "head_dim": 16, "intermediate_size": 32, "num_hidden_layers": 1}
"""Of Emu3.5's layout, in which U0 is, too."""
EMU35 = [
    *("image_size=64", "weights=random", "+model.spec.codes=24", "top_k=8"),
    "+model.tokenizer.config={codebook_size:24,channels:32,res_blocks:1}",
    *(f"++model.network.sizes.{name}={size}" for name, size in EMU.items()),
]
OTHERS = {
    "emu3_5": ["model=emu3_5_image", *EMU35],
    "xiaomi_u0": ["model=xiaomi_u0", *EMU35],
    "glm_image": [
        *("model=glm_image", "image_size=64", "weights=random", "+model.spec.codes=24"),
        *(f"++model.network.sizes.{name}={size}" for name, size in GLM.items()),
    ],
    "shapes": [],
    "shapes_mar": ["model=shapes_mar", "method=ar", "denoising_steps=2", "prompt=7"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llamagen_text", "lumina", *OTHERS])
def test_its_report_reads_a_run(family: str, tmp_path: Path) -> None:
    """A run has the length of all tokens that were decoded; its picture has those of the grid."""
    made = FAMILIES.get(family)
    options = OTHERS[family] if made is None else made.write(tmp_path)
    prompt = "a red ring" if made is None else made.prompts[0]
    quick = ["speed.prompts=0", "metrics=none", "tracking=none", "device=cpu"]
    window = [] if family == "shapes_mar" else ["window=6"]
    given = ["method=jacobi", *window, f"prompt={prompt}", *quick, *options]
    place = tmp_path / "run"
    cfg: Any = composed(*given)
    cfg.directory = str(place)
    evaluate(cfg)
    run = read_run(place)
    (tokens,) = pq.read_table(place / "records")["tokens"].to_pylist()
    assert run.length == len(tokens) == len(run.acceptance_by_place)
    rows, columns = run.grid
    assert (rows * columns < run.length) == (family == "glm_image")  # it draws a preview first
    accepted = run.value("accepted_length")
    assert accepted == 1 or f"instead of {len(tokens)}." in headline(run)[0]
    assert (place / "acceptance.png").is_file() and (place / "grid.png").is_file()
    write_report([run], tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    (prompted,) = json.loads(text)["runs"][0]["prompts"]
    assert len(prompted["replay"]["place"]) == len(tokens)
    assert prompted["picture"] is not None
