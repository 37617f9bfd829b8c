"""From the groups of conf/ to objects: targets, drafters, rules, encoders."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from tempera.config.instantiate import (
    accepted,
    declared,
    fitting,
    from_options,
    instantiate,
    needs,
    parsed,
    product,
    takes,
)
from tempera.config.options import Role, role_of
from tempera.decoding.interfaces import Drafter, ImageTarget, JointRule, Rule, Target
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError, shortened
from tempera.rules.schedules import floored
from tempera.rules.standard import BlockVerification
from tempera.runtime.distributed import started_as_main, started_with_others
from tempera.runtime.hub import Repository
from tempera.runtime.installation import command
from tempera.runtime.network_directory import CONFIG, PICKLE, WEIGHTS, draft_directory
from tempera.runtime.network_identity import identity_of
from tempera.runtime.pretrained import RANDOM, PretrainedFiles, are_sizes_enough, sizes_only
from tempera.runtime.processor import arithmetic, computes_bfloat16
from tempera.runtime.tracking import Tracker

if TYPE_CHECKING:
    import pandas as pd

META = torch.device("meta")
METHODS_FOR = {
    "discrete": "method=ar, eagle or coolsd",
    "continuous": "method=ar, cspd, cspd_published or cspd_exact",
}
DRAFTERS_FOR = {"discrete": "drafter=eagle or sjd", "continuous": "drafter=mar"}


def build_text_encoder(cfg: DictConfig) -> nn.Module:
    """Build `model.text_encoder`: frozen, on `device` in `dtype`. Its `encode(prompts)` returns the
    network's condition and its mask.
    """
    encoder: nn.Module = instantiate(cfg.model.text_encoder, **_truncate(cfg, "text_encoder"))
    return _frozen(encoder, cfg)


def build_captions(cfg: DictConfig) -> Any:
    """Build `model.captions`, whose `check(prompts)` raises TemperaError for a prompt or caption
    that the model cannot use. It needs no weights; None for a model without it.
    """
    if "captions" not in cfg.model:
        return None
    return instantiate(cfg.model.captions, **_truncate(cfg, "captions"))


def _truncate(cfg: DictConfig, part: str) -> dict[str, Any]:
    """The option `truncate`, for a part of the model that has such an argument."""
    if "truncate" not in cfg:
        return {}
    return accepted(cfg.model[part], {"truncate": cfg.truncate})


def build_tokenizer(cfg: DictConfig) -> nn.Module:
    """Build `model.tokenizer`, which maps images to codes and back: frozen, on `device`, always in
    float32.
    """
    tokenizer: nn.Module = instantiate(cfg.model.tokenizer)
    return tokenizer.to(parse_device(cfg.device)).eval().requires_grad_(False)


def build_image_decoder(cfg: DictConfig) -> nn.Module:
    """Build `model.tokenizer` to make pictures of codes: in bfloat16 if `dtype` is, since the
    activations of a large picture take gigabytes, otherwise in float32.
    """
    dtype = parse_dtype(cfg.dtype, parse_device(cfg.device))
    return build_tokenizer(cfg).to(dtype if dtype == torch.bfloat16 else torch.float32)


def build_target(cfg: DictConfig) -> ImageTarget:
    """Build the target: `model.target` with its network and text encoder, and the sampling of the
    top-level options. The network is frozen, on `device` in `dtype`; see `processor.arithmetic`.
    Its identity is that of the weights before they are rounded to `dtype`.
    """
    check_tokens(cfg)
    _check_image_size(cfg)
    sampling = build_sampling(cfg)
    device = parse_device(cfg.device)
    dtype = arithmetic(parse_dtype(cfg.dtype, device), device)
    made = accepted(cfg.model.network, {"device": device, "dtype": dtype})
    network: nn.Module = instantiate(cfg.model.network, **made)
    identity = accepted(cfg.model.target, {"identity": identity_of(network)})
    network = _frozen(network, cfg)
    conditioner = build_text_encoder(cfg).encode
    parts = {"network": network, "conditioner": conditioner, "sampling": sampling}
    target: ImageTarget = instantiate(cfg.model.target, **parts, **identity)
    return target


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


def build_encoder(cfg: DictConfig) -> Any:
    """Build `encoder`, which maps captions and images to codes. The target's weights are read only
    if the encoder needs the target.
    """
    check_tokens(cfg)
    tokenizer = build_tokenizer(cfg)
    makers: dict[str, Callable[[DictConfig], Any]] = {"target": build_target, "grid": _grid}
    return instantiate(
        cfg.encoder,
        tokenizer=tokenizer,
        **{name: make(cfg) for name, make in accepted(cfg.encoder, makers).items()},
    )


def _grid(cfg: DictConfig) -> tuple[int, int]:
    """Rows and columns of the target's image tokens, from the model's configuration if possible,
    otherwise from the built model.
    """
    described = cfg.model.get("spec") or cfg.model.network.get("config")
    rows, columns = instantiate(described).grid if described else build_target(cfg).grid
    return rows, columns


def build_fast_target(cfg: DictConfig) -> Any:
    """Build the target, and pack its weights for decoding. With `compile`, its rounds are compiled;
    `auto` means on a GPU.

    Raises:
        TemperaError: also for `compile=true` with continuous tokens.
    """
    discrete, compiles = is_discrete(cfg), cfg.compile
    if compiles == "auto":
        compiles = discrete and parse_device(cfg.device).type == "cuda"
    if compiles and not discrete:
        raise TemperaError(
            "compile=true is for models of discrete tokens: leave it out.", option="compile"
        )
    target: Any = build_target(cfg)
    if discrete:
        target.pack()
    if compiles:
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
    kind, wanted = _tokens(cfg), cfg.get("tokens", "discrete")
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


def build_sampling(cfg: DictConfig) -> Any:
    """Build the sampling from the top-level options: `tempera.decoding.probabilities.Sampling`, or
    the class that `model.sampling` names.
    """
    if "sampling" not in cfg.model:
        return from_options(cfg, Sampling)
    return from_options(cfg, hydra.utils.get_class(cfg.model.sampling))


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
        kind = str(cfg.drafter._target_).rpartition(".build_")[2]
        kind = f" draft={kind}" if kind in ("parallel", "medusa") else ""
        place = draft_directory(
            str(path),
            f"train a draft with `{command('train')} model={cfg.model.name}{kind}`, give another "
            f"with {option}=DIR or owner/name, or take a method without one, such as method=sjd",
        )
        if not Path(str(path)).exists() and started_as_main():
            print(f"draft: {path} of the hub, commit {place.name}")


def build_drafter(cfg: DictConfig, target: Target) -> Drafter:
    """The drafter of the method; it receives the target and the tree if it takes them, and the
    target's dtype unless it has its own.
    """
    offered = accepted(cfg.drafter, {"target": target, "tree": build_tree(cfg)})
    if cfg.drafter.get("dtype", "") is None:
        dtype = parse_dtype(cfg.dtype, parse_device(cfg.device))
        offered["dtype"] = str(dtype).removeprefix("torch.")
    drafter: Drafter = instantiate(cfg.drafter, **offered)
    return drafter


def draft_depth(cfg: DictConfig) -> int:
    """Most tokens in a row that the method drafts, as its drafter declares it (`interfaces.drafts`)
    or its tree has it; 0 without a draft.

    Raises:
        TemperaError: the drafter takes no tree and declares nothing.
    """
    depth = declared(cfg.drafter, "depth")
    if isinstance(depth, int):
        return depth
    if depth is not None:
        return int(depth(**parsed(cfg.drafter)))
    if takes(cfg.drafter, "tree"):
        return build_tree(cfg).max_depth
    raise TemperaError(
        f"{cfg.drafter._target_} does not say how deep it drafts, which the rule's schedule needs: "
        "decorate it with `@drafts` of tempera.decoding.interfaces, or take rule=exact",
        option="drafter",
    )


def build_rule(cfg: DictConfig) -> Any:
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


def _rule(cfg: DictConfig) -> Any:
    parsed(cfg.rule)
    offered: dict[str, Any] = {}
    if "schedule" in cfg:
        offered["schedule"] = _schedule(cfg)
    if "neighbours" in cfg:
        parsed(cfg.neighbours)  # before a codebook is read
        codebook = instantiate(cfg.model.tokenizer).codebook
        offered["neighbours"] = instantiate(cfg.neighbours, codebook=codebook)
    rule = instantiate(cfg.rule, **offered)
    check_rule(cfg, rule)
    return rule


def check_rule(cfg: DictConfig, rule: Any) -> None:
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
    kind, made = _tokens(cfg), product(cfg.drafter)
    if made is not None and made is not NoDraft:
        suited = "discrete" if issubclass(made, Drafter) else "continuous"
        if suited != kind:
            raise TemperaError(
                f"model={cfg.model.name} has {kind} tokens, but the drafter is for {suited} ones: "
                f"choose another drafter, such as {DRAFTERS_FOR[kind]}."
            )
    if needs(cfg.drafter, "tree") and not build_tree(cfg).nodes:
        raise TemperaError(
            "the drafter drafts along a tree, and this one has no nodes: give depth=1 or more, add "
            "+tree=chain, or choose a method without a draft, such as method=ar."
        )


def _schedule(cfg: DictConfig) -> Any:
    """The relaxations, or prices, of a draft's depths."""
    if not (depth := draft_depth(cfg)):
        raise TemperaError(
            "the rule's schedule needs a draft, and this method drafts nothing: give depth=1 or "
            "more, choose a method with a draft, such as method=coolsd, or rule=exact."
        )
    tree = accepted(cfg.schedule, {"tree": build_tree(cfg)})
    schedule = instantiate(cfg.schedule, length=depth, **tree)
    if "floor" not in cfg:
        return schedule
    return floored(schedule, fitting(cfg.floor, float, "floor"))


def build_method(cfg: DictConfig, target: Any, rule: Any) -> Any:
    """Build `decoding`, which decodes the target's tokens; it receives the method's drafter, and
    the rule from `build_rule`, if it takes them.
    """
    if isinstance(rule, Rule):
        rule = rule.for_target(target)
    offered = {"drafter": build_drafter(cfg, target), "rule": rule}
    return instantiate(cfg.decoding, **accepted(cfg.decoding, offered))


def build_pipeline(cfg: DictConfig, target: ImageTarget, rule: Any) -> Any:
    """Build `pipeline`: a target from `build_fast_target` with method, image decoder and seed.

    Raises:
        TemperaError: the method drafts more tokens than an image has.
    """
    depth = draft_depth(cfg) if is_discrete(cfg) and "window" not in cfg.drafter else 0
    if depth > target.length:
        raise TemperaError(
            f"depth={depth} drafts more tokens than an image of this model has ({target.length}): "
            "give a smaller depth",
            option="depth",
        )
    return instantiate(
        cfg.pipeline,
        target=target,
        method=build_method(cfg, target, rule),
        image_decoder=build_image_decoder(cfg),
        device=parse_device(cfg.device),
    )


@contextmanager
def without_weights(cfg: DictConfig) -> Iterator[tuple[DictConfig, list[PretrainedFiles]]]:
    """Inside the `with` block the networks of the configuration that it yields have sizes and no
    data, on the meta device in the dtype that `cfg` gives them; the files that they would be read
    from are listed as they are built. A trained draft has its own sizes, another one the usual.
    """
    from tempera.targets.forward import granularity_on  # it imports transformers

    device = parse_device(cfg.device, dry=True)
    dtype = arithmetic(parse_dtype(cfg.dtype, device), device)
    sized = copy.deepcopy(cfg)
    with open_dict(sized):
        sized.device, sized.dtype = META.type, str(dtype).removeprefix("torch.")
        if "compile" in sized:
            sized.compile = False
        keys = {"granularity": granularity_on(device)}
        sized.model.target.update(accepted(cfg.model.target, keys))
        path = OmegaConf.select(sized, "drafter.path")
        elsewhere = path is not None and not (Path(str(path)) / CONFIG).is_file()
        if elsewhere:  # not trained yet, or on the hub
            sized.drafter.path = RANDOM
    with sizes_only() as files:
        if elsewhere and Repository.named(str(path)):
            files.append(PretrainedFiles(str(path), (WEIGHTS, PICKLE), str(path)))
        yield sized, files


def start_tracker(
    cfg: DictConfig,
    directory: Path,
    job_type: str,
    choices: Mapping[str, str | None],
    notes: Mapping[str, Any] | None = None,
) -> Tracker:
    """Start `tracking` for a run. It records the whole resolved configuration; the run's group is
    the experiment, or else the model, and its tags are the choices.

    Args:
        cfg: the composed configuration.
        directory: the run directory.
        job_type: `eval`, `train_draft` and so on.
        choices: Hydra's choice in each group.
        notes: further values to record with the configuration.
    """
    tracked = [
        str(key)
        for key in cfg
        if Role.UNTRACKED not in role_of(str(key)) and not OmegaConf.is_missing(cfg, key)
    ]
    options = {key: _resolved(cfg[key]) for key in tracked}
    tracker: Tracker = instantiate(
        cfg.tracking,
        directory=directory,
        job_type=job_type,
        group=choices.get("experiment") or OmegaConf.select(cfg, "model.name") or job_type,
        tags=[f"{group}={name}" for group, name in choices.items() if "/" not in group and name],
        config={**options, **(notes or {})},
    )
    return tracker


def track(
    cfg: DictConfig,
    directory: Path,
    job_type: str,
    values: Mapping[str, Any],
    table: "pd.DataFrame | None" = None,
    files: Sequence[Path] = (),
) -> None:
    """Send to `tracking` what a command found, once it is done: what it measures is not disturbed.

    Args:
        cfg, directory, job_type: see `start_tracker`.
        values: numbers and texts of its summary.
        table: what it prints.
        files: what it wrote, kept as an artifact.
    """
    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    tracker = start_tracker(cfg, directory, job_type, chosen)
    tracker.summary(values)
    if table is not None:
        tracker.table(job_type, [*map(str, table)], table.astype(str).to_numpy().tolist())
    if files:
        tracker.artifact(f"{job_type}-{directory.name}", job_type, files)
    tracker.finish()


def parse_device(name: str, dry: bool = False) -> torch.device:
    """`auto` (CUDA if available), or a device by PyTorch's name.

    Args:
        name: the option.
        dry: nothing will be put there: a GPU may be elsewhere.

    Raises:
        TemperaError: this machine does not have it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))
        if device.type == "meta":
            if are_sizes_enough():
                return device
            raise RuntimeError(name)
        if dry and device.type == "cuda" and not torch.cuda.is_available():
            return device
        if device.type != "cuda":
            torch.empty(0, device=device)
        elif (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(name)  # counted: a tensor would take memory on the first device
    except (RuntimeError, AssertionError, ImportError):
        raise TemperaError(
            f"`device={shortened(str(name))}` is not on this machine; use auto, cpu, cuda or cuda:N"
        ) from None
    if device.index is not None and device.type == "cuda" and started_with_others():
        raise TemperaError(
            f"`device={name}` would put all processes of this run on one GPU; give device=cuda, "
            "and each takes one of its own"
        )
    return device


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` (bfloat16 on a GPU that computes it, else float32), float32, bfloat16 or float16."""
    if name == "auto":
        fast = device.type == "cuda" and computes_bfloat16(device)
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _resolved(value: Any) -> Any:
    """An option's value in plain Python, with interpolations resolved."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _frozen(module: nn.Module, cfg: DictConfig) -> nn.Module:
    device = parse_device(cfg.device)
    dtype = parse_dtype(cfg.dtype, device)
    module = module.to(device, dtype).to(arithmetic(dtype, device))
    return module.eval().requires_grad_(False)
