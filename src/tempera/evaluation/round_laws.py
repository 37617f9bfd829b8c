"""How many rounds an image takes under a rule, and what they cost in divergence, predicted from
drafts that were never used.

A few images are decoded by plain autoregression, but at every token a chain is drafted and scored
as well. For each rule this gives the probability that a round which begins there keeps 0, 1, …, L
drafts, and so the law of the number of rounds of each image, end of the image included. One
measurement serves all rules and all shorter chains. What is approximate:

- The drafts of a round and those of the next one are treated as independent, given the image.
- Images are the target's, also for a relaxed rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from tempera.data.prompts import Prompt
from tempera.decoding.diagnostics import mean_terms
from tempera.decoding.interfaces import Draft, Drafter, Rule, Scores, Target, Watcher
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.sequences import Sequences
from tempera.decoding.trace import Trace
from tempera.decoding.trees import Tree
from tempera.decoding.verification import TokenRule, drafted_acceptance_probs
from tempera.evaluation.calibration import TestedDrafts
from tempera.rules.standard import BlockVerification


@dataclass(frozen=True)
class AcceptNothing(Rule):
    """Draw one token from the target in every round, whatever was drafted: plain autoregression
    with drafts at every token.
    """

    @property
    @override
    def exact(self) -> bool:
        return True

    @override
    def walk(
        self, draft: Draft, scores: Scores, sequences: Sequences, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        root = scores.p[:, 0]
        return torch.zeros(len(root), dtype=torch.int64, device=root.device), root


@dataclass(frozen=True)
class TestedRule:
    """A rule to test on chains.

    Attributes:
        rule: block verification, or a rule that tests single tokens.
        depth: how many drafted tokens it sees, if its tests depend on that; None for all.
    """

    __test__: ClassVar[bool] = False  # for pytest

    rule: TokenRule | BlockVerification
    depth: int | None = None

    def outcome(self, draft: Draft, p: Tensor) -> Tensor:
        """For i = 0..L drafts: the probability that at least i are kept; and, times this
        probability, the term of the TV bound and that of the KL bound of the next token,
        [B, 3, 1 + L].
        """
        if self.depth is not None and self.depth < draft.tree.nodes:
            tree = Tree.chain(self.depth).to(p.device)
            q = None if draft.q is None else draft.q[:, : self.depth]
            draft = Draft(draft.tokens[:, : self.depth], q, tree)
            p = p[:, : 1 + self.depth]
        outcome = p.new_zeros(len(p), 3, 1 + draft.tree.nodes)
        accepted = outcome[:, 0]
        accepted[:, 0] = 1
        if isinstance(self.rule, BlockVerification):
            accepted[:, 1:] = self.rule.prefix_acceptance_probs(draft, p)
            return outcome
        accepted[:, 1:] = drafted_acceptance_probs(draft, p, self.rule).cumprod(-1)
        if not self.rule.exact:
            tv, kl = mean_terms(draft, p, self.rule)
            outcome[:, 1] = torch.where(accepted > 0, accepted * tv, 0.0)
            outcome[:, 2] = torch.where(accepted > 0, accepted * kl, 0.0)
        return outcome


def law_watcher(rules: Sequence[TestedRule]) -> TestedDrafts:
    """A watcher of `AcceptNothing` that tests drafted chains under several rules."""
    return TestedDrafts(lambda draft, p: [rule.outcome(draft, p) for rule in rules])


def outcomes(watcher: TestedDrafts, rules: Sequence[TestedRule]) -> dict[TestedRule, Tensor]:
    """For each rule of a `law_watcher`, its outcomes at the T tokens of B images: float64 [B, T,
    3, 1 + L], on the host.
    """
    by_rule = {}
    for index, rule in enumerate(rules):
        rounds = [outcomes[index] for outcomes in watcher.notes]
        by_rule[rule] = torch.stack(rounds, 1).double().cpu()
    return by_rule


@dataclass(frozen=True)
class RoundLaws:
    """The rounds of B images.

    Attributes:
        rounds: probability that an image takes 1..T rounds, float64 [B, T].
        tv_bound: the mean TV bound of an image, as in metrics.json.
        kl_per_token: the KL bound per token, in nats, as in metrics.json.
    """

    rounds: Tensor
    tv_bound: float = 0.0
    kl_per_token: float = 0.0

    @classmethod
    def predicted(cls, outcomes: Tensor, depth: int) -> "RoundLaws":
        """Of chains of `depth` tokens.

        Args:
            outcomes: of `TestedRule.outcome` at every token, float64 [B, T, 3, 1 + L] with
                L ≥ depth.
            depth: how many drafts a round may keep.
        """
        accepted, tv, nats = outcomes[..., : 1 + depth].unbind(2)
        ends = accepted - torch.nn.functional.pad(accepted[..., 1:], (0, 1))
        length = accepted.shape[1]
        begins = torch.zeros_like(accepted[..., 0])
        begins[:, 0] = 1
        visits = torch.zeros_like(begins)
        rounds = torch.zeros_like(begins)
        for count in range(length):
            visits += begins
            after = torch.nn.functional.pad(torch.zeros_like(begins), (0, 1 + depth))
            for tokens in range(1, 2 + depth):
                after[:, tokens : tokens + length] += begins * ends[..., tokens - 1]
            rounds[:, count] = after[:, length:].sum(-1)
            begins = after[:, :length]
            if begins.sum() < 1e-9:
                break
        indices = torch.arange(length).unsqueeze(-1) + torch.arange(1 + depth)
        counted = (indices < length) & (torch.arange(1 + depth) < depth)  # a bonus token adds none
        weights = visits.unsqueeze(-1) * counted / len(visits)
        return cls(rounds, float((weights * tv).sum()), float((weights * nats).sum() / length))

    @classmethod
    def counted(cls, trace: Trace) -> "RoundLaws":
        """Of images that a lossless method has decoded."""
        length = trace.step.shape[1]
        return cls(torch.nn.functional.one_hot(trace.rounds.cpu() - 1, length).double())

    @property
    def length(self) -> int:
        """Tokens per image, T."""
        return self.rounds.shape[1]

    @property
    def accepted_length(self) -> float:
        """Tokens ÷ rounds over all images, as in metrics.json."""
        counts = torch.arange(1, 1 + self.length, dtype=self.rounds.dtype)
        return self.length / float((self.rounds @ counts).mean())

    def median_rounds(self, batch_size: int = 1) -> float:
        """The median number of rounds of a batch, which lasts as long as its longest image."""
        shares = self.rounds.mean(0)
        total = shares.cumsum(0)
        level: float = 0.5 ** (1 / batch_size)  # of one image, for the median of the longest
        index = min(int((total < level).sum()), self.length - 1)
        share = float(shares[index])
        before = float(total[index]) - share
        return 0.5 + index + min((level - before) / max(share, 1e-12), 1.0)


def decoded(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    prompts: Sequence[Prompt],
    seed: int,
    device: torch.device,
    watch: Sequence[Watcher] = (),
) -> Trace:
    """Decode the prompts together."""
    streams = RandomStreams(seed, [prompt.id for prompt in prompts], device)
    texts = [prompt.text for prompt in prompts]
    return decode(target, drafter, rule, streams, texts, watch=watch).trace
