"""Hostile values for every option of every script. The options are those of the composed
configurations, so a new one is among them by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hostile_process import Case, Setup, nothing
from omegaconf import DictConfig, ListConfig, OmegaConf
from paths import CONF

from tempera.config.compose import composed, quoted

VALUES = {
    "null": "null",
    "word": "abc",
    "nan": "nan",
    "inf": "inf",
    "-inf": "-inf",
    "negative": "-1",
    "zero": "0",
    "fraction": "0.5",
    "huge": "1000000000000",
    "immense": "1" + 30 * "0",
    "empty": "",
    "list": "[1,2]",
    "nested": "[[a]]",
    "dict": "{a:1}",
    "number": "2024",
    "true": "true",
    "surrogate": "\udcff",
    "nul": quoted("a\0b"),
    "newline": quoted("a\nb"),
    "signs": quoted("a=b,~c/~d"),
    "brackets": quoted("[]{}%s%(x)d"),
    "missing": "???",
    "interpolation": "${nowhere}",
    "open": "[1,",
    "long": 5000 * "x",
    "unicode": quoted("\u202e\u0000é𝕏".replace("\0", "")),
}
"""By name, texts behind `option=`."""
REMOVED = "removed"
"""The option taken away, `~option`."""
DEEPER = "deeper"
"""An option below one that is a value."""


ODD = (
    *("=", "=1", "a", "@=1", "~", "+", "+a=", "a.b.c=1", "~nothing", "hydra=1"),
    *("hydra.run.dir=", "hydra.run.dir=null", "hydra/launcher=x", "-m", "--config-name=x"),
    *("--config-dir=x", "--config-path=x", "--cfg=x", "--info=x", "--nonsense", "--resolve"),
    *("--experimental-rerun=x", "--package=x", "--shell-completion", "--cfg", "-mr"),
    *("\udcff=1", "a=1=2", "'", '"'),
)
"""Arguments that are no options."""


@dataclass(frozen=True)
class Context:
    """A command line on which options are tried: quick, or `refused` for want of a file, so that
    the sentence may be about that.
    """

    script: str
    config: str
    arguments: tuple[str, ...]
    setup: Setup = nothing
    refused: bool = False


def a_prompt_file(directory: Path) -> None:
    (directory / "prompts.txt").write_text("a red ring\na blue star\n", encoding="utf-8")


EVAL = ("limit=1", "speed.prompts=0", "metrics=none", "tracking=none", "batch_size=1")
TRAIN = ("tracking=none", "steps=1", "batch_size=1", "holdout=1", "decodes=0", "ttt_steps=0")
BENCH = ("batch_sizes=[1]", "repeats=1", "trees=[]", "bandwidth=9")
TUNE = (
    *("limit=1", "images=1", "timed=1", "runs=1", "repeats=1", "metrics=none", "tracking=none"),
    *("depths=[2]", "trees=[]", "prices=[]", "deltas=[]"),
)
CONTINUOUS = ("model=shapes_mar", "data=shape_classes", "denoising_steps=2")


def contexts() -> list[Context]:
    """The scripts with one command line for every set of options; the first ones are the usual
    ones.
    """
    methods = [path.stem for path in sorted((CONF / "method").glob("*.yaml"))]
    methods.remove("auto")  # stands for another one's options
    found = [
        Context("eval/run.py", "eval", EVAL),
        Context("eval/report.py", "report", ("runs=.",), refused=True),
        Context("eval/bench.py", "bench", BENCH),
        Context("eval/calibrate.py", "calibrate", ("limit=1", "batch_size=1")),
        Context("eval/tune.py", "tune", TUNE),
        Context("train_draft/main.py", "train_draft", TRAIN),
        Context("train_draft/prepare.py", "prepare", ("source.count=2", "shard_size=2")),
        Context("train_draft/build_shapes.py", "build_shapes", ("stages=[]",)),
    ]
    for method in methods:
        continuous = CONTINUOUS if method.startswith("cspd") else ()
        options = (*EVAL, f"method={method}", *continuous)
        found.append(Context("eval/run.py", "eval", options))
    found += [
        Context("eval/run.py", "eval", (*EVAL, "method=ar", *CONTINUOUS)),
        Context("eval/run.py", "eval", (*EVAL, "data=file", "path=prompts.txt"), a_prompt_file),
        Context("eval/run.py", "eval", (*EVAL, "metrics=real")),
        Context("eval/run.py", "eval", (*EVAL[:2], "batch_size=1", "tracking=none")),
        Context("eval/run.py", "eval", (*EVAL[:3], "batch_size=1")),
        Context("train_draft/main.py", "train_draft", (*TRAIN, "loss=acceptance")),
        Context("train_draft/main.py", "train_draft", (*TRAIN, "draft=parallel")),
        Context(
            "train_draft/main.py",
            "train_draft",
            (*TRAIN, "train_data=generated", "source.count=20", "train_data.limit=20"),
        ),
        Context("train_draft/main.py", "train_draft", (*TRAIN, "train_data=shards"), refused=True),
        *(
            Context(
                "train_draft/prepare.py",
                "prepare",
                (f"source={path.stem}", "source.path=here"),
                refused=True,
            )
            for path in sorted((CONF / "source").glob("*.yaml"))
            if "path:" in path.read_text(encoding="utf-8")
        ),
        Context(
            "train_draft/prepare.py",
            "prepare",
            ("source.count=2", "shard_size=2", "encoder=target"),
        ),
    ]
    return found


def options(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every option of a configuration with its default, dotted, those that hold others as well."""
    for key in cfg:
        if str(key) == "hydra":
            continue
        name = f"{prefix}{key}"
        value = None if OmegaConf.is_missing(cfg, key) else cfg._get_node(key)
        plain = not isinstance(value, DictConfig | ListConfig)
        yield name, value._value() if value is not None and plain else value
        if (
            isinstance(value, DictConfig)
            and value._is_none() is False
            and isinstance(value._value(), dict)
        ):
            yield from options(value, f"{name}.")


def cases(lines: Sequence[Context] | None = None) -> Iterator[Case]:
    """Every option of every script, or of some command lines, with every value. An option of many
    command lines is tried on the first.
    """
    seen = set()
    for context in contexts() if lines is None else lines:
        cfg = composed(context.config, [*context.arguments])
        groups = [group for group in _groups(context.config) if "/" not in group]
        tried = [*options(cfg), *((group, "group") for group in groups)]
        for name, default in tried:
            if (context.script, name) in seen:
                continue
            seen.add((context.script, name))
            reads = f"${{suited:{name.rpartition('.')[2]}}}"  # an option that follows this one
            takers = [taker for taker, value in tried if value == reads]
            for kind, value in VALUES.items():
                case = _case(context, name, default, kind, f"{name}={value}")
                yield replace(case, names=(*case.names, *takers)) if case.names else case
            yield _case(context, name, default, REMOVED, f"~{name}")
            yield _case(context, name, default, DEEPER, f"+{name}.deeper=1")
        for line in ODD:
            if (context.script, line) not in seen:
                seen.add((context.script, line))
                yield Case(context.script, (*context.arguments, line), (), context.setup)


def _groups(config: str) -> list[str]:
    return [
        key.split()[-1].split("@")[0]
        for entry in OmegaConf.load(CONF / f"{config}.yaml").get("defaults", [])
        if isinstance(entry, DictConfig)
        for key in map(str, entry)
        if not key.startswith("override")
    ]


def _case(context: Context, name: str, default: object, kind: str, argument: str) -> Case:
    head, _, tail = name.rpartition(".")
    names = (name, tail, *([] if not head else [head.split(".")[0]]))
    value = argument.partition("=")[2]
    return Case(
        context.script,
        (*context.arguments, argument),
        ()
        if context.refused
        else (*names, *([value.strip("${}'\"")[:40]] if len(value) > 3 else [])),
        context.setup,
        endless=kind in ("huge", "immense", "number")
        or name == "compile"
        or context.script == "eval/tune.py",  # it takes half a minute where nothing is wrong
    )
