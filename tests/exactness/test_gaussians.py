"""Laws of the rules for continuous tokens, through the real loop: what is exact agrees with its
law, the bias of the others is the documented one, faults are seen.
"""

import copy
import math
import runpy
from typing import Any

import pytest
import torch
from paths import ROOT
from published_code.cspd import CSpDReferenceCode
from random_drafts import new_noise
from scipy import stats
from torch import Tensor

from tempera.continuous.diffusion import Kernel, denoise
from tempera.continuous.loop import Parallel, Speculative
from tempera.continuous.noise import normal_of
from tempera.continuous.residual_sampler import reject_until
from tempera.continuous.rules import CSpD, PathCoupling, Proposal
from tempera.decoding.interfaces import ACCEPTED
from tempera.decoding.random_streams import RandomStreams
from tempera.exactness.gaussians import Linear, Toy, ToyHead, Wavy, check, compare

LINEAR = Linear(stages=3, channels=2)
HEADS = {
    "one stage": Linear(1, 1),
    "three stages": LINEAR,
    "no noise in the last stage": Linear(3, 2, last_noise=False),
    "not linear": Wavy(),
}


# The instrument


@pytest.mark.parametrize("name", HEADS)
def test_a_target_alone_has_its_law_and_its_draft_has_another(name: str) -> None:
    head, length = HEADS[name], 1 if name == "not linear" else 3
    alone = check(None, head, length=length, rows=20_000)
    draft = check(None, head, draft=head.imitation(0.25), length=length, rows=20_000)
    assert alone.agrees and not draft.agrees, (alone, draft)


def test_the_distance_and_its_p_value_are_kolmogorovs() -> None:
    ids = list(map(str, range(300)))
    output = Parallel().decode(Toy(Linear(1, 1), 2), RandomStreams(0, ids), ids)
    columns = torch.randn(300, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    columns[:, 1] += 0.1
    tests = [stats.kstest(column.numpy(), "norm", method="asymp") for column in columns.T]
    found = compare(columns, output, projections=0)
    assert found.distance == pytest.approx(max(one.statistic for one in tests))
    assert found.p_value == pytest.approx(min(1, 2 * min(one.pvalue for one in tests)))
    assert (found.rows, found.margin) == (300, pytest.approx((math.log(40) / 600) ** 0.5))
    assert (found.accepted_length, found.trials) == (1.0, 0.0)
    columns[:, 1] = -columns[:, 0]  # each alone is normal, and not both
    assert compare(columns, output).distance > 0.1 > compare(columns, output, 0).distance


# The rules

COUPLED: dict[str, tuple[ToyHead, dict[str, Any]]] = {
    "normal": (Linear(1, 2), {}),
    "three stages": (LINEAR, {}),
    "no noise in the last stage": (Linear(3, 2, last_noise=False), {}),
    "not linear": (Wavy(), {"length": 1, "gamma": 1}),
    "long drafts after a prefix": (Linear(3, 1), {"gamma": 3, "length": 4, "prefill": 0.25}),
    "several tokens a drafting step": (Linear(3, 1), {"gamma": 2, "length": 5, "steps": 3}),
    "a perfect draft": (LINEAR, {"spread": 0.0}),
}


@pytest.mark.parametrize("name", COUPLED)
def test_the_coupling_is_exact(name: str) -> None:
    head, options = COUPLED[name]
    report = check(PathCoupling(), head, rows=20_000, **options)
    drafts = head.last_noise and options.get("length") != 1
    assert report.agrees and (report.accepted_length > 1.1) == drafts, report
    if name == "a perfect draft":
        assert report.accepted_length == 3.0


@pytest.mark.slow
def test_one_path_of_the_target_per_token_on_average() -> None:
    """A rejection has probability TV, and then takes 1/TV paths on average."""
    report = check(PathCoupling(), LINEAR, gamma=1, rows=50_000)
    tested = 3 / report.accepted_length  # drafted tokens an image of three
    assert report.agrees and 0.95 < report.trials / tested < 1.1, report


def test_the_paper_s_rule_is_exact_for_a_single_stage() -> None:
    assert (report := check(CSpD(), Linear(1, 2), rows=20_000)).agrees, report


@pytest.mark.slow
def test_the_paper_s_rule_is_exact_where_the_variances_before_the_last_stage_agree() -> None:
    head = Linear(3, 1)
    draft = head.imitation(0.25)
    draft.log_std = torch.cat([head.log_std[:-1], draft.log_std[-1:]])
    assert (report := check(CSpD(), head, draft=draft, rows=20_000)).agrees, report


def published(**options: Any) -> CSpDReferenceCode:
    """Without a draft."""
    drafter: Any = None
    return CSpDReferenceCode(drafter, **options)


@pytest.mark.parametrize("public", [False, True], ids=["paper", "public code"])
@pytest.mark.parametrize("alignment", [True, False])
def test_acceptance_and_residual_are_those_of_the_densities(alignment: bool, public: bool) -> None:
    """Eqs. 1, 4 and 11: the states before the last stage, x_S among them, weigh the last ratio. The
    public code inverts their weight, without noises, and widens the exponents.
    """
    head, ids, none = Linear(3, 1), list(map(str, range(200))), torch.zeros(200, 1, 1)
    other, drawn = head.imitation(0.5, 6), torch.randn(200, 1, 4, 1)
    path = denoise(other, none, drawn)
    noise, again = (new_noise(ids) for _ in range(2))
    rule: Any = CSpD(alignment, 1)
    if public:
        rule = published(exponent_temperature=2.0, trials=1, alignment=alignment)
    conditions = none.expand(-1, 1 if public else 2, -1)
    verdict = rule.verify(Proposal(path, drawn, other, none), head, conditions, noise)
    own = drawn if alignment else again.normal(1, 4, 1)
    if not public:
        again.normal(4, 1)  # for the token after the draft
    target = denoise(head, none, own)
    logs = [one.kernels.std[:, 0, :-1, 0].log().sum(-1) for one in (target, path)]
    squares = [one[:, 0, :-1, 0].square().sum(-1) / 2 for one in (own, drawn)]
    before = logs[0] - logs[1] if public else logs[1] - logs[0] + squares[1] - squares[0]
    p, q = (one.kernels.map(lambda leaf: leaf[:, 0, -1]) for one in (target, path))
    width, x = 2.0 if public else 1.0, path.token[:, 0]
    above, below = (
        -(((x - one.mean) / one.std / width) ** 2) / 2 - one.std.log() for one in (p, q)
    )
    kept = again.uniform(1)[:, 0].log() <= before + (above - below)[:, 0]
    assert torch.equal(verdict.origin[:, 0] == ACCEPTED, kept) and 20 < kept.sum() < 190
    trial = again.trials(torch.arange(200), 1, 0, 1, 2)[:, 0]
    x = p.at(normal_of(trial[:, :1]))
    found = trial[:, 1] < 1 - (q.log_density(x) - p.log_density(x) - before).exp()
    failed = none[:, 0] if public else p.at(again.normal(1))
    tokens = torch.where(found.unsqueeze(-1), x, failed)
    torch.testing.assert_close(verdict.tokens[~kept, 0], tokens[~kept])


@pytest.mark.slow
def test_the_biases_in_the_docs() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "continuous_laws.py"))["table"]
    page = (ROOT / "docs" / "results" / "continuous.md").read_text(encoding="utf-8")
    for line in table(rows=20_000).splitlines()[2:-2]:
        name, *cells = line.strip("| ").split(" | ")
        (row,) = (row for row in page.splitlines() if row.startswith(f"| {name} |"))
        for found, printed in zip(cells, row.strip("| ").split(" | ")[1:], strict=True):
            low, high = (float(cell.split()[0].replace("–", "0")) for cell in (printed, found))
            assert high == pytest.approx(low, abs=0.012), line
        assert name != "cspd_exact" or all("exact" in cell for cell in cells)


class Stale(PathCoupling):
    """Evaluates every drafted path under the condition of the first."""

    def verify(self, proposal: Any, denoiser: Any, conditions: Tensor, noise: Any) -> Any:
        return super().verify(proposal, denoiser, conditions[:, :1].expand_as(conditions), noise)


@pytest.mark.parametrize("rule", [Stale(), PathCoupling(trials=1)])
def test_a_planted_fault_is_detected(rule: PathCoupling) -> None:
    assert not check(rule, Linear(3, 1), rows=40_000).agrees


# The residual sampler


def test_a_last_stage_that_draws_nothing_is_no_reason_to_reject() -> None:
    head, ids = Linear(3, 1, last_noise=False), list(map(str, range(200)))
    other = copy.copy(head)
    other.shift = head.shift + torch.tensor([[0.0], [0.0], [2.0]])
    method = Speculative(Toy(other), PathCoupling(), 2, 0.0)
    trace: Any = method.decode(Toy(head), RandomStreams(0, ids), ids).trace
    assert trace.origin.eq(ACCEPTED).all() and not trace.trials.any()


def test_rounds_are_no_longer_than_an_image_and_those_of_the_public_code_end_at_multiples() -> None:
    none: Any = None
    assert Speculative(none, CSpD(), 10**30).ahead(36) == [1] * 36
    assert Speculative(none, CSpD(), 3, steps=3).ahead(5) == [2] * 3
    shares = 0, 0.05, 0.15, 1
    assert [len(published(prefill=share).prefilled(64)) for share in shares] == [1, 4, 10, 64]
    ends = [10]
    while ends[-1] < 64:
        ends.append(ends[-1] + len(published(gamma=8).ahead(ends[-1], 64)))
    assert ends == [10, 17, 25, 33, 41, 49, 57, 64]


@pytest.mark.parametrize("bound", [10, 3_000])
def test_a_residual_is_the_first_accepted_of_the_trials_in_order(bound: int) -> None:
    """However many run at once."""
    one = torch.ones(50, 1)
    noise = new_noise([str(row) for row in range(50)])
    wanted, scale = torch.arange(50) > 0, torch.full((50,), 0.01, dtype=torch.float64)
    found = reject_until(Kernel(0 * one, one), Kernel(0.05 * one, one), scale, wanted, noise, bound)
    draws = noise.trials(torch.arange(50), 1, 0, bound, 2)
    assert not torch.equal(*noise.trials(torch.arange(2), 2, 0, 1, 2))  # tokens of one row
    x = normal_of(draws[..., :1])
    keep = draws[..., 1] < 1 - ((x**2 - (x - 0.05) ** 2).squeeze(-1) / 2 - 0.01).exp()
    for row, hits in enumerate(keep):
        first = hits.nonzero().flatten().tolist()[:1]
        assert bool(found.failed[row]) == (bool(wanted[row]) and not first)
        if wanted[row]:
            assert int(found.trials[row]) == (first[0] + 1 if first else bound)
            assert not first or found.x[row] == x[row, first[0]]
    assert found.failed.any() if bound == 10 else int(found.trials.max()) > 80
