"""Images per minute of LlamaGen's own loop, beside tempera's (docs/results/discrete.md).

    git clone https://github.com/FoundationVision/LlamaGen
    python docs/peers.py LlamaGen [--size B] [--rows 1 4 16] [--turns 2]

Both draw images of LlamaGen-B or of a larger one (256×256 pixels, classes) with random weights of
these sizes in float32, by plain autoregression with guidance 4. Their `generate` decodes one image
at a time, as in their demo; ours one image at a time, and several rows together. They take turns.
The table has the median of images per minute of processor time on this process's threads, with the
least and the most, and the median as a multiple of the peer's. Pictures are not made.
"""

import importlib
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch

import tempera
from tempera.runtime.processor import name_of

PEER = "LlamaGen's generate"
SEED = 7
GUIDANCE = 4.0
TOKENS = 256
"""Of an image."""


def peer(clone: Path, size: str) -> Callable[[], None]:
    """What draws an image by the code of a clone of LlamaGen's repository."""
    sys.path.insert(0, str(clone))
    kind = getattr(importlib.import_module("autoregressive.models.gpt"), f"GPT_{size}")
    network = kind(
        vocab_size=16384, block_size=TOKENS, num_classes=1000, cls_token_num=1, model_type="c2i"
    )
    network.eval().requires_grad_(False)
    torch.nn.init.normal_(network.output.weight, std=0.02)
    generate = importlib.import_module("autoregressive.models.generate").generate

    def draw() -> None:
        generate(network, torch.tensor([1]), TOKENS, cfg_scale=GUIDANCE, top_k=0, top_p=1.0)

    return draw


def ours(size: str, rows: int) -> Callable[[], None]:
    """What draws so many images together by tempera."""
    model = tempera.load(
        f"llamagen_{size.lower()}_c2i",
        "ar",
        weights="random",
        image_size=256,
        guidance=GUIDANCE,
        dtype="float32",
        batch_size=rows,
        diagnostics=False,
    )
    classes = [str(number) for number in range(rows)]

    def draw() -> None:
        model.generate(classes, seed=SEED, images=False)

    return draw


def main() -> None:
    """Measure what the command line asks for."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--size", choices=("B", "L", "XL", "XXL"), default="B")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    size = asked.size
    lanes = {PEER: (1, peer(asked.clone, size))}
    for rows in asked.rows:
        lanes[f"tempera, {rows} row{'s' * (rows > 1)}"] = rows, ours(size, rows)
    paces: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(asked.turns):
        for name, (images, draw) in lanes.items():
            begins = time.process_time()
            draw()
            paces[name].append(60 * images / (time.process_time() - begins))
    where = f"{name_of(torch.device('cpu'))}, torch {torch.__version__}"
    print(f"LlamaGen-{size}, random weights, {where}")
    print("| loop | images per minute | least … most | ÷ peer |")
    print("|---|---|---|---|")
    peers = statistics.median(paces[PEER])
    for name, found in paces.items():
        median = statistics.median(found)
        spread = f"{min(found):.1f} … {max(found):.1f}"
        print(f"| {name} | {median:.1f} | {spread} | {median / peers:.2f} |")


if __name__ == "__main__":
    main()
