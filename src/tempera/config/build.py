"""From the groups of conf/ to objects: targets, drafters, rules, encoders."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import hydra
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from tempera.config.compose import written
from tempera.config.instantiate import Part, fitting, from_options, instantiate, part, product
from tempera.continuous.rules import DensityRule
from tempera.decoding.interfaces import Drafter, ImageTarget, JointRule, Rule
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.schedules import floored
from tempera.rules.standard import BlockVerification
from tempera.runtime.distributed import started_as_main
from tempera.runtime.hub import Repository
from tempera.runtime.installation import command
from tempera.runtime.network_directory import CONFIG, PICKLE, WEIGHTS, draft_directory
from tempera.runtime.network_identity import identity_of
from tempera.runtime.pretrained import RANDOM, PretrainedFiles, sizes_only
from tempera.runtime.processor import Place
from tempera.runtime.torchvision import import_torchvision
from tempera.targets.forward import granularity_on

if TYPE_CHECKING:  # an answer to a wrong option does not wait for these
    from tempera.continuous.loop import Decoding
    from tempera.continuous.target import MARTarget
    from tempera.data.encoders import CodeEncoder
    from tempera.data.prompts import CaptionCheck
    from tempera.evaluation.pipeline import Method, Pipeline
    from tempera.image_tokenizers.cosmos import CosmosTokenizer
    from tempera.image_tokenizers.emu3 import Emu3Tokenizer
    from tempera.image_tokenizers.kl import KLModel
    from tempera.image_tokenizers.vq import VQModel
    from tempera.metrics.evaluators import Evaluator
    from tempera.targets.transformer import TransformerTarget

AnyTarget: TypeAlias = "ImageTarget | MARTarget"
"""A target of discrete or of continuous tokens."""
AnyRule: TypeAlias = Rule | JointRule | DensityRule
"""A rule for discrete or for continuous tokens."""
AnyTokenizer: TypeAlias = "VQModel | KLModel | Emu3Tokenizer | CosmosTokenizer"
"""An image tokenizer."""
META = torch.device("meta")
METHODS_FOR = {
    "discrete": "method=ar, eagle or coolsd",
    "continuous": "method=ar, cspd, cspd_published or cspd_exact",
}
DRAFTERS_FOR = {"discrete": "drafter=eagle or sjd", "continuous": "drafter=mar"}


def place_of(cfg: DictConfig, dry: bool = False) -> Place:
    """The options `device` and `dtype`.

    Args:
        cfg: the composed configuration.
        dry: nothing will be put there: a GPU may be elsewhere.
    """
    return Place.named(cfg.device, cfg.dtype, dry)


def build_captions(cfg: DictConfig) -> "CaptionCheck | None":
    """Build `model.captions`, whose `check(prompts)` raises TemperaError for a prompt or caption
    that the model cannot use. It needs no weights; None for a model without it.
    """
    if "captions" not in cfg.model:
        return None
    captions: Part[CaptionCheck] = part(cfg.model.captions)
    return captions.make_with(_truncate(cfg))


def _truncate(cfg: DictConfig) -> dict[str, bool]:
    """The option `truncate`, for parts of the model that take it."""
    return {"truncate": cfg.truncate} if "truncate" in cfg else {}


def build_tokenizer(cfg: DictConfig) -> AnyTokenizer:
    """Build `model.tokenizer`, which maps images to codes and back: frozen, on `device`, always in
    float32.
    """
    return _tokenizer(cfg, place_of(cfg))


def build_image_decoder(cfg: DictConfig) -> AnyTokenizer:
    """Build `model.tokenizer` to make pictures of codes: in bfloat16 if `dtype` is, since the
    activations of a large picture take gigabytes, otherwise in float32.
    """
    return _image_decoder(cfg, place_of(cfg))


def _image_decoder(cfg: DictConfig, place: Place) -> AnyTokenizer:
    dtype = place.dtype if place.dtype == torch.bfloat16 else torch.float32
    return _tokenizer(cfg, place).to(dtype)


def _tokenizer(cfg: DictConfig, place: Place) -> AnyTokenizer:
    tokenizer: AnyTokenizer = instantiate(cfg.model.tokenizer)
    return tokenizer.to(place.device).eval().requires_grad_(False)


def build_target(cfg: DictConfig) -> AnyTarget:
    """Build the target: `model.target` with its network and text encoder, and the sampling of the
    top-level options. Network and text encoder are frozen, on `device` in `dtype`; see
    `processor.arithmetic`. Its identity is that of the weights before they are rounded to `dtype`.
    """
    place = place_of(cfg)
    check_tokens(cfg)
    _check_image_size(cfg)
    target: Part[AnyTarget] = part(cfg.model.target)
    network: Part[nn.Module] = part(cfg.model.network)
    encoder: Part[nn.Module] = part(cfg.model.text_encoder)
    sampling = build_sampling(cfg)
    made = network.make_with({"device": place.device, "dtype": place.arithmetic})
    identity = identity_of(made)
    return target.make_with(
        {"identity": identity},
        network=place.frozen(made),
        conditioner=place.frozen(encoder.make_with(_truncate(cfg))).encode,
        sampling=sampling,
    )


def build_discrete_target(cfg: DictConfig) -> "TransformerTarget":
    """`build_target`, for a model that `check_discrete` passes."""
    return cast("TransformerTarget", build_target(cfg))


def _check_image_size(cfg: DictConfig) -> None:
    """Raise TemperaError for a size of images for which no weights are published, unless they are
    one's own.
    """
    sizes = cfg.model.get("image_sizes")
    if not sizes or cfg.model.get("weights", cfg.weights) != cfg.model.hub:
        return
    if cfg.image_size not in sizes:
        raise TemperaError(
            f"model={cfg.model.name} is published for images of {', '.join(map(str, sizes))} "
            f"pixels, not {cfg.image_size}: choose one of these, or give weights=DIR of your own",
            option="image_size",
        )


def build_encoder(cfg: DictConfig) -> "CodeEncoder":
    """Build `encoder`, which maps captions and images to codes. The target's weights are read only
    if the encoder needs the target.
    """
    check_tokens(cfg)
    encoder: Part[CodeEncoder] = part(cfg.encoder)
    objects: dict[str, object] = {"tokenizer": build_tokenizer(cfg)}
    if encoder.takes("target"):
        objects["target"] = build_target(cfg)
    if encoder.takes("grid"):
        objects["grid"] = _grid(cfg)
    return encoder.make(**objects)


def _grid(cfg: DictConfig) -> tuple[int, int]:
    """Rows and columns of the target's image tokens, from the model's configuration if possible,
    otherwise from the built model.
    """
    described = cfg.model.get("spec") or cfg.model.network.get("config")
    rows, columns = instantiate(described).grid if described else build_target(cfg).grid
    return rows, columns


def build_fast_target(cfg: DictConfig) -> AnyTarget:
    """Build the target, and pack its weights for decoding. With `compile`, its rounds are compiled;
    `auto` means on a GPU.

    Raises:
        TemperaError: also for `compile=true` or `plain_rows=N` with continuous tokens.
    """
    if is_discrete(cfg):
        return build_fast_discrete_target(cfg)
    for name, usual in (("compile", ("auto", False)), ("plain_rows", ("auto",))):
        if cfg.get(name, "auto") not in usual:
            raise TemperaError(
                f"{written(name, cfg[name])} is for models of discrete tokens: leave it out.",
                option=name,
            )
    return build_target(cfg)


def build_fast_discrete_target(cfg: DictConfig) -> "TransformerTarget":
    """`build_fast_target`, for a model that `check_discrete` passes."""
    target = build_discrete_target(cfg)
    plain_rows = cfg.get("plain_rows", "auto")
    target.pack(None if plain_rows == "auto" else plain_rows)
    is_on_gpu = target.device.type == "cuda"
    if is_on_gpu if cfg.compile == "auto" else cfg.compile:
        target.compile()
    return target


def batch_size(cfg: DictConfig) -> int:
    """The option `batch_size`; for `auto` the usual one of the model's family."""
    return int(cfg.family.batch_size if cfg.batch_size == "auto" else cfg.batch_size)


def is_discrete(cfg: DictConfig) -> bool:
    """Whether the model's tokens are discrete; otherwise they are continuous."""
    return _tokens(cfg) == "discrete"


def _tokens(cfg: DictConfig) -> str:
    kind = cfg.model.get("tokens", "discrete")
    return str(fitting(kind, Literal["discrete", "continuous"], "model.tokens"))


def check_tokens(cfg: DictConfig) -> None:
    """Raise TemperaError unless method and model have the same kind of tokens; the default is
    discrete.
    """
    kind = _tokens(cfg)
    wanted = cfg.get("tokens", "discrete")
    if wanted not in (kind, "any"):
        raise TemperaError(
            f"model={cfg.model.name} has {kind} tokens, but the method is for {wanted} ones; "
            f"choose another model, or a method for {kind} tokens, such as {METHODS_FOR[kind]}.",
            option="method",
        )


def check_discrete(cfg: DictConfig, what: str) -> None:
    """Raise TemperaError, which begins with `what`, for a model of continuous tokens."""
    if not is_discrete(cfg):
        raise TemperaError(
            f"{what}, but those of model={cfg.model.name} are continuous: choose another model; a "
            "MAR's draft is a smaller MAR, as in drafter=mar_base."
        )


def build_sampling(cfg: DictConfig) -> object:
    """Build the sampling from the top-level options: `tempera.decoding.probabilities.Sampling`, or
    the class that `model.sampling` names.
    """
    if "sampling" not in cfg.model:
        return from_options(cfg, Sampling)
    return from_options(cfg, hydra.utils.get_class(cfg.model.sampling))


def measured_with(cfg: DictConfig) -> dict[str, Any]:
    """What the statistics of a draft depend on: the model, the draft and the sampling."""
    draft = OmegaConf.select(cfg, "drafter.path")
    return {"model": cfg.model.name, "draft": draft, **asdict(cast(Any, build_sampling(cfg)))}


def build_tree(cfg: DictConfig) -> Tree:
    """The draft tree of the method; empty if the method has none."""
    tree: Tree = instantiate(cfg.tree) if "tree" in cfg else Tree.empty()
    return tree


def check_draft(cfg: DictConfig, option: str = "drafter.path", *, of_the_hub: bool = True) -> None:
    """Raise TemperaError if the method's draft should be in a directory but is not. Called before
    any weights are read.

    Args:
        cfg: the composed configuration.
        option: with which the user can name the directory.
        of_the_hub: also download a draft of the hub.
    """
    path = OmegaConf.select(cfg, "drafter.path")
    if path is None or path == RANDOM:
        return
    if of_the_hub or Path(str(path)).exists() or Repository.named(str(path)) is None:
        trained_by = getattr(part(cfg.drafter).call, "trained_by", None)
        kind = f" draft={trained_by}" if trained_by else ""
        place = draft_directory(
            str(path),
            f"train a draft with `{command('train')} model={cfg.model.name}{kind}`, give another "
            f"with {option}=DIR or owner/name, or take a method without one, such as method=sjd",
        )
        if not Path(str(path)).exists() and started_as_main():
            print(f"draft: {path} of the hub, commit {place.name}")


def build_drafter(cfg: DictConfig, target: AnyTarget) -> Drafter:
    """The drafter of the method; it receives the target and the tree if it takes them, and the
    dtype of the target's weights unless it has its own.

    Raises:
        TemperaError: it drafts more tokens than an image has.
    """
    return _drafter(cfg, target, place_of(cfg))


def _drafter(cfg: DictConfig, target: AnyTarget, place: Place) -> Drafter:
    drafter: Part[Drafter] = part(cfg.drafter)
    has_dtype = drafter.options.get("dtype", "") is not None
    dtype = {} if has_dtype else {"dtype": place.dtype_name}
    made = drafter.make_with({"target": target, "tree": build_tree(cfg)}, **dtype)
    if is_discrete(cfg) and "window" not in cfg.drafter and made.depth > target.length:
        raise TemperaError(
            f"depth={made.depth} drafts more tokens than an image of this model has "
            f"({target.length}): give a smaller depth",
            option="depth",
        )
    return made


def draft_depth(cfg: DictConfig) -> int:
    """Most tokens in a row that the method drafts, as its drafter declares it (`interfaces.drafts`)
    or its tree has it; 0 without a draft.

    Raises:
        TemperaError: the drafter takes no tree and declares nothing.
    """
    drafter: Part[Drafter] = part(cfg.drafter)
    depth = getattr(drafter.call, "depth", None)
    if isinstance(depth, int):
        return depth
    if depth is not None:
        return int(depth(**drafter.options))
    if drafter.takes("tree"):
        return build_tree(cfg).max_depth
    raise TemperaError(
        f"{cfg.drafter._target_} does not say how deep it drafts, which the rule's schedule needs: "
        "decorate it with `@drafts` of tempera.decoding.interfaces, or take rule=exact",
        option="drafter",
    )


def build_rule(cfg: DictConfig) -> AnyRule | None:
    """The acceptance rule of the method; None if it has none. It needs no target: called before
    weights are read, it tells what is wrong in time. A relaxed rule's schedule spreads its budget
    over the depth of a draft, and is raised to `floor` if there is one. A rule with `neighbours`
    gets those of the codebook of `model.tokenizer`.

    Raises:
        TemperaError: also for a rule, or a drafter, of the other kind of tokens, and for a rule of
            chains beside a tree that branches.
    """
    check_tokens(cfg)
    rule = _rule(cfg) if "rule" in cfg else None
    _check_drafter(cfg)  # last, because it may import transformers
    return rule


def _rule(cfg: DictConfig) -> AnyRule:
    rule: Part[AnyRule] = part(cfg.rule)
    neighbours = part(cfg.neighbours) if "neighbours" in cfg else None
    objects: dict[str, object] = {}
    if "schedule" in cfg:
        objects["schedule"] = _schedule(cfg)
    if neighbours is not None:
        codebook = instantiate(cfg.model.tokenizer).codebook
        objects["neighbours"] = neighbours.make(codebook=codebook)
    made = rule.make(**objects)
    check_rule(cfg, made)
    return made


def check_rule(cfg: DictConfig, rule: object) -> None:
    """Raise TemperaError for a rule that is not for the model's tokens or the method's tree."""
    if is_discrete(cfg) and not isinstance(rule, Rule | JointRule):
        raise TemperaError(
            f"{type(rule).__name__} is a rule for continuous tokens, and those of "
            f"model={cfg.model.name} are discrete: choose rule=exact, relaxed or lantern",
            option="rule",
        )
    if isinstance(rule, BlockVerification) and build_tree(cfg).max_children > 1:
        raise TemperaError(
            f"{type(rule).__name__} accepts one chain by its prefixes, but this tree has branches: "
            "give tree=chain, or rule=exact",
            option="tree",
        )


def _check_drafter(cfg: DictConfig) -> None:
    """Raise TemperaError for a drafter of the other kind of tokens, and for one that lacks a tree
    with nodes.
    """
    kind = _tokens(cfg)
    made = product(cfg.drafter)
    if made is not None and made is not NoDraft:
        suited = "discrete" if issubclass(made, Drafter) else "continuous"
        if suited != kind:
            raise TemperaError(
                f"model={cfg.model.name} has {kind} tokens, but the drafter is for {suited} ones: "
                f"choose another drafter, such as {DRAFTERS_FOR[kind]}."
            )
    drafter: Part[Drafter] = part(cfg.drafter)
    if drafter.needs("tree") and not build_tree(cfg).nodes:
        raise TemperaError(
            "the drafter drafts along a tree, and this one has no nodes: give depth=1 or more, add "
            "+tree=chain, or choose a method without a draft, such as method=ar."
        )


def _schedule(cfg: DictConfig) -> object:
    """The relaxations, or prices, of a draft's depths."""
    schedule = part(cfg.schedule)
    depth = draft_depth(cfg)
    if not depth:
        raise TemperaError(
            "the rule's schedule needs a draft, and this method drafts nothing: give depth=1 or "
            "more, choose a method with a draft, such as method=coolsd, or rule=exact."
        )
    offered = {"tree": build_tree(cfg), "measured_with": measured_with(cfg)}
    made = schedule.make_with(offered, length=depth)
    return floored(made, fitting(cfg.floor, float, "floor")) if "floor" in cfg else made


def build_method(
    cfg: DictConfig,
    target: AnyTarget,
    rule: AnyRule | None,
) -> "Method | Decoding":
    """Build `decoding`, which decodes the target's tokens; it receives the method's drafter, and
    the rule from `build_rule`, if it takes them.
    """
    return _method(cfg, target, rule, place_of(cfg))


def _method(
    cfg: DictConfig, target: AnyTarget, rule: AnyRule | None, place: Place
) -> "Method | Decoding":
    method: Part[Method | Decoding] = part(cfg.decoding)
    if isinstance(rule, Rule):
        rule = rule.for_target(target)
    return method.make_with({"drafter": _drafter(cfg, target, place), "rule": rule})


def build_pipeline(
    cfg: DictConfig,
    target: AnyTarget,
    rule: AnyRule | None,
) -> "Pipeline":
    """Build `pipeline`: a target from `build_fast_target` with method, image decoder and seed."""
    place = place_of(cfg)
    pipeline: Part[Pipeline] = part(cfg.pipeline)
    return pipeline.make(
        target=target,
        method=_method(cfg, target, rule, place),
        image_decoder=_image_decoder(cfg, place),
        device=place.device,
    )


def build_evaluator(cfg: DictConfig) -> "Evaluator":
    """Build `metrics`, with the metrics of `torchmetrics` beside its own."""
    evaluator: Evaluator = instantiate(cfg.metrics)
    named = cfg.get("torchmetrics") or {}
    if not named and cfg.against is None:
        return evaluator
    import_torchvision()  # torchmetrics imports it
    from tempera.metrics.torch_metrics import Kind, TorchMetric, TorchMetrics

    metrics = {}
    for name in map(str, named):
        place = f"torchmetrics.{name}"
        kind = fitting(OmegaConf.select(cfg, f"{place}.kind"), Kind, f"{place}.kind")
        metric: Part[object] = part(OmegaConf.select(cfg, f"{place}.metric"))
        metrics[name] = TorchMetric(kind, metric.partial())  # its network is read in its turn
    return TorchMetrics(evaluator, metrics, cfg.against)


@contextmanager
def without_weights(cfg: DictConfig) -> Iterator[tuple[DictConfig, list[PretrainedFiles]]]:
    """Inside the `with` block the networks of the configuration that it yields have sizes and no
    data, on the meta device in the dtype that `cfg` gives them; the files that they would be read
    from are listed as they are built. A trained draft has its own sizes, another one the usual.
    """
    place = place_of(cfg, dry=True)
    sized = copy.deepcopy(cfg)
    with open_dict(sized):
        sized.device = META.type
        sized.dtype = str(place.arithmetic).removeprefix("torch.")
        if "compile" in sized:
            sized.compile = False
        target: Part[AnyTarget] = part(cfg.model.target)
        if target.takes("granularity"):
            sized.model.target.granularity = granularity_on(place.device)
        path = OmegaConf.select(sized, "drafter.path")
        elsewhere = path is not None and not (Path(str(path)) / CONFIG).is_file()
        if elsewhere:  # not trained yet, or on the hub
            sized.drafter.path = RANDOM
    with sizes_only() as files:
        if elsewhere and Repository.named(str(path)):
            files.append(PretrainedFiles(str(path), (WEIGHTS, PICKLE), str(path)))
        yield sized, files
