"""conf/: everything that can be chosen composes and runs; everything that cannot is refused in one
sentence.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from network_drafts import write_smaller
from omegaconf import DictConfig, OmegaConf, open_dict
from paths import CONF
from tiny_training import GRID, tiny_draft, tiny_target

from tempera.commands.train import build_recipe
from tempera.config.compose import composed as composed_options
from tempera.config.instantiate import instantiate, part
from tempera.config.parts import Parts
from tempera.decoding.interfaces import Drafter, drafts
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.drafters.draft_files import save_draft
from tempera.drafters.parallel_network import ParallelModel
from tempera.errors import TemperaError
from tempera.image_tokenizers.vq import VQConfig, VQModel
from tempera.rules.standard import BlockVerification, Exact
from tempera.runtime.hub import Repository
from tempera.runtime.processor import parse_device
from tempera.shapes import networks
from tempera.training.losses import AcceptanceLoss, EagleLoss

SCRIPTS = sorted(path.stem for path in CONF.glob("*.yaml"))
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
PLUGINS = {
    ("launcher", "joblib"): "hydra_plugins.hydra_joblib_launcher",
    ("launcher", "slurm"): "hydra_plugins.hydra_submitit_launcher",
}
UNDER = {"rule": "eagle", "drafter": "eagle", "schedule": "coolsd"}
"""Groups that need another method than the default to show all choices."""


TINY_CODES = f"model.tokenizer._target_={__name__}.tiny_tokenizer"


def composed(*overrides: str, config: str = "eval") -> DictConfig:
    """As the package composes it, with its checks."""
    return composed_options(config, overrides)


@cache
def scripts() -> dict[str, str]:
    """Groups that scripts choose from by default, each with one script."""
    found = {}
    for config in SCRIPTS:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            method = ["method=coolsd"] if config in ("eval", "generate") else []  # has a schedule
            chosen = compose(config, method, return_hydra_config=True).hydra.runtime.choices
        found |= {str(group): config for group in chosen if "/" not in str(group)}
    return found


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


CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
FIRST = {case[0]: case for case in reversed(CHOICES)}
"""One choice of every group."""


def test_no_group_is_forgotten() -> None:
    assert set(GROUPS) <= set(scripts())


@pytest.mark.parametrize(("group", "choice"), slow_but(CHOICES, *FIRST.values()))
def test_every_choice_composes_and_fits_its_target(group: str, choice: str) -> None:
    config = scripts()[group]
    if (group, choice) in PLUGINS:
        pytest.importorskip(PLUGINS[group, choice])
    under = [f"method={UNDER[group]}"] if config in ("eval", "generate") and group in UNDER else []
    if config in ("score", "export"):
        under = ["runs=run"]
    cfg = resolves(*under, f"{group}={choice}", config=config)
    for name, node in cfg.items():
        if OmegaConf.is_dict(node) and "_target_" in node and not OmegaConf.missing_keys(node):
            assert name == "drafter" or part(node)  # it may be another model's


@pytest.mark.parametrize("config", SCRIPTS)
def test_every_script_configuration_resolves(config: str) -> None:
    resolves(config=config)


METHODS = [
    "method=ar",
    "method=eagle tree=mc_sim_7b_63",
    "method=eagle tree=mc_sim_7b_63 rule=traversal",
    "method=eagle drafter=none",
    "method=uniform_rsd tree=naive_extend_57",
    "method=uniform_rsd rule=exact",
    "method=coolsd residual=vanilla depth=3 nu=0.3",
    "method=coolsd schedule=linear ell=12 floor=1",
    "method=coolsd drafter=parallel depth=2 delta=2 residual=kl",
    "method=optimal_rsd tree=naive_extend_57 price=1.5",
    "method=eagle2 branches=2 depth=3 nodes=6 rule=priced",
    "method=eagle2 branches=2 depth=3 nodes=6 rule=relaxed delta=1.2",
    "method=independent tree=mc_sim_7b_63",
    "method=independent depth=2 rule=lantern k=5",
    "method=jacobi window=8 initialisation=vertical_sample",
    "method=sjd window=8 rule=relaxed delta=1.2",
    "method=sjd window=8 rule=match",
    "method=sjd window=8 rule=block",
    "method=sjd window=8 reuse=0.5",
    "method=vvs depth=3 free=2 delta=1.5",
    "method=scd window=8 coupling=maximal",
    "method=scd window=8 rule=lanternpp k=5",
    "method=sjd_pac window=12 branches=2",
    "method=sjd_pac window=12 branches=2 rule=grouped k=5",
    "method=lantern k=24 drafter=eagle2 branches=3 depth=2 nodes=5 measure=jsd proximity=cosine "
    "delta=0.2",
    "method=lanternpp k=1 lam=0.5 proximity=random temperature=0",
    "method=gsd window=8 k=5 ranks=null residual=optimal",
    "method=entropy window=8 scale=2.8 residual=optimal entropy_temperature=[2.5,3,0.6]",
    "method=parallel_block",
    "method=parallel tree=mc_sim_7b_63",
    "method=parallel_tree",
    "method=parallel tree=sequoia nodes=12 rule=traversal",
    "method=priced_tree",
    "method=medusa depth=2",
    "method=dflash depth=2",
    "method=mentored depth=3 kl_budget=0.5 divergence=emitted",
    "method=cactus tree=mc_sim_7b_63 delta=1",
    "method=mixture depth=3 weight=0.5",
    "method=fly depth=3 ahead=1 least_entropy=0.1",
]
ONE_EACH = {method.split()[0]: method for method in reversed(METHODS)}
"""Each method once."""
GOLDEN = {
    "method=eagle tree=mc_sim_7b_63 rule=traversal": ("tttttvxiiixi", 9),
    "method=sjd window=8 rule=block": ("tttttttttttt", 10),
    "method=vvs depth=3 free=2 delta=1.5": ("lsrsprehgsbg", 3),
    "method=entropy window=8 scale=2.8 residual=optimal entropy_temperature=[2.5,3,0.6]": (
        "msrwujishnhn",
        7,
    ),
    "method=parallel_tree": ("ttttnhhhnbgi", 6),
    "method=parallel tree=sequoia nodes=12 rule=traversal": ("tttnhkviiish", 7),
    "method=priced_tree": ("tawmttttfrdt", 7),
}
"""Tokens, as letters, and rounds of seed 0: code that becomes simpler still draws the same."""
UNTRAINED = (
    "method=ar",
    "drafter=none",
    "method=jacobi",
    "method=sjd",
    "method=scd",
    "method=gsd",
    "method=entropy",
)


def tiny_tokenizer(directory: object = None) -> VQModel:
    """With as many codes as `tiny_target` has tokens."""
    torch.manual_seed(0)
    return VQModel(VQConfig(24, 4, 8, (1, 1), (1, 1), 1, 8, norm_groups=1))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    save_draft(tiny_draft(tiny_target()), directory)
    return directory


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parallel")
    save_draft(tiny_draft(tiny_target(), kind=ParallelModel), directory)
    return directory


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smaller")
    write_smaller(directory, vocab=24, grid=GRID)
    return directory


@pytest.mark.parametrize("method", slow_but(METHODS, *ONE_EACH.values()))
def test_every_method_generates(method: str, draft: Path, parallel: Path, smaller: Path) -> None:
    drafted = not any(choice in method for choice in UNTRAINED)
    own = parallel if "parallel" in method else draft
    untrained = "medusa" in method or "dflash" in method
    weights = [f"drafter.path={'random' if untrained else own}"] if drafted else []
    if "independent" in method:
        weights = [f"model.independent.directory={smaller}"]
    cfg = composed(*method.split(), *weights, TINY_CODES)
    target = tiny_target()
    drafter = Parts.of(cfg).drafter(target)
    rule = Parts.of(cfg).rule()
    output = decode(target, drafter, rule, RandomStreams(0, ["a"]), ["a red ring"])
    assert output.tokens.shape == (1, target.length)
    drawn = "".join(chr(ord("a") + token) for token in output.tokens[0].tolist())
    assert GOLDEN.get(method) in (None, (drawn, int(output.trace.rounds)))
    assert Parts.of(cfg).draft_depth == drafter.depth
    assert drafter.nodes == cfg.get(
        "nodes", Parts.of(cfg).tree.nodes if drafted else cfg.get("window", 0)
    )


@pytest.mark.parametrize("model", ["shapes", "llamagen_xl_stage1", "lumina"])
def test_the_method_of_a_family_is_exact_and_has_its_draft(model: str) -> None:
    cfg = composed(f"model={model}")
    assert isinstance(Parts.of(cfg).rule(), Exact | BlockVerification)
    assert "train_draft" not in str(cfg.drafter.get("path"))


@pytest.mark.parametrize("model", ["mar_base", "shapes_mar"])
def test_models_of_continuous_tokens_decode_plainly_by_default(model: str) -> None:
    cfg = resolves(f"model={model}", config="generate")
    assert HydraConfig.get().runtime.choices.method == "ar"
    assert cfg.model.tokens == "continuous"


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
    cfg = resolves("draft=medusa", config="train_draft")
    assert instantiate(cfg.loss) == AcceptanceLoss(eta=0.0)
    assert composed("method=medusa").drafter.path == str(networks.SHIPPED / "medusa")
    trained = composed("model=emu3", "method=medusa").drafter.path
    assert trained == "outputs/train_draft/emu3-medusa/draft"


def test_drafts_of_published_models_have_the_papers_recipe() -> None:
    cfg = composed("model=llamagen_xl_stage1", config="train_draft")
    recipe = build_recipe(cfg)
    assert (recipe.lr, recipe.batch_size, recipe.warmup_steps) == (1e-4, 16, 2000)
    assert (recipe.beta1, recipe.beta2, recipe.grad_clip) == (0.9, 0.95, 0.5)
    assert (recipe.validate_every, cfg.training.epochs) == (5938, 20)  # an epoch of 95,000
    assert recipe.holdout == 5000  # 5% of 100,000
    assert instantiate(cfg.loss) == EagleLoss(0.1)
    assert build_recipe(composed("model=lumina", config="train_draft")).noise_length == 512


def test_a_public_draft_serves_until_there_is_one_of_your_own(tmp_path: Path) -> None:
    options = ["model=llamagen_xl_stage1", "method=eagle", f"outputs={tmp_path}"]
    assert composed(*options).drafter.path == "jadohu/llamagen_drafter"
    assert composed(*options, "weights=random").drafter.path == "random"
    own = tmp_path / "train_draft" / "llamagen_xl_stage1" / "draft"
    own.mkdir(parents=True)
    (own / "config.json").touch()
    assert composed(*options).drafter.path == str(own)


def test_a_revision_is_that_of_the_weights() -> None:
    weights = composed("model=emu3", "revision=v1").model.weights
    assert Repository.named(weights) == Repository("BAAI/Emu3-Gen", revision="v1")


def test_the_shipped_models_check_prompts_before_they_are_built() -> None:
    Parts.of(composed("model=shapes")).captions().check(
        ["a dog"]
    )  # it takes any text, with a warning
    with pytest.raises(TemperaError, match="'a dog', is not a shape"):
        Parts.of(composed("model=shapes_mar", "weights=/nowhere")).captions().check(["a dog"])


def test_the_published_schedule_of_cool_sd() -> None:
    cfg = composed("method=coolsd", "delta=1.1")
    rule: Any = Parts.of(cfg).rule()
    assert rule.schedule == pytest.approx((2.855, 1.418, 0.704, 0.350, 0.174), abs=1e-3)
    assert rule.residual_kind == "optimal"


def test_rounds_of_continuous_tokens_are_not_compiled() -> None:
    with pytest.raises(TemperaError, match="compile=true is only for models with discrete tokens"):
        Parts.of(composed("model=shapes_mar", "compile=true")).fast_target()


def test_options_reach_the_objects() -> None:
    sampling = "guidance=7.5 temperature=0.9 top_k=10 top_p=0.8 min_p=0.2"
    options = "delta=2 floor=1 residual=vanilla"
    cfg = composed("method=coolsd", *options.split(), *sampling.split())
    rule: Any = Parts.of(cfg).rule()
    assert sum(omega for omega in rule.schedule if omega > 1) == pytest.approx(
        2 * (2.855 + 1.418 + 0.704) / 1.1, abs=2e-3
    )
    assert min(rule.schedule) == 1
    assert rule.residual_kind == "vanilla"
    assert Parts.of(cfg).sampling == Sampling(7.5, 0.9, 10, 0.8, min_p=0.2)


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
    draft = Parts.of(cfg).drafter(Parts.of(cfg).target()).model.run  # type: ignore[attr-defined]
    weight = draft.network.fc.weight
    assert draft.dtype == weight.dtype == torch.float32
    assert torch.equal(weight, weight.half().float()) == rounded


def test_a_cuda_device_is_counted_and_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda:1") == torch.device("cuda", 1) and parse_device("cuda").index is None
    for name in ("cuda:2", "cuda:x", "gpu"):
        with pytest.raises(TemperaError, match=f"`device={name}` is not on this machine"):
            parse_device(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse_device("cuda").type == "cuda"
    with pytest.raises(TemperaError, match="device=cuda"):
        parse_device("cuda:1")


@drafts(lambda copied, **_: copied)
def copies(target: Any, copied: int) -> Drafter:
    raise NotImplementedError


def undeclared(target: Any) -> Drafter:
    raise NotImplementedError


def test_a_drafter_says_what_it_is_wherever_it_stands() -> None:
    cfg = composed("method=uniform_rsd", "delta=2")
    cfg.drafter = {"_target_": f"{__name__}.copies", "copied": 4}
    assert Parts.of(cfg).draft_depth == 4 and len(Parts.of(cfg).rule().schedule) == 4
    cfg.drafter = {"_target_": f"{__name__}.undeclared"}
    with pytest.raises(TemperaError, match="undeclared does not say how deep it drafts"):
        Parts.of(cfg).rule()
    continuous = composed("model=shapes_mar", "method=cspd")
    continuous.drafter = {"_target_": f"{__name__}.copies", "copied": 4}
    with pytest.raises(
        TemperaError, match="has continuous tokens, but the drafter is for discrete"
    ):
        Parts.of(continuous).rule()
