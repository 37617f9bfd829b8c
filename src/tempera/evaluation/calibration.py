"""Schedules from measurements: record drafts along real decodes, keep what matters of them, solve
for the schedule.

What is kept of every round of exact decoding: on chains the ratio p/q at each of the L drafted
tokens (`Chains`), and on chains and trees how each drafted token would be tested at each of some
prices (`PricedRounds`); of all tokens, those after the first rejection included, since the target
scores them anyway. Given where a round begins, a draft is a draw from Q, so the means over rounds
are unbiased estimates of Eqs. 7 and 8, and of the KL bound, of a round for every schedule. What is
approximate:

- the rounds begin where *exact* decoding of these prompts began them; a relaxed schedule begins
  them elsewhere, and more seldom;
- the sample: some thousands of rounds, about one per two tokens of an image; the solver's optimum
  is that of the sample;
- rounds whose draft would run past the end of the image are left out;
- the bounds are per round. A longer round is one of fewer, so at equal expected length, and only
  there, bounds per round compare images.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import Draft, Drafter, Scores, Target, Verdict
from tempera.decoding.loop import decode
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree, take
from tempera.errors import TemperaError
from tempera.rules.optimal_prices import GRID, PricedRounds, prices_for, reachable_by_price
from tempera.rules.optimal_schedule import CEILING, Chains, reachable, schedule_for
from tempera.rules.schedules import Omegas, Prices
from tempera.rules.standard import Exact
from tempera.runtime.files import replacing, sha256_file
from tempera.runtime.installation import command


@dataclass(frozen=True)
class Statistics:
    """What is known of a draft.

    Attributes:
        ratios: p/q at the drafted tokens of chains, float32 [C, L]; none if they were trees.
        rounds: the same drafts as tested at prices, float32.
    """

    ratios: Tensor | None
    rounds: PricedRounds

    @property
    def chains(self) -> Chains:
        """The chains, equally weighed.

        Raises:
            TemperaError: the drafts were trees.
        """
        if self.ratios is None:
            raise TemperaError(
                "these statistics are of a tree, and schedule=calibrated wants chains: measure "
                f"again with `{command('calibrate')} tree=chain`"
            )
        ratios = self.ratios.double()
        return Chains(ratios, torch.full_like(ratios[:, 0], 1 / len(ratios)))


class Recorder:
    """A drafter of static trees that notes on the way what the target says of its drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.nodes, self.depth, self.uniforms = drafter.nodes, drafter.depth, drafter.uniforms
        self.tree, self.identity = drafter.tree, drafter.identity
        self.begin([])

    def begin(self, prompts: list[str]) -> None:
        """Forget the drafts of the images before."""
        self._ratios: list[Tensor] = []
        self._tested: list[PricedRounds] = []
        self._emitted: list[Tensor] = []
        if prompts:
            self.drafter.begin(prompts)

    def propose(self, uniforms: Tensor) -> Draft:
        """The drafter's proposal."""
        return self.drafter.propose(uniforms)

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Note the round; node n is tested where the target scored its parent."""
        token, parents = draft.tokens.unsqueeze(-1), 1 + draft.tree.parents
        self._ratios.append(
            (take(scores.p, parents).gather(-1, token) / draft.q.gather(-1, token)).squeeze(-1)
        )
        self._tested.append(PricedRounds.measured(draft, scores.p))
        self._emitted.append(emitted)
        self.drafter.observe(draft, verdict, scores, emitted)

    def statistics(self, length: int) -> Statistics:
        """Of the drafts that lie within their image of `length` tokens, on the host."""
        emitted = torch.stack(self._emitted)
        begins = emitted.cumsum(0) - emitted
        inside = ((emitted > 0) & (begins + self.depth <= length)).cpu()

        def of(noted: Sequence[Tensor]) -> Tensor:
            return torch.stack([round.cpu() for round in noted])[inside]

        tree = self._tested[0].tree
        rounds = PricedRounds.equal(
            tree.to(torch.device("cpu")),
            of([tested.keep for tested in self._tested]),
            of([tested.divergence for tested in self._tested]),
        )
        return Statistics(of(self._ratios) if tree.is_chain else None, rounds)


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    seed: int,
    device: torch.device,
    batch_size: int,
) -> Statistics:
    """Decode the prompts exactly and return what the target says of all drafts.

    Raises:
        TemperaError: the drafter has no static tree, or the batch is empty.
    """
    if batch_size < 1:
        raise TemperaError(f"batch_size={batch_size} is too small: give at least 1.")
    if drafter.tree is None or not drafter.tree.nodes:
        raise TemperaError(
            "a schedule is calibrated on chains or static trees of a draft network: use "
            "method=coolsd, eagle, uniform_rsd or optimal_rsd"
        )
    recorder, found = Recorder(drafter), []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        streams = RandomStreams(seed, [prompt.id for prompt in batch], device)
        decode(target, recorder, Exact(), streams, [prompt.text for prompt in batch])
        found.append(recorder.statistics(target.length))
    ratios = [one.ratios for one in found if one.ratios is not None]
    rounds = PricedRounds.equal(
        found[0].rounds.tree,
        torch.cat([one.rounds.keep for one in found]),
        torch.cat([one.rounds.divergence for one in found]),
    )
    return Statistics(torch.cat(ratios) if ratios else None, rounds)


def save_statistics(path: Path, found: Statistics, measured_with: Mapping[str, Any]) -> None:
    """Write the statistics and the options that they were measured with."""
    rounds = found.rounds
    tensors = {
        "parents": rounds.tree.parents,
        "prices": torch.tensor(GRID),
        "keep": rounds.keep,
        "divergence": rounds.divergence,
    }
    if found.ratios is not None:
        tensors["ratios"] = found.ratios
    with replacing(path) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            temporary,
            {"measured_with": json.dumps(dict(measured_with))},
        )


def load_statistics(path: Path) -> tuple[Statistics, dict[str, Any]]:
    """The statistics, and the options that they were measured with.

    Raises:
        TemperaError: the file is missing or is none of `save_statistics`.
    """
    if not path.is_file():
        raise TemperaError(
            f"there is no {path}: measure the draft first, with `{command('calibrate')}` and "
            "this run's options"
        )
    try:
        with safe_open(path, "pt") as file:
            notes = json.loads((file.metadata() or {})["measured_with"])
            if file.get_tensor("prices").tolist() != torch.tensor(GRID).tolist():
                raise KeyError("prices")
            rounds = PricedRounds.equal(
                Tree.from_parents(file.get_tensor("parents")),
                file.get_tensor("keep"),
                file.get_tensor("divergence"),
            )
            ratios = file.get_tensor("ratios") if "ratios" in file.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError):
        raise TemperaError(
            f"{path} holds no statistics of a draft: write it anew with `{command('calibrate')}`"
        ) from None
    return Statistics(ratios, rounds), notes


def conditions(model: str, draft: str | None, **sampling: float) -> dict[str, Any]:
    """What statistics depend on: the model, the draft (by the hash of its weights in the directory
    `draft`) and the sampling options.
    """
    weights = Path(draft) / "model.safetensors" if draft is not None else None
    return {
        "model": model,
        "draft": sha256_file(weights)[:16] if weights is not None and weights.is_file() else None,
        **sampling,
    }


def calibrated(
    length: int,
    statistics: str,
    expected_length: float | None,
    measured_with: dict[str, Any],
    ceiling: float = CEILING,
    delta: float | None = None,
) -> Omegas:
    """The schedule of `length` depths that minimises the TV bound at an expected length, on the
    chains of a file.

    Args:
        length: L; the file's chains may be longer.
        statistics: file written by `tempera-calibrate`.
        expected_length: E[τ + 1] of a round, on these chains.
        measured_with: arguments of `conditions` for this run; the file's must agree.
        ceiling: no ω is larger.
        delta: must be None: the expected length replaces it.

    Raises:
        TemperaError: the file is missing, too short, or of other conditions; the expected length is
            out of reach.
    """
    if delta is not None:
        raise TemperaError(
            f"delta={delta:g} does not go with schedule=calibrated: give expected_length=, or "
            "choose another schedule"
        )
    chains = _known(statistics, measured_with).chains
    _check_depth(statistics, chains.length, length)
    chains = Chains(chains.ratios[:, :length], chains.weights)
    if expected_length is None:
        raise _needs_length("calibrated", *reachable(chains, ceiling))
    return schedule_for(chains, expected_length, ceiling)


def optimal(
    length: int,
    tree: Tree,
    statistics: str,
    expected_length: float | None,
    measured_with: dict[str, Any],
) -> Prices:
    """The prices of `length` depths that give a round the least KL bound at an expected length, on
    the rounds of a file.

    Args:
        length: L; chains of the file may be longer.
        tree: of this run's drafts; the file's must be the same, or both must be chains.
        statistics: file written by `tempera-calibrate`.
        expected_length: tokens of a round, in these rounds.
        measured_with: arguments of `conditions` for this run; the file's must agree.

    Raises:
        TemperaError: the file is missing, too short, or of another tree or other conditions; the
            expected length is out of reach.
    """
    rounds = _known(statistics, measured_with).rounds
    if tree.nodes and tree.is_chain and rounds.tree.is_chain:
        _check_depth(statistics, rounds.tree.nodes, length)
        rounds = rounds.first_depths(length)
    elif not torch.equal(tree.parents.cpu(), rounds.tree.parents):
        raise TemperaError(
            f"{statistics} was measured with another draft tree: measure again with "
            f"`{command('calibrate')}` and this run's options"
        )
    if expected_length is None:
        raise _needs_length("optimal", *reachable_by_price(rounds))
    return prices_for(rounds, expected_length)


def _known(statistics: str, measured_with: dict[str, Any]) -> Statistics:
    """The statistics of a file; TemperaError if they are of other conditions than this run's."""
    found, known = load_statistics(Path(statistics))
    for name, now in conditions(**measured_with).items():
        if known.get(name) != now:
            raise TemperaError(
                f"{statistics} was measured with {name}={known.get(name)} and this run has "
                f"{name}={now}: "
                f"measure again with `{command('calibrate')}` and this run's options"
            )
    return found


def _check_depth(statistics: str, measured: int, drafted: int) -> None:
    if drafted > measured:
        raise TemperaError(
            f"{statistics} holds chains of {measured} and this run drafts {drafted}: measure "
            f"again with depth={drafted}"
        )


def _needs_length(schedule: str, low: float, high: float) -> TemperaError:
    return TemperaError(
        f"schedule={schedule} needs expected_length=, tokens a round from {low:.2f} (exact "
        f"decoding) to {high:.2f}"
    )
