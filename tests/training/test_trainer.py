"""The training loop: exact resumption, accumulation, several processes, refusals, and that it
trains.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from tiny_training import (
    RECIPE,
    recipe_with,
    tiny_codes,
    tiny_draft,
    tiny_target,
    tiny_train,
)

from tempera.drafters.draft_files import read_draft
from tempera.drafters.draft_network import DraftNetwork
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.eagle_network import EagleModel
from tempera.drafters.medusa import MedusaModel
from tempera.drafters.parallel_network import ParallelModel
from tempera.errors import TemperaError
from tempera.runtime.image_files import read_picture
from tempera.runtime.preemption import Preemption
from tempera.runtime.tracking import Tracker
from tempera.training import checkpoint, trainer, validation
from tempera.training.averaging import moving_average
from tempera.training.checkpoint import CHECKPOINT_MANIFEST, EXTRA, NETWORK
from tempera.training.losses import AcceptanceLoss, EagleLoss, Loss
from tempera.training.teacher_forcing import TeacherForcedBatch, teach
from tempera.training.trainer import TrainingRun

LAST = "checkpoint-12"
WHOLE: dict[str, Any] = {"gradient_accumulation": 2, "matrix_lr": 0.01}
LEARN = {"steps": 60, "validate_every": 20, "ema": 0.0, "lr": 1e-2, "batch_size": 8}


def stop() -> None:
    raise KeyboardInterrupt


class Notebook(Tracker):
    """Keeps what is logged; stops the run after a step, or does something then."""

    def __init__(self, at: int = -1, do: Callable[[], object] = stop) -> None:
        self.rows, self.at, self.do = list[dict[str, Any]](), at, do
        self.images = list[tuple[str, str]]()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append({**values, "step": step})
        if step == self.at:
            self.do()

    def image(self, name: str, path: Path, caption: str = "") -> None:
        self.images.append((name, caption))

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("runs") / "whole"
    tiny_train(directory, **WHOLE)
    return directory


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, whole: Path) -> None:
    """With Muon, AdamW, a moving average and accumulation."""
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        tiny_train(cut, Notebook(at=8), **WHOLE)
    before = load_file(cut / "checkpoint-5" / NETWORK)
    tiny_train(cut, **WHOLE)
    for name in (f"{LAST}/{NETWORK}", f"{LAST}/{EXTRA}", "draft/model.safetensors"):
        expected = load_file(whole / name)
        resumed = load_file(cut / name)
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[key], resumed[key]) for key in expected), name
    for name in ("optimizer.bin", "optimizer_1.bin"):
        moments = [torch.load(run / LAST / name)["state"] for run in (cut, whole)]
        torch.testing.assert_close(*moments, rtol=0, atol=0)
    assert not torch.equal(before["fc.weight"], resumed["fc.weight"])
    assert {path.name for path in cut.iterdir()} == {"draft", LAST, "training.json", "conditions"}


def same_results(run: Path, whole: Path) -> bool:
    """Whether two trainings ended with the same weights, average, draft and metrics."""
    for name in (f"{LAST}/{NETWORK}", f"{LAST}/{EXTRA}", "draft/model.safetensors"):
        mine, expected = load_file(run / name), load_file(whole / name)
        if not all(torch.equal(expected[key], mine[key]) for key in expected):
            return False
    mine, expected = (json.loads((at / "draft/metrics.json").read_text()) for at in (run, whole))
    return all(mine[name] == expected[name] for name in ("best", "latest", "weights"))


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGTERM interrupts, as the commands set it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(("at", "saved"), [(1, 2), (3, 4), (5, 6), (7, 8), (11, 12), (12, 12)])
def test_a_training_that_is_told_to_end_loses_no_step(
    at: int, saved: int, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor the validation that was due, for which there was no time."""
    with pytest.raises(KeyboardInterrupt):
        tiny_train(tmp_path, Notebook(at, terminate), **WHOLE)
    assert (tmp_path / f"checkpoint-{saved}" / CHECKPOINT_MANIFEST).is_file()
    assert f"it resumes after step {saved}." in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    tiny_train(tmp_path, **WHOLE)
    assert same_results(tmp_path, whole)


@pytest.mark.usefixtures("interrupts")
def test_a_validation_does_not_hold_a_training_that_is_told_to_end(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def imitation(*given: Any, stopped: Callable[[], bool]) -> torch.Tensor:
        terminate()
        asked.append(stopped())
        return validation.imitation(*given, stopped=stopped)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "imitation", imitation)
        tiny_train(tmp_path, **WHOLE)
    assert asked == [True] and (tmp_path / "checkpoint-4").is_dir()
    assert not (tmp_path / "draft").exists()
    tiny_train(tmp_path, **WHOLE)
    assert same_results(tmp_path, whole)


def test_a_signal_whose_handler_returns_leaves_a_checkpoint_and_the_training_goes_on(
    tmp_path: Path, whole: Path
) -> None:
    """As submitit's does for SIGTERM; the same signal again acts at once."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        tiny_train(tmp_path, Notebook(7, terminate), **WHOLE)
        assert got == [signal.SIGTERM] and same_results(tmp_path, whole)
        with Preemption() as preemption:
            terminate()
            assert preemption.came and len(got) == 1
            terminate()
            assert len(got) == 2
        assert len(got) == 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_kill_between_a_draft_and_what_describes_it_is_no_foreign_draft(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, calls = TrainingRun.describe, []

    def describe(run: TrainingRun, finished: bool) -> None:
        calls.append(finished)
        if calls == [False, False]:
            raise KeyboardInterrupt
        described(run, finished)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "describe", describe)
        with pytest.raises(KeyboardInterrupt):
            tiny_train(tmp_path, **WHOLE)
    tiny_train(tmp_path, **WHOLE)
    drafts = [load_file(run / "draft/model.safetensors") for run in (tmp_path, whole)]
    assert all(torch.equal(value, drafts[1][name]) for name, value in drafts[0].items())


def run_of(
    directory: Path,
    loss: Loss = EagleLoss(),  # noqa: B008
    kind: type[DraftNetwork] = EagleModel,
    **changes: Any,
) -> TrainingRun:
    target, recipe = tiny_target(), recipe_with(**RECIPE | changes)
    draft = tiny_draft(target, kind=kind)
    return TrainingRun(target, draft, tiny_codes(), loss, recipe, directory)


@pytest.mark.parametrize("unroll", [0, 2])
def test_gradient_accumulation_equals_a_large_batch(unroll: int, tmp_path: Path) -> None:
    gradients = []
    for parts in (1, 4):
        options = {"batch_size": 16, "gradient_accumulation": parts, "ttt_steps": unroll}
        run = run_of(tmp_path, grad_clip=0.0, **options)
        assert run.step(3).keys() == {"loss", "regression", "cross_entropy", "gradient_norm"}
        gradients.append({name: weight.grad for name, weight in run.draft.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


def test_two_steps_by_hand(tmp_path: Path) -> None:
    """The gradient is clipped, AdamW steps at its number's rate, and the average follows."""
    options = {"grad_clip": 0.05, "weight_decay": 0.1, "warmup_steps": 4}
    run, same = run_of(tmp_path, **options), run_of(tmp_path, **options)
    weights, average = list(same.draft.parameters()), moving_average(same.draft, 0.9)
    adam = torch.optim.AdamW(weights, 1.0, (0.9, 0.95), weight_decay=0.1)
    for number in range(2):
        adam.param_groups[0]["lr"] = 3e-3 * (1 + number) / 4
        adam.zero_grad()
        same.losses(list(range(4 * number, 4 * number + 4)))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.05)
        adam.step()
        average.update_parameters(same.draft)
        run.step(number)
    for mine, expected in ((run.draft, same.draft), (run.averaged, average.module)):
        torch.testing.assert_close(mine.state_dict(), expected.state_dict())
    assert run.held.keys == tiny_codes().holdout([0, 1, 2, 3]).keys


def test_options_reach_the_loss(tmp_path: Path) -> None:
    usual = {"hidden_noise": 0.0, "cfg_dropout": 0.0}
    changes = ({}, {"hidden_noise": 0.5}, {"cfg_dropout": 0.9}, {"mixed_precision": "bf16"})
    losses = [run_of(tmp_path, **{**usual, **one}).losses([0, 1, 2, 3])["loss"] for one in changes]
    assert len({loss.item() for loss in losses}) == 4


def test_muon_steps_the_matrices_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path, matrix_lr=0.1, lr=1e-9, warmup_steps=0)
    before = {name: weight.detach().clone() for name, weight in run.draft.named_parameters()}
    run.step(0)
    for name, weight in run.draft.named_parameters():
        assert ((weight - before[name]).norm() > 0.01) == (weight.ndim == 2), name


def test_training_improves_and_keeps_the_best_draft(tmp_path: Path) -> None:
    notebook, target = Notebook(), tiny_target()
    metrics = tiny_train(tmp_path, notebook, target, **LEARN)
    losses = notebook.series("train/loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    names = ("top3", "tv", "accepted_length")
    top3, tv, lengths = (notebook.series(f"validation/{name}") for name in names)
    assert len(top3) == len(lengths) == 3 and all(1 <= length <= 3 for length in lengths)
    assert tv[-1] < tv[0]
    assert metrics["best"]["top3"] == max(top3) and metrics["finished"]
    EagleDraft(read_draft(EagleModel, tmp_path / "draft"), target)
    readme = (tmp_path / "draft" / "README.md").read_text()
    assert "top3" in readme and "model=tiny drafter=eagle drafter.path=" in readme
    assert notebook.series("train/lr")[:3] == pytest.approx([0.005, 0.01, 0.01])
    logged = {f"train/{name}" for name in ("regression", "cross_entropy", "gradient_norm", "lr")}
    assert logged <= notebook.rows[0].keys()


def test_sample_pictures_are_drawn_with_the_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside one another, at every validation; if they fail, training continues."""
    seen, notebook = list[torch.Tensor](), Notebook()

    def grey(tokens: torch.Tensor, captions: list[str]) -> Any:
        assert len(tokens) == len(captions) == 2
        seen.append(tokens)
        return 10 * tokens.view(-1, 1, 3, 4).expand(-1, 3, -1, -1).to(torch.uint8).numpy()

    def run(directory: Path, pictures: Any) -> str:
        changes = {"steps": 8, "validate_every": 4, "decodes": 2}
        target, recipe = tiny_target(), recipe_with(**RECIPE | changes)
        made = TrainingRun(target, tiny_draft(target), tiny_codes(), EagleLoss(), recipe, directory,
                           pictures=pictures)  # fmt: skip
        made.train(lambda: notebook)
        return made.made_by

    made_by = run(tmp_path / "one", grey)
    assert [one for one, _ in notebook.images] == ["samples"] * 2
    assert "step 4: " in notebook.images[0][1] and " · " in notebook.images[0][1]
    picture = read_picture(tmp_path / "one" / "samples.png", made_by)
    assert picture.shape == (3, 3, 2 * 4)
    assert picture[0, 0, [0, 4]].tolist() == (10 * seen[1][:, 0]).tolist()
    run(tmp_path / "two", lambda *_: 1 / 0)
    assert "the sample pictures failed (division by zero)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (EagleModel, AcceptanceLoss()),
        (ParallelModel, AcceptanceLoss(regression=2.0)),
        (MedusaModel, AcceptanceLoss(eta=0.0)),
    ],
)
def test_the_acceptance_loss_raises_the_acceptance(
    kind: type[DraftNetwork], loss: Loss, tmp_path: Path
) -> None:
    """Of a draft that reads its own predictions, and of one of several slots, all of whose weights
    learn.
    """
    notebook, target = Notebook(), tiny_target(2.0)
    options = {**LEARN, "ttt_steps": 1, "ttt_decay": 0.8}
    metrics = tiny_train(tmp_path, notebook, target, loss, kind, **options)
    acceptance = notebook.series("train/acceptance")
    assert sum(acceptance[-5:]) > 1.1 * sum(acceptance[:5])
    assert notebook.series("train/tv") == pytest.approx([1 - share for share in acceptance])
    tv = notebook.series("validation/tv")
    assert tv[-1] < tv[0] and metrics["architecture"] == kind.__name__
    before = tiny_draft(target, kind=kind).state_dict()
    after = read_draft(kind, tmp_path / "draft").state_dict()
    assert not [name for name, weight in after.items() if weight.equal(before[name])]


def test_weights_of_unrolled_steps_decay(tmp_path: Path) -> None:
    """And those of slots, by the same weights."""

    def loss(**changes: Any) -> torch.Tensor:
        run = run_of(tmp_path, AcceptanceLoss(), hidden_noise=0.0, **changes)
        return run.losses([0, 1, 2, 3])["loss"]

    alike, first = loss(ttt_steps=2), loss(ttt_steps=0)
    second = 2 * loss(ttt_steps=1) - first
    third = 3 * alike - first - second
    decayed = loss(ttt_steps=2, ttt_decay=0.5)
    torch.testing.assert_close(decayed, (first + second / 2 + third / 4) / 1.75)
    assert not torch.allclose(decayed, alike)
    run, images = run_of(tmp_path), tiny_codes().train([0, 1, 2, 3])
    tokens, lost = images.tokens.repeat(2, 1), torch.arange(8) >= 4
    lesson = teach(run.target, images.captions * 2, tokens, lost)
    states, length = [lesson.previous], lesson.hidden.shape[1]
    for _ in range(2):
        ahead = run.draft(*lesson.unrolled(states, run.draft.visible(len(states))))
        states.append(lesson.before(ahead[:, -length:]))
    last = run.draft(*lesson.unrolled(states, run.draft.visible(3)))[:, -length:]
    after, true = (one[:, lesson.start :] for one in (last, lesson.hidden))
    torch.testing.assert_close(third, AcceptanceLoss()(after, true, run.head)["loss"])


@pytest.mark.parametrize("columns", [0, 4])
def test_slots_of_medusa_learn_the_places_that_they_draft(columns: int, tmp_path: Path) -> None:
    """Head k reads the state before the root and predicts the place k + 1 behind it; with columns,
    it also reads the state of the token that stands a row above that place.
    """
    target = tiny_target()
    sizes = {"length": 3, "columns": columns}
    draft: Any = MedusaModel.of(target.network, "tiny", identity=target.identity, **sizes)
    recipe = recipe_with(**RECIPE | {"hidden_noise": 0.0, "cfg_dropout": 0.0})
    run = TrainingRun(target, draft, tiny_codes(), AcceptanceLoss(), recipe, tmp_path)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.normal_(0, 0.3)
    images = tiny_codes().train([0, 1, 2, 3])
    lost = torch.arange(8) >= 4
    lesson = teach(run.target, images.captions * 2, images.tokens.repeat(2, 1), lost)
    losses = []
    for slot in range(draft.slots):
        predicted = torch.zeros_like(lesson.hidden)
        for place in range(slot + 1, lesson.hidden.shape[1]):
            beside = state(lesson, place + 1 - columns).unsqueeze(2) if columns else None
            before = state(lesson, place - slot - 1)
            predicted[:, place] = draft.heads(before, beside)[:, 0, slot]
        start = lesson.start
        part = AcceptanceLoss()(predicted[:, start:], lesson.hidden[:, start:], run.head)
        losses.append(part["loss"])
    weights = torch.tensor(run.recipe.step_weights(draft.slots))
    expected = (weights * torch.stack(losses)).sum()
    torch.testing.assert_close(run.losses([0, 1, 2, 3])["loss"], expected)


def state(lesson: TeacherForcedBatch, place: int) -> torch.Tensor:
    """The target's state at a place, [R, 1, H]: 0 on the padding before the caption, and before."""
    if place < 0:
        return torch.zeros_like(lesson.hidden[:, :1])
    found = lesson.hidden[:, place : place + 1]
    return found * lesson.real[:, place, None, None] if place < lesson.real.shape[1] else found


def test_a_worse_draft_does_not_replace_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top3, kept = iter([0.4, 0.6, 0.5]), list[bytes]()
    path = tmp_path / "draft" / "model.safetensors"

    def measured(*_: Any, **__: Any) -> torch.Tensor:
        kept.append(path.read_bytes() if path.is_file() else b"")
        return torch.tensor([100.0, 10.0, 100 * next(top3), 50.0], dtype=torch.float64)

    monkeypatch.setattr(trainer, "imitation", measured)
    metrics = tiny_train(tmp_path, decodes=0)
    assert metrics["best"] == {"step": 8, "top1": 0.1, "top3": 0.6, "tv": 0.5}
    assert metrics["latest"]["step"] == 12
    assert b"" == kept[0] != kept[1] != kept[2] == path.read_bytes()


def test_a_finished_run_does_nothing_but_replaces_a_lost_draft(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    first = json.loads((tmp_path / "draft" / "metrics.json").read_text())

    def again() -> dict[str, Any]:
        tracker = Notebook(do=lambda: pytest.fail("a finished run tracks nothing"))
        return tiny_train(tmp_path, tracker, **WHOLE)

    assert again() == first
    assert "already trained, 12 steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before
    shutil.rmtree(tmp_path / "draft")
    assert again()["best"]["step"] == 12
    assert (tmp_path / "draft" / "model.safetensors").is_file()


def of_seal(**changes: Any) -> Callable[[Path], None]:
    """Damages what a checkpoint says of itself."""

    def damage(path: Path) -> None:
        manifest = json.loads((path / CHECKPOINT_MANIFEST).read_text())
        manifest["progress"] |= {
            name: changes[name] for name in changes if name in manifest["progress"]
        }
        manifest |= {name: changes[name] for name in changes if name in manifest}
        (path / CHECKPOINT_MANIFEST).write_text(json.dumps(manifest))

    return damage


def of_byte(name: str) -> Callable[[Path], None]:
    """Flips one bit of one file."""

    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)

    return damage


FILES = ("network.safetensors", "extra.safetensors", "optimizer.bin", "optimizer_1.bin",
         "scheduler.bin", "scheduler_1.bin", "random_states_0.pkl")  # fmt: skip
DAMAGES: dict[str, Callable[[Path], None]] = {
    "step 1000000000 of 12": of_seal(step=10**9),
    "progress.seconds=nan": of_seal(seconds=float("nan")),
    "it belongs to another training run": of_seal(made_by="another"),
    "files=[]": of_seal(files=[]),
    "there is no file": lambda path: (path / "optimizer.bin").unlink(),
    **{f"{name} is not what was saved": of_byte(name) for name in FILES},
}
"""What is told -> what was done to a checkpoint."""


@pytest.mark.parametrize("told", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(
    told: str, tmp_path: Path, whole: Path
) -> None:
    run = run_of(tmp_path, **{**WHOLE, "steps": 12})
    made_by = json.loads((whole / "draft/metrics.json").read_text())["made_by"]
    copy = shutil.copytree(whole / LAST, tmp_path / LAST)
    assert {path.name for path in copy.iterdir()} == {*FILES, CHECKPOINT_MANIFEST}
    assert run.checkpoints.load(12, made_by)
    DAMAGES[told](copy)
    with pytest.raises(TemperaError, match=r"cannot resume from .*checkpoint-12") as refused:
        run.checkpoints.load(12, made_by)
    assert f"({told}" in str(refused.value) and "\n" not in str(refused.value)


def test_a_save_that_is_cut_off_leaves_the_checkpoint_before(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Mock(side_effect=[checkpoint.write_json, KeyboardInterrupt])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_json", lambda *values: written()(*values))
        tiny_train(tmp_path, **WHOLE)
    assert {path.name for path in tmp_path.glob("*checkpoint*")} == {
        "checkpoint-5",
        ".checkpoint-10.tmp",
    }
    tiny_train(tmp_path, **WHOLE)
    assert {path.name for path in tmp_path.glob("*checkpoint*")} == {LAST}
    weights = [load_file(run / LAST / NETWORK)["fc.weight"] for run in (tmp_path, whole)]
    assert torch.equal(*weights)


def test_what_a_user_keeps_beside_checkpoints_stays(tmp_path: Path, whole: Path) -> None:
    """Under names like theirs, too, and inside of them."""
    kept = [
        "checkpoint-best/model.safetensors",
        "checkpoint-5-copy/notes.txt",
        ".checkpoint-mine.tmp/notes.txt",
        "checkpoint-3/notes.txt",
        "checkpoint-notes.txt",
    ]
    foreign = tmp_path / "checkpoint-2"
    manifest = json.loads((whole / LAST / CHECKPOINT_MANIFEST).read_text()) | {
        "made_by": "another",
        "files": {},
    }

    def keep() -> None:
        foreign.mkdir()
        (foreign / CHECKPOINT_MANIFEST).write_text(json.dumps(manifest))
        for name in (*kept, "checkpoint-5/notes.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")

    tiny_train(tmp_path, Notebook(6, keep), **WHOLE)
    assert all((tmp_path / name).read_text() == "mine" for name in kept)
    assert {path.name for path in (tmp_path / "checkpoint-5").iterdir()} == {"notes.txt"}
    assert (foreign / CHECKPOINT_MANIFEST).is_file() and (
        tmp_path / LAST / CHECKPOINT_MANIFEST
    ).is_file()
    assert not (tmp_path / "checkpoint-10").exists()


def test_the_files_of_a_checkpoint_have_reached_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    flushed = set[int]()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    run.checkpoints.save(run.progress, "training")
    files = {path.stat().st_ino for path in (tmp_path / "checkpoint-0").iterdir()}
    assert files <= flushed


def test_a_full_disk_is_told_with_the_place(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.accelerator.save_state = Mock(side_effect=RuntimeError("file write failed"))
    with pytest.raises(TemperaError, match=r"cannot write .*checkpoint-0: file write failed; give"):
        run.checkpoints.save(run.progress, "training")


def test_too_little_memory_is_no_fault_of_a_checkpoint(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.checkpoints.save(run.progress, "training")
    run.accelerator.load_state = Mock(side_effect=torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        run.checkpoints.load(12, "training")


def test_refusals(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        TemperaError, match=r"made with recipe.lr=0.003, but this run has recipe.lr=0.01"
    ):
        tiny_train(whole, **{**WHOLE, "lr": 0.01})
    with pytest.raises(TemperaError, match=r"made with loss.class=EagleLoss"):
        tiny_train(whole, loss=AcceptanceLoss(), **WHOLE)
    (tmp_path / "file").touch()
    with pytest.raises(TemperaError, match=r"cannot write in .*file/run"):
        tiny_train(tmp_path / "file" / "run")
    with pytest.raises(TemperaError, match="is not divisible"):
        tiny_train(tmp_path / "new", batch_size=5, gradient_accumulation=2)
    other = tiny_target()
    other.identity = "other"
    with pytest.raises(TemperaError, match=r"made with target=\w+, but this run has target=other"):
        tiny_train(whole, target=other, **WHOLE)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    with pytest.raises(TemperaError, match="started by another version of tempera"):
        tiny_train(whole, **WHOLE)


def test_parts_of_another_training_are_refused(tmp_path: Path, whole: Path) -> None:
    other, copy = tmp_path / "other", tmp_path / "copy"
    shutil.copytree(whole, other)
    tiny_train(other / "new", **WHOLE, seed=2)
    for part, told in (
        (LAST, "to another training"),
        ("draft", "not the draft"),
        ("conditions", ""),
    ):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        shutil.copytree(other / "new" / part, copy / part, dirs_exist_ok=True)
        if told:
            with pytest.raises(TemperaError, match=told):
                tiny_train(copy, **WHOLE)
        else:  # the same text encoder's
            tiny_train(copy, **WHOLE)
    shutil.copy(other / "new/draft/model.safetensors", copy / "draft/model.safetensors")
    with pytest.raises(TemperaError, match="not the draft that this training run wrote"):
        tiny_train(copy, **WHOLE)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    target = tiny_target()
    poison = Notebook(8, lambda: target.network.lm_head.weight.fill_(float("nan")))
    with pytest.raises(TemperaError, match=r"not finite at step 8 .*last good checkpoint is kept"):
        tiny_train(tmp_path, poison, target, validate_every=6, decodes=0)
    saved = load_file(tmp_path / "checkpoint-5" / NETWORK)
    assert all(value.isfinite().all() for value in saved.values())
    assert (tmp_path / "draft" / "model.safetensors").is_file()


def test_launchers_that_split_networks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{engine}", "true")  # as `accelerate launch` does
            with pytest.raises(TemperaError, match="launch with torchrun"):
                tiny_train(tmp_path)
    assert not (tmp_path / "training.json").exists()


SETTINGS: dict[str, dict[str, str]] = {
    "": {},
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 is ignored: this training run has "
    "gradient_accumulation=1": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    "ACCELERATE_MIXED_PRECISION=bf16 is ignored: this training run has mixed_precision=no": {
        "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_MODE": "reduce-overhead",
    },
    "ACCELERATE_DYNAMO_BACKEND=eager is ignored: this training run has dynamo=no": {
        "ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_MIXED_PRECISION": "no",
    },
}  # fmt: skip
"""What `accelerate launch` sets, after what the main process says of it."""


@pytest.mark.slow
def test_options_count_and_not_what_accelerates_launcher_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    found = []
    for number, (told, variables) in enumerate(SETTINGS.items()):
        AcceleratorState._reset_state(True)  # else it keeps what it read first
        GradientState._reset_state()
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            tiny_train(tmp_path / str(number))
        lines = [line for line in capsys.readouterr().out.splitlines() if "is ignored" in line]
        assert lines == [told] * bool(told)
        found.append(load_file(tmp_path / str(number) / LAST / NETWORK))
    assert all(torch.equal(run[key], found[0][key]) for run in found for key in found[0])


def test_precisions_follow_each_other_in_one_process(tmp_path: Path) -> None:
    """A run in bfloat16 leaves nothing behind that stops the next one in float32."""
    options = {"steps": 2, "decodes": 0, "validate_every": 2}
    for precision, dtype in (("bf16", torch.bfloat16), ("no", torch.float32)):
        target = tiny_target(dtype=dtype)
        metrics = tiny_train(
            tmp_path / precision, target=target, mixed_precision=precision, **options
        )
        assert 0 <= metrics["best"]["tv"] <= 1
        kept = load_file(tmp_path / precision / "draft" / "model.safetensors")
        assert {value.dtype for value in kept.values()} == {torch.float32}
