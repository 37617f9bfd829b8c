import pytest
import torch
from random_drafts import SMALL
from table_models import RULE

from tempera.decoding import replay
from tempera.decoding.interfaces import ACCEPTED, BONUS, RESAMPLED
from tempera.decoding.replay import PASSED, REJECTED, UNTESTED, DraftLog, replays
from tempera.decoding.trees import Tree
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.none import NoDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.exactness.tables import TableDraft, TableTarget, emit
from tempera.rules.standard import Exact

IDS = [str(row) for row in range(40)]
TARGET = TableTarget(4, 7)
DRAFTERS = {
    "chain": lambda: StaticTreeDrafter(TableDraft(TARGET, noise=2.0), Tree.chain(3)),
    "tree": lambda: StaticTreeDrafter(TableDraft(TARGET, noise=2.0), SMALL),
    "none": NoDraft,
}


def recorded(name):
    """What a drafter emits with and without a log, and the log's replays."""
    log, rule = DraftLog(IDS), Exact() if name == "none" else RULE
    output = emit(TARGET, DRAFTERS[name](), rule, rows=40, watch=[log])
    plain = emit(TARGET, DRAFTERS[name](), rule, rows=40)
    return output, plain, replays(IDS, output, log, (1, 7))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_replay_leads_to_the_finished_tokens(name):
    output, plain, rows = recorded(name)
    assert torch.equal(output.tokens, plain.tokens)
    for row, tokens in zip(rows, output.tokens.tolist(), strict=True):
        assert row["tokens"] == tokens
        assert (row["rows"], row["columns"]) == (1, 7)
        first = 0
        position = [at for at, place in enumerate(row["place"]) if place == 1]
        assert len(position) == len(row["nodes"])
        for start, end, nodes in zip(position, [*position[1:], 7], row["nodes"], strict=True):
            drafted, parent, fate = (
                row[key][first : first + nodes] for key in ("drafted", "parent", "fate")
            )
            first += nodes
            kept = [token for token, one in zip(drafted, fate, strict=True) if one == PASSED]
            accepted = row["origin"][start:end].count(ACCEPTED)
            assert kept[: end - start] == tokens[start : start + len(kept)]
            assert len(kept) >= accepted
            assert accepted == min(len(kept), end - start)
            for node, one in enumerate(fate):
                reached = parent[node] < 0 or fate[parent[node]] == PASSED
                assert reached or one == UNTESTED
            if end - start > len(kept) and row["origin"][end - 1] == RESAMPLED:
                assert REJECTED in fate
            if row["origin"][end - 1] == BONUS and nodes:
                deepest = max(range(nodes), key=lambda n: fate[n] == PASSED and n)
                assert deepest not in parent
        assert first == len(row["drafted"])


def test_siblings_after_the_kept_one_are_not_tested():
    rows = recorded("tree")[2]
    firsts = {
        tuple(row["fate"][start : start + 3])
        for row in rows
        for start in range(0, len(row["fate"]), SMALL.nodes)
    }
    assert (PASSED, UNTESTED, UNTESTED) in firsts
    assert (REJECTED, PASSED, UNTESTED) in firsts
    assert not any(fates[0] == UNTESTED for fates in firsts)


def test_fates_are_stored_as_these_numbers():
    assert (UNTESTED, REJECTED, PASSED) == (0, 1, 2)


def test_rounds_of_trees_that_differ_by_row():
    log = DraftLog({"2"})
    drafter = DynamicTreeDrafter(TableDraft(TARGET), 4, branches=2, depth=3, nodes=6)
    output = emit(TARGET, drafter, Exact(), rows=6, watch=[log])
    rows = replays(IDS[:6], output, log, (1, 7))
    assert [row["id"] for row in rows] == ["2"]
    assert len(rows[0]["parent"]) == sum(rows[0]["nodes"]) == len(rows[0]["fate"])


def test_long_drafts_are_left_out_and_their_rounds_kept(monkeypatch):
    whole = recorded("chain")[2][0]
    monkeypatch.setattr(replay, "LARGEST", len(whole["drafted"]))
    assert recorded("chain")[2][0] == whole
    monkeypatch.setattr(replay, "LARGEST", len(whole["drafted"]) - 1)
    short = recorded("chain")[2][0]
    assert short["nodes"] == whole["nodes"]
    assert short["drafted"] == short["parent"] == short["fate"] == []
