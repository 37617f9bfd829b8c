"""The training loop: exact resumption, accumulation, several processes, refusals, and that it
trains.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from paths import ROOT, SUPPORT
from safetensors.torch import load_file
from tiny_training import RECIPE, tiny_codes, tiny_draft, tiny_target, tiny_train

from tempera.drafters.eagle import EagleDraft
from tempera.drafters.eagle_network import EagleModel
from tempera.drafters.parallel_network import ParallelModel
from tempera.errors import TemperaError
from tempera.runtime.tracking import NoTracker
from tempera.training import trainer
from tempera.training.checkpoint import load_state
from tempera.training.losses import AcceptanceLoss, EagleLoss, Loss
from tempera.training.recipe import Recipe
from tempera.training.trainer import TrainingRun


@pytest.fixture(autouse=True)
def _fresh() -> None:
    AcceleratorState._reset_state(True)
    torch.set_num_threads(1)


class Notebook(NoTracker):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append({**values, "step": step})

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


def script(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run tests/support/tiny_training.py in a separate process."""
    paths = os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])
    env = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        **environment,
    }
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    tiny_train(tmp_path / "whole", gradient_accumulation=2)
    main = TORCHRUN[-1]
    killed = script(main, str(tmp_path / "killed"), KILL_AT="8")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = load_file(tmp_path / "killed" / "last.safetensors")
    again = script(main, str(tmp_path / "killed"))
    assert again.returncode == 0, again.stderr
    for name in ("last.safetensors", "draft/model.safetensors"):
        whole, resumed = load_file(tmp_path / "whole" / name), load_file(tmp_path / "killed" / name)
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), name
    assert not torch.equal(before["network/fc.weight"], whole["fc.weight"])
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {
        "draft",
        "last.safetensors",
        "training.json",
    }


TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    str(SUPPORT / "tiny_training.py"),
)


def assert_same_training(two: Path, one: Path) -> None:
    """Up to rounding."""
    expected, found = (load_file(path / "last.safetensors") for path in (one, two))
    assert expected.keys() == found.keys()
    for key in expected:
        torch.testing.assert_close(
            found[key],
            expected[key],
            rtol=1e-3,
            atol=1e-5,
            msg=lambda text, key=key: f"{key}: {text}",
        )


@pytest.mark.slow
def test_two_processes_train_the_same_draft_as_one(tmp_path: Path) -> None:
    both = script(*TORCHRUN, str(tmp_path / "two"))
    assert both.returncode == 0, both.stderr
    alone = tiny_train(tmp_path / "one", gradient_accumulation=2)
    assert_same_training(tmp_path / "two", tmp_path / "one")
    assert '"processes": 2' in (tmp_path / "two" / "draft" / "metrics.json").read_text()
    assert alone["processes"] == 1


@pytest.mark.slow
def test_fsdp_trains_the_same_parallel_draft_as_one_process(tmp_path: Path) -> None:
    both = script(*TORCHRUN, str(tmp_path / "two"), ACCELERATE_USE_FSDP="true", PARALLEL="yes")
    assert both.returncode == 0, both.stderr
    loss, kind = AcceptanceLoss(), ParallelModel
    tiny_train(tmp_path / "one", loss=loss, kind=kind, gradient_accumulation=2)
    assert_same_training(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_fsdp_resumes_from_an_unsharded_checkpoint_to_the_same_draft(
    tmp_path: Path,
) -> None:
    class Stop(NoTracker):
        def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
            if step == 8:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_train(tmp_path / "two", Stop(), gradient_accumulation=2)
    both = script(*TORCHRUN, str(tmp_path / "two"), ACCELERATE_USE_FSDP="true")
    assert both.returncode == 0, both.stderr
    assert '"processes": 2' in (tmp_path / "two" / "draft" / "metrics.json").read_text()
    alone = tiny_train(tmp_path / "one", gradient_accumulation=2)
    assert_same_training(tmp_path / "two", tmp_path / "one")
    found = json.loads((tmp_path / "two" / "draft" / "metrics.json").read_text())
    assert found["best"] == pytest.approx(alone["best"], abs=1e-3)


def run_of(
    directory: Path,
    loss: Loss = EagleLoss(),  # noqa: B008
    kind: type[EagleModel | ParallelModel] = EagleModel,
    **changes: Any,
) -> TrainingRun:
    target = tiny_target()
    recipe = Recipe(**{**RECIPE, **changes})
    return TrainingRun(
        target,
        tiny_draft(target, kind=kind),
        tiny_codes(),
        loss,
        recipe,
        directory,
        Accelerator(cpu=True),
        True,
    )


@pytest.mark.parametrize("unroll", [0, 2])
def test_gradient_accumulation_equals_a_large_batch(unroll: int, tmp_path: Path) -> None:
    gradients = []
    for accumulation in (1, 4):
        run = run_of(
            tmp_path,
            batch_size=16,
            gradient_accumulation=accumulation,
            grad_clip=0.0,
            ttt_steps=unroll,
        )
        step = run.step(3)
        gradients.append({name: parameter.grad for name, parameter in run.draft.named_parameters()})
        assert step.losses.keys() == {"loss", "regression", "cross_entropy"}
    whole, parts = gradients
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-7)


def test_muon_steps_the_matrices_and_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    run = run_of(tmp_path, matrix_lr=0.1, lr=1e-9, warmup_steps=0)
    before = {name: weight.detach().clone() for name, weight in run.draft.named_parameters()}
    run.step(0)
    for name, weight in run.draft.named_parameters():
        assert ((weight - before[name]).norm() > 0.01) == (weight.ndim == 2), name
    whole = tiny_train(tmp_path / "whole", steps=4, matrix_lr=0.01, decodes=0, validate_every=4)
    run = run_of(tmp_path / "cut", steps=4, matrix_lr=0.01, decodes=0, validate_every=4)
    run.directory.mkdir()
    for number in range(2):
        run.step(number)
    run.state.progress.step, run.began = 2, time.monotonic()
    run.save()
    again = run_of(tmp_path / "cut", steps=4, matrix_lr=0.01, decodes=0, validate_every=4)
    assert load_state(again.directory, again.state)
    again.finish(NoTracker)
    one, other = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "cut"))
    assert whole["finished"] and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(
        TemperaError, match=r"matrix_lr=0.1 is not possible with a network that FSDP"
    ):
        trainer.make_optimisers(run.draft, Recipe(matrix_lr=0.1), sharded=True)


def test_training_improves_and_keeps_the_best_draft(tmp_path: Path) -> None:
    notebook = Notebook()
    target = tiny_target()
    metrics = tiny_train(
        tmp_path, notebook, target, steps=60, validate_every=20, ema=0.0, lr=1e-2, batch_size=8
    )
    losses = notebook.series("train/loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    top3, tv = notebook.series("validation/top3"), notebook.series("validation/tv")
    assert len(top3) == len(notebook.series("validation/accepted_length")) == 3
    assert all(1 <= length <= 3 for length in notebook.series("validation/accepted_length"))
    assert tv[-1] < tv[0]
    assert metrics["best"]["top3"] == max(top3)
    assert metrics["finished"]
    EagleDraft(EagleModel.from_pretrained(tmp_path / "draft"), target)
    assert "top3" in (tmp_path / "draft" / "README.md").read_text()
    assert {
        "train/regression",
        "train/cross_entropy",
        "train/gradient_norm",
        "train/lr",
    } <= notebook.rows[0].keys()


@pytest.mark.slow
def test_a_parallel_draft_trains_all_its_slots(tmp_path: Path) -> None:
    notebook, target = Notebook(), tiny_target(2.0)
    options = {"steps": 60, "validate_every": 20, "ema": 0.0, "lr": 1e-2, "batch_size": 8}
    loss = AcceptanceLoss(regression=2.0)
    metrics = tiny_train(
        tmp_path, notebook, target, loss, ParallelModel, ttt_steps=3, ttt_decay=0.8, **options
    )
    tv, losses = notebook.series("validation/tv"), notebook.series("train/tv")
    assert tv[-1] < tv[0]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert metrics["architecture"] == "ParallelModel"
    before = tiny_draft(target, kind=ParallelModel)
    after = ParallelModel.from_pretrained(tmp_path / "draft")
    for name, weight in after.state_dict().items():
        assert not weight.equal(before.state_dict()[name]), name
    assert "drafter=parallel drafter.path=" in (tmp_path / "draft" / "README.md").read_text()


def test_slots_are_weighted_and_of_one_pass(tmp_path: Path) -> None:
    run = run_of(tmp_path, AcceptanceLoss(), ParallelModel, hidden_noise=0.0, ttt_decay=0.5)
    passes: list[int] = []
    run.model.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[1]))
    losses: list[float] = []

    def noted(predicted: Any, hidden: Any, head: Any) -> Any:
        parts = AcceptanceLoss()(predicted, hidden, head)
        losses.append(parts["loss"].item())
        return parts

    noted.guided = True  # type: ignore[attr-defined]
    run.loss = noted  # type: ignore[assignment]
    total = run.losses([0, 1])["loss"].item()
    weights = [0.5**slot / 1.9375 for slot in range(5)]
    assert total == pytest.approx(
        sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    )
    assert passes == [5 * (6 + run.target.length - 1)]


def test_a_worse_draft_does_not_replace_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top3 = iter([0.4, 0.6, 0.5])

    def measured(*_: Any) -> torch.Tensor:
        return torch.tensor([100.0, 10.0, 100 * next(top3), 50.0], dtype=torch.float64)

    class Watch(Notebook):
        """Reads the kept draft before every validation is logged."""

        def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
            super().log(values, step)
            if "validation/top3" in values:
                path = tmp_path / "draft" / "model.safetensors"
                kept.append(path.read_bytes() if path.is_file() else b"")

    kept: list[bytes] = []
    monkeypatch.setattr(trainer, "imitation", measured)
    metrics = tiny_train(tmp_path, Watch(), decodes=0)
    after = (tmp_path / "draft" / "model.safetensors").read_bytes()
    assert metrics["best"] == {"step": 8, "top1": 0.1, "top3": 0.6, "tv": 0.5}
    assert metrics["latest"]["step"] == 12
    before_first, after_first, after_second = kept
    assert b"" == before_first != after_first != after_second
    assert after == after_second


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_acceptance_loss_raises_the_acceptance(guidance: float, tmp_path: Path) -> None:
    notebook = Notebook()
    tiny_train(
        tmp_path,
        notebook,
        tiny_target(guidance),
        AcceptanceLoss(),
        steps=60,
        validate_every=20,
        lr=1e-2,
        batch_size=8,
        ttt_steps=1,
        ttt_decay=0.8,
    )
    acceptance = notebook.series("train/acceptance")
    assert sum(acceptance[-5:]) > 1.1 * sum(acceptance[:5])
    assert notebook.series("train/tv") == pytest.approx([1 - share for share in acceptance])
    tv = notebook.series("validation/tv")
    assert tv[-1] < tv[0]
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["loss"] == {"class": "AcceptanceLoss", "eta": 3.0, "regression": 0.0}
    with pytest.raises(TemperaError, match=r"was started with loss.class=AcceptanceLoss, now it"):
        tiny_train(tmp_path, steps=60)


def test_weights_of_unrolled_steps_decay(tmp_path: Path) -> None:
    def parts(**changes: Any) -> dict[str, torch.Tensor]:
        return run_of(tmp_path, hidden_noise=0.0, **changes).losses([0, 1, 2, 3])

    alike, first, decayed = (
        parts(ttt_steps=2),
        parts(ttt_steps=0),
        parts(ttt_steps=2, ttt_decay=0.5),
    )
    second = 2 * parts(ttt_steps=1)["loss"] - first["loss"]
    third = 3 * alike["loss"] - first["loss"] - second
    expected = (first["loss"] + second / 2 + third / 4) / 1.75
    torch.testing.assert_close(decayed["loss"], expected)
    assert not torch.allclose(decayed["loss"], alike["loss"])


def test_a_finished_run_prints_so_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tempera.training.trainer import train

    first = tiny_train(tmp_path, steps=2, decodes=0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    target = tiny_target()
    recipe = Recipe(**{**RECIPE, "steps": 2, "decodes": 0})

    def no_tracker() -> NoTracker:
        raise AssertionError("a finished run tracks nothing")

    assert (
        train(
            target,
            tiny_draft(target),
            tiny_codes(),
            EagleLoss(),
            recipe,
            tmp_path,
            no_tracker,
            {"data": {"source": "tiny"}},
        )
        == first
    )
    assert "already trained, 2 steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before


def test_refusals(tmp_path: Path) -> None:
    tiny_train(tmp_path / "run", steps=2, decodes=0)
    with pytest.raises(TemperaError, match=r"was started with recipe.lr=0.003, now it is 0.01"):
        tiny_train(tmp_path / "run", steps=2, decodes=0, lr=0.01)
    weights = tmp_path / "run" / "last.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(TemperaError, match=r"cannot resume from .*last.safetensors"):
        tiny_train(tmp_path / "run", steps=2, decodes=0)
    (tmp_path / "file").touch()
    with pytest.raises(TemperaError, match=r"cannot write in .*file/run"):
        tiny_train(tmp_path / "file" / "run")
    with pytest.raises(TemperaError, match="does not divide"):
        tiny_train(tmp_path / "new", batch_size=5, gradient_accumulation=2)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    target = tiny_target()

    class Poison(NoTracker):
        def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
            if step == 8:
                target.network.lm_head.weight.fill_(float("nan"))

    with pytest.raises(TemperaError, match=r"not finite at step 8 .*last good checkpoint is kept"):
        tiny_train(tmp_path, Poison(), target, validate_every=6, decodes=0)
    assert all(
        value.isfinite().all() for value in load_file(tmp_path / "last.safetensors").values()
    )
    assert (tmp_path / "draft" / "model.safetensors").is_file()


UNABLE = {
    "ACCELERATE_USE_FSDP": "among several processes, but there is only one: give --num_processes",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported, FSDP is",
    "FSDP_OFFLOAD_PARAMS": "set fsdp_offload_params to false",
    "FSDP_ACTIVATION_CHECKPOINTING": "set fsdp_activation_checkpointing to false",
}


@pytest.mark.parametrize("option", UNABLE)
def test_unsupported_launches_are_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(option, "true")  # as `accelerate launch` does
    with pytest.raises(TemperaError, match=UNABLE[option]):
        tiny_train(tmp_path)
    assert not (tmp_path / "training.json").exists()


@pytest.mark.slow
def test_bfloat16_target_and_autocast(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    metrics = tiny_train(tmp_path, target=target, mixed_precision="bf16", steps=2, validate_every=2)
    assert 0 <= metrics["best"]["tv"] <= 1
    assert all(
        value.dtype == torch.float32
        for value in load_file(tmp_path / "draft" / "model.safetensors").values()
    )
