"""Arrange the images of `data=geneval` as GenEval's own scorer reads them (Ghosh et al. 2023).

    python -m tempera.metrics.geneval_layout RUN/images evaluation_metadata.jsonl DIRECTORY

For every prompt: `00012/metadata.jsonl`, its line of the metadata, and `00012/samples/0003.png`.
"""

import argparse
import shutil
import sys
from pathlib import Path

from tempera.errors import TemperaError
from tempera.runtime.files import regular_file, write_text


def arrange(images: Path, metadata: Path, directory: Path) -> int:
    """Copy the images `<prompt>-<repetition>.png` into GenEval's layout; returns their number.

    Raises:
        TemperaError: there are none, or the metadata has no line for one.
    """
    lines = regular_file(metadata).read_text(encoding="utf-8-sig").splitlines()
    found = sorted(images.glob("[0-9]*-[0-9]*.png"))
    if not found:
        raise TemperaError(f"{images} holds no images of GenEval's prompts: use data=geneval.")
    for image in found:
        prompt, _, repetition = image.stem.partition("-")
        if int(prompt) >= len(lines):
            raise TemperaError(f"{metadata} has no line for {image.name}: give the run's own file.")
        write_text(directory / prompt / "metadata.jsonl", lines[int(prompt)] + "\n")
        target = directory / prompt / "samples" / f"{repetition}.png"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(image, target)
    return len(found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("images", "metadata", "directory"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    try:
        print(f"{arrange(**vars(given))} images: {given.directory}")
    except (TemperaError, OSError) as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
