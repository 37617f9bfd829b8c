"""Images per minute by the number of rows that are decoded together (docs/results/discrete.md).

    python docs/throughput.py METHOD... [--rows 1 4 16 64] [--captions 256]

decodes captions of the shipped model's held-out world with each method and each number of rows, in
turn, and prints a table: images per minute of processor time on this process's threads, rounds, and
the share of row-rounds that decode an image; the others are idle. Pictures are not made. To compare
two versions, run it in turn with the `src` of each on PYTHONPATH.
"""

import time
from argparse import ArgumentParser

import torch

import tempera
from tempera.data.prompts import Prompt
from tempera.runtime.processor import name_of
from tempera.shapes.scenes import world_prompts

SEED = 7


def measure(method: str, rows: int, prompts: list[Prompt]) -> str:
    """A line of the table: the rows, images per minute, rounds and the useful share."""
    rounds = 0

    def count(_: object) -> None:
        nonlocal rounds
        rounds += 1

    model = tempera.load("shapes", method, batch_size=rows, diagnostics=False)
    texts = [prompt.text for prompt in prompts]
    model.generate(texts[:rows], seed=SEED, images=False)  # not timed: packs weights, fills caches
    begins = time.process_time()
    result = model.generate(texts, seed=SEED, images=False, callback=count)
    seconds = time.process_time() - begins
    useful = int(result.trace.rounds.sum()) / (rounds * min(rows, len(texts)))
    pace = 60 * len(texts) / seconds
    return f"| `{method}` | {rows} | {pace:.0f} | {rounds} | {useful:.0%} |"


def main() -> None:
    """Measure what the command line asks for."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--captions", type=int, default=256)
    asked = parser.parse_args()
    prompts = world_prompts(asked.captions)
    machine = name_of(torch.device("cpu"))
    print(f"{asked.captions} captions, {machine}, {tempera.__file__}")
    print("| method | rows | images per minute | rounds | useful row-rounds |")
    print("|---|---|---|---|---|")
    for method in asked.methods:
        for rows in asked.rows:
            print(measure(method, rows, prompts), flush=True)


if __name__ == "__main__":
    main()
