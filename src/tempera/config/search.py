"""Where Hydra finds configurations: in conf/ and in directories of the user's own
(`--config-path`, `--config-dir`, `hydra.searchpath=`), and what a script can choose there.
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
from hydra.plugins.config_source import ConfigResult
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
        for place in further:
            for file in sorted(place.rglob("*.yaml")):
                if (main / file.relative_to(place)).is_file():
                    raise TemperaError(
                        f"{file} has the name of a configuration in {main}, which comes first: "
                        "rename yours, and choose it by its new name"
                    )
        given = [argument for argument in arguments if argument.startswith("hydra.searchpath=")]
        return cls(main, further, tuple(given))

    @property
    def flags(self) -> tuple[str, ...]:
        """The arguments that make a command line find the same configurations."""
        shipped = self.main == conf_directory()
        main = () if shipped else ("--config-path", str(self.main))
        further = [word for place in self.further for word in ("--config-dir", str(place))]
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
        for place in self.further:
            path.prepend("command-line", f"file://{place}", SearchPathQuery(provider="schema"))
        return ConfigLoaderImpl(path)

    def load(self, config_name: str, arguments: Sequence[str]) -> DictConfig:
        """The composed configuration, with Hydra's own node `hydra`."""
        overrides = [*self.searchpath, *arguments]
        return self.loader().load_configuration(
            config_name, overrides, run_mode=RunMode.RUN, from_shell=False
        )


SHIPPED = Directories(conf_directory())
DIRECTORIES: ContextVar[Directories] = ContextVar("directories", default=SHIPPED)
"""Those of the command line that is running."""


class Catalogue:
    """The configurations that a script can choose, as Hydra reads them.

    Attributes:
        files: by their paths, such as `eval` and `rule/relaxed`.
        groups: the choices of each group.
    """

    def __init__(self, config_name: str) -> None:
        directories = DIRECTORIES.get()
        self._loader = directories.loader()
        self._overrides = list(directories.searchpath)
        self.files: dict[str, ConfigResult] = {}
        self.groups: dict[str, list[str]] = {}
        self._read(config_name)

    def _read(self, path: str) -> None:
        found = self._loader.repository.load_config(path)
        if path in self.files or found is None:
            return
        self.files[path] = found
        for group, choice in self._defaults(path):
            if group and group not in self.groups:
                choices = self._loader.get_group_options(group, overrides=self._overrides)
                self.groups[group] = choices
                for name in choices:
                    self._read(f"{group}/{name}")
            elif not group:
                self._read(choice)

    def _defaults(self, path: str) -> Iterator[tuple[str, str]]:
        """(group, choice) of a defaults list; a configuration that it includes has no group."""
        own_group = path.rpartition("/")[0]
        for default in self.files[path].defaults_list or ():
            match default:
                case GroupDefault(group=str(group)):
                    name = group.lstrip("/")
                    if not name.startswith("hydra/"):
                        yield name, str(default.value)
                case ConfigDefault(path=str(included)) if included != "_self_":
                    inside = own_group and not included.startswith("/")
                    yield "", f"{own_group}/{included}" if inside else included.lstrip("/")

    def owners(self, option: str) -> list[tuple[str, str]]:
        """(group, choice) of the choices that add an option, which may be one of a group's, such as
        `metrics.names`.
        """
        return [
            (group, choice)
            for group, choices in sorted(self.groups.items())
            for choice in choices
            if self._adds(group, choice, option)
        ]

    def _adds(self, group: str, choice: str, option: str) -> bool:
        """Whether a choice, or a configuration that it includes, has an option."""
        for path in self._reached(f"{group}/{choice}", included=True):
            file = self.files[path]
            package = "" if file.header.get("package") == "_global_" else f"{group}."
            is_inside = option.startswith(package)
            if is_inside and option.removeprefix(package) in option_names(plain(file.config)):
                return True
        return False

    def _reached(self, path: str, *, included: bool) -> set[str]:
        """A configuration with those that it includes, or else with those of its choices, and so
        on.
        """
        reached = set[str]()
        waiting = [path]
        while waiting:
            path = waiting.pop()
            if path in reached or path not in self.files:
                continue
            reached.add(path)
            for group, choice in self._defaults(path):
                if included and not group:
                    waiting.append(choice)
                elif not included and group:
                    waiting.append(f"{group}/{choice}")
        return reached

    def methods(self, owners: Sequence[tuple[str, str]]) -> list[str]:
        """The methods that one of these choices is part of, by itself or by its parts."""
        paths = {f"{group}/{choice}" for group, choice in owners}
        return [
            name
            for name in self.groups.get("method", ())
            if paths & self._reached(f"method/{name}", included=False)
        ]


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
    places = [*directories.further, directories.main]
    files = {file.stem: file for place in places for file in (place / group).glob("*.yaml")}
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


def option_names(options: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all values and nodes."""
    for key, value in options.items():
        if key != "_target_":
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from option_names(value, f"{prefix}{key}.")


for _resolver in (of_family, summaries):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
