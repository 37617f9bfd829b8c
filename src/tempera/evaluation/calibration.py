"""Schedules from measurements: record statistics of drafts during exact decoding, then solve for
the schedule.

Every round of exact decoding contributes, on chains, the ratio p/q at each of the L drafted tokens
(`Chains`), and on chains and trees the outcome of each drafted token's test at several prices
(`PricedRounds`). Tokens after the first rejection count too, since the target scores them anyway.
Given where a round begins, its draft is a draw from Q, so means over rounds are unbiased estimates
of Eqs. 7 and 8 and of the KL bound, per round and for every schedule. The approximations are:

- Rounds begin where *exact* decoding of these prompts begins them. A relaxed schedule begins them
  elsewhere, and less often.
- The optimum is that of a sample: some thousands of rounds, about one per two tokens of an image.
- Rounds whose draft would run past the end of the image are left out.
- The bounds are per round, and longer rounds are fewer. Bounds per round therefore compare images
  only at equal expected length.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Draft, Drafter, Round, Target, Watcher
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree, take
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Progress, progress_bar
from tempera.rules.optimal_prices import GRID, PricedRounds, prices_for, reachable_by_price
from tempera.rules.optimal_schedule import Chains, reachable, schedule_for
from tempera.rules.schedules import Omegas, Prices
from tempera.rules.standard import Exact
from tempera.runtime.files import replacing, sha256_file, writable_directory
from tempera.runtime.installation import command
from tempera.runtime.network_directory import PICKLE, WEIGHTS


@dataclass(frozen=True)
class Statistics:
    """Statistics of a draft.

    Attributes:
        ratios: p/q at the drafted tokens of C chains, float32 [C, L]; None if drafts are trees.
        rounds: the same drafts, tested at several prices, float32.
    """

    ratios: Tensor | None
    rounds: PricedRounds

    @property
    def chains(self) -> Chains:
        """The chains, with equal weights.

        Raises:
            TemperaError: the drafts are trees.
        """
        if self.ratios is None:
            raise TemperaError(
                "these statistics are of a tree, but schedule=calibrated needs chains: "
                "give tree=chain"
            )
        ratios = self.ratios.double()
        return Chains(ratios, torch.full_like(ratios[:, 0], 1 / len(ratios)))

    def first_depths(self, length: int) -> "Statistics":
        """The statistics of chains cut to the first `length` drafts; of trees, the same.

        Raises:
            TemperaError: the chains are shorter.
        """
        if self.ratios is None:
            return self
        measured = self.rounds.tree.nodes
        if length > measured:
            raise TemperaError(
                f"the statistics are of chains of {measured} tokens, but this run drafts "
                f"{length}: measure them again with depth={length}",
                option="depth",
            )
        return Statistics(self.ratios[:, :length], self.rounds.first_depths(length))

    def reach(self, ceiling: float | None = None) -> tuple[float, float]:
        """The expected lengths of exact decoding, and of the most relaxed schedule: ω = `ceiling`,
        or the highest price, at every depth.
        """
        if ceiling is None:
            return reachable_by_price(self.rounds)
        return reachable(self.chains, ceiling)


class TestedDrafts:
    """A watcher: notes how the target scores the drafts of static trees.

    Args:
        note: what is noted of a round, from its draft and p; by default what `statistics` needs.

    Attributes:
        notes: of each round of the last batch.
    """

    __test__: ClassVar[bool] = False  # for pytest

    def __init__(self, note: Callable[[Draft, Tensor], Any] | None = None) -> None:
        self.note = note or ratios_and_round
        self.notes: list[Any] = []
        self._emitted: list[Tensor] = []
        self._depth = 0

    def __call__(self, round: Round) -> None:
        """Note a round."""
        if round.sequences.rounds == 1:
            self.notes = []
            self._emitted = []
        self.notes.append(self.note(round.draft, round.scores.p))
        self._emitted.append(round.sequences.emitted.clone())
        self._depth = round.sequences.depth

    def statistics(self, length: int) -> Statistics:
        """Statistics, on the host, of the drafts that end within their image of `length` tokens."""
        ratios, priced = zip(*self.notes, strict=True)
        emitted = torch.stack(self._emitted)
        begins = emitted.cumsum(0) - emitted
        inside = ((emitted > 0) & (begins + self._depth <= length)).cpu()

        def selected(rounds: Iterable[Tensor]) -> Tensor:
            return torch.stack([of_batch.cpu() for of_batch in rounds])[inside]

        tree = priced[0].tree
        rounds = PricedRounds.equal(
            tree.to(torch.device("cpu")),
            selected(round.accept_probs for round in priced),
            selected(round.divergence for round in priced),
        )
        return Statistics(selected(ratios) if tree.is_chain else None, rounds)


def ratios_and_round(draft: Draft, p: Tensor) -> tuple[Tensor, PricedRounds]:
    """p/q of each drafted token [B, N], and the round by prices; node n is tested against p at its
    parent.
    """
    token = draft.tokens.unsqueeze(-1)
    q = draft.drawn_from(p.shape[-1])
    ratios = take(p, 1 + draft.tree.parents).gather(-1, token) / q.gather(-1, token)
    return ratios.squeeze(-1), PricedRounds.measured(draft, p)


def checked_tree(tree: Tree | None) -> Tree:
    """The tree of drafts; raises TemperaError unless they are chains or static trees."""
    if tree is None or not tree.nodes:
        raise TemperaError(
            "a schedule can only be calibrated on chains or static trees of a draft network: "
            "give method=coolsd, eagle, uniform_rsd or optimal_rsd",
            option="method",
        )
    return tree


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    seed: int,
    device: torch.device,
    batch_size: int,
) -> Statistics:
    """Decode the prompts exactly and return the statistics of all drafts.

    Raises:
        TemperaError: the drafter has no static tree.
    """
    checked_tree(drafter.tree)
    tested = TestedDrafts()
    batches: list[Statistics] = []
    with progress_bar("measuring the draft", len(prompts) * target.length) as bar:
        watch: list[Watcher] = [tested, Progress(bar.update)]
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            streams = RandomStreams(seed, [prompt.id for prompt in batch], device)
            texts = [prompt.text for prompt in batch]
            decode(target, drafter, Exact(), streams, texts, watch=watch)
            batches.append(tested.statistics(target.length))
    ratios = [batch.ratios for batch in batches if batch.ratios is not None]
    accept_probs = torch.cat([batch.rounds.accept_probs for batch in batches])
    divergence = torch.cat([batch.rounds.divergence for batch in batches])
    rounds = PricedRounds.equal(batches[0].rounds.tree, accept_probs, divergence)
    return Statistics(torch.cat(ratios) if ratios else None, rounds)


def is_measured(path: Path, tree: Tree, measured_with: dict[str, Any]) -> bool:
    """Whether a file holds statistics of such drafts: of this tree, or of chains that are at least
    as long, under the `conditions` of this run.

    Raises:
        TemperaError: it is another file, or none can be written there.
    """
    writable_directory(path.parent)
    if not path.is_file():
        return False
    measured, earlier = load_statistics(path)
    known = measured.rounds.tree
    if tree.is_chain and known.is_chain:
        reaches = known.nodes >= tree.nodes
    else:
        reaches = torch.equal(tree.parents.cpu(), known.parents)
    return reaches and not _difference(earlier, measured_with)


def save_statistics(path: Path, statistics: Statistics, measured_with: Mapping[str, Any]) -> None:
    """Write the statistics and the options that they were measured with."""
    rounds = statistics.rounds
    tensors = {
        "keep": rounds.accept_probs,
        "divergence": rounds.divergence,
        "parents": rounds.tree.parents,
        "prices": torch.tensor(GRID),
    }
    if statistics.ratios is not None:
        tensors["ratios"] = statistics.ratios
    with replacing(path) as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, {"measured_with": json.dumps(dict(measured_with))})


def load_statistics(path: Path) -> tuple[Statistics, dict[str, Any]]:
    """The statistics, and the options that they were measured with.

    Raises:
        TemperaError: the file is missing or was not written by `save_statistics`.
    """
    if not path.is_file():
        raise TemperaError(
            f"there is no {path}: run `{command('eval')} expected_length=LENGTH` with this run's "
            "options to measure the draft"
        )
    try:
        with safe_open(path, "pt") as file:
            notes = json.loads(file.metadata()["measured_with"])
        tensors = load_file(path)
        if not torch.equal(tensors["prices"], torch.tensor(GRID)):
            raise KeyError("prices")
        tree = Tree.from_parents(tensors["parents"])
        rounds = PricedRounds.equal(tree, tensors["keep"], tensors["divergence"])
        _check(rounds, tensors.get("ratios"))
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RecursionError):
        raise TemperaError(
            f"{path} has no statistics of a draft: delete it, or give a new name as statistics=",
            option="statistics",
        ) from None
    return Statistics(tensors.get("ratios"), rounds), notes


def _check(rounds: PricedRounds, ratios: Tensor | None) -> None:
    """Raise ValueError unless such statistics can have been measured."""
    count = len(rounds.accept_probs)
    nodes = rounds.tree.nodes
    prices = len(GRID)
    expected: list[tuple[Tensor, tuple[int, ...], float]] = [
        (rounds.accept_probs, (count, nodes, prices), 1 + 1e-4),
        (rounds.divergence, (count, 1 + nodes, prices), math.inf),
    ]
    if ratios is not None:
        expected.append((ratios, (count, nodes), math.inf))
    for tensor, shape, most in expected:
        in_range = tensor.isfinite() & (tensor >= 0) & (tensor <= most)
        if not count or tensor.shape != shape or not in_range.all():
            raise ValueError("not measured")


def conditions(
    model: str, weights: str, draft: str | None, **sampling: float | Sequence[float] | None
) -> dict[str, Any]:
    """The conditions that statistics depend on: the model, what names its weights, the draft (a
    hash of the weights in the directory `draft`; the name of one on the hub) and the sampling
    options.
    """
    found = {
        "model": model,
        "weights": weights,
        "draft": None if draft is None else _named(draft),
        **sampling,
    }
    return {name: [*one] if isinstance(one, tuple) else one for name, one in found.items()}


def _named(draft: str) -> str:
    """What tells a draft from others."""
    for name in (WEIGHTS, PICKLE):
        file = Path(draft).expanduser() / name
        if file.is_file():
            return sha256_file(file)[:16]
    return draft


def calibrated(
    length: int,
    statistics: str,
    expected_length: float | None,
    measured_with: dict[str, Any],
    ceiling: float,
    delta: float | None = None,
) -> Omegas:
    """The schedule of `length` depths that minimises the TV bound at an expected length, for the
    chains in a file.

    Args:
        length: L; the file's chains may be longer.
        statistics: file written by `save_statistics`.
        expected_length: E[τ + 1] of a round, on these chains.
        measured_with: the `conditions` of this run; those of the file must be the same.
        ceiling: the largest ω allowed.
        delta: must be None, since the expected length replaces it.

    Raises:
        TemperaError: the file is missing, its chains are too short, or its conditions differ; or
            the expected length is out of reach.
    """
    if delta is not None:
        raise TemperaError(
            "the calibrated schedule follows from expected_length and takes no δ: leave "
            f"delta={delta:g} out, or choose another schedule",
            option="delta",
        )
    measured = _load_matching(statistics, measured_with).first_depths(length)
    wanted_length = _required(expected_length, measured.reach(ceiling))
    return schedule_for(measured.chains, wanted_length, ceiling)


def optimal(
    length: int,
    tree: Tree,
    statistics: str,
    expected_length: float | None,
    measured_with: dict[str, Any],
) -> Prices:
    """The prices of `length` depths that minimise a round's KL bound at an expected length, for the
    rounds in a file.

    Args:
        length: L; the file's chains may be longer.
        tree: the tree of this run's drafts; the file's must be the same, or both must be chains.
        statistics: file written by `save_statistics`.
        expected_length: mean number of tokens per round, in these rounds.
        measured_with: the `conditions` of this run; those of the file must be the same.

    Raises:
        TemperaError: the file is missing, its chains are too short, or its tree or conditions
            differ; or the expected length is out of reach.
    """
    measured = _load_matching(statistics, measured_with)
    if tree.nodes and tree.is_chain:
        measured = measured.first_depths(length)
    if not torch.equal(tree.parents.cpu(), measured.rounds.tree.parents):
        raise _mismatch(statistics, "another draft tree")
    wanted_length = _required(expected_length, measured.reach())
    return prices_for(measured.rounds, wanted_length)


def _load_matching(statistics: str, measured_with: dict[str, Any]) -> Statistics:
    """The statistics of a file; raises TemperaError unless its conditions are those of this run."""
    measured, earlier = load_statistics(Path(statistics))
    difference = _difference(earlier, measured_with)
    if difference:
        raise _mismatch(statistics, difference)
    return measured


def _difference(earlier: Mapping[str, Any], measured_with: dict[str, Any]) -> str:
    """The first of the `conditions` that differs from those of a file; empty if none does."""
    for name, now in conditions(**measured_with).items():
        before = earlier.get(name)
        if before != now:
            return f"{name}={before}, but this run has {name}={now}"
    return ""


def _mismatch(statistics: str, what: str) -> TemperaError:
    """The error for statistics that were measured with something else than this run has."""
    return TemperaError(
        f"{statistics} was measured with {what}: run `{command('eval')} expected_length=LENGTH` "
        "with this run's options to measure the draft again"
    )


def _required(expected_length: float | None, reach: tuple[float, float]) -> float:
    """The expected length; raises TemperaError if there is none."""
    if expected_length is None:
        shortest, longest = reach
        raise TemperaError(
            f"this schedule needs expected_length=: give {shortest:.2f} (exact decoding) to "
            f"{longest:.2f} tokens per round"
        )
    return expected_length
