"""Mistakes in a part of one's own: told in a sentence that names the part, before anything is
decoded with it.
"""

import pytest
import torch

from tempera import (
    Draft,
    Drafter,
    RandomStreams,
    Rule,
    Sampling,
    TemperaError,
    Tree,
    decode,
    exactness,
)
from tempera.decoding.interfaces import DraftModel, Scores
from tempera.decoding.probabilities import excess, ratio, sample
from tempera.decoding.verification import TokenRule
from tempera.drafters.dynamic_tree import DynamicTreeDrafter
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.exactness.tables import TableTarget, emit

CHAIN = Tree.chain(3)
TREE = Tree.from_paths([[0], [1], [0, 0]])
EVEN = torch.full((3,), 1 / 3)
NONE = "is not a probability distribution"
ODD = "accept returned values outside of 0"


class Guess(Drafter):
    """Drafts three tokens, each from the same q."""

    nodes = depth = uniforms = 3
    tree = CHAIN

    def propose(self, sequences, uniforms):
        q = EVEN.expand(len(uniforms), 3, 3)
        return Draft(sample(q, uniforms), q, self.tree)


class Even(DraftModel):
    """The same q after every token."""

    def roots(self, sequences):
        return EVEN.expand(len(sequences.lengths), -1), None

    def expand(self, above, tokens, level):
        return EVEN.expand(*tokens.shape, -1), None


class Mine(TokenRule):
    """The exact rule, written by someone else."""

    def accept(self, p, q, depth):
        return ratio(p, q)

    def residual(self, p, q, token, depth):
        return excess(p, q)


def changed(base, **members):
    """An object of a class with other members."""
    return type(base.__name__, (base,), members)()


def drafted(tokens=lambda rows: torch.zeros(rows, 3, dtype=torch.int64), q=None, tree=CHAIN):
    """`propose` of a drafter that drafts this, made from the number of rows."""

    def propose(self, sequences, uniforms):
        rows = len(uniforms)
        return Draft(tokens(rows), None if q is None else q(rows), tree)

    return propose


def run(drafter=None, rule=None, target=None, rows=50):
    parts = target or TableTarget(3, 4), drafter or Guess(), rule or Mine()
    return emit(*parts, rows=rows)


DRAFTS = {
    "no draft": (lambda s, i, u: (u, None, CHAIN), "propose returned an object of tuple"),
    "more nodes": (drafted(tree=Tree.chain(5)), "nodes=5 and depth=5, .* declares nodes=3 and dep"),
    "int32": (drafted(lambda rows: torch.zeros(rows, 3).int()), "tokens of .* should be .*int64"),
    "one row": (drafted(lambda rows: torch.zeros(1, 3).long()), r"should be .*\[50, 3\]"),
    "unknown token": (drafted(lambda rows: torch.full((rows, 3), 3)), "tokens outside of 0 … 2"),
    "negative token": (drafted(lambda rows: torch.full((rows, 3), -1)), "tokens outside of 0 … 2"),
    "q of one": (drafted(q=lambda rows: EVEN.expand(rows, 3)), r"q of .* should be .*\[50, 3, 3\]"),
    "q of logits": (drafted(q=lambda rows: (EVEN - 1).expand(rows, 3, 3)), NONE),
    "q of weights": (drafted(q=lambda rows: (2 * EVEN).expand(rows, 3, 3)), NONE),
    "q of float64": (drafted(q=lambda rows: EVEN.expand(rows, 3, 3).double()), "be .*float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_cannot_be_is_refused(name):
    propose, sentence = DRAFTS[name]
    with pytest.raises(TemperaError, match=sentence) as told:
        run(changed(Guess, propose=propose))
    assert "Guess.propose" in str(told.value)


def test_one_nan_in_q_is_no_distribution():
    q = torch.tensor([0.5, torch.nan, 0.5])
    with pytest.raises(TemperaError, match="q of Guess.propose is not a probability distribution"):
        run(changed(Guess, propose=drafted(q=lambda rows: q.expand(rows, 3, 3))))


def test_a_draft_model_is_named():
    model = changed(Even, roots=lambda self, images: (2 * EVEN.expand(50, 3), None))
    with pytest.raises(
        TemperaError, match="StaticTreeDrafter.propose with Even is not a probability distribution"
    ):
        run(StaticTreeDrafter(model, CHAIN))


MODELS = {
    "one row": ({"roots": lambda s, i: (EVEN[None], None)}, r"roots returned .*, not \[50, V\]"),
    "a place": ({"roots": lambda s, i: (EVEN.expand(50, 1, 3), None)}, "roots returned Q of "),
    "Q alone": ({"roots": lambda s, i: EVEN.expand(50, 3)}, "roots must return two values"),
    "no place": ({"expand": lambda s, a, t, n: (EVEN.expand(50, 3), a)}, r"expand .*\[50, 1, V\]"),
    "Q below": ({"expand": lambda s, a, t, n: EVEN.expand(50, 1, 3)}, "expand must return two"),
}


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_that_returns_something_else_is_refused(name, is_dynamic):
    members, sentence = MODELS[name]
    model = changed(Even, **members)
    made = DynamicTreeDrafter(model, 3, 1, 3, 3) if is_dynamic else StaticTreeDrafter(model, CHAIN)
    with pytest.raises(TemperaError, match=f"Even.{sentence}"):
        run(made)


SILENT = type("Silent", (Drafter,), {"nodes": 3, "propose": Guess.propose})()
PARTS = {
    "no depth": ({"drafter": SILENT}, "Silent has no `depth`"),
    "a class": ({"drafter": Guess}, "Guess is a class: give an instance"),
    "a model": ({"drafter": Even()}, "Even is a draft model: give a drafter"),
    "a class of rules": ({"rule": Mine}, "the rule is .*Mine.*: give a tempera.Rule"),
    "no target": ({"target": EVEN}, "Tensor has no `length`, which every target needs"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_something_else_are_refused(name):
    given, sentence = PARTS[name]
    parts = {"target": TableTarget(3, 4), "drafter": Guess(), "rule": Mine()} | given
    with pytest.raises(TemperaError, match=sentence):
        decode(*parts.values(), RandomStreams(0, ["a"]), ["a"])


def test_there_is_a_row():
    with pytest.raises(TemperaError, match="rows=-1 is not valid"):
        decode(TableTarget(3, 4), Guess(), Mine(), RandomStreams(0, ["a"]), ["a"], rows=-1)


def in_place(self, p, q, *_):
    return p.div_(q).clamp_(max=1)


RULES = {
    "above 1": ({"accept": lambda s, p, q, d: p / q}, ODD),
    "below 0": ({"accept": lambda s, p, q, d: -ratio(p, q)}, ODD),
    "nan": ({"accept": lambda s, p, q, d: p * torch.nan}, ODD),
    "a number": ({"accept": lambda s, p, q, d: 1.0}, "accept returned should be"),
    "one of all": ({"accept": lambda s, p, q, d: p.sum(-1)}, "accept returned should be"),
    "float64": ({"accept": lambda s, p, q, d: p.double()}, "accept returned should be .*float32"),
    "changes p": ({"accept": in_place}, "accept changed its argument `p` in place"),
    "changes q": ({"residual": lambda s, p, q, t, d: q.zero_() + p}, "residual changed .* `q`"),
    "no residual": ({"residual": lambda s, p, q, t, d: 0 * p}, f"residual returned {NONE}"),
    "difference": ({"residual": lambda s, p, q, t, d: p - q}, f"residual returned {NONE}"),
    "a mass": ({"residual": lambda s, p, q, t, d: (p - q).clamp(0)}, f"residual returned {NONE}"),
    "a token": ({"residual": lambda s, p, q, t, d: p.argmax(-1)}, "residual returned should be"),
    "no bool": ({"passed": lambda s, d, p, i, u: u[:, :3]}, "passed returned"),
    "one for all": ({"passed": lambda s, d, p, i, u: u[:, 0] < 1}, "passed returned"),
}  # fmt: skip


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_returns_something_else_is_refused(name, tree):
    members, sentence = RULES[name]
    with pytest.raises(TemperaError, match=f"Mine.{sentence}"):
        run(StaticTreeDrafter(Even(), tree), changed(Mine, **members))


WALKS = {
    "one thing": (lambda stop, probs: stop, "Whole.walk must return a node and the distribution"),
    "int32": (lambda stop, probs: (stop.int(), probs), r"Whole.walk returned torch.int32 \[50\]"),
    "all places": (lambda stop, probs: (stop, probs.unsqueeze(1)), r"distribution of \[50, 1, 3\]"),
    "fewer tokens": (lambda stop, probs: (stop, probs[:, :2]), r"distribution of \[50, 2\]"),
    "node -1": (lambda stop, probs: (stop - 1, probs), "prompt '0' no next token: .* its node is"),
    "node 9": (lambda stop, probs: (stop + 9, probs), "prompt '0' no next token: .* its node is"),
}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_that_ends_nowhere_is_refused(name):
    give, sentence = WALKS[name]

    class Whole(Rule):
        def walk(self, draft, scores, sequences, uniforms):
            p = scores.p[:, 0]
            return give(torch.zeros_like(p[:, 0], dtype=torch.int64), p)

    with pytest.raises(TemperaError, match=sentence):
        run(rule=Whole())


def test_p_that_is_no_distribution_is_refused():
    class Logits(TableTarget):
        def score(self, draft, longest):
            scores = super().score(draft, longest)
            return Scores(scores.p.log(), scores.hidden)

    with pytest.raises(TemperaError, match="p of Logits.score is not a probability distribution"):
        run(target=Logits(3, 4))


@pytest.mark.parametrize("part", ["propose", "observe"])
def test_images_are_only_read(part):
    def write(self, sequences, *arguments):
        sequences.tokens[:, -1] = 1
        return getattr(Guess, part)(self, sequences, *arguments)

    with pytest.raises(TemperaError, match="changed the images in place"):
        run(changed(Guess, **{part: write}))


def test_what_is_right_passes():
    """Also where nothing can be rejected, so that a residual by hand is 0 ÷ 0; and in inference
    mode, where PyTorch does not count changes.
    """

    def by_hand(self, p, q, token, depth):
        left = (p - q).clamp(min=0)
        return left / left.sum(-1, keepdim=True)

    rule = changed(Mine, residual=by_hand)
    one = Sampling(guidance=1.0, top_k=1)
    assert exactness.check(rule, CHAIN, sampling=one, rows=1000).agrees
    with torch.inference_mode():
        assert exactness.check(rule, lambda target, draft: Guess(), rows=1000).agrees
