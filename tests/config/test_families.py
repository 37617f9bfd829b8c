"""What suits a model is its family's, unless an option says otherwise; the toy world is refused
where photographs are drawn.
"""

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import tempera.config.instantiate  # noqa: F401  the resolvers of conf/
from tempera.config.compose import composed
from tempera.config.families import check_suited
from tempera.errors import TemperaError

SUITED = {
    ("eval", "data"): {
        "shapes": "tempera.shapes.scenes.world_prompts",
        "shapes_mar": "tempera.shapes.labels.shape_prompts",
        "lumina": "tempera.data.benchmarks.coco_prompts",
        "mar_huge": "tempera.data.benchmarks.imagenet_prompts",
    },
    ("train_draft", "train_data"): {
        "shapes": "tempera.shapes.scenes.world_codes",
        "llamagen_xl_stage1": "tempera.training.dataset.encoded_codes",
        "lumina": "tempera.training.dataset.generated_codes",
    },
    ("train_draft", "source"): {
        "llamagen_xl_stage1": "tempera.data.laion_coco.LaionCoco",
        "lumina": "tempera.data.benchmarks.CocoTraining",
        "llamagen_b_c2i": "tempera.data.benchmarks.ImageNetClasses",
    },
    ("prepare", "encoder"): {
        "llamagen_xl_stage1": "tempera.data.encoders.vq_encoder",
        "lumina": "tempera.data.encoders.target_encoder",
    },
}


@pytest.mark.parametrize(("script", "group"), SUITED)
def test_defaults_follow_the_model(script: str, group: str) -> None:
    for model, target in SUITED[script, group].items():
        cfg = composed(script, [f"model={model}"])
        assert cfg[group]["_target_"] == target, model
        check_suited(cfg)


@pytest.mark.slow
def test_options_and_presets_win() -> None:
    cfg = composed("eval", ["model=lumina", "data=parti", "batch_size=3"])
    assert cfg.data["_target_"].endswith("parti_prompts") and cfg.batch_size == 3
    assert composed("eval", ["model=lumina"]).batch_size == 4
    cfg = composed("eval", ["experiment=cspd_table1"])  # the preset chooses the model
    assert cfg.data["_target_"].endswith("shape_prompts")
    cfg = composed("eval", ["experiment=cspd_table1", "model=mar_huge", "drafter=mar_base"])
    assert cfg.data["_target_"].endswith("imagenet_prompts")


@pytest.mark.slow
def test_epochs_of_the_recipe_or_steps() -> None:
    cfg = composed("train_draft", ["model=llamagen_xl_stage1"])
    assert (cfg.steps, cfg.epochs, cfg.limit, cfg.cfg_dropout) == (None, 20, 100000, 0.1)
    assert composed("train_draft", ["model=lumina", "steps=7"]).steps == 7
    assert composed("train_draft", []).steps == 3000


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        ("eval", ["data=shapes"], "the prompts of the toy world do not suit model=lumina: leave "
         "data= out, which gives data=coco, or take model=shapes"),
        ("eval", ["metrics=shapes"], "leave metrics= out, which gives metrics="),
        ("train_draft", ["train_data=shapes"], "which gives train_data=generated"),
        ("train_draft", ["train_data=generated", "source=shapes"], "gives source=coco_captions"),
        ("prepare", ["source=shapes"], "the scenes of the toy world do not suit model=lumina"),
    ],
)  # fmt: skip
def test_toy_data_and_a_real_model_are_refused(script: str, options: list[str], told: str) -> None:
    with pytest.raises(TemperaError) as problem:
        check_suited(composed(script, ["model=lumina", *options]))
    assert told in str(problem.value)


@pytest.mark.slow
def test_class_numbers_are_no_texts() -> None:
    with pytest.raises(TemperaError, match="the class numbers of data=imagenet do not suit model="):
        check_suited(composed("eval", ["data=imagenet"]))
    check_suited(composed("eval", ["model=llamagen_b_c2i", "data=imagenet"]))


def test_a_prompt_of_ones_own_needs_no_data() -> None:
    check_suited(composed("eval", ["model=lumina", "data=shapes", "prompt=a cat"]))
    check_suited(composed("eval", ["model=shapes", "data=parti"]))


@pytest.mark.slow
def test_a_revision_is_of_a_hub_repository() -> None:
    cfg = composed("eval", ["model=llamagen_xl_stage1", "revision=v2"])
    assert cfg.model.weights == "peizesun/llamagen_t2i@v2" == cfg.model.tokenizer_weights
    assert composed("eval", ["model=lumina"]).model.weights == "Alpha-VLLM/Lumina-mGPT-7B-768"
    options = ["model=lumina", "revision=v2"]
    for weights in ("random", "owner/name@v1", "/"):
        with pytest.raises(
            (TemperaError, OmegaConfBaseException), match=r"`revision=v2` is of a hub repository"
        ):
            str(composed("eval", [*options, f"weights={weights}"]).model.weights)


def test_a_family_that_does_not_exist() -> None:
    with pytest.raises((TemperaError, HydraException, OmegaConfBaseException), match="no family=x"):
        composed("eval", ["family=x"])
