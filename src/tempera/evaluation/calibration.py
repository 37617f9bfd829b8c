"""Schedules from measurements: record drafted chains along real decodes, keep what matters of them,
solve for the schedule.

What is kept (`Chains`): for every round of exact decoding, the ratio p/q at each of the L drafted
tokens, those after the first rejection included, since the target scores them anyway. Given where a
round begins, a chain is a draw from Q, so the means over chains are unbiased estimates of Eqs. 7
and 8 of a round for every schedule. What is approximate:

- the rounds begin where *exact* decoding of these prompts began them; a relaxed schedule begins
  them elsewhere, and more seldom;
- the sample: some thousands of chains, about one per two tokens of an image; the solver's optimum
  is that of the sample;
- rounds whose draft would run past the end of the image are left out;
- the bound is per round. A longer round is one of fewer, so at equal expected length, and only
  there, bounds per round compare images.
"""

import json
from collections.abc import Mapping, Sequence
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
from tempera.errors import TemperaError
from tempera.rules.optimal_schedule import CEILING, Chains, reachable, schedule_for
from tempera.rules.schedules import Omegas
from tempera.rules.standard import Exact
from tempera.runtime.files import replacing, sha256_file
from tempera.runtime.installation import command


class Recorder:
    """A drafter of chains that notes p/q at its drafted tokens on the way."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.nodes, self.depth, self.uniforms = drafter.nodes, drafter.depth, drafter.uniforms
        self.tree, self.identity = drafter.tree, drafter.identity
        self.begin([])

    def begin(self, prompts: list[str]) -> None:
        """Forget the chains of the images before."""
        self._ratios: list[Tensor] = []
        self._emitted: list[Tensor] = []
        if prompts:
            self.drafter.begin(prompts)

    def propose(self, uniforms: Tensor) -> Draft:
        """The drafter's proposal."""
        return self.drafter.propose(uniforms)

    def observe(self, draft: Draft, verdict: Verdict, scores: Scores, emitted: Tensor) -> None:
        """Note the round; the chain's node n follows what is scored at place n."""
        token = draft.tokens.unsqueeze(-1)
        self._ratios.append(
            (scores.p[:, :-1].gather(-1, token) / draft.q.gather(-1, token)).squeeze(-1)
        )
        self._emitted.append(emitted)
        self.drafter.observe(draft, verdict, scores, emitted)

    def ratios(self, length: int) -> Tensor:
        """p/q of the chains that lie within their image of `length` tokens, float32 [C, L], on the
        host.
        """
        ratios, emitted = torch.stack(self._ratios, 1), torch.stack(self._emitted, 1)
        begins = emitted.cumsum(1) - emitted
        return ratios[(emitted > 0) & (begins + self.depth <= length)].cpu()


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    seed: int,
    device: torch.device,
    batch_size: int,
) -> Tensor:
    """Decode the prompts exactly and return p/q along all drafted chains, float32 [C, L].

    Raises:
        TemperaError: the drafter does not draw chains from left to right, or the batch is empty.
    """
    if batch_size < 1:
        raise TemperaError(f"batch_size={batch_size} is too small: give at least 1.")
    if drafter.tree is None or not drafter.tree.is_chain:
        raise TemperaError(
            "a schedule is calibrated on chains of a draft network: use method=coolsd, eagle or "
            "uniform_rsd with tree=chain"
        )
    recorder, found = Recorder(drafter), []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        streams = RandomStreams(seed, [prompt.id for prompt in batch], device)
        decode(target, recorder, Exact(), streams, [prompt.text for prompt in batch])
        found.append(recorder.ratios(target.length))
    return torch.cat(found)


def save_statistics(path: Path, ratios: Tensor, measured_with: Mapping[str, Any]) -> None:
    """Write the chains, float32 [C, L], and the options that they were measured with."""
    with replacing(path) as temporary:
        save_file(
            {"ratios": ratios.contiguous()},
            temporary,
            {"measured_with": json.dumps(dict(measured_with))},
        )


def load_statistics(path: Path) -> tuple[Chains, dict[str, Any]]:
    """The chains, equally weighed, and the options that they were measured with.

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
            ratios, notes = (
                file.get_tensor("ratios").double(),
                json.loads((file.metadata() or {})["measured_with"]),
            )
    except (SafetensorError, KeyError, ValueError):
        raise TemperaError(
            f"{path} holds no statistics of a draft: write it anew with `{command('calibrate')}`"
        ) from None
    return Chains(ratios, torch.full_like(ratios[:, 0], 1 / len(ratios))), notes


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
    chains, known = load_statistics(Path(statistics))
    for name, now in conditions(**measured_with).items():
        if known.get(name) != now:
            raise TemperaError(
                f"{statistics} was measured with {name}={known.get(name)} and this run has "
                f"{name}={now}: "
                f"measure again with `{command('calibrate')}` and this run's options"
            )
    if length > chains.length:
        raise TemperaError(
            f"{statistics} holds chains of {chains.length} and this run drafts {length}: measure "
            f"again with depth={length}"
        )
    chains = Chains(chains.ratios[:, :length], chains.weights)
    if expected_length is None:
        low, high = reachable(chains, ceiling)
        raise TemperaError(
            f"schedule=calibrated needs expected_length=, tokens a round from {low:.2f} (exact "
            f"decoding) to {high:.2f}"
        )
    return schedule_for(chains, expected_length, ceiling)
