"""What no command line may do to a configuration; the scripts' own options are in test_conf.py."""

import pytest

from tempera.config.compose import composed
from tempera.errors import TemperaError


@pytest.mark.parametrize(
    ("config", "argument", "said"),
    [
        ("eval", "experiment=frontir", "there is no experiment=frontir; choose one of "),
        ("train_draft", "recipe=foo", "there is no recipe=foo; choose one of "),
        ("eval", "model=inf", "there is no model=inf; choose one of "),
        ("bench", "tree=-1", "there is no tree=-1; choose one of chain"),
        ("eval", "model=null", "there is no model=null; choose one of "),
        ("train_draft", "recipe=null", "recipe=null is not possible; ~recipe removes it"),
        ("eval", "plan=abc", "`plan=abc` is not possible; it holds options, such as plan."),
        ("eval", "plan=null", "`plan=null` is not possible; it holds options"),
        ("calibrate", "model.target=nan", "`model.target=nan` is not possible; it holds options"),
        ("calibrate", "batch_size=[1,2]", "`batch_size=[1, 2]` is not possible; it must be a sin"),
        ("build_shapes", "stages=clip", "`stages=clip` is not possible; it must be a list"),
        ("build_shapes", "=1", "'=1' names no option: write option=value"),
        ("eval", "++=[a]", "'++=[a]' names no option: write option=value"),
        ("eval", "~seed", "`seed` cannot be removed: leave out ~seed"),
        ("eval", "limit=\udcff", r"'limit=\udcff' is not UTF-8 text, or holds a NUL"),
        ("report", "--cfg=x", "argument --cfg/-c: invalid choice: 'x'"),
        ("report", "--nonsense", "unrecognized arguments: --nonsense; --hydra-help"),
        ("report", "--cfg", "argument --cfg/-c: expected one argument; "),
        ("eval", "--resolve", "--resolve goes with --cfg job"),
        ("eval", "-mr", "--run, --multirun, --cfg, --info and --shell-completion exclude"),
        ("eval", "--experimental-rerun=x", "--experimental-rerun reads a pickle"),
        ("eval", "--shell-completion", "--shell-completion goes with install=bash"),
        ("eval", "limit='a\0b'", r"'limit='a\x00b'' is not UTF-8 text, or holds a NUL"),
    ],
)
def test_what_the_shape_of_the_options_rules_out(config: str, argument: str, said: str) -> None:
    with pytest.raises(TemperaError) as refused:
        composed(config, [argument])
    assert str(refused.value).startswith(said)


def test_a_flag_between_options_is_refused() -> None:
    with pytest.raises(TemperaError, match="^flags such as -m go before all options or after"):
        composed("eval", ["seed=1", "-m", "limit=1"])


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("train_draft", ["~recipe"]),
        ("eval", ["paper={name:x}"]),
        ("report", ["runs=[a,b]"]),
        ("report", ["runs=a"]),
        ("eval", ["model='shapes'", "+note=1"]),
    ],
)
def test_what_is_null_or_missing_may_be_anything(config: str, arguments: list[str]) -> None:
    composed(config, arguments)
