"""Messages for problems of the machine; mistakes on the command line are tested in test_conf.py."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from paths import ROOT

from tempera import errors
from tempera.config import messages
from tempera.config.messages import OPTIONS, sentence

CORE = [
    "runtime",
    "decoding",
    "image_tokenizers",
    "rules",
    "targets",
    "drafters",
    "continuous",
    "exactness",
]
GROUPS = [path.name for path in (ROOT / "conf").iterdir() if path.is_dir()]
FACTS = {
    errors.BenchmarkTooLarge: (16,),
    errors.CannotCompile: ("no compiler",),
    errors.ChainsTooShort: ("statistics.safetensors", 3, 5),
    errors.CoupledDraft: ("BlockVerification",),
    errors.DeltaNotUsed: (2.5,),
    errors.DiskTooSmall: ("outputs", "2 GB", "1 GB"),
    errors.DraftTooShort: (5, 7),
    errors.EmptyDraft: ("depth=0",),
    errors.EmptySearch: ("prompts=0",),
    errors.LengthBeyondDraft: (4.25, 3, 3.2, 4.0),
    errors.LengthNotFound: ("delta", 3.4, 7.0, 3.5),
    errors.LengthNotGiven: ("optimal", 2.0, 4.0),
    errors.LengthOutOfReach: (9.5, 2.0, 3.0),
    errors.MemoryTooSmall: ("cpu", "2 GB", "1 GB"),
    errors.MemoryUnknown: ("mps",),
    errors.NaNProbabilities: ("draft", "a red ring"),
    errors.NoSmallerModel: (),
    errors.NoStaticTree: (),
    errors.NotAChain: ("BlockVerification",),
    errors.NotAClass: ("prompt 1 of 1, 'dog'", 1000),
    errors.NotADensityRule: ("Exact",),
    errors.NotADiscreteRule: ("CSpD",),
    errors.OtherCodebook: (Path("l2_5.safetensors"), "abc", "def"),
    errors.OtherSchedule: ("Priced", "prices", "relaxations"),
    errors.NoRange: (2.0, 1.0, "delta"),
    errors.NoReference: (["FID", "KID"],),
    errors.OtherWorld: ("anole",),
    errors.UnknownMeasure: ("fidd", ["fid", "kid"]),
    errors.UnknownTree: ("oak", ["naive_extend_57"]),
    errors.TooFewImages: (8,),
    errors.PromptTooLong: ("prompt 1 of 1", 130, 120),
}


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_says_which_options_help(problem: Exception) -> None:
    message = sentence(problem, Path("conf"), "eval", [])
    assert message is not None and message.startswith(
        "out of memory: give a smaller batch_size, dtype=bfloat16 or a shorter draft"
    )
    assert "\n" not in message


def test_a_path_may_be_too_long() -> None:
    with pytest.raises(OSError, match="too long") as problem:
        Path(5000 * "x").read_text()
    assert sentence(problem.value, Path("conf"), "eval", []) == (
        f"the path '{99 * 'x'}…' is too long; give a shorter one"
    )


def test_what_cannot_be_merged_is_shown() -> None:
    with pytest.raises(OmegaConfBaseException) as problem:
        OmegaConf.merge(OmegaConf.create({"names": [1]}), OmegaConf.create({"names": {"a": 1}}))
    assert sentence(problem.value, Path("conf"), "eval", ["limit=1", "+names.a=1"]) == (
        "Cannot merge DictConfig with ListConfig (at `limit=1 +names.a=1`); correct it"
    )


def test_a_bug_is_not_the_users() -> None:
    assert sentence(RuntimeError("shape mismatch"), Path("conf"), "eval", []) is None


@pytest.mark.slow
def test_an_unknown_option_is_looked_up_in_other_choices() -> None:
    """`cross_entropy` also stands in recipe=shapes, which only model=shapes takes."""
    arguments = ["model=anole", "loss=acceptance", "cross_entropy=1"]
    with (
        initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
        pytest.raises(HydraException) as problem,
    ):
        compose("train_draft", arguments)
    assert sentence(problem.value, ROOT / "conf", "train_draft", arguments) == (
        "there is no option `cross_entropy` with loss=acceptance: it belongs to loss=eagle "
        "and recipe=shapes"
    )


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_the_command_line_names_the_options_that_fix_an_error(kind: type[Exception]) -> None:
    problem = kind(*FACTS[kind])
    assert sentence(problem, Path("conf"), "eval", []) == f"{problem} ({OPTIONS[kind]})"
    first = [
        name for fact in FACTS[kind][:1] for name in (fact if isinstance(fact, list) else [fact])
    ]
    assert all(str(fact) in str(problem) for fact in first)
    again = pickle.loads(pickle.dumps(problem))  # launchers send errors between processes
    assert vars(again) == vars(problem) and str(again) == str(problem)


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_these_options_exist(kind: type[Exception]) -> None:
    for group, choice in re.findall(r"(\w+)=(\w+)", OPTIONS[kind]):
        if group in GROUPS:
            assert (ROOT / "conf" / group / f"{choice}.yaml").is_file()


def texts_raised(path: Path) -> Iterator[str]:
    """String constants inside the `raise` statements and the `TemperaError`s of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        made = isinstance(node, ast.Call) and ast.unparse(node.func) == "TemperaError"
        if made or isinstance(node, ast.Raise):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


@pytest.mark.parametrize("package", CORE)
def test_the_library_does_not_mention_command_line_options(package: str) -> None:
    options = re.compile(rf"\b(?:{'|'.join(GROUPS)})(?:=\w|\.\w+=)|expected_length=|command line")
    for path in sorted((ROOT / "src" / "tempera" / package).glob("*.py")):
        assert [text for text in texts_raised(path) if options.search(text)] == [], path


@pytest.mark.parametrize(
    ("option", "arguments"), [("k", []), ("top_k", ["model=shapes_mar"]), ("price", [])]
)
def test_few_configurations_are_composed_to_find_an_option(
    option: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a quarter of a second."""
    composed = []

    def counted(conf: Path, config_name: str, overrides: list[str]) -> DictConfig | None:
        composed.append(overrides)
        return uncounted(conf, config_name, overrides)

    uncounted = messages._composed
    monkeypatch.setattr(messages, "_composed", counted)
    assert "it belongs to" in messages.unknown_option(option, ROOT / "conf", "eval", arguments)
    assert len(composed) <= 9
