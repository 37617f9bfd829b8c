"""The script of mutation testing, tests/support/mutation.py: what it changes and what it leaves."""

import pytest

pytestmark = pytest.mark.slow

CODE = """
from typing import Any


def half(x: int | None, names: dict[str, Any]) -> float | None:
    if x is None:
        raise ValueError(f"{x + 1} is not a number")
    return x / 2


@dataclass(frozen=True)
class Found:
    def first(self) -> Any:
        if found := self.all:
            return zip(found, found, strict=True)


def drawn(count: int, seed: int = 7, *, size: int = 5):
    return track(bar(count, disable=size < 3), linewidth=2)


def thrown(*, seed: int = 9):
    return seed
"""


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory):
    """All mutations of the code."""
    import mutation
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    folder = tmp_path_factory.mktemp("mutation")
    (folder / "module.py").write_text(CODE)
    with use_db(folder / "session.sqlite", WorkDB.Mode.create) as db:
        init([folder / "module.py"], db, {})
        return mutation, db.work_items


def test_one_mutation_a_place_by_the_seed(items) -> None:
    mutation, found = items
    chosen = mutation.one_a_place(found, 1)
    places = [item.mutations[0].start_pos for item in chosen]
    assert len(set(places)) == len(places) > 4
    names = [[item.mutations[0].operator_name for item in mutation.one_a_place(found, seed)]
             for seed in (1, 1, 2)]  # fmt: skip
    assert names[0] == names[1] != names[2]
    assert not any("Div_Bit" in name for name in names[0])


def test_only_what_is_computed_is_mutated(items) -> None:
    mutation, found = items
    shown = set()
    for item in found:
        (spec,) = item.mutations
        if mutation.plausible(spec) and mutation.mutated(spec) is not None:
            shown.add(CODE.splitlines()[spec.start_pos[0] - 1].strip())
    defined = "def drawn(count: int, seed: int = 7, *, size: int = 5):"
    assert shown == {"if x is None:", "return x / 2", "@dataclass(frozen=True)", defined}
    lines = CODE.splitlines()
    default = 1 + lines.index(defined), defined.index("7")
    seeds = [item.mutations[0] for item in found if item.mutations[0].start_pos == default]
    assert seeds and all(mutation.mutated(spec) is None for spec in seeds)


def test_tests_of_a_module() -> None:
    import mutation

    assert mutation.tests_of("rules/standard") == [
        "rules/test_standard.py",
        "rules/test_standard_block.py",
        "exactness/test_laws.py",
    ]
    assert mutation.tests_of("metrics/acceptance") == [
        "metrics/test_acceptance.py",
        "evaluation/test_run.py",
    ]
    assert mutation.tests_of("decoding/loop")[:2] == [
        "decoding/test_loop.py",
        "decoding/test_round_graph.py",
    ]
    with pytest.raises(SystemExit, match="there is no module rules/none"):
        list(mutation.module_paths(["rules/none"]))
