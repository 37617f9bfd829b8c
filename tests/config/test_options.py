"""What a command line may not say: one table of command lines and the options at fault."""

from pathlib import Path

import pytest

from tempera.commands import asked, evaluate, train
from tempera.commands.train import build_recipe
from tempera.config.cli import literal
from tempera.config.compose import composed
from tempera.config.instantiate import from_options, instantiate, part
from tempera.config.messages import sentence
from tempera.config.parts import Parts
from tempera.data.prepare import prepare
from tempera.errors import TemperaError

REFUSED = [
    # unknown names: the nearest is suggested
    ("eval", "method=coolsd dleta=2", "`delta`"),
    ("eval", "data.path=x", "data=file"),
    ("eval", "method=eagle delta=2", "rule=relaxed"),
    ("eval", "foo=1", "`foo`"),
    ("eval", "method=eagle ++delta=2", "`delta` has no effect"),
    # unknown choices
    ("eval", "method=coolds", "did you mean coolsd?"),
    ("train_draft", "recipe=foo", "chameleon"),
    ("eval", "model=/dev/null", "no model=/dev/null"),
    # grammar
    ("eval", "metrics=real,none", "metrics"),
    ("eval", "foo", "name=value"),
    ("eval", "data.limit=[1", "data.limit=[1"),
    # types and ranges of a script's own options
    ("eval", f"seed={10**20}", "seed"),
    ("eval", "data.limit=0", "limit"),
    ("eval", "batch_size=many", "batch_size"),
    ("eval", "replays=-1", "replays"),
    ("eval", "dtype=float8", "dtype"),
    ("eval", "compile=maybe", "compile"),
    ("eval", "truncate=2", "truncate"),
    ("eval", "dry_run=2", "dry_run"),
    ("train_draft", "training.epochs=0", "epochs"),
    ("train_draft", "training.steps=null", "epochs"),
    ("eval", "hydra.run=3", "hydra.run=3"),
    ("prepare", "shard_size=abc", "shard_size"),
    ("eval", "speed=3", "speed.prompts=4"),
    ("eval", "matching=x", "speed.prompts=4"),
    ("train_draft", "training.decodes=100000", "decodes"),
    ("train_draft", "training.lr=nan", "lr"),
    ("train_draft", "training.mixed_precision=fp8", "mixed_precision"),
    ("train_draft", "loss.cross_entropy=-1", "loss.cross_entropy"),
    # values of groups
    ("eval", "method=coolsd delta=abc", "delta"),
    ("eval", "method=coolsd delta=-1", "delta"),
    ("eval", "depth=-2", "-2"),
    ("eval", "depth=0", "depth=1"),
    ("eval", "method=coolsd drafter=none", "rule=exact"),
    ("eval", "method=lantern k=0", "k"),
    # parts that do not fit each other
    ("eval", "method=eagle rule=density", "rule=exact"),
    ("eval", "method=eagle drafter=mar", "drafter=eagle"),
    ("eval", "model=shapes_mar method=cspd drafter=eagle", "drafter=mar"),
    ("eval", "model=shapes_mar method=eagle", "method=ar"),
    ("eval", "method=sjd drafter=eagle", "+tree=chain"),
    ("eval", "method=sjd tree=chain", "leave it out"),
    ("eval", "method=ar rule=relaxed", "rule=exact"),
    ("eval", "method=block tree=naive_extend_57", "tree=chain"),
]


def parts(config: str, arguments: str) -> None:
    """Compose, and build what a run builds before it reads weights."""
    cfg = composed(config, arguments.split())
    if config == "train_draft":
        from_options(cfg, train.Options)
        from_options(cfg.training, train.Duration)
        build_recipe(cfg)
        instantiate(cfg.loss)
    if config == "prepare":
        from_options(cfg, prepare, source=None, encoder=None, directory=None)
    if config == "eval":
        from_options(cfg, asked.Options)
        part(cfg.data)
        part(cfg.speed)
        part(cfg.matching)
        Parts.of(cfg).rule()


@pytest.mark.parametrize(("config", "arguments", "named"), REFUSED)
def test_a_mistake_is_one_sentence_that_names_the_option(
    config: str, arguments: str, named: str
) -> None:
    with pytest.raises(TemperaError) as problem:
        parts(config, arguments)
    said = sentence(problem.value, config, arguments.split())
    assert said is not None and named in said, said
    assert "\n" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    "options",
    [
        "method=coolsd rule=exact",
        "method=uniform_rsd schedule=linear",
        "method=gsd drafter=eagle +tree=chain",
        "method=eagle rule=relaxed delta=2 schedule=uniform",
        "+note=1",
        "method=coolsd delta='2'",
        "paper={name:x}",
        "hydra.run.dir=x",
    ],
)
def test_what_is_possible_is_not_refused(options: str) -> None:
    parts("eval", options)


def test_a_text_model_is_not_given_numbers_of_classes(tmp_path: Path) -> None:
    options = ["data=imagenet", "metrics=none", "tracking=none", "device=cpu"]
    with pytest.raises(TemperaError) as problem:
        evaluate.main(composed("eval", options, tmp_path / "run"))
    assert problem.value.option == "data"
    with pytest.raises(TemperaError, match="continuous tokens"):
        evaluate.main(composed("eval", ["model=shapes_mar", "method=coolsd"], tmp_path / "run"))


@pytest.mark.parametrize(
    "text",
    [
        "a dog's ball, and (two) cats: 50%",
        'the "big" one \\',
        "${x}",
        "\\\\${a}",
        "'it's'",
        '"PEACE" beside "LOVE"',
        "[a, b]",
    ],
)
def test_a_prompt_is_taken_literally(text: str) -> None:
    assert composed("eval", [literal(f"prompt={text}")]).prompt == text


def test_prompts_that_stay_as_they_are() -> None:
    assert literal("prompt=null") == "prompt=null"
    assert literal("prompt='a, b'") == "prompt='a, b'"
    assert literal("delta=1,2") == "delta=1,2"
    assert composed("eval", [literal("outputs=bücher/ä")]).outputs == "bücher/ä"
    assert literal("method=é,a") == "method=é,a"  # a sweep


@pytest.mark.parametrize(
    "path", ["/runs/a (2)", "(control)/run", "./run(1)", "runs/delta=2", "~/a;b", "runs/ä(1)"]
)
def test_a_path_is_taken_as_it_is_typed(path: str) -> None:
    """Hydra's own grammar refuses these signs without quotes."""
    assert composed("eval", [literal(f"outputs={path}")]).outputs == path


@pytest.mark.parametrize("value", ["glob(a/*)", "choice(a/b,c)", "runs/(1),runs/2", "[a/b]"])
def test_what_hydra_reads_of_a_path_stays(value: str) -> None:
    assert literal(f"data={value}") == f"data={value}"


def test_a_directory_that_cannot_be_made_is_told_with_the_option() -> None:
    with pytest.raises(OSError, match="proc") as problem:
        Path("/proc/x/run").mkdir(parents=True)
    said = sentence(problem.value, "eval", [])
    assert said is not None and "write '/proc/x'" in said and "hydra.run.dir=DIR" in said
