"""Table models, a block-generating image decoder and a toy evaluator for the evaluation tests."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tempera.data.prompts import Prompt
from tempera.decoding.trees import Tree
from tempera.drafters.draft_files import save_draft
from tempera.drafters.eagle_network import EagleModel
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.evaluation.latency import SpeedProtocol
from tempera.evaluation.pipeline import Method, Pipeline
from tempera.evaluation.run import Evaluation, RunPlan, evaluate, facts
from tempera.evaluation.run_directory import claim
from tempera.exactness.tables import TableDraft, TableTarget
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.metrics.evaluators import Evaluator, Networks, NoEvaluator
from tempera.metrics.scores import GivenScores
from tempera.reporting import run_report
from tempera.reporting.run_names import run_name
from tempera.rules.standard import Exact, Relaxed
from tempera.runtime.distributed import Processes
from tempera.runtime.tracking import Tracker
from tempera.shapes.networks import TextEncoder
from tempera.shapes.scenes import world_prompts
from tempera.targets.llamagen import LlamaGen, LlamaGenConfig


class Blocks:
    """Generates token k as a block of grey; calls `before` each time."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before

    def decode_codes(self, codes: torch.Tensor) -> torch.Tensor:
        self.before()
        grey = 0.75 * codes.float() - 1
        return grey[:, None].repeat_interleave(8, 2).repeat_interleave(8, 3).expand(-1, 3, -1, -1)


class ToyEvaluator(NoEvaluator):
    """Features are mean greys of the blocks; the CLIP score is the first of them."""

    identity = "toy"
    resamples = 50

    def load(self, device: torch.device) -> Iterator[Networks]:
        def features(pictures: torch.Tensor) -> torch.Tensor:
            return pictures[:, 0, 0, ::8].double()

        def scores(pictures: torch.Tensor, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
            score = features(pictures)[:, 0] / 255
            return {"clip_score": score, "shape1": score, "shape2": score * torch.nan}

        yield Networks(features, [scores])

    def reference(self, edge: int) -> Iterator[np.ndarray]:
        yield np.random.default_rng(0).integers(0, 255, (40, 3, 8, 48), dtype=np.uint8)


def tiny_pipeline(
    plain: bool = False, before: Callable[[], None] = lambda: None, seed: int = 0
) -> Pipeline:
    """A relaxed chain of two on tables of 4 tokens, images of 1×6; or plain autoregression."""
    target = TableTarget(vocab_size=4, length=6)
    method = Method(NoDraft(), Exact())
    if not plain:
        method = Method(StaticTreeDrafter(TableDraft(target), Tree.chain(2)), Relaxed((2.0, 1.0)))
    return Pipeline(target, method, Blocks(before), seed, torch.device("cpu"))


def tiny_evaluate(
    directory: Path,
    pipeline: Pipeline | None = None,
    prompts: Sequence[Prompt] | None = None,
    tracker: Tracker | None = None,
    timed: int = 3,
    batch: Any = None,
    batch_size: int = 8,
    scores: str | None = None,
    report: bool = False,
    evaluator: Evaluator | None = None,
    **settings: object,
) -> dict[str, float]:
    """A whole evaluation; with a report if one is wanted or there is a tracker."""
    prompts = world_prompts(20) if prompts is None else prompts
    identity = {"method": "coolsd", "delta": 1.5, **settings}
    name = run_name(str(identity["method"]), {}, identity["delta"])  # type: ignore[arg-type]
    pipeline = pipeline or tiny_pipeline()
    protocol = SpeedProtocol(timed, width=None, batches=[batch] if batch else [])
    about = {"overrides": [], "changes": {}, **facts(name, pipeline, protocol)}
    plan = RunPlan(directory, identity, batch_size, True, 24)
    claim(directory, identity, about, prompts)
    scorers: list[Evaluator] = [evaluator or ToyEvaluator()]
    if scores is not None:
        scorers.append(GivenScores(scores))
    for scorer in scorers:
        scorer.check_prompts(prompts)
    run = Evaluation(
        plan=plan,
        pipeline=pipeline,
        prompts=prompts,
        scorers=scorers,
        protocol=protocol,
        processes=Processes(cpu=True),
    )
    result = evaluate(run)
    assert result is not None
    if report or tracker:
        tracker = tracker or Tracker()
        run_report.write(directory, tracker)
        tracker.finish()
    return {name: one["value"] for name, one in result["metrics"].items()}


def network(directory: str = "") -> LlamaGen:
    """A random LlamaGen of 2 layers × 16 on 4×4 tokens of 32 codes: `model.network` of a tiny model
    for the script. Like the other parts it stands for one that is read from `directory`.
    """
    torch.manual_seed(0)
    model = LlamaGen(LlamaGenConfig(32, 16, 32, 2, 2, (4, 4), prefix_length=6, caption_dim=8))
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.5)
    return model


def text_encoder(directory: str = "") -> TextEncoder:
    torch.manual_seed(1)
    return TextEncoder(6, 8, layers=1, heads=2)


def tokenizer(directory: str = "") -> VQModel:
    torch.manual_seed(2)
    return VQModel(VQConfig(32, 4, 8, (1, 1), (1, 1), 1, 8, 4))


def tiny_options(directory: Path) -> list[str]:
    """Command-line options that put the tiny model in place of the shapes one, with a draft in
    `directory`.
    """
    save_draft(EagleModel.of(network(), "tiny"), directory / "draft")
    parts = [
        f"model.{part}._target_=tiny_evaluation.{part}"
        for part in ("network", "text_encoder", "tokenizer")
    ]
    quick = [
        "data.limit=6",
        "batch_size=4",
        "speed.prompts=1",
        "metrics=none",
        "tracking=none",
    ]
    return [*parts, f"drafter.path={directory / 'draft'}", *quick]
