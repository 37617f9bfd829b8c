"""Options that have no effect beside others are refused if they are given, but in sweeps."""

import pytest

from tempera.config.build import check_discrete
from tempera.config.compose import composed
from tempera.config.effects import IDLE, check_effects
from tempera.errors import TemperaError

IDLE_ONES = [
    ("eval", ["prompt=star", "path=p.txt", "data=file"], "data=file"),
    ("eval", ["speed.prompts=0", "speed.batches=[8]"], "speed.batches=[8]"),
    ("eval", ["matching.seed=3"], "matching.seed=3"),
    ("eval", ["free_parameter.most=3"], "free_parameter.most=3"),
    ("eval", ["drafter=sjd", "tree=mc_sim_7b_63"], "tree=mc_sim_7b_63"),
    ("train_draft", ["epochs=3"], "epochs=3"),
    ("train_draft", ["limit=3"], "limit=3"),
    ("train_draft", ["train_data=shapes_mixed", "limit=3"], "limit=3"),
    ("prepare", ["dtype=bfloat16"], "dtype=bfloat16"),
    ("prepare", ["guidance=3"], "guidance=3"),
    ("train_draft", ["ttt_steps=0", "ttt_decay=0.5"], "ttt_decay=0.5"),
    ("train_draft", ["draft=parallel", "ttt_steps=2"], "ttt_steps=2"),
    ("train_draft", ["loss=acceptance", "cfg_dropout=0.5"], "cfg_dropout=0.5"),
    ("train_draft", ["decodes=0", "depth=3"], "depth=3"),
    ("tune", ["deltas=[1.1]", "prices=[]"], "deltas=[1.1]"),
    ("tune", ["prices=[1.0]"], "prices=[1.0]"),
    ("report", ["runs=.", "project=mine"], "project=mine"),
]
READ_ONES = [
    ("eval", ["prompt=star", "limit=1"]),
    ("eval", ["speed.prompts=1", "speed.batches=[8]"]),
    ("train_draft", ["train_data=generated", "limit=30"]),
    ("prepare", ["encoder=target", "guidance=3"]),
    ("eval", ["expected_length=3", "matching.seed=3"]),
    ("eval", ["method=lantern", "drafter=eagle2", "depth=3"]),
    ("eval", ["method=gsd", "drafter=eagle", "+tree=chain", "depth=3"]),
    ("train_draft", ["epochs=3", "steps=null"]),
    ("train_draft", ["draft=parallel", "ttt_decay=0.5"]),
    ("train_draft", ["cfg_dropout=0.5", "depth=3"]),
    ("tune", ["budget=kl:0.05", "deltas=[1.1]"]),
    ("tune", ["deltas=[]", "prices=[]"]),
    ("report", ["runs=.", "publish=true", "project=mine"]),
]


@pytest.mark.parametrize(("script", "options", "named"), IDLE_ONES)
def test_an_option_without_effect_is_refused(script: str, options: list[str], named: str) -> None:
    with pytest.raises(TemperaError) as problem:
        check_effects(composed(script, options), script, options)
    assert str(problem.value).startswith(f"`{named}` has no effect ")
    assert ": " in str(problem.value)


@pytest.mark.parametrize(("script", "options"), READ_ONES)
def test_an_option_that_is_read_is_not(script: str, options: list[str]) -> None:
    check_effects(composed(script, options), script, options)


def test_these_options_exist() -> None:
    for script, idle in IDLE.items():
        cfg = composed(script, {"eval": ["data=file"], "report": ["runs=."]}.get(script, []))
        for option in (option for one in idle for option in one.options):
            assert option.partition(".")[0] in cfg, (script, option)


@pytest.mark.parametrize("script", ["train_draft", "prepare"])
def test_drafts_and_shards_are_of_discrete_tokens(script: str) -> None:
    with pytest.raises(TemperaError, match="what, but those of model=shapes_mar are continuous: "):
        check_discrete(composed(script, ["model=shapes_mar"]), "what")
    check_discrete(composed(script, []), "what")
