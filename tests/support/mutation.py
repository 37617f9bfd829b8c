"""Mutation testing with cosmic-ray: change one operator, number or condition at a time, and see
whether a test of the changed module fails.

    python tests/support/mutation.py [--sample N] [--seed S] [--fast] [MODULE ...]

A module is `rules/standard`, or a package such as `rules`; all of MODULES unless given. At each
place of the sources one of cosmic-ray's mutations is drawn, by the seed; `--sample N` takes N
places. What changes only annotations, messages, guards such as `strict=`, the look of figures and
progress bars, or the default of a seed is left out. A mutant is shown to the fast tests of its
module and, where they miss it, to the slow ones, unless `--fast`. Results are kept in
outputs/mutation/, a session of cosmic-ray (cr-report reads it): the same command goes on.

A survivor that survivors.toml explains does not count. Ends with status 1 if another one survives.
"""

import argparse
import ast
import difflib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from fault_runner import FAST, ROOT, SLOW, copy_sources, seen_by, warm
from survivors import entries, faults, reason
from tested_in import test_files

PACKAGE = ROOT / "src" / "tempera"
MODULES = ("decoding", "rules", "drafters", "exactness", "training/losses", "metrics")
LAWS = "exactness/test_laws.py"
MORE = {
    "decoding/interfaces": ("decoding/test_verification.py",),
    "decoding/loop": ("decoding/test_round_graph.py",),
    "decoding": ("decoding/test_loop.py", "decoding/test_diagnostics.py", LAWS),
    "rules": (LAWS,),
    "drafters/cache_slots": ("drafters/test_eagle_dynamic.py",),
    "drafters": ("drafters/test_jacobi.py", "decoding/test_round_graph.py", LAWS),
    "exactness": (LAWS,),
    "training": ("training/test_trainer.py",),
    "metrics": ("evaluation/test_run.py",),
}
"""Tests of a module beside its own, then those that see faults of any module of a package."""
SECONDS = {FAST: 150, SLOW: 900}
"""Processor time that the tests of a mutant may take."""
SILENT = ("override", "torch.inference_mode()", "torch.no_grad()", "cache", "runtime_checkable")
"""Decorators that change no result."""
GUARDS = ("frozen", "strict")
"""Arguments that only refuse what the code never does."""
LOOK = ("alpha", "disable", "dpi", "figsize", "fontsize", "linewidth", "markersize", "transient")
"""Arguments of figures and progress bars that change how they look and not what they show."""
KINDS = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitAnd", "BitOr", "BitXor"},
    {"Is", "IsNot"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"USub", "UAdd"},
)
"""Operators are replaced by others of their kind; any test would see `a / b` become `a | b`."""


def tests_of(module: str) -> list[str]:
    """The test files of a module such as `rules/standard`, its own first."""
    more = [*MORE.get(module, ()), *MORE.get(module.split("/")[0], ())]
    return list(dict.fromkeys([*test_files(module), *more]))


def module_paths(names: Sequence[str]) -> Iterator[Path]:
    """The files of modules and packages; raises SystemExit for an unknown one."""
    for name in names:
        place = PACKAGE / name
        found = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        if not all(path.is_file() for path in found):
            sys.exit(f"there is no module {name}")
        yield from (path for path in found if path.name != "__init__.py")


class _Substance(ast.NodeTransformer):
    """Takes out of a module what no result depends on: annotations, messages, docstrings, the
    guards `dataclass(frozen=…)` and `zip(strict=…)`, the look of figures, and default seeds, since
    one seed is as good as another.
    """

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        last = (node.posonlyargs + node.args)[-len(node.defaults) :]
        node.defaults = [
            ast.Constant(None) if name.arg == "seed" else default
            for name, default in zip(last, node.defaults, strict=False)
        ]
        node.kw_defaults = [
            ast.Constant(None) if name.arg == "seed" else default
            for name, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)
        ]
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        node.decorator_list = [one for one in node.decorator_list if ast.unparse(one) not in SILENT]
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = [one for one in node.decorator_list if ast.unparse(one) not in SILENT]
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        node.keywords = [one for one in node.keywords if one.arg not in GUARDS + LOOK]
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        return ast.Raise(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)


def substance(code: str) -> str:
    """What a module computes."""
    return ast.dump(_Substance().visit(ast.parse(code)))


def plausible(spec: MutationSpec) -> bool:
    """Whether a mutation replaces an operator by one of its kind, or is no such replacement."""
    parts = spec.operator_name.split("_")
    operators = set(parts[1:]) - {"Delete"}
    return len(operators) < 2 or any(operators <= kind for kind in KINDS)


def one_a_place(items: Sequence[WorkItem], seed: int) -> list[WorkItem]:
    """At each place of the sources one of its mutations, in random order."""
    draws = random.Random(seed)
    places: dict[tuple[str, tuple[int, int]], list[WorkItem]] = {}
    for item in sorted(items, key=_key):
        (spec,) = item.mutations
        if not plausible(spec):
            continue
        places.setdefault((str(spec.module_path), spec.start_pos), []).append(item)
    chosen = [draws.choice(found) for found in places.values()]
    draws.shuffle(chosen)
    return chosen


def _key(item: WorkItem) -> tuple[str, str, int]:
    (spec,) = item.mutations
    return str(spec.module_path), spec.operator_name, spec.occurrence


def mutated(spec: MutationSpec) -> tuple[str, str] | None:
    """A module's code and its mutant; None where they compute the same or the mutant is no code."""
    code = (ROOT / spec.module_path).read_text(encoding="utf-8")
    mutant = mutate_code(code, get_operator(spec.operator_name)(), spec.occurrence)
    with suppress(SyntaxError):  # `not name := value`
        if mutant is not None and substance(mutant) != substance(code):
            return code, mutant
    return None


def shown(module: str, code: str, mutant: str, sources: Path, marks: Sequence[str]) -> str | None:
    """The first test that sees the mutant in the copy of the sources."""
    file = sources / "tempera" / f"{module}.py"
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()
    file.write_text(mutant, encoding="utf-8")
    try:
        seen = (seen_by(tests_of(module), sources, mark, SECONDS[mark]) for mark in marks)
        return next(filter(None, seen), None)
    finally:
        file.write_text(code, encoding="utf-8")


def changed_lines(code: str, mutant: str) -> str:
    """The lines that differ, as `- old` and `+ new`."""
    lines = difflib.unified_diff(code.splitlines(), mutant.splitlines(), n=0, lineterm="")
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "+-")


def run(items: Sequence[WorkItem], db: WorkDB, count: int | None, marks: Sequence[str]) -> None:
    """Show the first `count` mutants that compute something else to the tests, or all."""
    results, left = dict(db.results), count
    warm()
    with tempfile.TemporaryDirectory() as directory:
        sources = copy_sources(Path(directory))
        for item in items:
            if left == 0:
                break
            (spec,) = item.mutations
            if (pair := mutated(spec)) is None:
                continue
            left = None if left is None else left - 1
            if item.job_id in results:
                continue
            module = str(spec.module_path.relative_to("src/tempera").with_suffix(""))
            seen = shown(module, *pair, sources, marks)
            outcome = TestOutcome.KILLED if seen else TestOutcome.SURVIVED
            diff = changed_lines(*pair)
            db.set_result(item.job_id, WorkResult(WorkerOutcome.NORMAL, seen, outcome, diff))
            place = f"{module}:{spec.start_pos[0]}"
            print(f"{outcome.value:8} {place} {spec.operator_name}: {seen}", flush=True)


def report(items: Sequence[WorkItem], db: WorkDB) -> int:
    """Print what was killed by package and every survivor; returns how many are not explained."""
    modules = {item.job_id: item.mutations[0].module_path for item in items}
    total: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    open_ones = 0
    for job, result in db.results:
        module = str(modules[job].relative_to("src/tempera").with_suffix(""))
        package = module.split("/")[0]
        total[package] += 1
        killed[package] += result.is_killed
        if not result.is_killed:
            why = reason(module, result.diff or "")
            open_ones += why is None
            print(f"\n{module}: {why or 'NOT EXPLAINED'}\n{result.diff}")
    for package in total:
        print(f"{package:12} {killed[package]:5} of {total[package]:5} killed")
    print(f"{'all':12} {killed.total():5} of {total.total():5} killed, {open_ones} not explained")
    return open_ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=MODULES, help="modules or packages")
    parser.add_argument("--sample", type=int, help="how many places to mutate; all unless given")
    parser.add_argument("--seed", type=int, default=0, help="draws places and mutations")
    parser.add_argument("--fast", action="store_true", help="leave the slow tests out")
    options = parser.parse_args()
    os.chdir(ROOT)
    if wrong := [fault for entry in entries() for fault in faults(entry, PACKAGE)]:
        sys.exit("survivors.toml: " + "; ".join(wrong))
    paths = [path.relative_to(ROOT) for path in module_paths(options.modules)]
    names = "-".join(name.replace("/", "_") for name in options.modules)
    session = ROOT / "outputs" / "mutation" / f"{names}-{options.seed}.sqlite"
    session.parent.mkdir(parents=True, exist_ok=True)
    with use_db(session, WorkDB.Mode.create) as db:
        if not db.num_work_items:
            init(paths, db, {})
        items = db.work_items
        chosen = one_a_place(items, options.seed)
        run(chosen, db, options.sample, [FAST] if options.fast else [FAST, SLOW])
        sys.exit(1 if report(items, db) else 0)


if __name__ == "__main__":
    main()
