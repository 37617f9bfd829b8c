"""The prompts that README, docs, presets, docstrings and notebooks show are ones that the shipped
model draws well with its usual method.
"""

import re

import numpy as np
import pytest
import torch
from paths import ROOT

import tempera
from tempera.shapes.classifier import correct, load_classifier
from tempera.shapes.world import Scene, parse_caption

SHOWN = ("README.md", "docs/**/*.md", "conf/**/*.yaml", "src/**/*.py", "notebooks/*.ipynb")


def shown_prompts() -> dict[str, Scene]:
    """Quoted captions of the world, with what they tell."""
    files = [path for pattern in SHOWN for path in ROOT.glob(pattern)]
    quoted = re.compile(r"""\\?["']([A-Za-z][^"'\\\n]{4,90})\\?["']""")
    texts = {text for path in files for text in quoted.findall(path.read_text(encoding="utf-8"))}
    told = {text: parse_caption(text) for text in sorted(texts)}
    return {text: scene for text, scene in told.items() if scene is not None}


def test_the_examples_are_found() -> None:
    assert "a large green star" in shown_prompts() and 4 <= len(shown_prompts()) <= 40


@pytest.mark.slow
def test_every_example_shows_what_it_tells() -> None:
    prompts = shown_prompts()
    pictures = tempera.generate(list(prompts), seed=0).images
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    images = pixels.permute(0, 3, 1, 2) / 127.5 - 1
    right = correct(load_classifier()(images), list(prompts.values()))
    wrong = {
        name: [text for text, hit in zip(prompts, hits.tolist(), strict=True) if hit == 0]
        for name, hits in right.items()
    }
    assert {name: texts for name, texts in wrong.items() if texts} == {}
