"""Where Hydra finds configurations: in conf/ and in directories of the user's own
(`--config-path`, `--config-dir`, `hydra.searchpath=`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tempera.config import resolvers  # noqa: F401  conf/ needs them
from tempera.config.nodes import plain
from tempera.errors import TemperaError
from tempera.runtime.installation import FLAGS, conf_directory


@dataclass(frozen=True)
class Directories:
    """Where configurations lie.

    Attributes:
        main: the directory of the scripts' configurations: conf/, or `--config-path`.
        further: the directory of `--config-dir`, or nothing.
        searchpath: the argument `hydra.searchpath=[…]`, or nothing.
    """

    main: Path
    further: tuple[Path, ...] = ()
    searchpath: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Directories":
        """Those of a command line.

        Raises:
            TemperaError: a configuration of `--config-dir` has the name of a shipped one, which
                Hydra would take instead.
        """
        flags, _ = get_args_parser().parse_known_args(list(arguments))
        main = Path(flags.config_path).resolve() if flags.config_path else conf_directory()
        further = (Path(flags.config_dir).resolve(),) if flags.config_dir else ()
        for root in further:
            for file in sorted(root.rglob("*.yaml")):
                if (main / file.relative_to(root)).is_file():
                    raise TemperaError(
                        f"{file} has the same name as a configuration in {main}, which takes "
                        "precedence: rename yours, and choose it by its new name"
                    )
        given = [argument for argument in arguments if argument.startswith("hydra.searchpath=")]
        return cls(main, further, tuple(given))

    @property
    def flags(self) -> tuple[str, ...]:
        """The arguments that make a command line find the same configurations."""
        shipped = self.main == conf_directory()
        main = () if shipped else ("--config-path", str(self.main))
        further = [word for root in self.further for word in ("--config-dir", str(root))]
        return *main, *further, *self.searchpath

    def use(self) -> None:
        """Let this process look there, and say so in the commands that it prints."""
        DIRECTORIES.set(self)
        FLAGS.set(self.flags)

    def loader(self) -> ConfigLoaderImpl:
        """Hydra's loader for these directories."""
        version.setbase("1.3")
        setup_globals()
        path = create_config_search_path(str(self.main))
        for root in self.further:
            path.prepend("command-line", f"file://{root}", SearchPathQuery(provider="schema"))
        return ConfigLoaderImpl(path)

    def load(self, config_name: str, arguments: Sequence[str]) -> DictConfig:
        """The composed configuration, with Hydra's own node `hydra`."""
        overrides = [*self.searchpath, *arguments]
        return self.loader().load_configuration(
            config_name, overrides, run_mode=RunMode.RUN, from_shell=False
        )

    def sets(self, config: str) -> set[str]:
        """The groups and options that a configuration such as experiment/debug sets, and those in
        its own defaults list.
        """
        found = self.loader().repository.load_config(config)
        if found is None:
            return set()
        names = set(_leaves(plain(found.config)))
        for default in found.defaults_list or ():
            if isinstance(default, GroupDefault):
                names.add(str(default.group).lstrip("/"))
            elif isinstance(default, ConfigDefault) and (path := str(default.path)) != "_self_":
                inside = f"{config.rpartition('/')[0]}/{path}"
                names |= self.sets(path[1:] if path.startswith("/") else inside)
        return names

    def groups(self) -> set[str]:
        """The names of all groups."""
        return {root.parent.name for root in self._choices()}

    def owners(self, option: str) -> list[str]:
        """The choices, such as `rule=relaxed`, that add an option."""
        return [
            f"{file.parent.name}={file.stem}"
            for file in self._choices()
            if file.parent.name != "experiment" and _adds(file, file.parent.name, option)
        ]

    def adds(self, option: str) -> bool:
        """Whether a choice of model, method or data adds an option, or a file that one is based on
        does.
        """
        for root in (self.main, *self.further):
            for file in root.glob("*/**/*.yaml"):
                group = file.relative_to(root).parts[0]
                if group not in ("experiment", "paths", "local") and _adds(file, group, option):
                    return True
        return False

    def _choices(self) -> list[Path]:
        roots = (self.main, *self.further)
        return sorted(file for root in roots for file in root.glob("*/*.yaml"))


def _adds(file: Path, group: str, option: str) -> bool:
    """Whether a file of a group sets an option of its group, or one at the top."""
    text = file.read_text(encoding="utf-8")
    name = re.escape(option.removeprefix(f"{group}."))
    if "# @package _global_" in text and option.startswith(f"{group}."):
        return bool(re.search(rf"(?m)^{group}:\n(?:[ #].*\n)*?  {name}:", text))
    is_own = "# @package _global_" in text or option.startswith(f"{group}.")
    return is_own and bool(re.search(f"(?m)^{name}:", text))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of values in nested nodes, such as `speed.prompts`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


SHIPPED = Directories(conf_directory())
DIRECTORIES: ContextVar[Directories] = ContextVar("directories", default=SHIPPED)
"""Those of the command line that is running."""


def of_family(family: str, group: str) -> str:
    """`${of_family:FAMILY,GROUP}`, in a script's defaults list: the choice of a family of models in
    a group, which stands in conf/family/ or in a directory of the user's own.

    Raises:
        TemperaError: the family has none.
    """
    if choice := _family_options(family).get(group):
        return str(choice)
    raise TemperaError(
        f"family={family} has no {group}: give one in family/{family}.yaml, or {group}=CHOICE",
        option="family",
    )


def _family_options(name: str) -> Mapping[str, Any]:
    """What the configuration of a family of models says. In another process of a sweep, Hydra's
    application has the directories.
    """
    loaders: list[Any] = [DIRECTORIES.get().loader()]
    if GlobalHydra.instance().is_initialized():
        loaders.append(GlobalHydra.instance().config_loader())
    for loader in loaders:
        if found := loader.repository.load_config(f"family/{name}"):
            return plain(found.config)
    return {}


def summaries(group: str) -> str:
    """`${summaries:GROUP}`, in a script's help: the choices of a group, each with the first
    sentence of the comment that its file begins with.
    """
    directories = DIRECTORIES.get()
    roots = [*directories.further, directories.main]
    files = {file.stem: file for root in roots for file in (root / group).glob("*.yaml")}
    lines = []
    for name, file in sorted(files.items()):
        words = []
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                words.append(line.removeprefix("#").strip())
        comment = re.match(r".*?\.(?= [A-Z]|$)|.*", " ".join(words))
        lines.append(f"{name:<15} {comment[0] if comment else ''}".rstrip())
    return "\n".join(lines).replace("$", "$$")  # Hydra's help is a template


for _resolver in (of_family, summaries):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
