"""What a configuration describes: a model, and a method for it. `Parts.of` checks all of their
options once, where a command begins; nothing is read until a part is asked for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import PositiveInt
from torch import nn

from tempera.config.instantiate import Part, fitting, from_options, options_of, part, product
from tempera.continuous.rules import DensityRule
from tempera.decoding.compiled import why_not
from tempera.decoding.interfaces import Drafter, ImageTarget, Rule
from tempera.decoding.probabilities import Sampling
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.schedules import floored
from tempera.runtime.files import fingerprint
from tempera.runtime.hub import Repository
from tempera.runtime.installation import command
from tempera.runtime.network_directory import CONFIG, PICKLE, WEIGHTS, draft_directory
from tempera.runtime.network_identity import identity_of
from tempera.runtime.pretrained import RANDOM, PretrainedFiles, sizes_only
from tempera.runtime.processor import Placement
from tempera.runtime.quantised import WeightsDtype, check_quantises
from tempera.targets.forward import granularity_on

if TYPE_CHECKING:  # an answer to a wrong option does not wait for these
    from tempera.continuous.target import MARTarget
    from tempera.data.encoders import CodeEncoder
    from tempera.data.prompts import CaptionCheck
    from tempera.decoding.loop import Decoding
    from tempera.evaluation.pipeline import ImageDecoder, Method, Pipeline
    from tempera.image_tokenizers.interface import ImageTokenizer
    from tempera.image_tokenizers.kl import KLModel
    from tempera.targets.transformer import TransformerTarget

AnyTarget: TypeAlias = "ImageTarget | MARTarget"
"""A target of discrete or of continuous tokens."""
AnyRule: TypeAlias = Rule | DensityRule
"""A rule for discrete or for continuous tokens."""
AnyTokenizer: TypeAlias = "ImageTokenizer | KLModel"
"""An image tokenizer."""
Tokens: TypeAlias = Literal["discrete", "continuous"]
META = torch.device("meta")
PACKAGE = Path(__file__).resolve().parent.parent
METHODS_FOR = {
    "discrete": "method=ar, eagle or coolsd",
    "continuous": "method=ar, cspd or cspd_exact",
}
GROUPS = ("drafter", "tree", "rule", "schedule", "neighbours")
"""Nodes of a method whose values name a run too, as `drafter.path=DIR` does."""
BUILDS = ("dtype", "weights", "weights_dtype", "compile")
"""Options of the target's networks that name a run."""
ONE: TypeAlias = str | int | float | None
"""One value of an option."""
PATH_OPTIONS = ("path", "directory")
"""Arguments that the identities of weights stand for."""
FILES = (*PATH_OPTIONS, "statistics")
"""Options at the top that name files."""
DRAFTERS_FOR = {"discrete": "drafter=eagle or sjd", "continuous": "drafter=mar"}


EARNED = 4096
"""Tokens in a row from which on `compile=auto` compiles. On an H200 LlamaGen-XL compiles in 30 to
50 seconds, and each of its rounds then takes 16 to 23 milliseconds less.
"""


def pays(device: torch.device, tokens: int | None) -> bool:
    """Whether `compile=auto` compiles rounds: on a GPU, for enough tokens in a row (batches × T) or
    an unknown number, where it can be done. Prints why not.
    """
    if device.type != "cuda":
        return False
    if tokens is not None and tokens < EARNED:
        print("rounds are not compiled for so few images; compile=true compiles them")
        return False
    problem = why_not(device)
    if problem is not None:
        print(f"rounds are not compiled: {problem}")
    return problem is None


@dataclass(frozen=True)
class Parts:
    """A model with a method, whose options are right; without a method it decodes plainly.

    Attributes:
        model: the model's name.
        tokens: the kind of its tokens.
        placement: of its networks.
        batch_size: prompts decoded together.
        shrinks: decode fewer together where memory runs out: `batch_size=auto`.
        compiled: whether rounds are compiled; `auto`: on a GPU.
        truncate: whether texts that are too long are cut; None if the script has no such option.
        floor: what every depth of the schedule is raised to.
        sampling_part: makes `sampling`.
        target_part, network_part, text_encoder_part, tokenizer_part: make the model.
        captions_part: checks prompts before weights are read.
        grid_part: describes the model's grid, where its configuration does.
        drafter_part, tree_part, rule_part, schedule_part, neighbours_part: make the method.
        decoding_part: of method and rule makes what decodes.
        pipeline_part: makes pictures; None in scripts that make none.
    """

    model: str
    tokens: Tokens
    placement: Placement
    batch_size: int
    shrinks: bool
    compiled: bool | Literal["auto"]
    truncate: bool | None
    floor: float | None
    sampling_part: Part[Any]
    target_part: Part[AnyTarget]
    network_part: Part[nn.Module]
    text_encoder_part: Part[nn.Module]
    tokenizer_part: Part[AnyTokenizer]
    captions_part: "Part[CaptionCheck] | None"
    grid_part: Part[Any] | None
    drafter_part: Part[Drafter]
    tree_part: Part[Tree] | None
    rule_part: Part[AnyRule] | None
    schedule_part: Part[Any] | None
    neighbours_part: Part[Any] | None
    decoding_part: "Part[Decoding]"
    pipeline_part: "Part[Pipeline] | None"

    @classmethod
    def of(cls, cfg: DictConfig, discrete: str = "", *, elsewhere: bool = False) -> "Parts":
        """Those of a composed configuration.

        Args:
            cfg: the configuration.
            discrete: what is for discrete tokens alone, where a model of others is to be refused.
            elsewhere: they will be made on another machine, which may have the GPU that this lacks.

        Raises:
            TemperaError: an option is not possible, or model, method, drafter, tree and rule do not
                fit each other.
        """
        model = cfg.model
        kind: Tokens = fitting(
            model.get("tokens", "discrete"), Literal["discrete", "continuous"], "model.tokens"
        )
        if discrete:
            check_discrete(cfg, discrete)
        _check_tokens(cfg, kind)
        _check_weights(cfg)
        _check_image_size(cfg)
        placement = from_options(cfg, Placement.named, **({"dry_run": True} if elsewhere else {}))
        cfg = _with_draft_dtype(cfg, placement)
        sampling = hydra.utils.get_class(model.sampling) if "sampling" in model else Sampling
        compiled = cfg.get("compile", "auto")
        batch_size = cfg.get("batch_size", cfg.family.batch_size)
        batch_size = fitting(batch_size, PositiveInt | Literal["auto"], "batch_size")
        made = cls(
            model=model.name,
            tokens=kind,
            placement=placement,
            batch_size=int(cfg.family.batch_size if batch_size == "auto" else batch_size),
            shrinks=batch_size == "auto",
            compiled=fitting(compiled, bool | Literal["auto"], "compile"),
            truncate=fitting(cfg.truncate, bool, "truncate") if "truncate" in cfg else None,
            floor=fitting(cfg.floor, float, "floor") if "floor" in cfg else None,
            rule_part=_part(cfg, "rule"),
            schedule_part=_part(cfg, "schedule"),
            neighbours_part=_part(cfg, "neighbours"),
            tree_part=_part(cfg, "tree"),
            sampling_part=options_of(cfg, sampling),
            target_part=part(model.target),
            network_part=part(model.network),
            text_encoder_part=part(model.text_encoder),
            tokenizer_part=part(model.tokenizer),
            captions_part=_part(model, "captions"),
            grid_part=_part(model, "spec") or _part(model.network, "config"),
            drafter_part=_drafter(cfg, kind),
            decoding_part=_part(cfg, "decoding") or Part(_plain_method, {}, cfg),
            pipeline_part=_part(cfg, "pipeline"),
        )
        made._check_fit()
        return made

    def _check_fit(self) -> None:
        """Raise TemperaError for weights that the kind of tokens does not have, and for a drafter
        without the nodes that it drafts.
        """
        if self.placement.quantised and not self.is_discrete:
            raise TemperaError(
                f"weights_dtype={self.placement.quantised} is only for models with discrete "
                "tokens: leave it out",
                option="weights_dtype",
            )
        if self.drafter_part.needs("tree") and not self.tree.nodes:
            raise TemperaError(
                "the drafter needs a draft tree with at least one node: give depth=1 or more, "
                "add +tree=chain, or choose a method without a draft, such as method=ar."
            )

    def with_option(self, name: str, value: object) -> "Parts":
        """The same with another value of an option of the method, such as `delta`.

        Raises:
            TemperaError: it does not fit.
        """
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            field: one.with_option(name, value)
            for field, one in parts.items()
            if isinstance(one, Part)
        }
        return replace(self, **changed)

    @property
    def sampling(self) -> Any:
        """`tempera.decoding.probabilities.Sampling`, or what `model.sampling` names."""
        return self.sampling_part.make()

    @property
    def method_parts(self) -> dict[str, Part[Any]]:
        """The parts of the method that there are, by the node that describes them."""
        parts: dict[str, Part[Any] | None] = {
            "decoding": self.decoding_part,
            "drafter": self.drafter_part,
            "tree": self.tree_part,
            "rule": self.rule_part,
            "schedule": self.schedule_part,
            "neighbours": self.neighbours_part,
        }
        return {name: one for name, one in parts.items() if one is not None}

    def settings(self, choices: Mapping[str, str | None], **others: Any) -> dict[str, Any]:
        """What decoding depends on beside the networks: the choice in the group of each part, and
        every value that a part takes, by the user's name for it and, within the method's parts, by
        `part.argument`. An option of one's own is among them once a part takes it.

        Args:
            choices: Hydra's choice in each group.
            others: options of the command that results depend on too.
        """
        parts = self.method_parts
        chosen = {name: choices[name] for name in ("model", *parts) if choices.get(name)}
        shared = (self.sampling_part, self.target_part, self.grid_part, self.pipeline_part)
        options = others if self.floor is None else {"floor": self.floor, **others}
        for one in filter(None, (*shared, *parts.values())):
            options |= {
                name: value for name, value in one.named.items() if _is_setting(name, value)
            }
        inside = {
            f"{name}.{key}": value
            for name, one in parts.items()
            for key, value in one.options.items()
            if key not in (*options, *PATH_OPTIONS) and isinstance(value, ONE)
        }
        return {**chosen, **options, **inside}

    def changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What runs are named by: the choices and options that were given and that say how images
        are decoded, the choices first.

        Args:
            given: choices and values, by what the user calls them.
        """
        groups = [name for name in self.method_parts if name in given]
        options = {*self.settings({}), *GROUPS, *BUILDS} - {"seed"}
        others = [name for name in given if name.partition(".")[0] in options]
        return {name: given[name] for name in [*groups, *others]}

    @property
    def is_discrete(self) -> bool:
        """Whether the model's tokens are discrete; otherwise they are continuous."""
        return self.tokens == "discrete"

    @property
    def tree(self) -> Tree:
        """The draft tree; empty if the method has none."""
        return self.tree_part.make() if self.tree_part else Tree.empty()

    @property
    def reads_files(self) -> bool:
        """Whether the rule is made of files: of a codebook, or of statistics of a draft."""
        solved = self.schedule_part is not None and "statistics" in self.schedule_part.options
        return solved or self.neighbours_part is not None

    @property
    def is_plain(self) -> bool:
        """Whether the method is plain autoregression."""
        one_by_one = self.decoding_part.options.get("steps") is None
        return self.drafter_part.call is NoDraft and one_by_one

    @property
    def verification(self) -> dict[str, Any]:
        """What decodes the tokens, beside networks and tree, as an identity."""
        parts = {
            "decoding": self.decoding_part,
            "rule": self.rule_part,
            "schedule": self.schedule_part,
            "neighbours": self.neighbours_part,
        }
        described: dict[str, Any] = {name: one.identity for name, one in parts.items() if one}
        return described if self.floor is None else described | {"floor": self.floor}

    @property
    def draft(self) -> str | None:
        """Where the draft is read from, `random`, or None without a network of its own."""
        path = self.drafter_part.options.get("path")
        return None if path is None else str(path)

    @property
    def measured_with(self) -> dict[str, Any]:
        """What the statistics of a draft depend on: the model, what its weights are read from, the
        draft and the sampling.
        """
        weights = fingerprint(self.network_part.identity)
        named = {"model": self.model, "weights": weights, "draft": self.draft}
        return {**named, **asdict(self.sampling)}

    @property
    def draft_depth(self) -> int:
        """Most tokens in a row that the method drafts, as its drafter declares it
        (`interfaces.drafts`) or its tree has it; 0 without a draft.

        Raises:
            TemperaError: the drafter takes no tree and declares nothing.
        """
        drafter = self.drafter_part
        depth = getattr(drafter.call, "depth", None)
        if isinstance(depth, int):
            return depth
        if depth is not None:
            return int(depth(**drafter.options))
        if drafter.takes("tree"):
            return self.tree.max_depth
        name = f"{drafter.call.__module__}.{drafter.call.__qualname__}"
        raise TemperaError(
            f"{name} does not say how deep it drafts, which the rule's schedule needs: decorate "
            "it with `@drafts` of tempera.decoding.interfaces, or choose rule=exact",
            option="drafter",
        )

    def check_draft(self, option: str = "drafter.path", *, of_the_hub: bool = True) -> None:
        """See `check_draft`."""
        check_draft(self.drafter_part, self.model, option, of_the_hub=of_the_hub)

    def draft_from(self) -> dict[str, str] | None:
        """Where the draft's network comes from: its `path`, and its `origin` in words; None of a
        method without one.
        """
        path = _draft_path(self.drafter_part)
        if path is None:
            return None
        origin = "on this machine"
        if path == RANDOM:
            origin = "random weights"
        elif not Path(path).exists():
            is_draft = "path" in self.drafter_part.options
            origin = (
                f"from the hub, commit {draft_directory(path).name}" if is_draft else "from the hub"
            )
        elif Path(path).resolve().is_relative_to(PACKAGE):
            origin = "comes with tempera"
        return {"path": path, "origin": origin}

    def captions(self) -> "CaptionCheck | None":
        """Its `check(prompts)` raises TemperaError for a prompt or caption that the model cannot
        use. It needs no weights; None for a model without it.
        """
        if self.captions_part is None:
            return None
        return self.captions_part.make_with(self._truncate)

    def tokenizer(self, dtype: torch.dtype = torch.float32) -> AnyTokenizer:
        """It maps images to codes and back: frozen, on `device`, in `dtype`; a large one is also
        read in it.
        """
        tokenizer: AnyTokenizer = self.tokenizer_part.make_with({"dtype": dtype})
        return tokenizer.to(self.placement.device).eval().requires_grad_(False)

    def image_decoder(self) -> AnyTokenizer:
        """The tokenizer that makes pictures of codes: in bfloat16 if `dtype` is, since the
        activations of a large picture take gigabytes, otherwise in float32.
        """
        dtype = self.placement.dtype if self.placement.dtype == torch.bfloat16 else torch.float32
        return self.tokenizer(dtype).to(dtype)

    def target(self) -> AnyTarget:
        """The target with its network and text encoder, which are frozen, on `device` in `dtype`
        (see `processor.arithmetic`). Its identity is that of the weights before they are rounded.
        """
        placement = self.placement
        network = self.network_part.make_with(
            {"device": placement.device, "dtype": placement.arithmetic}
        )
        identity = identity_of(network)
        layers = cast(Any, network).model.layers if placement.quantised else ()
        return self.target_part.make_with(
            {"identity": identity},
            network=placement.frozen(network, layers),
            conditioner=placement.frozen(self.text_encoder_part.make_with(self._truncate)).encode,
            sampling=self.sampling,
        )

    def discrete_target(self) -> "TransformerTarget":
        """`target`, of parts that are `discrete`."""
        return cast("TransformerTarget", self.target())

    def fast_target(self, images: int | None = None) -> AnyTarget:
        """The target with its weights packed for decoding, and its rounds compiled if they are to
        be.

        Args:
            images: how many it will draw, if that is known; see `pays`.

        Raises:
            TemperaError: also for `compile=true` with continuous tokens.
        """
        if not self.is_discrete:
            if self.compiled is True:
                raise TemperaError(
                    "compile=true is only for models with discrete tokens: leave it out."
                )
            return self.target()
        target = self.discrete_target()
        target.pack()
        tokens = None if images is None else ceil(images / self.batch_size) * target.length
        wanted = pays(target.device, tokens) if self.compiled == "auto" else self.compiled
        if wanted:
            target.compile()
        return target

    def drafter(self, target: AnyTarget) -> Drafter:
        """The drafter, with the target and the tree if it takes them, and the dtype of the target's
        weights unless it has its own.

        Raises:
            TemperaError: it drafts more tokens than an image has.
        """
        has_dtype = self.drafter_part.options.get("dtype", "") is not None
        dtype = {} if has_dtype else {"dtype": self.placement.dtype_name}
        made = self.drafter_part.make_with({"target": target, "tree": self.tree}, **dtype)
        has_window = "window" in self.drafter_part.options
        if self.is_discrete and not has_window and made.depth > target.length:
            raise TemperaError(
                f"depth={made.depth} drafts more tokens than an image of this model has "
                f"({target.length}): give a smaller depth",
                option="depth",
            )
        return made

    def rule(self) -> AnyRule | None:
        """The acceptance rule; None if the method has none. It needs no target: made before weights
        are read, it tells what is wrong in time. A relaxed rule's schedule spreads its budget over
        the depth of a draft, and is raised to `floor` if there is one. A rule with `neighbours`
        gets those of the tokenizer's codebook.

        Raises:
            TemperaError: also for a rule of the other kind of tokens, and for a rule of chains
                beside a tree that branches.
        """
        if self.rule_part is None:
            return None
        objects: dict[str, object] = {}
        if self.schedule_part is not None:
            objects["schedule"] = self._schedule(self.schedule_part)
        if self.neighbours_part is not None:
            tokenizer: Any = self.tokenizer_part.make()
            objects["neighbours"] = self.neighbours_part.make(codebook=tokenizer.codebook)
        rule = self.rule_part.make(**objects)
        self.check_rule(rule)
        return rule

    def check_rule(self, rule: object) -> None:
        """Raise TemperaError for a rule that is not for the model's tokens or the method's tree."""
        if self.is_discrete and not isinstance(rule, Rule):
            raise TemperaError(
                f"{type(rule).__name__} is a rule for continuous tokens, but model={self.model} "
                "has discrete ones: choose rule=exact, relaxed or lantern",
                option="rule",
            )
        if isinstance(rule, Rule) and rule.chains_only and self.tree.max_children > 1:
            raise TemperaError(
                f"{type(rule).__name__} takes chains, but this tree has branches: give tree=chain, "
                "or rule=exact",
                option="tree",
            )

    def _schedule(self, schedule: Part[Any]) -> object:
        """The relaxations, or prices, of a draft's depths."""
        depth = self.draft_depth
        if not depth:
            raise TemperaError(
                "the rule's schedule needs a draft, but this method drafts nothing: give depth=1 "
                "or more, choose a method with a draft, such as method=coolsd, or rule=exact."
            )
        offered = {"tree": self.tree, "measured_with": self.measured_with}
        made = schedule.make_with(offered, length=depth)
        return made if self.floor is None else floored(made, self.floor)

    def method(self, target: AnyTarget, rule: AnyRule | None) -> "Decoding":
        """What decodes the target's tokens; it takes the drafter, and the rule, if it needs one."""
        return self.decoding_part.make_with({"drafter": self.drafter(target), "rule": rule})

    def pipeline(
        self,
        target: AnyTarget,
        rule: AnyRule | None,
        image_decoder: "ImageDecoder | None" = None,
    ) -> "Pipeline":
        """A target from `fast_target` with method, image decoder and seed; the image decoder is by
        default the model's.
        """
        assert self.pipeline_part is not None
        return self.pipeline_part.make(
            target=target,
            method=self.method(target, rule),
            image_decoder=image_decoder or self.image_decoder(),
            device=self.placement.device,
        )

    def code_encoder(self, encoder: "Part[CodeEncoder]") -> "CodeEncoder":
        """What maps captions and images to codes. The target's weights are read only if it needs
        the target.
        """
        objects: dict[str, object] = {"tokenizer": self.tokenizer()}
        if encoder.takes("target"):
            objects["target"] = self.target()
        if encoder.takes("grid"):
            described: Any = self.grid_part.make() if self.grid_part else self.target()
            rows, columns = described.grid
            objects["grid"] = rows, columns
        return encoder.make(**objects)

    @contextmanager
    def sized(self) -> Iterator[tuple["Parts", list[PretrainedFiles]]]:
        """Inside the `with` block the networks of the parts that it yields have sizes and no data,
        on the meta device in the dtype that they would have; the files that they would be read from
        are listed as they are built. A trained draft has its own sizes, another one the usual.
        """
        target = self.target_part
        if target.takes("granularity"):
            target = target.having(granularity=granularity_on(self.placement.device))
        drafter = self.drafter_part
        elsewhere = self.draft is not None and not (Path(self.draft) / CONFIG).is_file()
        if elsewhere:  # not trained yet, or on the hub
            drafter = drafter.having(path=RANDOM)
        placement = Placement(META, self.placement.arithmetic, self.placement.quantised)
        with sizes_only() as files:
            if elsewhere and Repository.named(str(self.draft)):
                files.append(PretrainedFiles(str(self.draft), (WEIGHTS, PICKLE), str(self.draft)))
            sized = replace(self, target_part=target, drafter_part=drafter)
            yield replace(sized, placement=placement, compiled=False), files

    @property
    def _truncate(self) -> dict[str, bool]:
        """The option `truncate`, for parts of the model that take it."""
        return {} if self.truncate is None else {"truncate": self.truncate}


def _with_draft_dtype(cfg: DictConfig, placement: Placement) -> DictConfig:
    """The configuration with the dtype that `drafter.dtype=auto` is, which runs then record.

    Raises:
        TemperaError: this installation or this device cannot quantise a draft as `drafter.dtype`
            asks.
    """
    dtype = OmegaConf.select(cfg, "drafter.dtype")
    if dtype in get_args(WeightsDtype):
        check_quantises("drafter.dtype", dtype, placement.device)
    if dtype != "auto":
        return cfg
    decided = cfg.copy()
    OmegaConf.update(decided, "drafter.dtype", placement.draft_dtype_name)
    return decided


def check_job(cfg: DictConfig) -> None:
    """Raise TemperaError for an option of a job of a sweep that is not possible. Nothing is read,
    and the job may run on another machine.
    """
    for name, node in cfg.items_ex(resolve=False):
        if name != "hydra" and OmegaConf.is_dict(node) and "_target_" in node:
            part(node)
    if "model" in cfg:
        parts = Parts.of(cfg, elsewhere=True)
        if not parts.reads_files and cfg.get("expected_length") is None:
            parts.rule()


def check_discrete(cfg: DictConfig, what: str) -> None:
    """Raise TemperaError for a model of continuous tokens; `what` says what is for discrete ones
    alone.
    """
    if cfg.model.get("tokens", "discrete") != "discrete":
        raise TemperaError(
            f"{what}, but model={cfg.model.name} has continuous ones: choose another model; the "
            "draft of a MAR is a smaller MAR, as in drafter=mar_base."
        )


def check_draft(
    drafter: Part[Any], model: str, option: str = "drafter.path", *, of_the_hub: bool = True
) -> None:
    """Raise TemperaError if the draft should be in a directory but is not. Called before any
    weights are read.

    Args:
        drafter: makes the drafter.
        model: the model's name.
        option: with which the user can name the directory.
        of_the_hub: also download a draft of the hub.
    """
    path = drafter.options.get("path")
    if path is None or path == RANDOM:
        return
    is_here = Path(str(path)).exists()
    if not of_the_hub and not is_here and Repository.named(str(path)) is not None:
        return
    network = getattr(drafter.call, "kind", None)
    kind = f" draft={network.drafter}" if network else ""
    draft_directory(
        str(path),
        f"train a draft with `{command('train')} model={model}{kind}`, give another with "
        f"{option}=DIR or owner/name, or choose a method that needs none, such as method=sjd",
    )


def _draft_path(drafter: Part[Any]) -> str | None:
    """Where a drafter or a network in it is read from; None if it is not read."""
    for name in ("path", "directory", "weights"):
        if isinstance(path := drafter.options.get(name), str):
            return path
    inside = [value for value in drafter.options.values() if isinstance(value, Part)]
    return next(filter(None, map(_draft_path, inside)), None)


def _is_setting(name: str, value: object) -> bool:
    """Whether a value is one or a list, of an option at the top that names no file."""
    ones = value if isinstance(value, list | tuple) else [value]
    return "." not in name and name not in FILES and all(isinstance(one, ONE) for one in ones)


def _part(node: DictConfig, name: str) -> Part[Any] | None:
    """The part of this name, if there is one."""
    return part(node[name]) if node.get(name) else None


def _plain_method() -> "Method":
    """Plain autoregression, of a script without methods."""
    from tempera.evaluation.pipeline import Method
    from tempera.rules.standard import Exact

    return Method(NoDraft(), Exact())


def _drafter(cfg: DictConfig, kind: Tokens) -> Part[Drafter]:
    """The drafter's part, by default of no draft; raises TemperaError for one of the other kind of
    tokens.
    """
    if "_target_" not in (cfg.get("drafter") or {}):
        return Part(NoDraft, {}, cfg)
    made = product(cfg.drafter)
    if made is not None and made is not NoDraft:
        suited = "discrete" if issubclass(made, Drafter) else "continuous"
        if suited != kind:
            raise TemperaError(
                f"model={cfg.model.name} has {kind} tokens, but the drafter is for {suited} ones: "
                f"choose another drafter, such as {DRAFTERS_FOR[kind]}."
            )
    drafter: Part[Drafter] = part(cfg.drafter)
    return drafter


def _check_tokens(cfg: DictConfig, kind: Tokens) -> None:
    """Raise TemperaError unless method and model have the same kind of tokens; the default is
    discrete.
    """
    has_method = "_target_" in (cfg.get("drafter") or {})
    wanted = cfg.get("tokens", "discrete" if has_method else "any")
    if wanted not in (kind, "any"):
        raise TemperaError(
            f"model={cfg.model.name} has {kind} tokens, but the method is for {wanted} ones; "
            f"choose another model, or a method for {kind} tokens, such as {METHODS_FOR[kind]}.",
            option="method",
        )


def _check_weights(cfg: DictConfig) -> None:
    """Raise TemperaError for random weights of a model that is shipped with its own."""
    if cfg.family.toy and cfg.get("weights") == RANDOM:
        raise TemperaError(
            f"model={cfg.model.name} comes with its weights: leave out weights=random, which is "
            "for models with gigabytes of weights"
        )


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
