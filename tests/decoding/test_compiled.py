"""Compiled rounds emit what rounds emit that are not. Speed is not tested here."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import slow_but
from graph_replays import replayed
from near_codes import near, published_gsd
from network_drafts import dflash, eagle, eagle2, eagle3, independent, medusa, parallel
from random_drafts import SMALL, new_sequences, random_draft
from tiny_networks import (
    PROMPTS,
    SIZES,
    WIDE,
    captions,
    lively,
    llamagen,
    text_ids,
    text_target,
    tiny_target,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tempera.decoding import compiled, loop, sequences
from tempera.decoding.diagnostics import Diagnosed, look
from tempera.decoding.interfaces import Draft, Drafter, Scores
from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling, sample
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.rows import Rows
from tempera.decoding.timing import Clock
from tempera.decoding.trees import Block, Tree
from tempera.decoding.verification import verify
from tempera.drafters import jacobi
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.evaluation.benchmark import room, time_rounds
from tempera.evaluation.launches import launches
from tempera.evaluation.pipeline import Method, Progress
from tempera.rules.cactus import Cactus
from tempera.rules.entropy import EntropyAware
from tempera.rules.fly import FLy
from tempera.rules.mentored import Mentored
from tempera.rules.mixture import Mixture
from tempera.rules.neighbourhood import GSD, Lantern, LanternPP
from tempera.rules.optimal import Priced
from tempera.rules.standard import BlockVerification, Exact, Match, Relaxed
from tempera.rules.traversal import Traversal
from tempera.targets import attention, flexible_attention
from tempera.targets.attention import attend
from tempera.targets.chameleon import CHAMELEON
from tempera.targets.emu3 import EMU3
from tempera.targets.family import Family, load_network
from tempera.targets.glm_image import GLM_IMAGE
from tempera.targets.janus import JANUS
from tempera.targets.qwen2 import QWEN2
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget

CHAIN = Tree.chain(3)
TREE = Tree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
METHODS = {
    "ar": lambda target: NoDraft(),
    "eagle": lambda target: eagle(target, CHAIN),
    "tree": lambda target: eagle(target, TREE),
    "eagle2": eagle2,
    "eagle3": lambda target: eagle3(target, TREE),
    "parallel": lambda target: parallel(target, CHAIN, features=(0,)),
    "dflash": lambda target: dflash(target, CHAIN, features=(0,)),
    "medusa": lambda target: medusa(target, CHAIN),
    "independent": lambda target: independent(
        target, CHAIN, vocab=target.vocab_size, grid=target.grid
    ),
    "jacobi": lambda target: jacobi.jacobi(target, 5),
    "sjd": lambda target: jacobi.sjd(target, 5),
    "scd": lambda target: jacobi.scd(target, 5),
    "sjd_pac": lambda target: jacobi.sjd_pac(target, min(12, target.length), branches=2, levels=2),
}
RULES = {
    "relaxed": (TREE, Relaxed([1.5, 1.2, 1.1])),
    "lantern": (TREE, Lantern(near(10, 3), 0.2)),
    "lanternpp": (CHAIN, LanternPP(near(10, 3), 2.0, "kl")),
    "gsd": (CHAIN, GSD(near(10, 3))),
    "gsd_published": (CHAIN, published_gsd(11)),
    "entropy": (CHAIN, EntropyAware()),
    "block": (CHAIN, BlockVerification()),
    "traversal": (TREE, Traversal()),
    "priced": (TREE, Priced(0.5)),
    "mixture": (TREE, Mixture(0.3)),
    "cactus": (TREE, Cactus(0.3)),
    "mentored": (TREE, Mentored(0.1)),
    "fly": (CHAIN, FLy(0.1, 1)),
}
"""Further rules, with a tree to verify."""
PARTS = "propose", "score", "verify", "append", "observe"
BATCHES = [PROMPTS[:2], PROMPTS[2:]]
VIEWS = (
    "alias",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "squeeze",
    "unsqueeze",
    "view",
)


SAMPLING = Sampling(3.0, temperature=2.0, top_k=7)


def captioned(device: str = "cpu") -> TransformerTarget:
    """A tiny LlamaGen whose lines end."""
    network = llamagen(num_hidden_layers=1).to(device)
    network.spec = ModelSpec(4, 4, 10, 0, ("{text}",), (0,), 99, line_end=10)
    return TransformerTarget(network, captions, SAMPLING, granularity=4)


def classes(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = [len(prompt) for prompt in prompts]
    return torch.tensor(labels), torch.ones(len(prompts), 1, dtype=torch.bool)


def of_classes() -> TransformerTarget:
    sizes = {"prefix_length": 1, "caption_dim": None, "num_classes": 5, "grid": (3, 3)}
    return tiny_target(SAMPLING, llamagen(num_hidden_layers=1, **sizes), classes, granularity=4)


def of_text(family: Family, **sizes: Any) -> TransformerTarget:
    return text_target(SAMPLING, 3, 3, 8, family, line_end=19, num_hidden_layers=1, **sizes)


def of_janus() -> TransformerTarget:
    spec = ModelSpec(3, 3, 8, 0, (1, "{text}", 3), (), 64, null_filling=2)
    sizes = {**SIZES, "vocab_size": 20, "num_hidden_layers": 1, "rope_theta": 10000.0}
    network = load_network(JANUS, spec, "random", [], "", sizes)
    return tiny_target(SAMPLING, lively(network), text_ids)


def of_glm() -> TransformerTarget:
    """A preview and an image, positions in three sections, four norms a layer; unguided."""
    spec = ModelSpec(3, 3, 8, 0, ("{text}", 3), (), 64, preview=(2, 2))
    sizes = {**SIZES, "vocab_size": 20, "vision_vocab_size": 12, "num_hidden_layers": 1}
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1]}
    network = load_network(GLM_IMAGE, spec, "random", [], "", sizes | rope)
    return tiny_target(replace(SAMPLING, guidance=1.0), lively(network), text_ids)


def of_many_codes(device: str = "cpu") -> TransformerTarget:
    """As many as LlamaGen has."""
    network = llamagen(num_hidden_layers=1, vocab_size=16384).to(device)
    network.spec = ModelSpec(4, 4, 16384, 0, ("{text}",), (0,), 16500)
    return TransformerTarget(network, captions, SAMPLING, granularity=4)


FAMILIES = {
    "llamagen_classes": of_classes,
    "chameleon": lambda: of_text(CHAMELEON, swin_norm=False, model_parallel_size=None),
    "emu3": lambda: of_text(EMU3),
    "janus": of_janus,
    "qwen2": lambda: of_text(QWEN2),
    "glm_image": of_glm,
}


def decoded(
    method: str,
    compile: bool,
    target: TransformerTarget | None = None,
    batches: list[list[str]] = BATCHES,
    watch: Any = (),
) -> list[torch.Tensor]:
    """Two batches, decoded with a target, by default `captioned`."""
    target = target or captioned()
    if compile:
        target.pack()
        target.compile()
    drafter, rule = METHODS[method](target), Match() if method == "jacobi" else Exact()
    return [
        decode(
            target, drafter, rule, RandomStreams(0, names, target.device), names, watch=watch
        ).tokens
        for names in batches
    ]


@pytest.fixture
def backend(monkeypatch):
    """Compiles by a backend that generates no code, and counts."""

    def use(name: str) -> CompileCounterWithBackend:
        made = CompileCounterWithBackend(name)
        monkeypatch.setattr(compiled, "generated", made)
        compiled.forget()
        return made

    yield use
    compiled.forget()


ON_FAMILIES = ("tree", "parallel", "sjd_pac")
"""Methods by what they take of a target beside nothing: its head; the features of its layers, too;
only its grid, for a tree of a window. `independent` takes its prompts.
"""
MANY = "vocabulary of 16384"
CASES = [
    *(("llamagen", method, 3) for method in METHODS),
    ("llamagen", "tree", 1),
    *((family, "ar", 1) for family in FAMILIES),
    *((family, "independent", 3) for family in FAMILIES),
    *((family, method, 3) for family in ("emu3", "glm_image") for method in ON_FAMILIES),
    *((MANY, method, 2) for method in ("eagle2", "independent", "sjd", "sjd_pac")),
]
QUICK = [("llamagen", "eagle2", 3), ("llamagen", "parallel", 3), ("chameleon", "ar", 1)]


def attend_reached(query, keys, values, mask, reached, scale):
    """What `flexible_attention.attend_reached` computes, with blocks of one key."""
    beyond = torch.arange(keys.shape[2], device=keys.device) >= reached[:, None]
    hidden = torch.finfo(mask.dtype).min
    return attend(query, keys, values, mask.masked_fill(beyond[:, None, None], hidden), scale)


@pytest.fixture
def impatient(monkeypatch):
    """Rows take the next prompt as soon as their image is complete: these are too short to wait."""
    at_once = property(lambda _: 0.0, lambda *_: None)
    monkeypatch.setattr(Rows, "patience", at_once, raising=False)


@pytest.fixture
def replays(impatient, monkeypatch):
    """Attention skips keys that rows have not reached, as it may on a GPU."""
    monkeypatch.setattr(attention, "skips", lambda *_: torch.compiler.is_compiling())
    monkeypatch.setattr(flexible_attention, "attend_reached", attend_reached)
    return replayed(monkeypatch)


@pytest.mark.parametrize(("family", "method", "rows"), slow_but(CASES, *QUICK, (MANY, "sjd", 2)))
def test_a_round_is_a_step_of_five_graphs_whatever_prompts_its_rows_have(
    family, method, rows, replays
):
    """A second batch makes none: not its first round, nor rows that take other prompts, nor the
    last ones, which have fewer prompts than rows and some too long for those before.
    """
    make = of_many_codes if family == MANY else FAMILIES.get(family, captioned)
    names, loose, rounds, before = [*PROMPTS, "a"], [], [0], [None]

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            name = function.overloadpacket.__name__
            if name not in VIEWS:
                loose.append(name)
            return function(*arguments, **options or {})

    def watch(one):
        rounds[0] += 1
        if one.sequences.prompts == before[0]:  # no image is complete, none begins
            assert len(loose) <= 3, loose  # draws, an empty draft, and the report to the host
        before[0] = list(one.sequences.prompts)
        loose.clear()

    def images(target, drafter, count, rows, watch=()):
        rule, streams = (
            Match() if method == "jacobi" else Exact(),
            RandomStreams(0, "01234"[:count]),
        )
        return decode(target, drafter, rule, streams, names[:count], rows=rows, watch=watch)

    target, plain = make(), make()
    target.pack()
    target.compile()
    drafter = METHODS[method](target)
    with Operations():
        first = images(target, drafter, rows, rows, [watch])
        before[0] = None
        found = images(target, drafter, len(names), rows, [watch])
    graphs = PARTS[1:4] if method == "ar" else PARTS  # where nothing is drafted
    assert replays.calls == [*graphs] * (rounds[0] - 1)  # the first of all is as it is written
    assert replays.variants == dict.fromkeys(graphs, 1)
    del replays.captures["_run_prefix"]  # in each batch, for its buffers
    assert replays.captures == dict.fromkeys(graphs, 1)
    expected = images(plain, METHODS[method](plain), len(names), 1)
    assert found.tokens.equal(expected.tokens) and found.tokens[:rows].equal(first.tokens)
    assert found.trace.rounds.equal(expected.trace.rounds)


MORE = ["a" * (4 - number % 4) + str(number) for number in range(10)]


def refilled(method: str, target: TransformerTarget, rows: int) -> torch.Tensor:
    """The tokens of `MORE`, decoded in so many rows."""
    drafter, rule = METHODS[method](target), Match() if method == "jacobi" else Exact()
    streams = RandomStreams(0, MORE, target.device)
    return decode(target, drafter, rule, streams, MORE, rows=rows).tokens


@pytest.mark.parametrize(
    "make",
    [
        captioned,
        pytest.param(FAMILIES["emu3"], marks=pytest.mark.slow, id="emu3"),
        pytest.param(FAMILIES["glm_image"], marks=pytest.mark.slow, id="glm_image"),
    ],
)
def test_the_prefix_of_prompts_in_a_running_batch_is_one_graph_for_each_number(make, replays):
    """From the second time on, and for as long as the batch runs: the next has other buffers."""
    target = make()
    target.compile()
    for rows in (2, 3):
        assert refilled("tree", target, rows).equal(refilled("tree", make(), 1))
        assert 0 < replays.captures["_run_prefix"] <= rows  # so many may begin together
        assert replays.replays["_run_prefix"] > 1
        del replays.captures["_run_prefix"], replays.replays["_run_prefix"]


def test_a_batch_of_longer_prompts_computes_its_masks_in_no_graph(replays):
    """What a graph computes is overwritten when the next round begins."""
    names = ["a", "b", "a long prompt " * 12]

    def images(compile, rows):
        target = of_text(EMU3)
        if compile:
            target.compile()
        drafter, streams = METHODS["tree"](target), RandomStreams(0, names)
        return decode(target, drafter, Exact(), streams, names, rows=rows).tokens

    assert images(True, 2).equal(images(False, 1))


@pytest.mark.parametrize(
    ("method", "rule", "most"),
    [
        ("tree", Lantern(near(11, 3), 0.2), 32),  # with the rule's own figures
        *(pytest.param(name, Exact(), 8, marks=pytest.mark.slow) for name in ("eagle2", "sjd")),
    ],
    ids=str,
)
def test_diagnostics_are_one_more_graph(method, rule, most, replays, monkeypatch):
    """With the numbers of eager rounds, also of rows that are refilled, and no host read."""
    loose, eager = [], []
    names = [*PROMPTS, "a"]

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            loose.append(function.overloadpacket.__name__)
            return function(*arguments, **options or {})

    def images(compiled, rows, watch=()):
        target = captioned()
        if compiled:
            target.compile()
        drafter = METHODS[method](target)
        streams = RandomStreams(0, list(map(str, range(len(names)))))
        given = target, drafter, rule, streams, names
        return decode(*given, rows=rows, diagnostics=True, watch=watch).trace

    before = Diagnosed.__call__

    def counted(watcher, round):
        with Operations() as _:
            loose.clear()
            before(watcher, round)
            eager.append(len([name for name in loose if name not in VIEWS]))

    with monkeypatch.context() as patch:
        patch.setattr(Diagnosed, "__call__", counted)
        found = images(True, 2)
    assert max(eager[1:]) <= most, eager  # each column is written where it belongs
    assert replays.variants["record"] == 1
    expected = images(False, 1)
    for name, column in expected.tensors().items():
        got = found.tensors()[name]
        torch.testing.assert_close(got, column, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("name", slow_but(RULES, "relaxed", "lantern", "cactus"))
@torch.no_grad()
def test_what_diagnostics_see_of_a_rule_is_one_graph(name):
    tree, rule = RULES[name]
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2, 1 + tree.nodes, 11, generator=generator).softmax(-1)
    q = torch.randn(2, tree.nodes, 11, generator=generator).softmax(-1)
    draft = Draft(q.flatten(0, 1).multinomial(1, generator=generator).view(2, -1), q, tree)
    uniforms = torch.rand(2, tree.nodes + 1, generator=generator)
    scores = Scores(p, p)
    verdict = verify(draft, scores, rule, new_sequences(2, 9, tree.max_depth), uniforms)
    inputs = draft, verdict, scores, rule, None
    expected = look(*inputs)
    torch._dynamo.reset()
    found = torch.compile(look, backend="eager", fullgraph=True)(*inputs)
    rounds = {"rtol": 1e-6, "atol": 1e-7}  # a graph adds up all tokens, not those that count
    bounds = rounds if isinstance(rule, (Lantern, GSD)) else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, **bounds, equal_nan=True)


def test_a_table_of_a_rule_stays_where_it_is(replays):
    target = captioned()
    target.compile()
    drafter, rule = METHODS["eagle"](target), Lantern(near(11, 3), 0.2)
    for seed in range(2):
        decode(target, drafter, rule, RandomStreams(seed, PROMPTS), PROMPTS)
    assert replays.variants == replays.captures == dict.fromkeys(PARTS, 1)


def test_the_host_reads_of_a_round_while_the_next_one_runs(replays, monkeypatch):
    """But where the round may have completed an image. Nobody sees a round too many."""
    inner = sequences._Report.read

    def read(report):
        replays.calls.append("read")
        return inner(report)

    monkeypatch.setattr(sequences._Report, "read", read)

    begins = compiled.Settling.begin_round

    def begin_round(rounds, *others):
        replays.calls.append("round")
        begins(rounds, *others)

    monkeypatch.setattr(compiled.Settling, "begin_round", begin_round)
    target = captioned()
    target.compile()
    drafter = METHODS["eagle"](target)
    told, seen, ends = [], [], []
    progress = Progress(told.append)

    def watch(round):
        progress(round)
        seen.append(round.sequences.rounds)
        longest = int(round.sequences.lengths.max())
        ends.append(longest + drafter.depth + 1 >= target.length)

    output = decode(target, drafter, Exact(), RandomStreams(0, ["a"]), ["a"], watch=[watch])
    assert seen == list(range(1, 1 + int(output.trace.rounds.max())))
    assert sum(told) == target.length
    read_before, since = [], 0  # when a round begins
    for name in replays.calls:
        if name == "round":
            read_before.append(since)
        since += name == "read"
    behind = [rounds - reads for rounds, reads in enumerate(read_before)]
    free = [1 if not end else 0 for end in ends[:-1]]
    assert all(a >= b for a, b in zip(behind[1:], free, strict=True)), (behind, ends)
    assert behind.count(1) > len(behind) / 2 and max(behind) == 1
    assert replays.calls.count("read") == len(seen)


@pytest.mark.parametrize("method", ["eagle", "host"])
def test_timing_and_counting_compile_nothing(method, replays, monkeypatch):
    """A drafter on the host runs between compiled parts."""
    monkeypatch.setitem(METHODS, "host", lambda target: HostLookUp())
    target, clock = captioned(), Clock()
    target.compile()
    timed = Method(METHODS[method](target), Exact())
    parts = target, timed.drafter, timed.rule
    output = decode(*parts, RandomStreams(0, ["a"]), ["a"], run=clock)
    rounds = int(output.trace.rounds.max())
    compiles = PARTS if method == "eagle" else ("score", "verify", "append")
    assert clock.rounds == rounds and min(clock.seconds.values()) > 0
    assert replays.variants == replays.captures == dict.fromkeys(compiles, 1)
    assert Counter(replays.calls) == dict.fromkeys(compiles, rounds - 1)  # the first is plain
    assert output.tokens.equal(decoded(method, False, batches=[["a"]])[0])
    with target.encoded(["a"]):
        time_rounds(target, {method: timed}, ["a"], 1)
        made = dict(replays.variants)
        launches(target, timed, ["a"], room(timed.drafter.depth))
    assert replays.variants == made


class Repeats(Drafter):
    """Drafts the token that the round before emitted last."""

    nodes = depth = 1
    tree = Tree.chain(1)

    def __init__(self):
        self.last = torch.empty(0)

    def begin(self, prompts, images, uniforms, rows):
        none = images.tokens.new_zeros(len(prompts), 1)
        self.last = compiled.persistent(self.last, none, rows)

    def propose(self, images, uniforms):
        return Draft(self.last + 0, None, self.tree)


class Overwritten(Repeats):
    """In a buffer of its own."""

    def observe(self, images, draft, verdict, scores):
        self.last.copy_(verdict.next_token[:, None])


class Kept(Repeats):
    """In new memory in each round."""

    def observe(self, images, draft, verdict, scores):
        self.last = verdict.next_token[:, None] + 0


class Moved(Overwritten):
    """In a buffer that moves when rows begin."""

    def begin(self, prompts, images, uniforms, rows):
        self.last = self.last.clone()
        super().begin(prompts, images, uniforms, rows)


def of_many_rounds(drafter, compiles, rule=None, watch=()):
    """Images that leave rounds time to settle, though rows begin now and then."""
    names = [*PROMPTS, "a"]
    target = tiny_target(SAMPLING, llamagen(num_hidden_layers=1, grid=(6, 6)), captions)
    if compiles:
        target.compile()
    given = target, drafter, rule or Exact(), RandomStreams(0, "01234"), names
    return decode(*given, rows=2, watch=watch).tokens


@pytest.mark.parametrize(
    ("kind", "captures"), [(Overwritten, [1]), (Kept, [0]), (Moved, range(2, 9))]
)
def test_what_a_round_keeps_is_there_in_the_next(kind, captures, replays):
    """Wherever it is. What moves in each round is in no CUDA graph."""
    assert of_many_rounds(kind(), True).equal(of_many_rounds(kind(), False))
    assert replays.captures["observe"] in captures
    assert (replays.replays["observe"] > 20) == (kind is not Kept)


def test_rounds_that_have_settled_are_replayed_without_a_look(replays):
    """From the third on, where graphs have been captured before; each decoding has its own."""
    target = captioned()
    target.compile()
    drafter = METHODS["eagle"](target)

    def rounds():
        return len(list(loop.rounds(target, drafter, Exact(), RandomStreams(0, ["a"]), ["a"])))

    rounds()
    replays.replays.clear()
    assert replays.replays == dict.fromkeys(PARTS, rounds() - 2)


class Adaptive(Exact):
    """A rule that a watcher makes stricter and looser."""

    def __init__(self):
        self.power = 1.0

    def accept(self, p, q, depth):
        return super().accept(p, q, depth) ** self.power


def test_a_rule_may_change_while_rounds_are_settled(replays):
    def images(compiles):
        rule = Adaptive()

        def adapt(round):
            rule.power = (1.0, 3.0)[round.sequences.rounds // 9 % 2]

        return of_many_rounds(Overwritten(), compiles, rule, [adapt])

    assert images(True).equal(images(False)) and replays.replays["verify"] > 20


def test_two_models_that_decode_in_turn_settle_apart(replays):
    targets = [captioned(), captioned()]
    for target in targets:
        target.compile()
    names = [*PROMPTS, "a"]

    def begun(target):
        streams = RandomStreams(0, "01234")
        return loop.rounds(target, Moved(), Exact(), streams, names, rows=2)

    in_turn = [
        [one.sequences.emitted.clone() for one in pair]
        for pair in zip(*map(begun, targets), strict=True)
    ]
    assert all(a.equal(b) for a, b in in_turn)
    alone = [one.sequences.emitted.clone() for one in begun(captioned())]
    assert all(a.equal(b) for (a, _), b in zip(in_turn, alone, strict=True))


class LookUp(Drafter):
    """Drafts each row's first token, or 1 for 0, on the host."""

    nodes = depth = 1
    tree = Tree.chain(1)

    def propose(self, images, uniforms):
        first = [row[0] if row[0] > 0 else 1 for row in images.tokens.tolist()]
        return Draft(torch.tensor(first)[:, None], None, self.tree)


class HostLookUp(LookUp):
    compiles = False


class Alternates(HostLookUp):
    """A chain and a pair in turn."""

    nodes = depth = 2
    trees = Tree.chain(2), Tree.from_paths([[0], [1]])

    def __init__(self):
        self.rounds = 0

    def propose(self, images, uniforms):
        self.rounds += 1
        tree = self.trees[self.rounds // 5 % 2]
        tokens = torch.tensor([[1, 2]]).expand(len(images.tokens), -1)
        return Draft(tokens, None, tree)


def test_trees_of_the_host_may_change(replays):
    assert of_many_rounds(Alternates(), True).equal(of_many_rounds(Alternates(), False))
    assert replays.replays["score"] > 20


class Counting(LookUp):
    """Waits for the counts of the round before."""

    def propose(self, images, uniforms):
        return super().propose(images, uniforms) if sum(images.counts) >= 0 else None


@pytest.mark.parametrize("kind", [LookUp, Counting])
def test_a_part_that_cannot_be_compiled_is_named(backend, monkeypatch, kind):
    """No compiler of the machine's is at fault."""
    backend("eager")
    monkeypatch.setitem(METHODS, "host", lambda target: kind())
    refused = rf"`propose` of {kind.__name__} cannot be compiled \("
    with pytest.raises(TemperaError, match=refused) as message:
        decoded("host", True)
    said = str(message.value)
    assert "compiles = False" in said and "C++" not in said and "\n" not in said


class Reads(Exact):
    """A rule that branches on a value."""

    def accept(self, p, q, depth):
        return super().accept(p, q, depth) if p.mean() > 0 else q


def test_the_place_in_a_rule_that_cannot_be_compiled_is_named(backend):
    backend("eager")
    draft, p, uniforms = random_draft(2, SMALL)
    with pytest.raises(
        TemperaError, match=r"cannot be compiled \(.*, in accept of test_compiled.py"
    ):
        compiled.graph_of(verify)(draft, Scores(p, p), Reads(), new_sequences(2), uniforms)


def _made(x, y):
    return x + torch.arange(3)


def _constant(x, y):
    return x + torch.tensor([1.0, 2.0, 3.0], device=x.device)


def _summed(x, y):
    return x.unsqueeze(-1).expand(3, 8193).cumsum(-1)


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (_made, "made on the CPU"),
        (_constant, "a constant of the host"),
        (_summed, "cannot generate"),
    ],
)
def test_what_a_graph_may_not_do_fails(part, fault, replays):
    with pytest.raises(Exception, match=fault):
        compiled.graph_of(part)(torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_every_rule_is_one_graph(name):
    tree, rule = RULES[name]
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2, 1 + tree.nodes, 11, generator=generator).softmax(-1)
    q = torch.randn(2, tree.nodes, 11, generator=generator).softmax(-1)
    draft = Draft(q.flatten(0, 1).multinomial(1, generator=generator).view(2, -1), q, tree)
    images = new_sequences(2, 9, tree.max_depth)
    uniforms = torch.rand(2, tree.nodes + 1, generator=generator)
    inputs = draft, Scores(p, p), rule, images, uniforms
    expected = vars(verify(*inputs))  # also makes what is made once
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    found = vars(torch.compile(verify, backend=counter, fullgraph=True)(*inputs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    (graph,) = counter.graphs
    constants = [node for node in graph.graph.nodes if node.target is torch.tensor]
    assert not constants  # a round would copy them to the device


@torch.no_grad()
def test_compiled_sums_over_the_vocabulary_are_pytorchs_own():
    """torch 2.11 cannot generate them (pytorch/pytorch#180221)."""
    counter = CompileCounterWithBackend("aot_eager")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 16384, generator=generator)
    u = torch.rand(2, 3, generator=generator)
    sampling = Sampling(1.0, top_p=0.9)

    def drawn(logits, u):
        return sample(sampling.distribution(logits), u)

    expected = drawn(logits, u)
    torch._dynamo.reset()
    found = torch.compile(drawn, backend=counter, fullgraph=True)(logits, u)
    assert torch.equal(found, expected)
    called = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert called.count("tempera.running_sum.default") == 2 and "cumsum" not in called
    for dtype in (torch.float32, torch.float64):
        torch.library.opcheck(torch.ops.tempera.running_sum, (logits[0], dtype))


def test_the_keys_of_a_dictionary_of_layouts_have_one_type():
    """torch 2.11 compares keys field by field."""
    target = captioned()
    drafter = independent(target, TREE)
    decode(target, drafter, Exact(), RandomStreams(0, PROMPTS), PROMPTS)
    layouts = drafter.model.draft.runner.cache.layouts
    assert len(layouts) > 2  # of its root, of a level, and of emitted tokens
    assert {type(block) for block in layouts} == {Block}


def test_traced_and_functionalised_rounds_write_into_the_cache_in_place(backend):
    counter = backend("aot_eager")
    found, expected = decoded("ar", True), decoded("ar", False)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    writes = [graph.code.count("index_copy_") for graph in counter.graphs]
    assert sum(map(bool, writes)) >= 1


class Adapted(torch.nn.Module):
    """A linear layer and a trained difference of it, as LoRA has them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.weight = layer.weight  # whoever takes the one module for the other finds it
        self.bias = layer.bias
        self.scale = 1.0

    def forward(self, x):
        return self.layer(x) + self.scale * x.sum(-1, keepdim=True)


def _adapt(layer):
    layer.mlp.gate_up = Adapted(layer.mlp.gate_up)


def _rescale(layer):
    layer.mlp.gate_up.scale = -3.0


def _hook(layer):
    layer.mlp.register_forward_hook(lambda module, inputs, out: 3 * out)


@pytest.mark.parametrize("method", ["ar", pytest.param("independent", marks=pytest.mark.slow)])
def test_what_changes_on_a_compiled_model_works(method, backend):
    """Its graphs do not look at its modules in every round; they are looked at before."""
    counter = backend("eager")
    target = captioned()
    drafter = METHODS[method](target)
    network = target.network if method == "ar" else drafter.model.draft.network
    (layer, *_) = network.model.layers
    rule = Exact()

    def images(compiled):
        target.runner.compiled = compiled
        return decode(target, drafter, rule, RandomStreams(0, ["a"]), ["a"])

    target.compile()
    images(True)
    for change in (_adapt, _rescale, _hook):
        before = counter.frame_count
        change(layer)
        found, expected = images(True), images(False)
        assert torch.equal(found.tokens, expected.tokens), change
        assert torch.equal(found.trace.rounds, expected.trace.rounds), change
        assert counter.frame_count > before, change
    layer.mlp._forward_hooks.clear()
    before = counter.frame_count
    assert torch.equal(images(True).tokens, images(False).tokens)
    assert counter.frame_count == before  # the graphs from before the hook


FURTHER = torch.square


class Further(Exact):
    """A rule that asks a function of its own and one of this module."""

    def __init__(self, function):
        self.function = function

    def accept(self, p, q, depth):
        return FURTHER(self.function(super().accept(p, q, depth)))


def test_functions_of_others_may_change_on_compiled_rounds(backend, monkeypatch):
    """Those of ours are not compared in every round."""
    counter = backend("eager")
    draft, p, uniforms = random_draft(20, SMALL)
    rule, verifies = Further(torch.square), compiled.graph_of(verify)
    given = draft, Scores(p, p), rule, new_sequences(20), uniforms

    def accepted(graphs):
        expected = verify(*given).accepted  # also makes what is made once
        found = verifies(*given).accepted
        assert torch.equal(found, expected) and counter.frame_count == graphs
        return found.tolist()

    first = accepted(1)
    assert accepted(1) == first
    rule.function = torch.zeros_like
    assert accepted(2) != first
    rule.function = torch.square
    monkeypatch.setitem(globals(), "FURTHER", torch.zeros_like)
    assert accepted(3) != first


def test_a_model_in_another_dtype_is_refused(backend):
    backend("eager")
    target = captioned()
    target.compile()
    drafter = NoDraft()
    decode(target, drafter, Exact(), RandomStreams(0, ["a"]), ["a"])
    target.network.model.layers[0].mlp.double()
    with pytest.raises((TemperaError, RuntimeError), match="dtype"):
        decode(target, drafter, Exact(), RandomStreams(0, ["a"]), ["a"])


def test_two_models_with_layers_alike_share_graphs_and_others_do_not(backend):
    counter = backend("eager")
    found = []
    for biased in (False, False, True):
        network = llamagen(num_hidden_layers=1)
        if biased:
            down = network.model.layers[0].mlp.down_proj
            down.bias = torch.nn.Parameter(torch.linspace(-3, 3, len(down.weight)))
        target = TransformerTarget(network, captions, SAMPLING, granularity=4)
        images = []
        for compiles in (True, False):
            target.runner.compiled = compiles
            streams = RandomStreams(0, ["a"])
            images.append(decode(target, NoDraft(), Exact(), streams, ["a"]).tokens)
        assert torch.equal(*images)
        found.append(counter.frame_count)
    assert found[0] == found[1] < found[2]


def test_guards_do_not_grow_with_layers(backend, monkeypatch):
    counts = []
    backend("eager")
    wanted = compiled._Graphs._wanted
    for layers in (1, 3):
        compiled.forget()
        kept = []

        def count(graphs, guards, kept=kept):
            flags = wanted(graphs, guards)
            kept.append(sum(flags))
            return flags

        with monkeypatch.context() as patch:
            patch.setattr(compiled._Graphs, "_wanted", count)
            network = llamagen(num_hidden_layers=layers)
            target = TransformerTarget(network, captions, SAMPLING, granularity=4)
            target.compile()
            decode(target, NoDraft(), Exact(), RandomStreams(0, ["a"]), ["a"])
        counts.append(max(kept))
    few, many = counts
    assert many - few <= 2 * 6, counts  # of the buffer of a layer's cache; 190 with its modules
    assert many < 400


@pytest.mark.slow
def test_generated_code_decodes_like_eager_rounds(monkeypatch, tmp_path):
    """With the code that is generated for a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled.forget()
    found, expected = decoded("eagle2", True), decoded("eagle2", False)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [captioned, of_many_codes])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_rounds_decode_like_eager_ones_on_a_gpu(method, make):
    found, expected = (decoded(method, compile, make("cuda")) for compile in (True, False))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ar", "tree", "independent", "dflash", "sjd"])
def test_refilled_rows_decode_like_eager_ones_on_a_gpu(method, impatient):
    target = captioned("cuda")
    target.pack()
    target.compile()
    expected = refilled(method, captioned("cuda"), 1)
    assert all(refilled(method, target, rows).equal(expected) for rows in (2, 3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ar", "tree", "eagle2", "sjd"])
def test_skipped_keys_change_no_token_on_a_gpu(method, monkeypatch):
    """Of images that reach a second block of keys."""
    monkeypatch.setattr(attention, "skipping_is_faster", lambda *_: True)

    def target():
        network = llamagen(num_hidden_layers=1, grid=(14, 14), **WIDE).to("cuda")
        return TransformerTarget(network, captions, SAMPLING)

    found, expected = (decoded(method, compile, target()) for compile in (True, False))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def _wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 3 + 1


@pytest.mark.slow
def test_a_failed_compilation_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    missing = torch._inductor.config.patch({"cpp.cxx": ("no_such_compiler",)})
    with missing, pytest.raises(TemperaError, match=r"no_such_compiler") as message:
        compiled.graph_of(_wave)(torch.ones(5))
    assert "\n" not in str(message.value)


def test_out_of_memory_in_compilation_is_raised_unchanged(monkeypatch):
    def refuse(*inputs):
        raise torch._dynamo.exc.BackendCompilerFailed(
            "inductor", torch.OutOfMemoryError("of 80 GiB"), None
        )

    compiled.forget()
    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    with pytest.raises(torch.OutOfMemoryError):
        compiled.graph_of(_wave)(torch.ones(1))
    compiled.forget()


def test_a_buffer_keeps_its_address_while_shape_and_dtype_stay():
    first = compiled.persistent(torch.empty(0), torch.arange(3))
    assert first.tolist() == [0, 1, 2]
    assert compiled.persistent(first, torch.tensor([4, 5, 6])) is first and first.tolist() == [
        4,
        5,
        6,
    ]
    for other in (torch.ones(3), torch.arange(2)):
        assert compiled.persistent(first, other) is not first


def test_the_mark_of_constants_is_torchs_own():
    """`constant` sets it without an import of the compiler."""

    def theirs():
        return 1

    def ours():
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(compiled.constant(ours)) == vars(theirs) != {}
