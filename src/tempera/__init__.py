"""tempera: fast autoregressive image generation by speculative decoding.

>>> import tempera
>>> result = tempera.generate("a large green star", method="coolsd", delta=2, seed=0)
>>> result.images[0].size
(48, 48)

`generate` and `load` take any model and method of `conf/`. A loop with parts of your own is built
from `decode`, `Tree`, `RandomStreams`, the rules, and your own `Target`, `Drafter` or `TokenRule`;
`exactness.check` tests a rule against the target's law:

>>> rule = tempera.Relaxed(tempera.schedules.uniform(2.0, 3))
>>> print(tempera.exactness.check(rule, tempera.Tree.chain(3), rows=20_000))
DIFFERS: p = 0 (rejects below 0.0001), TV 0.27... where chance alone gives 0.01..., 20000 rows, ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tempera import exactness as exactness
    from tempera.api import (
        LoadedModel as LoadedModel,
    )
    from tempera.api import (
        Result as Result,
    )
    from tempera.api import (
        generate as generate,
    )
    from tempera.api import (
        load as load,
    )
    from tempera.decoding.interfaces import (
        Draft as Draft,
    )
    from tempera.decoding.interfaces import (
        Drafter as Drafter,
    )
    from tempera.decoding.interfaces import (
        Rule as Rule,
    )
    from tempera.decoding.interfaces import (
        Target as Target,
    )
    from tempera.decoding.loop import decode as decode
    from tempera.decoding.loop import rounds as rounds
    from tempera.decoding.probabilities import Sampling as Sampling
    from tempera.decoding.random_streams import RandomStreams as RandomStreams
    from tempera.decoding.trace import Trace as Trace
    from tempera.decoding.trees import Tree as Tree
    from tempera.decoding.verification import TokenRule as TokenRule
    from tempera.drafters.none import NoDraft as NoDraft
    from tempera.errors import TemperaError as TemperaError
    from tempera.rules import schedules as schedules
    from tempera.rules.standard import Exact as Exact
    from tempera.rules.standard import Relaxed as Relaxed
    from tempera.wrapped.accelerated import accelerate as accelerate

_HOME = {
    "Draft": "tempera.decoding.interfaces",
    "Drafter": "tempera.decoding.interfaces",
    "Exact": "tempera.rules.standard",
    "LoadedModel": "tempera.api",
    "NoDraft": "tempera.drafters.none",
    "RandomStreams": "tempera.decoding.random_streams",
    "Relaxed": "tempera.rules.standard",
    "Result": "tempera.api",
    "Rule": "tempera.decoding.interfaces",
    "Sampling": "tempera.decoding.probabilities",
    "Target": "tempera.decoding.interfaces",
    "TemperaError": "tempera.errors",
    "accelerate": "tempera.wrapped.accelerated",
    "TokenRule": "tempera.decoding.verification",
    "Trace": "tempera.decoding.trace",
    "Tree": "tempera.decoding.trees",
    "decode": "tempera.decoding.loop",
    "exactness": "tempera.exactness",
    "generate": "tempera.api",
    "load": "tempera.api",
    "rounds": "tempera.decoding.loop",
    "schedules": "tempera.rules.schedules",
}
"""Where each name lives; imported when it is first used, so that `import tempera` is quick."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("tempera.runtime.installation").installed_version()
    if name not in _HOME:
        raise AttributeError(f"module 'tempera' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
