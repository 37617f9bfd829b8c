"""All numbers of the shipped model on README and these pages, from runs to text.

    python docs/results/make.py runs             # each row once: 1 to 10 minutes on one core
    python docs/results/make.py speed SESSION    # each kind of round, in turn with plain AR
    python docs/results/make.py study            # relaxations at equal length: hours
    python docs/results/make.py pages            # tables, sentences and pareto.png

The first three skip what is done and write results.json, which is committed; `pages` reads nothing
else. SESSION is a name such as 2026-11-25: a session times every kind of round once, on
one core. Acceptance and quality do not depend on the machine's load, but times do.
"""

import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILE = HERE / "results.json"
QUOTES = (HERE / "quotes.txt").read_text(encoding="utf-8").splitlines()
"""Sentences of the pages, with the row and the quantity in place of each number."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBER = r"([+−-]?\d+(?:\.\d+)?%?|infinite)"
ROUNDS = [  # rows by the kind of their rounds; the first of each kind is timed
    ["ar"],
    ["eagle", "uniform_rsd delta=1.5", "uniform_rsd delta=2", "uniform_rsd delta=3",
     "coolsd delta=1.1", "coolsd delta=1.5", "coolsd delta=2", "coolsd delta=3",
     "coolsd floor=1 delta=1.1", "coolsd floor=1 delta=1.5", "coolsd floor=1 delta=2",
     "coolsd floor=1 delta=3"],
    ["optimal_rsd price=1", "optimal_rsd schedule=optimal expected_length=3.8"],
    ["parallel", "coolsd drafter=parallel floor=1 delta=2",
     "coolsd drafter=parallel floor=1 delta=3"],
    ["mar ar", "mar ar last_noise=true"],  # of shapes_mar, with continuous tokens
    *([row] for row in (
        "block", "block drafter=parallel", "independent", "eagle tree=mc_sim_7b_63", "eagle2",
        "lantern", "lanternpp", "jacobi", "sjd", "scd", "sjd_pac", "gsd", "mar ar steps=18",
        "mar ar steps=9", "mar ar steps=6", "mar cspd gamma=4", "mar cspd_published gamma=4",
        "mar cspd_published gamma=8", "mar cspd_exact gamma=2", "mar cspd_exact gamma=4",
        "mar cspd_exact gamma=8",
    )),
]  # fmt: skip
KIND = {row: kind[0] for kind in ROUNDS for row in kind}
PLAIN = ["ar", "mar ar"]
REAL = ["eagle", "parallel", "lantern"]
"""Kinds of rounds that are also timed on LlamaGen-XL."""
SAME_ON_XL = {"block": "eagle", "optimal_rsd price=1": "eagle",
              "block drafter=parallel": "parallel",
              "eagle tree=mc_sim_7b_63": "lantern"}  # fmt: skip
"""Kinds that differ in verification only, which takes hardly any time there."""
METRICS = ["accepted_length", "fid", "kid", "clip_score", "attribute_accuracy", "tv", "tv_bound",
           "kl_per_token", "top1", "top10", "entropy", "shape_accuracy",
           "colour_accuracy"]  # fmt: skip
PAIRED = ["attribute_accuracy", "shape_accuracy", "colour_accuracy", "clip_score"]
QUALITY = ["limit=512", "speed.prompts=0"]
SPEED = ["limit=12", "speed.prompts=12", "metrics=none", "diagnostics=false"]
BENCH = ["eval/bench.py", "model=llamagen_xl_stage1", "weights=random", "dtype=float32",
         "batch_sizes=[1]", "repeats=5"]  # fmt: skip
STUDY = ["experiment=study", "limit=2048", "seed=0,1", "matching.prompts=256"]
REPORTED = {"length, evaluation": "length", "TV bound": "tv", "KL bound per token": "kl",
            "FID ↓": "fid", "CLIP score ↑": "clip", "attribute accuracy ↑": "attributes",
            "shape accuracy ↑": "shapes", "colour accuracy ↑": "colours"}  # fmt: skip
"""Columns of the study's tables whose numbers are quoted."""
BESIDE = {"length": "accepted length", "TV bound": "TV bound ↓", "KL bound": "KL bound per token ↓"}
LOST = [*REPORTED][3:]


class Interval(NamedTuple):
    """A value and its 95% interval; `:.2f` shows the value, and `:.2f±` the interval beneath it."""

    value: float
    low: float
    high: float

    @property
    def loss(self) -> "Interval":
        """How much smaller a difference is than 0."""
        return Interval(-self.value, -self.high, -self.low)

    def __format__(self, spec: str) -> str:
        digits, both, _ = spec.partition("±")
        if self.value == float("inf"):
            return "infinite"
        texts = [format(one, digits) for one in self]
        if both and texts[1] != texts[2]:
            return "{}<br><small>{} … {}</small>".format(*texts)
        return texts[0]


def read() -> dict[str, Any]:
    """The content of results.json."""
    empty: dict[str, Any] = {"rows": {}, "sessions": {}}
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else empty


def write(results: dict[str, Any]) -> None:
    """Write results.json, a line for each row and each timing."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    FILE.write_text(text + "\n", encoding="utf-8")


def start(*command: str) -> None:
    """Run a script of the repository with this Python."""
    print("python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


def choices(row: str) -> list[str]:
    """A row's experiment, and its options."""
    method = row.removeprefix("mar ")
    experiment = "frontier" if row == method else "frontier_continuous"
    return [experiment, *f"method={method}".split(" ")]


def evaluate(row: str, *more: str) -> None:
    """Run a row."""
    experiment, *options = choices(row)
    start("eval/run.py", f"experiment={experiment}", "tracking=none", *more, *options)


def metrics(row: str) -> Path:
    """The file that a finished run of the row leaves."""
    experiment, *options = choices(row)
    return ROOT / "outputs" / experiment / ",".join(sorted([*options, *QUALITY])) / "metrics.json"


def runs() -> None:
    """Decode and score every row that is not done; if interrupted, collect those that are."""
    if not (ROOT / "outputs/calibration/shapes.safetensors").exists():
        start("eval/calibrate.py")
    try:
        for row in KIND:
            if not metrics(row).exists():
                evaluate(row, *QUALITY, "batch_size=64")
    finally:
        collect()


def collect() -> None:
    """Write the finished rows, with their differences from plain autoregression by prompt."""
    from tempera.reporting import baseline
    from tempera.reporting.collect import read_run

    done = {row: read_run(metrics(row).parent) for row in KIND if metrics(row).exists()}
    baseline.compare(list(done.values()))
    results = read()
    rows = results["rows"] | {
        row: {key: ends(run.metrics[key]) for key in METRICS if key in run.metrics}
        | {f"{key}_minus_ar": ends(run.differences[key]) for key in PAIRED if run.differences}
        for row, run in done.items()
    }
    results["rows"] = {row: rows[row] for row in KIND if row in rows}
    write(results)


def ends(metric: Any) -> list[float]:
    """Value and interval of a metric of a run, or the value three times, to five digits."""
    found = [metric[end] for end in Interval._fields]
    return [float(f"{metric['value'] if one is None else one:.5g}") for one in found]


def speed(session: str) -> None:
    """Time every kind of round that this session has not timed, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    for kind in dict.fromkeys([*KIND.values(), *(f"{kind} on XL" for kind in REAL)]):
        if kind in PLAIN or kind in read()["sessions"].get(session, {}):
            continue
        row, real, _ = kind.partition(" on XL")
        directory = ROOT / "outputs/round_costs" / session / kind.replace(" ", "_")
        if real:
            start(*BENCH, *choices(row)[1:], f"hydra.run.dir='{directory}'")
        else:
            evaluate(row, *SPEED, f"hydra.run.dir='{directory}'")
        results = read()
        found = times_on_xl(directory) if real else cost_here(directory)
        results["sessions"].setdefault(session, {"machine": machine()})[kind] = found
        write(results)


def study() -> None:
    """Run the study, and keep the tables of its report."""
    from tempera.reporting import collect
    from tempera.reporting.study import tables

    start("eval/run.py", "-m", "tracking=none", *STUDY)
    found, _ = collect.collect(collect.find_runs([ROOT / "outputs" / "study"])[0])
    kept = {}
    names = ("overview", "losses", "differences", "correlations")
    for name, section in zip(names, tables(found), strict=True):
        lines = section.table.to_dict("records")
        kept[name] = {line.pop(section.table.columns[0]): line for line in lines}
    write(read() | {"study": kept})


def cost_here(directory: Path) -> list[float]:
    """A timed run's cost of a round in rounds of plain AR, with its interval."""
    measured = json.loads((directory / "metrics.json").read_text())["metrics"]["efficiency"]
    return [round(1 / measured[end], 3) for end in ("value", "high", "low")]


def times_on_xl(directory: Path) -> list[float]:
    """Milliseconds of LlamaGen-XL's rounds: of plain AR, of the method, and of its drafting."""
    column = json.loads((directory / "bench.json").read_text())["columns"][0]
    parts = (column["ar"]["round"], column["method"]["round"], column["method"]["draft"])
    return [round(part["median"], 1) for part in parts]


def machine() -> str:
    """The processor's name."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return re.sub(r"\(R\)|\(TM\)| Processor", "", found[1]) if found else "unknown processor"


def of_text(cell: str) -> Interval:
    """A cell of a report: its value, and its interval or the value again."""
    if cell == "infinite":
        return Interval(*[float("inf")] * 3)
    found = [float(one) for one in re.findall(r"[+-]?\d+\.?\d*", cell)]
    return Interval(*(found if len(found) == 3 else found[:1] * 3))


def study_numbers(kept: dict[str, Any]) -> dict[str, Any]:
    """All numbers of the study: of each row, of each correlation, and over all relaxations."""
    rows: dict[str, Any] = {}
    for name, line in kept["overview"].items():
        cells = {**line, **kept["losses"].get(name, {})}
        known: dict[str, Any] = {REPORTED[one]: of_text(cells[one]) for one in REPORTED
                                 if one in cells}  # fmt: skip
        beside = kept["differences"].get(name, {})
        known |= {f"{key}_beside": of_text(beside[one]) for one, key in REPORTED.items()
                  if one in beside}  # fmt: skip
        uniform = rows.get(f"uniform_rsd {name[name.find('at ') :]}")
        if uniform:
            for key in ("tv", "kl"):
                known[f"{key}_more"] = known[key].value / getattr(uniform, key).value - 1
                known[f"{key}_less"] = -known[f"{key}_more"]
        rows[name] = SimpleNamespace(**known)
    low, high = (row for name, row in rows.items() if name.startswith("uniform_rsd"))
    of_relaxed = {name: row for name, row in rows.items() if " at " in name}
    step = 0.02 / (high.length.value - low.length.value)
    rows["0.02 tokens"] = SimpleNamespace(
        tv=step * (high.tv.value - low.tv.value), kl=step * (high.kl.value - low.kl.value)
    )
    scores = ("fid", "clip", "attributes", "shapes", "colours")
    ends = {key: [getattr(row, key) for name, row in of_relaxed.items() if "lantern " not in name]
            for key in scores}  # fmt: skip
    rows["most"] = SimpleNamespace(
        **{key: -min(one.low for one in ends[key]) for key in scores[1:]},
        fid=max(one.high for one in ends["fid"]),
        length=max(abs(row.length.value - float(name[-3:])) for name, row in of_relaxed.items()),
    )
    rows["width"] = SimpleNamespace(
        **{key: statistics.median((one.high - one.low) / 2 for one in ends[key]) for key in scores},
        lower_fid=sum("*" in kept["losses"][name]["FID ↓"] for name in of_relaxed),
    )
    for name, line in kept["correlations"].items():
        rows[name] = {one.removeprefix("loss of "): of_text(line[one]) for one in line}
    return rows


def study_tables(kept: dict[str, Any]) -> dict[str, str]:
    """The study's tables in Markdown, by their names on the page."""
    found, lost, ranks = [], [], []
    for name, line in kept["overview"].items():
        method, at, length = name.partition(" at ")
        run = {"run": f"`{re.sub(' tree=chain| drafter=eagle', '', method)}`{at}{length}"}
        beside, losses = kept["differences"].get(name, {}), kept["losses"].get(name)
        differences = {f"Δ {one}": beside.get(column, "–") for one, column in BESIDE.items()}
        found.append(run | line | differences)
        if losses:
            lost.append(run | {column: losses[column] for column in LOST})
    for name, line in kept["correlations"].items():
        ranks.append({"divergence, length": name} | line)
    return {"found": lines_of(found), "lost": lines_of(lost), "ranks": lines_of(ranks)}


def lines_of(records: list[dict[str, str]]) -> str:
    """A table in Markdown of cells as a report has them, with each interval beneath its value."""
    lines = [[*records[0]], ["-"] * len(records[0]), *([*one.values()] for one in records)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = re.sub(r" \((\S+ … \S+)\)", r"<br><small>\1</small>", text)
    return re.sub(r"-(?=\d)", "−", text.replace("*", r"\*"))


def numbers(results: dict[str, Any]) -> dict[str, SimpleNamespace]:
    """All numbers of each row: what was measured, and what follows from it."""
    rows = {}
    for row, measured in results["rows"].items():
        known: dict[str, Any] = {key: Interval(*found) for key, found in measured.items()}
        length = known["accepted_length"]
        if "kl_per_token" in known:
            known["exact"] = "yes" if known["kl_per_token"].value < 1e-6 else "no"
        known["saved"] = 1 - 1 / length.value
        kind = KIND[row]
        xl = of_sessions(results, SAME_ON_XL.get(kind, kind) + " on XL")
        costs = {
            "here": of_sessions(results, kind),
            "xl": [[own / ar] * 3 for ar, own, _ in xl],
            "cheap": [[1 + draft / ar] * 3 for ar, _, draft in xl],
        }
        for where, timed in costs.items():
            if timed or kind in PLAIN:
                cost = spread(timed or [[1.0] * 3])
                gain = (length.value / cost.value, length.low / cost.high, length.high / cost.low)
                known |= {f"{where}_cost": cost, where: Interval(*gain)}
        rows[row] = SimpleNamespace(**known)
    return rows


def of_sessions(results: dict[str, Any], kind: str) -> list[list[float]]:
    """What each session measured of a kind of rounds."""
    return [session[kind] for session in results["sessions"].values() if kind in session]


def spread(timed: list[list[float]]) -> Interval:
    """The median over sessions, and the interval that contains all of theirs."""
    values, lows, highs = zip(*timed, strict=True)
    return Interval(statistics.median(values), min(lows), max(highs))


COLUMNS = {  # of each table: heading and cell, by the row's numbers
    "readme": {
        "exact": "{exact}",
        "tokens per round": "{accepted_length:.2f}",
        "rounds saved": "{saved:.0%}",
        "speed-up here": "{here:.1f}",
        "on XL": "{xl:.1f}",
        "ideal": "{cheap:.1f}",
        "attributes ↑": "{attribute_accuracy:.3f}",
    },
    "quality": {
        "accepted length": "{accepted_length:.2f±}",
        "FID ↓": "{fid:.1f±}",
        "KID ↓": "{kid:.2f±}",
        "CLIP score ↑": "{clip_score:.3f±}",
        "attribute accuracy ↑": "{attribute_accuracy:.3f±}",
        "TV(p, q)": "{tv:.2f}",
        "TV bound": "{tv_bound:.1f}",
        "KL bound per token ↓": "{kl_per_token:.3f}",
    },
    "speed": {
        "tokens per round": "{accepted_length:.2f}",
        "rounds saved": "{saved:.0%}",
        "a round in AR rounds": "{here_cost:.1f±}",
        "speed-up here": "{here:.2f±}",
        "on LlamaGen-XL": "{xl:.1f}",
        "if passes cost the same": "{cheap:.1f}",
    },
    "continuous": {
        "tokens per round": "{accepted_length:.2f±}",
        "speed-up": "{here:.2f±}",
        "FID ↓": "{fid:.1f±}",
        "KID ↓": "{kid:.2f±}",
        "CLIP score ↑": "{clip_score:.3f±}",
        "shapes ↑": "{shape_accuracy:.3f±}",
        "colours ↑": "{colour_accuracy:.3f±}",
    },
    "differences": {
        "attributes": "{attribute_accuracy_minus_ar:+.3f±}",
        "shapes": "{shape_accuracy_minus_ar:+.3f±}",
        "colours": "{colour_accuracy_minus_ar:+.3f±}",
        "CLIP score": "{clip_score_minus_ar:+.3f±}",
    },
}
CHOSEN = ["ar", "eagle", "block drafter=parallel", "scd", "coolsd delta=2",
          "coolsd drafter=parallel floor=1 delta=3",
          "optimal_rsd schedule=optimal expected_length=3.8", "lantern"]  # fmt: skip
"""README's rows; the other tables have all."""


def table(name: str, rows: dict[str, SimpleNamespace]) -> str:
    """A table in Markdown; "–" where nothing was measured."""
    columns = COLUMNS[name]
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    shown = [row for row in rows if row.startswith("mar ") == (name == "continuous")]
    for row in CHOSEN if name == "readme" else shown:
        cells = [f"`{row.removeprefix('mar ')}`"]
        for template in columns.values():
            try:
                cells.append(template.format(**vars(rows[row])))
            except KeyError:
                cells.append("–")
        if set(cells[1:]) != {"–"}:
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("-0.", "−0.")


def sessions(results: dict[str, Any]) -> str:
    """When and where rounds were timed, with some costs of each session in AR rounds."""
    kinds = ["eagle", "parallel", "eagle tree=mc_sim_7b_63", "scd", "lantern"]
    lines = ["| session | machine | `" + "` | `".join(kinds) + "` |", "|---" * 7 + "|"]
    for name, about in results["sessions"].items():
        costs = [f"{about[kind][0]:.2f}" if kind in about else "–" for kind in kinds]
        lines.append("| " + " | ".join([name, about["machine"], *costs]) + " |")
    return "\n".join(lines)


def times(results: dict[str, Any]) -> str:
    """Times of LlamaGen-XL's rounds, the medians of all sessions."""
    lines = ["| round of | AR, ms | the method, ms | of it drafting, ms |", "|---|---|---|---|"]
    for kind in REAL:
        columns = zip(*of_sessions(results, f"{kind} on XL"), strict=True)
        shown = [f"{statistics.median(column):.0f}" for column in columns]
        lines.append(f"| `{kind}` | " + " | ".join(shown or ["–"] * 3) + " |")
    return "\n".join(lines)


def quotes(
    text: str, known: dict[str, dict[str, Any]], templates: Sequence[str]
) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Where a page quotes these sentences, and the numbers that should stand there."""
    for template in templates:
        pattern, values = "", []
        for words, field, spec, _ in Formatter().parse(template):
            pattern += r"\s+".join(map(re.escape, re.split(r"\s+", words)))
            if field is not None:
                pattern += NUMBER
                values.append(f"{{{field}:{spec}}}".format(**known).replace("-", "−"))
        for found in re.finditer(pattern, text):
            yield found, values


def everything(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What sentences quote: `r` of the rows, `s` of the study."""
    return {"r": numbers(results), "s": study_numbers(results["study"])}


def render(text: str, results: dict[str, Any]) -> str:
    """A page with its tables and its quoted numbers as in the results."""
    known = everything(results)
    made = {name: table(name, known["r"]) for name in COLUMNS} | study_tables(results["study"])
    made |= {"sessions": sessions(results), "real": times(results)}
    for name, lines in made.items():
        text = re.sub(rf"(?s)(<!-- {name} -->\n+)\|.*?(\n+<!-- end -->)", rf"\1{lines}\2", text)
    edits = [
        (*found.span(place), value)
        for found, values in quotes(text, known, QUOTES)
        for place, value in enumerate(values, start=1)
    ]
    for first, end, value in sorted(edits, reverse=True):
        text = text[:first] + value + text[end:]
    return text


def pages() -> None:
    """Write the tables and numbers of all pages, and the picture."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(render(text, read()), encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "pareto_figure.py"), run_name="__main__")


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "runs": runs, "speed": speed, "study": study, "pages": pages,
    }  # fmt: skip
    commands[sys.argv[1]](*sys.argv[2:])
