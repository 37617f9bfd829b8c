"""tempera.generate and tempera.load: the command line's images, options and sentences, and names
that are imported when they are first used.
"""

import copy
import doctest
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tempera
import tempera.api
from tempera import LoadedModel, Result, TemperaError
from tempera.drafters.jacobi import sjd
from tempera.exactness.tables import TableTarget

CAPTIONS = ["a large green star", "a small red ring", "a large green star"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tempera.load(model="shapes", method="coolsd", delta=2, batch_size=2)


@pytest.fixture(scope="module")
def result(loaded: LoadedModel) -> Result:
    return loaded.generate(CAPTIONS, seed=3)


def test_a_result(result: Result) -> None:
    assert result.prompts == tuple(CAPTIONS)
    assert [image.size for image in result.images] == [(48, 48)] * 3
    assert result.tokens.shape == result.trace.step.shape == (3, 144)
    rounds = result.trace.rounds.sum()
    assert result.accepted_length == pytest.approx(3 * 144 / rounds)
    accepted = (result.trace.depth > 0).sum()
    assert result.tau == pytest.approx(accepted / rounds)
    assert 1 < result.tau + 0.9 <= result.accepted_length < 6
    assert f"accepted_length={result.accepted_length:.2f}" in repr(result)


@pytest.mark.slow
def test_an_image_depends_on_prompt_and_seed_alone(loaded: LoadedModel, result: Result) -> None:
    """A prompt that comes again gets another image; alone, the image of its first coming."""
    assert not torch.equal(result.tokens[0], result.tokens[2])
    alone = loaded.generate(CAPTIONS[0], seed=3)
    assert torch.equal(alone.tokens[0], result.tokens[0])
    assert not torch.equal(loaded.generate(CAPTIONS[0], seed=4).tokens, alone.tokens)


@pytest.mark.slow
def test_the_command_line_draws_the_same(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from tempera.commands.scripts import evaluate

    monkeypatch.chdir(tmp_path)
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.run.dir=run"]
    options = ["method=coolsd", "delta=2", "seed=3", "metrics=none", "tracking=none"]
    options += ["speed.prompts=0"]
    monkeypatch.setattr(
        sys, "argv", ["run.py", f"prompt={CAPTIONS[0]}", "diagnostics=false", *options, *quiet]
    )
    evaluate()
    (file,) = Path("run/images").iterdir()
    assert Image.open(file).tobytes() == result.images[0].tobytes()


WRONG_OPTIONS: list[tuple[dict, str]] = [
    ({"method": "coolsd", "dleta": 2}, "`delta`"),
    ({"method": "coolsd", "delta": [1, 2]}, "`delta="),
    ({"delta": object()}, "cannot be an option"),
    ({"model": "shapes_mar", "method": "coolsd"}, "method=ar"),
    ({"limit": 2}, "`limit`"),
    ({"seed": 5}, "`seed`"),
    ({"batch_size": "auto"}, "batch_size"),
]


@pytest.mark.parametrize(("options", "named"), WRONG_OPTIONS)
def test_a_wrong_option_is_named_in_one_sentence(options: dict, named: str) -> None:
    with pytest.raises(TemperaError) as refused:
        tempera.load(**options)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("model", "method"), [("shapes", "parallel_block"), ("shapes_mar", "ar")])
def test_without_a_method_an_exact_one_runs(model: str, method: str) -> None:
    assert tempera.load(model).method == method


def test_threads_take_turns(loaded: LoadedModel) -> None:
    alone = [loaded.generate(caption, seed=1).tokens for caption in CAPTIONS[:2]]
    with ThreadPoolExecutor(4) as threads:
        made = list(
            threads.map(lambda n: loaded.generate(CAPTIONS[n % 2], seed=1).tokens, range(6))
        )
    assert all(torch.equal(tokens, alone[n % 2]) for n, tokens in enumerate(made))
    with pytest.raises(TemperaError, match="tempera.load again"):
        copy.deepcopy(loaded)


@pytest.mark.parametrize(
    "prompts",
    [
        *(None, 1.5, True, b"a red ring", {"a red ring"}, {"a red ring": 1}, Path("prompts.txt")),
        *([None], [["a red ring"]], [b"a red ring"], "\udcff", torch.tensor([1, 2])),
    ],
    ids=repr,
)
def test_what_is_no_text_is_no_prompt(prompts: object) -> None:
    """Before the model is loaded: there is no weight of this one."""
    with pytest.raises(TemperaError, match="prompt"):
        tempera.generate(prompts, weights="/nowhere")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["0", "abc", 1.5, None, True, [1.5], 10**20], ids=repr)
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(TemperaError, match="seed=.* is not valid: give a whole number"):
        tempera.generate("a red ring", seed=seed, weights="/nowhere")  # type: ignore[arg-type]


def test_values_of_other_libraries() -> None:
    loaded = tempera.load(
        method="uniform_rsd",
        delta=np.float64(2.5),
        depth=np.int64(3),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert loaded.pipeline.method.rule.schedule == (2.5, 2.5, 2.5)
    assert tempera.load(method="uniform_rsd", delta="2.5").pipeline.method.rule.schedule[0] == 2.5
    prompts = np.array(["a red ring", "a blue star"])
    numbers = loaded.generate(prompts, seed=np.int64(3)).tokens
    assert torch.equal(numbers, loaded.generate(tuple(map(str, prompts)), seed=3).tokens)


@pytest.mark.parametrize("prompts", ["", " ", [], ["a small red ring", ""]])
def test_an_empty_prompt_is_refused(prompts: str | list[str], loaded: LoadedModel) -> None:
    with pytest.raises(TemperaError, match="give"):
        loaded.generate(prompts)


def test_a_model_of_continuous_tokens() -> None:
    result = tempera.generate("a red ring", "shapes_mar", "ar", steps=2, denoising_steps=2)
    assert result.tokens.ndim == 3
    assert result.images[0].size == (48, 48)


@pytest.mark.docs
@pytest.mark.parametrize("module", [tempera, tempera.api], ids=lambda module: module.__name__)
def test_the_examples_run(module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(module, optionflags=flags)
    assert failed == 0 < tried


def test_every_public_name_is_there() -> None:
    assert all(getattr(tempera, name) is not None for name in tempera.__all__)
    assert tempera.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="Exct"):
        tempera.Exct  # noqa: B018


def test_import_is_light() -> None:
    heavy = "{'torch', 'hydra', 'numpy'}"
    code = f"import sys, tempera; dir(tempera); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Unshowable:
    """As a broken object of a user's."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "8", Unshowable()], ids=type)
def test_a_loaded_model_takes_batch_sizes_above_zero(loaded: LoadedModel, size: object) -> None:
    before = loaded.batch_size
    with pytest.raises(TemperaError, match="batch_size=.*is not valid"):
        loaded.batch_size = size  # type: ignore[assignment]
    assert loaded.batch_size == before


def test_objects_that_cannot_be_shown_are_refused_like_others(loaded: LoadedModel) -> None:
    strange = Unshowable()
    for call in (
        lambda: loaded.generate(strange),  # type: ignore[arg-type]
        lambda: loaded.generate([strange]),  # type: ignore[list-item]
        lambda: loaded.generate("a ring", seed=strange),  # type: ignore[arg-type]
        lambda: tempera.load(delta=strange),
    ):
        with pytest.raises(TemperaError, match="an object of Unshowable"):
            call()


def test_several_images_another_guidance_a_generator_and_progress(loaded: LoadedModel) -> None:
    seen: list[int] = []
    two = loaded.generate(CAPTIONS[0], seed=3, num_images=2, progress=seen.append)
    assert torch.equal(two.tokens, loaded.generate([CAPTIONS[0]] * 2, seed=3).tokens)
    assert sum(seen) == 2 * 144
    free = loaded.generate(CAPTIONS[0], seed=3, guidance=1.0)
    assert not torch.equal(free.tokens, two.tokens[:1])
    drawn = [
        loaded.generate(CAPTIONS[0], torch.Generator().manual_seed(1)).tokens for _ in range(2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], two.tokens[:1])
    assert repr(loaded).startswith("LoadedModel(model='shapes', method='coolsd', rule=Relaxed(")
    assert repr(loaded).endswith("12×12 tokens, float32 on cpu, batch_size=2)")
    with pytest.raises(TemperaError, match="num_images=0"):
        loaded.generate("a", num_images=0)


def test_a_seed_for_every_image(loaded: LoadedModel) -> None:
    """An image is then that of its prompt and its seed, whatever stands beside it."""
    many = loaded.generate(CAPTIONS[0], [5, 6], num_images=2)
    assert torch.equal(many.tokens[1:2], loaded.generate(CAPTIONS[0], seed=6).tokens)
    assert not torch.equal(many.tokens[0], many.tokens[1])
    with pytest.raises(TemperaError, match="3 seeds for 2 images"):
        loaded.generate(CAPTIONS[0], [1, 2, 3], num_images=2)
    with pytest.raises(TemperaError, match="2 images of one prompt have the seed 4"):
        loaded.generate(CAPTIONS[0], [4, 4], num_images=2)


def test_a_callback_sees_every_round(loaded: LoadedModel) -> None:
    seen: list[Any] = []
    result = loaded.generate(CAPTIONS[0], callback=seen.append)
    assert len(seen) == int(result.trace.rounds.sum())
    assert torch.equal(seen[-1].tokens, result.tokens)
    assert isinstance(seen[-1].draft, tempera.Draft) and len(seen[-1].verdict.accepted) == 1


def test_an_image_grows_round_by_round(loaded: LoadedModel) -> None:
    result = loaded.generate(CAPTIONS[0])
    written = [0]
    for one in loaded.rounds(CAPTIONS[0]):
        written.append(one.sequences.written)
        (count,) = one.sequences.counts
        assert torch.equal(one.tokens[:, :count], result.tokens[:, :count])
        assert not one.tokens[:, count:].any()
        with pytest.raises(TemperaError, match="the rounds of another batch"):
            loaded.generate(CAPTIONS[0])
    assert written == sorted(set(written)) and written[-1] == 144
    (picture,) = loaded.pictures(one.tokens)
    assert picture.tobytes() == result.images[0].tobytes()
    next(loaded.rounds(CAPTIONS[0]))  # a generator that nobody holds is closed
    assert torch.equal(loaded.generate(CAPTIONS[0]).tokens, result.tokens)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"progress": 3}, "progress=3 is not valid: give a function"),
        ({"callback": "x"}, "callback='x' is not valid"),
        ({"guidance": "3"}, "guidance='3' is not valid: give a number"),
        ({"temperature": 0.5}, "`temperature` is not an argument of generate"),
    ],
    ids=str,
)
def test_wrong_arguments_of_generate(
    argument: dict[str, Any], sentence: str, loaded: LoadedModel
) -> None:
    with pytest.raises(TemperaError, match=sentence):
        loaded.generate(CAPTIONS[0], **argument)


def test_objects_in_place_of_names(loaded: LoadedModel) -> None:
    target, rule = loaded.pipeline.target, tempera.Relaxed(tempera.schedules.uniform(2.0, 5))
    own = tempera.load(method="sjd", rule=rule, target=target)
    assert own.pipeline.method.rule is rule and own.pipeline.target is target
    mine = tempera.load(drafter=lambda target: sjd(target, window=8), target=target, rule=rule)
    assert mine.pipeline.method.drafter.nodes == 8
    assert "method='ar', rule=Relaxed(" in repr(mine)
    assert len(mine.generate(CAPTIONS[0]).images) == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rule": object()}, "rule=.* is not valid: give a tempera.Rule"),
        ({"rule": tempera.Exact(), "delta": 2}, "there is no option `delta`"),
        (
            {"rule": tempera.Exact(), "model": "shapes_mar", "method": "ar"},
            "model=shapes_mar has continuous",
        ),
        ({"drafter": 3}, "drafter=3 is not valid"),
        (
            {"drafter": tempera.NoDraft(), "method": "eagle"},
            "a custom drafter replaces method=eagle",
        ),
        ({"target": object()}, "target=.* is not valid: give a tempera.Target"),
        (
            {"target": TableTarget(), "method": "ar"},
            "the target has a vocabulary of 3 tokens, but the image decoder",
        ),
        ({"target": TableTarget(), "top_k": 3}, "the target has its own top_k"),
        (
            {"target": TableTarget()},
            "TransformerTarget, but TableTarget is not one: give method=ar",
        ),
        ({"drafter": lambda target: None}, "the function drafter= returned None"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else None,
)
def test_objects_that_do_not_fit(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TemperaError, match=sentence):
        tempera.load(**given)


def test_a_model_of_continuous_tokens_is_loaded_with_its_guidance() -> None:
    """Its draft has a copy, which another guidance in memory would not reach."""
    loaded = tempera.load(model="shapes_mar", method="cspd")
    with pytest.raises(
        TemperaError, match="cannot change its guidance after loading: load it with guid"
    ):
        loaded.generate(CAPTIONS[0], guidance=1.0)
