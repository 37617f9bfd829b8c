"""conf/: everything that can be chosen composes and runs; everything that cannot is refused in one
sentence.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from cases import slow_but, slow_rows_but
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from paths import CONF
from tiny_training import tiny_draft, tiny_target

from tempera.commands.scripts import evaluate
from tempera.config.build import (
    build_captions,
    build_drafter,
    build_method,
    build_rule,
    build_sampling,
    build_target,
    build_tokenizer,
    build_tree,
    check_compile,
    check_draft,
    check_method,
    check_tokens,
    check_training,
    make_fast,
    parse_device,
)
from tempera.config.cli import literal, named, script
from tempera.config.instantiate import accepted, check, instantiate, usage
from tempera.config.messages import sentence
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.tape import TapeRecorder
from tempera.drafters.parallel_network import ParallelModel
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.rules.standard import BlockVerification
from tempera.shapes import networks
from tempera.shapes.build.stages import save_network
from tempera.targets.llamagen import to_official
from tempera.training.losses import AcceptanceLoss, EagleLoss

SCRIPTS = sorted(path.stem for path in CONF.glob("*.yaml"))
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
TREES = ["chain", "mc_sim_7b_63", "naive_extend_57"]
SCHEDULES = ["uniform", "exponential", "linear"]
PLUGINS = {
    ("launcher", "slurm"): "hydra_plugins.hydra_submitit_launcher",
}
OFFERED = {  # what the scripts hand to these nodes as objects
    "rule": ["schedule", "neighbours"],
    "schedule": ["length", "tree"],
    "neighbours": ["codebook"],
    "tree": [],
    "data": [],
    "metrics": [],
}
UNDER = {
    "rule": ["method=eagle"],
    "drafter": ["method=eagle"],
}  # groups that need another method than the default to show all choices


MODELS, ALL_METHODS = (
    sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in ("model", "method")
)


TINY_CODES = f"model.tokenizer._target_={__name__}.tiny_tokenizer"


def composed(*overrides: str, config: str = "eval") -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config, list(overrides))


def groups(path: Path) -> Iterator[str]:
    """The groups in the defaults list of a file and of the files that it names."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for entry in content.get("defaults", []):
        if isinstance(entry, dict):
            ((key, choice),) = entry.items()
            group = key.removeprefix("optional ").removeprefix("override ").removeprefix("/")
            if (CONF / group).is_dir():
                yield group
                if (CONF / group / f"{choice}.yaml").is_file():
                    yield from groups(CONF / group / f"{choice}.yaml")


def choices() -> list[tuple[str, str, str]]:
    """(script, group, choice) for all groups in the defaults list of each script."""
    return [
        (config, group, path.stem)
        for config in SCRIPTS
        for group in sorted(set(groups(CONF / f"{config}.yaml")))
        for path in sorted((CONF / group).glob("*.yaml"))
    ]


def resolves(*overrides: str, config: str = "eval") -> DictConfig:
    """The configuration, after every interpolation in it was followed, Hydra's own as in a run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            config, [*overrides, "hydra.runtime.output_dir=run"], return_hydra_config=True
        )
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    OmegaConf.to_container(cfg, resolve=True)
    return cfg


# What can be chosen


CHOICES = choices()
FIRST = {group: (config, group, choice) for config, group, choice in reversed(CHOICES)}
"""One choice of every group."""


def test_no_group_is_forgotten() -> None:
    assert {group for _, group, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("config", "group", "choice"), slow_rows_but(CHOICES, *FIRST.values()))
def test_every_choice_composes_and_fits_its_target(config: str, group: str, choice: str) -> None:
    if (group, choice) in PLUGINS:
        pytest.importorskip(PLUGINS[group, choice])
    cfg = resolves(
        *(UNDER.get(group, []) if config == "eval" else []), f"{group}={choice}", config=config
    )
    for name, offered in OFFERED.items():
        if OmegaConf.is_dict(cfg.get(name)):
            known = [other for other in offered if name != "rule" or other in cfg]
            check(cfg[name], accepted(cfg[name], dict.fromkeys(known)))


@pytest.mark.parametrize("config", SCRIPTS)
def test_every_script_configuration_resolves(config: str) -> None:
    resolves(config=config)


METHODS = [
    "method=ar",
    *[f"method=eagle tree={tree}" for tree in TREES],
    "method=eagle depth=2",
    *[f"method={method} tree={tree}" for method in ("coolsd", "uniform_rsd") for tree in TREES],
    *[
        f"method=coolsd schedule={schedule} tree={tree} floor=1"
        for schedule in SCHEDULES
        for tree in TREES
    ],
    *[f"method=optimal_rsd tree={tree} price=1.5" for tree in TREES],
    "method=coolsd residual=vanilla depth=3 nu=0.3",
    "method=coolsd residual=kl depth=3 delta=2",
    "method=eagle2 branches=2 depth=3 nodes=6 rule=priced",
    "method=sjd window=8 rule=priced price=0.3",
    "method=lantern k=5 residual=kl",
    "method=coolsd schedule=linear ell=12",
    "method=eagle rule=relaxed delta=2 schedule=uniform",
    "method=eagle drafter=none",
    "method=eagle2 branches=3 depth=2 nodes=5",
    "method=independent depth=3",
    *[f"method=independent tree={tree}" for tree in TREES],
    "method=eagle2 branches=2 depth=3 nodes=6 rule=relaxed delta=1.2",
    *[
        f"method={method} window=8 initialisation=vertical_sample"
        for method in ("jacobi", "sjd", "scd")
    ],
    "method=scd window=8 coupling=maximal",
    "method=sjd window=8 rule=relaxed delta=1.2",
    "method=sjd window=8 rule=match",
    "method=sjd_pac window=12 branches=2 branching=first",
    "method=sjd_pac window=12 proactive=false",
    *[
        f"method={method} k=5 tree={tree} residual=optimal"
        for method in ("lantern", "lanternpp")
        for tree in TREES
    ],
    "method=lantern k=24 drafter=eagle2 branches=3 depth=2 nodes=5 measure=jsd proximity=cosine "
    "delta=0.2",
    "method=lanternpp k=1 lam=0.5 proximity=random temperature=0",
    "method=gsd window=8 k=24",
    "method=gsd window=8 k=5 ranks=null residual=optimal",
    "method=sjd window=8 rule=lantern k=5",
    "method=sjd_pac window=12 branches=2 rule=grouped k=5",
    "method=scd window=8 rule=lanternpp k=5",
    "method=independent depth=2 rule=lantern k=5",
    "method=block",
    "method=sjd window=8 rule=block",
    "method=independent depth=3 rule=block",
    "method=parallel depth=3",
    *[f"method=parallel tree={tree}" for tree in TREES],
    "method=coolsd drafter=parallel depth=2 delta=2",
    "method=block drafter=parallel",
]
ONE_EACH = {method.split()[0]: method for method in reversed(METHODS)}
"""Each method once."""
UNTRAINED = ("method=ar", "drafter=none", "method=jacobi", "method=sjd", "method=scd", "method=gsd")


def tiny_tokenizer(directory: object = None) -> VQModel:
    """With as many codes as `tiny_target` has tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "encoder_multipliers": (1, 1),
        "decoder_multipliers": (1, 1),
        "norm_groups": 1,
    }
    return VQModel(
        VQConfig(codebook_size=24, codebook_dim=4, channels=8, res_blocks=1, z_channels=8, **sizes)
    )


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    tiny_draft(tiny_target()).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parallel")
    tiny_draft(tiny_target(), kind=ParallelModel).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, network, encoder = (
        tmp_path_factory.mktemp("smaller"),
        tiny_target().network,
        networks.TextEncoder(6, 8, layers=1, heads=2),
    )
    save_network(
        to_official(network.state_dict(), network.config.num_attention_heads),
        networks.target_config(network),
        directory,
    )
    save_network(encoder.state_dict(), encoder.config, directory / "text_encoder")
    return directory


@pytest.mark.parametrize("method", slow_but(METHODS, *ONE_EACH.values()))
def test_every_method_generates(
    method: str, draft: Path, parallel: Path, smaller: Path, tmp_path: Path
) -> None:
    drafted = not any(choice in method for choice in UNTRAINED)
    kept = [f"neighbours.directory={tmp_path}"] if " k=" in method else []
    own = parallel if "parallel" in method else draft
    weights = [f"drafter.path={own}"] if drafted else []
    if "independent" in method:
        weights = [f"model.independent.directory={smaller}"]
    cfg = composed(*method.split(), *kept, *weights, TINY_CODES)
    target = tiny_target()
    drafter = build_drafter(cfg, target)
    rule = build_rule(cfg, drafter.depth)
    output = decode(target, drafter, rule, RandomStreams(0, ["a"]), ["a red ring"])
    assert output.tokens.shape == (1, target.length)
    assert drafter.nodes == cfg.get(
        "nodes", build_tree(cfg).nodes if drafted else cfg.get("window", 0)
    )


def test_a_parallel_draft_has_its_own_loss_and_directory() -> None:
    cfg = resolves("model=emu3", "draft=parallel", config="train_draft")
    assert instantiate(cfg.loss) == AcceptanceLoss(regression=2.0)
    trained = composed("model=emu3", "method=parallel").drafter.path
    assert trained == f"{HydraConfig.get().run.dir}/draft"
    shipped = composed("method=parallel").drafter.path
    assert shipped == str(networks.SHIPPED / "parallel")
    chosen = composed("draft=parallel", "loss=eagle", config="train_draft")
    assert isinstance(instantiate(chosen.loss), EagleLoss)
    assert composed("method=parallel", "weights=random", "model=emu3").drafter.path == "random"


@pytest.mark.parametrize("name", ["nan", "tempera.nothing"])
def test_a_sampling_that_does_not_exist_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(TemperaError, match=f"^`model.sampling={name}` "):
        check_method(composed("model=shapes_mar", "method=cspd", f"model.sampling={name}"))


def test_more_neighbours_than_any_codebook_has_pass_the_first_check() -> None:
    check_method(composed("method=gsd", f"k={10**30}"))


def test_a_missing_draft_to_start_from_is_refused_with_the_option() -> None:
    with pytest.raises(TemperaError) as problem:
        check_training(composed("start=nowhere", config="train_draft"))
    said = "there is no directory nowhere: give a trained draft's directory with start=DIR, or "
    assert str(problem.value).startswith(said)


def test_a_missing_parallel_draft_is_refused_with_the_command_that_trains_it() -> None:
    missing = (
        "there is no directory outputs/train_draft/emu3-parallel/draft: train a draft with `.* "
        "model=emu3 draft=parallel`, give another"
    )
    with pytest.raises(TemperaError, match=missing):
        check_draft(composed("model=emu3", "method=coolsd", "drafter=parallel", "delta=2"))


def test_the_shipped_models_check_prompts_before_they_are_built() -> None:
    assert build_captions(composed("model=shapes")) is None  # it takes any text
    with pytest.raises(TemperaError, match="'a dog', is no shape"):
        build_captions(composed("model=shapes_mar", "weights=/nowhere")).check(["a dog"])


def test_block_verification_of_a_tree_is_refused_before_and_in_decoding(draft: Path) -> None:
    cfg = composed("method=block", "tree=naive_extend_57", f"drafter.path={draft}")
    branches = (
        "BlockVerification accepts one chain by its prefixes, but this draft has branches; draft a "
        "chain"
    )
    with pytest.raises(TemperaError, match=branches):
        check_method(cfg)
    target = tiny_target()
    drafter = build_drafter(cfg, target)
    rule, streams = BlockVerification(), RandomStreams(0, ["a"])
    with pytest.raises(TemperaError, match=branches):
        decode(target, drafter, rule, streams, ["a red ring"])


@pytest.mark.slow
def test_neighbours_are_kept_for_the_next_run(tmp_path: Path) -> None:
    options = ["method=gsd", "k=5", f"neighbours.directory={tmp_path}"]
    rule = build_rule(composed(*options, TINY_CODES), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["l2_5.safetensors"]
    assert build_rule(composed(*options, TINY_CODES), 1) == rule
    with pytest.raises(
        TemperaError,
        match="l2_5.safetensors were built for another codebook .* another directory",
    ):
        build_rule(composed(*options), 1)


def test_the_published_schedule_of_cool_sd() -> None:
    cfg = composed("method=coolsd")
    rule: Any = build_rule(cfg, build_tree(cfg).max_depth)
    assert rule.schedule == pytest.approx((2.855, 1.418, 0.704, 0.350, 0.174), abs=1e-3)
    assert rule.residual_kind == "optimal"


def test_options_reach_the_objects() -> None:
    cfg = composed(
        "method=coolsd",
        "delta=2",
        "floor=1",
        "residual=vanilla",
        "guidance=7.5",
        "temperature=0.9",
        "top_k=10",
        "top_p=0.8",
    )
    rule: Any = build_rule(cfg, 5)
    assert sum(omega for omega in rule.schedule if omega > 1) == pytest.approx(
        2 * (2.855 + 1.418 + 0.704) / 1.1, abs=2e-3
    )
    assert min(rule.schedule) == 1
    assert rule.residual_kind == "vanilla"
    sampling = build_sampling(cfg)
    assert (sampling.guidance, sampling.temperature, sampling.top_k, sampling.top_p) == (
        7.5,
        0.9,
        10,
        0.8,
    )


def test_trees_are_the_public_ones() -> None:
    nodes = {tree: build_tree(composed("method=eagle", f"tree={tree}")).nodes for tree in TREES}
    assert nodes == {"chain": 5, "mc_sim_7b_63": 25, "naive_extend_57": 57}


@pytest.mark.slow
@pytest.mark.skipif(
    not (networks.SHIPPED / "draft").is_dir(), reason="the shipped weights are not built yet"
)
def test_the_shapes_model_builds_with_every_method() -> None:
    cfg = composed("model=shapes")
    target = build_target(cfg)
    tokenizer = build_tokenizer(cfg)
    assert target.length == target.grid[0] * target.grid[1] == 144
    assert next(tokenizer.parameters()).dtype == torch.float32
    for method in ("ar", "eagle", "eagle2", "coolsd", "uniform_rsd"):
        build_drafter(composed("model=shapes", f"method={method}"), target)
    if (networks.SHIPPED / "independent").is_dir():
        build_drafter(composed("model=shapes", "method=independent"), target)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_method_and_a_model_fit_exactly_where_their_tokens_do(model: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        combined = [
            compose("eval", [f"model={model}", f"method={method}"]) for method in ALL_METHODS
        ]
    for cfg in combined:
        if cfg.tokens in (cfg.model.get("tokens", "discrete"), "any"):
            check_tokens(cfg)
            wanted = inspect.signature(get_object(cfg.decoding["_target_"])).parameters
            check(
                cfg.decoding, dict.fromkeys(name for name in ("drafter", "rule") if name in wanted)
            )
            continue
        with pytest.raises(TemperaError) as problem:
            build_target(cfg)
        tokens = cfg.model.get("tokens", "discrete")
        message = (
            f"model={model} has {tokens} tokens, but the method is for {cfg.tokens} ones; choose"
        )
        assert str(problem.value).startswith(message)
        assert "\n" not in str(problem.value)


@pytest.mark.slow
def test_both_kinds_of_tokens_have_models_and_methods() -> None:
    kinds = {composed(f"model={model}").model.get("tokens", "discrete") for model in MODELS}
    methods = {composed(f"method={method}").tokens for method in ALL_METHODS}
    assert kinds == methods - {"any"} == {"discrete", "continuous"}


# What is refused, as a user meets it: through the command line


@script("eval")
def stand_in(cfg: DictConfig) -> dict[str, float]:
    """A script that builds what needs no weights."""
    tree = build_tree(cfg)
    build_sampling(cfg)
    build_rule(cfg, tree.max_depth)
    if "window" in cfg or "branches" in cfg:
        check(cfg.drafter, {"target": None})
    print("prompt:", cfg.prompt)
    return {}


REFUSED = {
    "method=foo": "there is no method=foo; choose one of ar, ",
    "method=colsd": "there is no method=colsd; choose one of ar, ",
    "model=foo": "there is no model=foo; choose one of",
    "model=[[a]]": "there is no model=[a]; choose one of",
    "data=[1,2]": "there is no data=1; choose one of",
    "tree=foo": "there is no tree=foo; choose one of chain, mc_sim_7b_63, naive_extend_57",
    "experiment=frontir": "there is no experiment=frontir; choose one of coolsd_figure3, ",
    "-m experiment=frontier,foo": "there is no experiment=foo; choose one of coolsd_figure3, ",
    "metod=ar": "there is no option `metod`: did you mean `method`?",
    "dleta=2": "there is no option `dleta`: did you mean `delta`?",
    "delta=abc": "`delta=abc` is not possible; it must be a number",
    "delta=null": "`delta=null` is not possible; it must be a number",
    "delta=-1": "delta=-1 is not a relaxation budget; give a number above 0",
    "delta=1,2": "'delta=1,2' gives several values: add -m to run them all",
    "floor=abc": "`floor=abc` is not possible; it must be a number",
    "residual=foo": "`residual=foo` is not possible; it must be one of optimal, vanilla",
    "depth=2.5": "`depth=2.5` is not possible; it must be a whole number",
    "guidance=high": "`guidance=high` is not possible; it must be a number",
    "temperature=-1": "temperature=-1 is not possible; give 0 (greedy) or more",
    "top_k=1.5": "`top_k=1.5` is not possible; it must be a whole number",
    "ar": "cannot read 'ar': options are written name=value, as in method=ar",
    "delta=[1": "cannot read 'delta=[1': quote a value",
    "method=eagle delta=2": "there is no option `delta` with method=eagle: it belongs to "
    "rule=lantern, relaxed (method=coolsd, lant",
    "method=eagle lam=2": "there is no option `lam` with method=eagle: it belongs to "
    "rule=lanternpp (method=lanternpp)",
    "method=lantern k=0": "k=0 nearest codes cannot be taken from a codebook of 1024; give a k "
    "between 1 and 1024",
    "method=lantern k=1025": "k=1025 nearest codes cannot be taken from a codebook of 1024; give "
    "a k between 1 and 1024",
    "method=lantern k=1.5": "`k=1.5` is not possible; it must be a whole number",
    "method=lantern k=2 delta=0": "delta=0 does not bound a distortion by measure=tvd; give a "
    "number above 0, at most 1",
    "method=lantern k=2 delta=1.5": "delta=1.5 does not bound a distortion by measure=tvd; give "
    "a number above 0, at most 1",
    "method=lantern k=2 measure=jsd delta=0.7": "delta=0.7 does not bound a distortion by "
    "measure=jsd; give a number above 0, at most 0.",
    "method=lantern measure=kl": "`measure=kl` is not possible; it must be one of tvd, jsd",
    "method=lantern proximity=l1": "`proximity=l1` is not possible; it must be one of l2, "
    "cosine, random",
    "method=lantern residual=vanilla": "`residual=vanilla` is not possible; it must be one of "
    "published, optimal",
    "method=lanternpp lam=0": "lam=0 lets a token take nothing from its neighbours; give a "
    "finite number above 0",
    "method=lanternpp lam=-2": "lam=-2 lets a token take nothing from its neighbours; give a "
    "finite number above 0",
    "method=gsd ranks=-1": "ranks=-1 is not a distance; give 0 (every code alone) or more, or "
    "none (null) for static groups",
    "method=gsd ranks=abc": "`ranks=abc` is not possible; it must be a whole number or null",
    "method=eagle schedule=linear": "there is no option `schedule` with method=eagle: it belongs "
    "to rule=priced, relaxed",
    "schedule=uniform nu=0.5": "there is no option `nu` with schedule=uniform: it belongs to",
    "method=ar depth=3": "there is no option `depth` with method=ar: it belongs to "
    "drafter=eagle2 (method=block, coolsd, ",
    "tree=mc_sim_7b_63 depth=3": "there is no option `depth` with tree=mc_sim_7b_63: it belongs "
    "to drafter=eagle2 and tree=chain",
    "method=sjd window=abc": "`window=abc` is not possible; it must be a whole number",
    "method=eagle2 branches=abc": "`branches=abc` is not possible; it must be a whole number",
    "method=sjd initialisation=foo": "`initialisation=foo` is not possible; it must be one of "
    "random, horizontal_repeat, vertical_repeat,",
    "method=sjd branches=2": "there is no option `branches` with method=sjd: it belongs to "
    "drafter=eagle2, sjd_pac (method=eagle2, ",
    "sampling.top_k=5": "there is no option `sampling.top_k`: did you mean `top_k`?",
    "model.sampling.top_k=5": "there is no option `model.sampling.top_k`: did you mean `top_k`?",
    "loss=eagle": "there is no option `loss` here: it belongs to python train_draft/main.py",
    "stages=[target]": "there is no option `stages` here: it belongs to python train_draft/build",
    "length=5": "there is no option `length`: did you mean `tree.length`?",
    "method=eagle +delta=2": "there is no option `delta` with method=eagle: it belongs to",
    "method=optimal_rsd price=21": "a kept draft cannot cost 21 nats; give prices from 0",
    "limit=4 prompt=star": "`limit=4` has no effect beside prompt=, which makes one image",
    "prompt=star data=parti": "`data=parti` has no effect beside prompt=",
    "prompt=star offset=3": "`offset=3` has no effect beside prompt=",
    "speed.prompts=0 speed.batches=[8]": "`speed.batches=[8]` has no effect with speed.prompts=0",
    "matching.prompts=3": "`matching.prompts=3` has no effect without expected_length=",
    "drafter=sjd depth=3": "`depth=3` has no effect with this drafter, which has no draft tree",
    "launcher=slurm": "`launcher=slurm` has no effect without -m",
    "drafter.pth=x": "there is no option `drafter.pth`: did you mean `drafter.path`?",
}


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    def run(*arguments: str) -> tuple[int | str | None, str, str]:
        quiet = [
            f"hydra.run.dir={tmp_path / 'run'}",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ]
        monkeypatch.setattr(sys, "argv", ["run.py", *quiet, *arguments])
        monkeypatch.chdir(tmp_path)  # tables of neighbours are kept below
        status: int | str | None = 0
        try:
            stand_in()
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("arguments", slow_but(REFUSED, "method=foo", "dleta=2", "delta=abc"))
def test_refused_in_one_sentence(arguments: str, command: Any) -> None:
    status, _, err = command(*arguments.split())
    assert status == 1
    assert err.count("\n") == 1
    assert err.startswith(f"error: {REFUSED[arguments]}"), err


NO_FIT = {
    "method=eagle rule=density": "CSpD is no rule for discrete tokens; choose another, such as "
    "Exact (rule=exact, relaxed or lantern)",
    "method=eagle rule=coupling": "PathCoupling is no rule for discrete tokens",
    "method=eagle drafter=mar": "model=shapes has discrete tokens, but the drafter is for "
    "continuous ones: choose another drafter, such as drafter=eagle or sjd",
    "model=shapes_mar method=cspd drafter=eagle": "model=shapes_mar has continuous tokens, but "
    "the drafter is for discrete ones: choose another drafter, such as drafter=mar",
    "method=sjd drafter=eagle": "the drafter drafts along a tree, and the method has none: add "
    "+tree=chain",
    "method=ar rule=relaxed": "the rule's schedule needs a draft, and this method has none",
    "method=lantern k=0": "k=0 is too small: give the number of nearest codes, at least 1",
    "method=lantern delta=2": "delta=2 does not bound a distortion by measure=tvd",
    "method=lanternpp lam=-1": "lam=-1 lets a token take nothing from its neighbours",
    "method=gsd ranks=-1": "ranks=-1 is not a distance",
    "delta=-1": "delta=-1 is not a relaxation budget",
    "method=optimal_rsd price=-1": "a kept draft cannot cost -1 nats",
    "schedule=linear ell=3": "ell=3 lets the relaxation reach 0",
    "depth=-2": "a chain cannot have -2 tokens",
}


@pytest.mark.parametrize("options", slow_but(NO_FIT, "method=eagle rule=density"))
def test_parts_that_do_not_fit_are_refused_before_weights_are_read(
    options: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = composed(*options.split(), "weights=/nowhere")
    with pytest.raises(TemperaError) as problem:
        check_method(cfg)
    assert sentence(problem.value, CONF, "eval", []).startswith(NO_FIT[options])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    ["schedule=calibrated", "schedule=optimal", "method=gsd drafter=eagle +tree=chain", "+note=1"],
)
def test_what_fits_is_not_refused(options: str) -> None:
    check_method(composed(*options.split(), "weights=/nowhere"))


@pytest.fixture
def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[Callable[[], None]], tuple[int, str]]:
    """Runs a function as a script; its exit status and standard error."""

    def run(main: Callable[[], None]) -> tuple[int, str]:
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.run.dir=run"]
        monkeypatch.setattr(sys, "argv", ["run.py", *quiet])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as stop:
            main()
        assert isinstance(stop.value.code, int)
        return stop.value.code, capsys.readouterr().err

    return run


def test_an_interruption_that_a_library_turned_into_another_error(ended: Any) -> None:
    @script("eval")
    def interrupted(cfg: DictConfig) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("half of a configuration")

    assert ended(interrupted) == (130, "interrupted; the same command goes on\n")


def test_an_error_among_its_own_causes(ended: Any) -> None:
    @script("eval")
    def circular(cfg: DictConfig) -> None:
        problem = TemperaError("a file is broken")
        problem.__context__ = ValueError("nested too deeply")
        problem.__context__.__cause__ = problem
        raise problem

    assert ended(circular) == (1, "error: a file is broken\n")


def test_an_unwritable_run_directory(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = command(f"hydra.run.dir={tmp_path / 'file' / 'run'}")
    assert (status, err.count("\n")) == (1, 1)
    assert (
        f"cannot write '{tmp_path / 'file' / 'run'}': Not a directory; choose another directory "
        "with hydra.run.dir=DIR" in err
    )


@pytest.mark.parametrize(
    "text",
    slow_but(
        [
            "a small red ring",
            "a dog's ball, and (two) cats: 50%",
            'the "big" one \\',
            "${x}",
            "[a, b]",
        ],
        "a dog's ball, and (two) cats: 50%",
    ),
)
def test_a_prompt_is_taken_literally(text: str, command: Any) -> None:
    status, out, err = command(f"prompt={text}")
    assert (status, err) == (0, "")
    assert out == f"prompt: {text}\n"


def test_prompts_that_stay_as_they_are() -> None:
    assert literal("prompt=null") == "prompt=null"
    assert literal("prompt='a, b'") == "prompt='a, b'"
    assert literal("delta=1,2") == "delta=1,2"


@pytest.mark.parametrize(
    ("started", "first"),
    [
        ("eval/report.py", "python eval/report.py runs=outputs/multirun"),
        ("/usr/bin/tempera-report", "tempera-report runs=outputs/multirun"),
    ],
)
def test_help_names_the_command_as_it_was_started(
    started: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "--help"])
    assert usage("report").startswith(first)
    assert "#" not in usage("report")


def test_a_value_longer_than_a_file_name_is_no_position() -> None:
    output = f"output={5000 * 'x'}"
    assert named([output, "runs", "-m"], "runs") == [output, "-m", 'runs=["runs"]']


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @script("eval")
    def broken(cfg: DictConfig) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(
        sys,
        "argv",
        [
            "run.py",
            f"hydra.run.dir={tmp_path}",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ],
    )
    with pytest.raises(RuntimeError, match="a bug"):
        broken()


def test_called_with_a_configuration_a_script_is_a_function() -> None:
    assert stand_in(composed()) == {}
    with pytest.raises(TemperaError, match="delta=-1"):
        stand_in(composed("delta=-1"))


# instantiate


def example(
    number: float,
    word: str = "x",
    kind: Literal["a", "b"] = "a",
    pair: tuple[int, int] = (1, 2),
    maybe: int | None = None,
    thing: object = None,
) -> dict[str, Any]:
    """A target with all sorts of arguments."""
    return {
        "number": number,
        "word": word,
        "kind": kind,
        "pair": pair,
        "maybe": maybe,
        "thing": thing,
    }


NETWORK = "tempera.drafters.eagle_network.eagle_network"


def node(**values: Any) -> DictConfig:
    return OmegaConf.create({"_target_": f"{__name__}.example", **values})


def test_values_and_objects_arrive() -> None:
    thing = object()
    made = instantiate(node(number=2, pair=[3, 4]), thing=thing)
    assert made == {
        "number": 2,
        "word": "x",
        "kind": "a",
        "pair": [3, 4],
        "maybe": None,
        "thing": thing,
    }
    assert made["thing"] is thing


@pytest.mark.parametrize(("given", "arrives"), [(2, 2), ("2.5", 2.5), (10**30, 1e30)])
def test_a_number_arrives_as_one(given: object, arrives: float) -> None:
    made = instantiate(node(number=given))["number"]
    assert made == arrives and type(made) is type(arrives)


def test_nested_and_partial() -> None:
    inner = node(number=1)
    assert instantiate(node(number=2, thing=inner))["thing"]["number"] == 1
    assert instantiate(node(_partial_=True, word="y"))(3.0)["word"] == "y"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": "abc"}, "`number=abc` is not possible; it must be a number"),
        ({"number": True}, "`number=True` is not possible; it must be a number"),
        ({"number": 1, "kind": "c"}, "`kind=c` is not possible; it must be one of a, b"),
        ({"number": 1, "pair": 3}, "`pair=3` is not possible; it must be a list"),
        (
            {"number": 1, "maybe": "z"},
            "`maybe=z` is not possible; it must be a whole number or null",
        ),
        (
            {"number": 1, "colour": 2},
            "has no argument `colour`; it takes number, word, kind, pair, maybe, thing",
        ),
        ({}, "needs `number`"),
        (
            {"number": 1, "thing": {"_target_": f"{__name__}.example", "number": "q"}},
            "`thing.number=q` is not possible",
        ),
        (
            {
                "number": 1,
                "thing": {"_target_": "tempera.rules.schedules.uniform", "delta": -2, "length": 3},
            },
            "delta=-2 is not a relaxation budget",
        ),
        *(
            (
                {"_target_": NETWORK, "_partial_": True, "features": features},
                f"`features={features}` is not possible; it must be a list",
            )
            for features in (["a"], [["a"]], [1.5], 2, "abc")
        ),
        (
            {"_target_": "tempera.nowhere.Thing"},
            "_target_=tempera.nowhere.Thing` cannot be imported",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TemperaError) as problem:
        instantiate(node(**values))
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)


def test_an_interpolated_value_is_named_as_the_user_typed_it() -> None:
    cfg = OmegaConf.create(
        {"delta": "abc", "rule": {"_target_": f"{__name__}.example", "number": "${delta}"}}
    )
    with pytest.raises(TemperaError, match="`delta=abc` is not possible"):
        instantiate(cfg.rule)


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ([], False),
        (["dtype=float16"], True),
        (["drafter.dtype=float16"], True),
        (["dtype=float16", "drafter.dtype=float32"], False),
    ],
)
def test_a_draft_has_the_dtype_of_the_target_unless_it_has_its_own(
    options: list[str], rounded: bool
) -> None:
    cfg = composed("method=eagle", "device=cpu", "drafter.path=random", *options)
    draft = build_drafter(cfg, build_target(cfg)).model  # type: ignore[attr-defined]
    weight = draft.model._fc.as_columns().weight
    assert draft.dtype == weight.dtype == torch.float32
    assert torch.equal(weight, weight.half().float()) == rounded


def test_rounds_of_discrete_tokens_are_recorded_on_a_cpu() -> None:
    cfg = composed("method=coolsd", "device=cpu")
    graphs = build_method(cfg, build_target(cfg)).graphs
    assert isinstance(graphs.recorder, TapeRecorder)


@pytest.mark.slow
def test_compile_fuses_and_compiles_the_target() -> None:
    class Plain:
        fused = compiled = False

        def fuse(self) -> None:
            self.fused = True

        def compile(self) -> None:
            self.compiled = True

    target = Plain()
    for options, expected in (([], False), (["compile=true"], True)):
        make_fast(composed(*options), target)
        assert target.fused and target.compiled is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["compile=maybe"], "`compile=maybe` is not possible; it must be true or false"),
        (
            ["compile=true", "model=mar_base", "method=ar"],
            "compile=true is for models with discrete tokens, but those of model=mar_base are",
        ),
        (["compile=true", "device=cpu"], r"compile=true does not pay on a CPU.*device=cuda"),
    ],
)
def test_compile_is_true_or_false_for_discrete_tokens_on_a_gpu(
    options: list[str], message: str
) -> None:
    with pytest.raises(TemperaError, match=message):
        check_compile(composed(*options))
    with pytest.raises(TemperaError, match=message):
        evaluate(composed(*options))


@pytest.mark.slow
def test_compile_is_possible_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_compile(composed("compile=true", "device=cuda"))
    check_compile(composed("device=cpu"))


def test_a_cuda_device_is_counted_and_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda:1") == torch.device("cuda", 1) and parse_device("cuda").index is None
    for name in ("cuda:2", "cuda:x", "gpu"):
        with pytest.raises(
            TemperaError,
            match=rf"`device={name}` is not on this machine; use auto, cpu, cuda or cuda:N",
        ):
            parse_device(name)
