"""Laws of the rules for continuous tokens, through the real loop: what is exact agrees with its
law, the bias of the others is measured, faults are seen.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tempera.continuous.diffusion import Denoiser, Kernel
from tempera.continuous.noise import Noise
from tempera.continuous.residual_sampler import reject_until
from tempera.continuous.rules import (
    ContinuousVerdict,
    CSpD,
    CSpDReferenceCode,
    DensityRule,
    MaximalCoupling,
    PathCoupling,
    Proposal,
)
from tempera.decoding.loop import Output
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trace import RESAMPLED
from tempera.exactness import gaussians

LINEAR = gaussians.Linear(stages=3, channels=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", [gaussians.Linear(1, 1), LINEAR, gaussians.Linear(3, 2, last_noise=False)]
)
def test_the_target_alone_has_the_law_that_the_heads_are_known_to_have(
    head: gaussians.ToyHead,
) -> None:
    assert (report := gaussians.check(None, head, rows=50_000)).agrees, report


@pytest.mark.slow
def test_the_law_by_quadrature_is_the_targets() -> None:
    assert (report := gaussians.check(None, gaussians.Wavy(), length=1, rows=50_000)).agrees, report
    draft = gaussians.Toy(gaussians.Wavy().imitation(0.25), 1, 0.0)
    output = gaussians.Parallel().decode(
        draft, RandomStreams(0, [str(row) for row in range(20_000)]), ["x"] * 20_000
    )
    assert not gaussians.compare(
        gaussians.Toy(gaussians.Wavy(), 1, 0.0).whiten(output), output
    ).agrees


COUPLED = {
    "normal": (gaussians.Linear(1, 2), {}),
    "three stages, other variances": (LINEAR, {}),
    "three stages, the same variances": (LINEAR, {"draft": LINEAR.imitation(0.25, same_std=True)}),
    "not linear": (gaussians.Wavy(), {"length": 1, "gamma": 1}),
    "long drafts after a prefix": (
        gaussians.Linear(3, 1),
        {"gamma": 3, "length": 4, "prefill": 0.25},
    ),
    "several tokens a drafting step": (
        gaussians.Linear(3, 1),
        {"gamma": 2, "length": 5, "steps": 3},
    ),
    "a perfect draft": (LINEAR, {"spread": 0.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [MaximalCoupling(), PathCoupling()])
@pytest.mark.parametrize("name", COUPLED)
def test_the_coupling_is_exact(name: str, rule: MaximalCoupling | PathCoupling) -> None:
    head, options = COUPLED[name]
    assert (report := gaussians.check(rule, head, **options)).agrees, report
    if name == "a perfect draft":
        assert report.accepted_length == 3.0


@pytest.mark.slow
def test_without_noise_in_the_last_stage_the_coupling_is_exact_and_accepts_nothing() -> None:
    report = gaussians.check(MaximalCoupling(), gaussians.Linear(3, 2, last_noise=False))
    assert report.agrees and report.accepted_length == 1.0, report


@pytest.mark.slow
def test_a_whole_path_is_coupled_without_noise_in_the_last_stage() -> None:
    head = gaussians.Linear(3, 2, last_noise=False)
    report = gaussians.check(PathCoupling(), head)
    assert report.agrees and report.accepted_length == 1.0, report


@pytest.mark.slow
def test_a_whole_path_is_kept_more_often_than_all_of_its_stages() -> None:
    head = gaussians.Linear(8, 1)
    draft = head.imitation(0.1, same_std=True)
    stage, path = (
        gaussians.check(rule, head, draft=draft, rows=20_000)
        for rule in (MaximalCoupling(), PathCoupling())
    )
    assert stage.accepted_length < path.accepted_length, (stage, path)


@pytest.mark.slow
def test_one_path_of_the_target_per_token_on_average() -> None:
    """A rejection has probability TV, and then takes 1/TV paths on average (docs/methods.md)."""
    report = gaussians.check(PathCoupling(), LINEAR, gamma=1, rows=50_000)
    tested = 3 / report.accepted_length  # drafted tokens an image of three
    assert report.agrees and 0.95 < report.trials / tested < 1.1, report


@pytest.mark.slow
def test_the_paper_s_rule_is_exact_for_a_single_stage() -> None:
    assert (report := gaussians.check(CSpD(), gaussians.Linear(1, 2))).agrees, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "head", "low", "high"),
    [
        (CSpD(), gaussians.Linear(3, 1), 0.06, 0.08),
        (CSpD(alignment=False), gaussians.Linear(3, 1), 0.08, 0.12),
        (CSpD(alignment=False), gaussians.Linear(1, 1), 0.01, 0.03),
        (CSpDReferenceCode(), gaussians.Linear(3, 1, last_noise=False), 0.08, 0.10),
        (
            CSpDReferenceCode(exponent_temperature=1.0),
            gaussians.Linear(3, 1, last_noise=False),
            0.26,
            0.30,
        ),
    ],
)
def test_the_biases_in_the_docs(
    rule: CSpD | CSpDReferenceCode, head: gaussians.Linear, low: float, high: float
) -> None:
    report = gaussians.check(rule, head, rows=50_000)
    assert not report.agrees and low < report.distance < high, report


@pytest.mark.slow
def test_the_paper_s_rule_is_exact_where_the_variances_before_the_last_stage_agree() -> None:
    head = gaussians.Linear(3, 1)
    draft = head.imitation(0.25)
    draft.log_std = torch.cat([head.log_std[:-1], draft.log_std[-1:]])
    assert (report := gaussians.check(CSpD(), head, draft=draft)).agrees, report


# Faults that must be seen


@dataclass(frozen=True)
class Forgetful(MaximalCoupling):
    """Replaces a rejected state by a plain draw from p instead of the residual."""

    def _replace(
        self, p: Kernel, q: Kernel, x: Tensor, wanted: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.zeros_like(wanted)
        return p.at(noise.normal(p.mean.shape[-1])), none.long(), none


@dataclass(frozen=True)
class Stale(MaximalCoupling):
    """Evaluates every drafted token under the condition of the first."""

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        return super().verify(proposal, denoiser, conditions[:, :1].expand_as(conditions), noise)


@dataclass(frozen=True)
class StalePath(PathCoupling):
    """Evaluates every drafted path under the condition of the first."""

    def verify(
        self, proposal: Proposal, denoiser: Denoiser, conditions: Tensor, noise: Noise
    ) -> ContinuousVerdict:
        return super().verify(proposal, denoiser, conditions[:, :1].expand_as(conditions), noise)


FAULTS = [Forgetful(), Stale(), MaximalCoupling(trials=1), StalePath(), PathCoupling(trials=1)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_detected(rule: MaximalCoupling | PathCoupling) -> None:
    assert not gaussians.check(rule, gaussians.Linear(3, 1), rows=100_000).agrees


# The residual sampler


def test_the_residual_sampler_stops_and_counts_its_failures() -> None:
    same = Kernel(torch.zeros(50, 1), torch.ones(50, 1))  # p = q leaves nothing
    noise = Noise(RandomStreams(0, [str(row) for row in range(50)]))
    wanted = torch.arange(50) < 40
    drawn = reject_until(same, same, torch.zeros(50, dtype=torch.float64), wanted, noise, bound=37)
    assert torch.equal(drawn.failed, wanted) and torch.equal(drawn.trials, 37 * wanted)


def drafted(rule: DensityRule, last_noise: bool, rows: int = 2_000) -> Output:
    head = gaussians.Linear(3, 1, last_noise=last_noise)
    method = gaussians.Speculative(gaussians.Toy(head.imitation(0.25)), rule, 2, 0.0)
    return method.decode(
        gaussians.Toy(head), RandomStreams(0, [str(i) for i in range(rows)]), ["x"] * rows
    )


def test_a_failed_residual_is_a_draw_from_the_target() -> None:
    output = drafted(CSpD(trials=1), last_noise=True)
    trace = output.trace
    assert isinstance(trace, gaussians.ContinuousTrace) and int(trace.failures.sum()) > 100
    assert trace.failures.shape == trace.trials.shape == trace.order.shape
    assert torch.equal(trace.trials == 1, trace.origin == RESAMPLED)  # rejected tokens alone
    assert not (output.tokens == 0).any()


def test_the_public_code_gives_zeros_if_its_residual_fails() -> None:
    once, often = (drafted(CSpDReferenceCode(1.0, n), last_noise=False) for n in (1, 100))
    assert isinstance(once.trace, gaussians.ContinuousTrace)
    zeros = (once.tokens == 0).all(-1).gather(1, once.trace.order)
    assert torch.equal(zeros, once.trace.failures == 1) and zeros.any()
    assert isinstance(often.trace, gaussians.ContinuousTrace)
    assert int(often.trace.failures.sum()) < int(once.trace.failures.sum()) / 4


def test_the_residual_of_the_public_code_uses_plain_densities() -> None:
    """Widened by the temperature, p and q would differ less, and more trials would fail."""
    wide = drafted(CSpDReferenceCode(exponent_temperature=3.0), last_noise=False)
    assert isinstance(wide.trace, gaussians.ContinuousTrace)
    rejected = wide.trace.origin == RESAMPLED
    assert int(wide.trace.trials.sum()) / int(rejected.sum()) < 1.5  # 1.1; widened: 1.9


def test_rounds_of_the_public_code_end_at_multiples_of_gamma() -> None:
    rule, sizes = CSpDReferenceCode(), [1] * 64
    assert [len(rule.prefilled(share, sizes)) for share in (0, 0.05, 0.15, 1)] == [1, 4, 10, 64]
    step, rounds = 10, []
    while step < 64:
        rounds.append(range(64)[step : step + len(rule.drafted(step, 8, sizes))])
        step = rounds[-1].stop
    assert [(part[0], part[-1]) for part in rounds[:2]] == [(10, 16), (17, 24)]
    assert rounds[-1][-1] == 63


def test_trials_do_not_depend_on_other_rows() -> None:
    p, q = (
        Kernel(torch.zeros(8, 2), torch.ones(8, 2)),
        Kernel(torch.full((8, 2), 0.1), torch.full((8, 2), 1.05)),
    )
    ids = [str(row) for row in range(8)]
    scale, wanted = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    together = reject_until(p, q, scale, wanted, Noise(RandomStreams(0, ids)), 10_000)
    slow = int(together.trials.argmax())
    mine = (Kernel(*(leaf[slow : slow + 1] for leaf in kernel)) for kernel in (p, q))
    alone = reject_until(*mine, scale[:1], wanted[:1], Noise(RandomStreams(0, [ids[slow]])), 10_000)
    assert (
        torch.equal(together.x[slow], alone.x[0])
        and int(together.trials[slow]) == int(alone.trials[0]) > 16
    )


def test_an_image_does_not_depend_on_its_batch() -> None:
    head = gaussians.Linear(3, 2)
    method = gaussians.Speculative(gaussians.Toy(head.imitation(0.25)), MaximalCoupling(), 2, 0.0)
    ids = ["a", "b", "c"]
    together = method.decode(gaussians.Toy(head), RandomStreams(0, ids), ids).tokens
    alone = method.decode(gaussians.Toy(head), RandomStreams(0, ["c"]), ["c"]).tokens
    assert torch.allclose(together[2], alone[0], atol=1e-5)


@pytest.mark.parametrize("scaled", [0.1, 0.3, 0.8, 1.36, 2.5])
def test_the_p_value_of_kolmogorov(scaled: float) -> None:
    from scipy.special import kolmogorov

    assert gaussians._tail(scaled) == pytest.approx(kolmogorov(scaled), abs=1e-9)


@pytest.mark.parametrize("scaled", [0.0, 0.001])
def test_a_tiny_distance_is_no_evidence(scaled: float) -> None:
    assert gaussians._tail(scaled) == 1


def decoded_alone(rows: int) -> Output:
    """The target's images, a token a round."""
    ids = list(map(str, range(rows)))
    toy = gaussians.Toy(gaussians.Linear(1, 1), 2)
    return gaussians.Parallel().decode(toy, RandomStreams(0, ids), ids)


def test_the_distance_and_its_p_value_are_kolmogorovs() -> None:
    from scipy import stats

    columns = torch.randn(300, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    columns[:, 1] += 0.1
    tests = [stats.kstest(column.numpy(), "norm", method="asymp") for column in columns.T]
    assert gaussians.kolmogorov(columns).tolist() == pytest.approx([one.statistic for one in tests])
    output = decoded_alone(300)
    alone = gaussians.compare(columns[:, 1:], output)  # one column: no projections
    assert alone.distance == pytest.approx(tests[1].statistic)
    assert alone.p_value == pytest.approx(min(1, tests[1].pvalue))
    assert (alone.rows, alone.margin) == (300, pytest.approx((math.log(40) / 600) ** 0.5))
    assert (alone.accepted_length, alone.trials) == (1.0, 0.0)
    both = gaussians.compare(columns, output)  # two columns and eight projections
    assert both.distance >= max(one.statistic for one in tests)
    tail = stats.kstwobign.sf(both.distance * 300**0.5)
    assert both.p_value == pytest.approx(min(1, 10 * tail))
    more = gaussians.compare(columns, output, projections=0)
    assert more.p_value == pytest.approx(min(1, 2 * min(one.pvalue for one in tests)))


def test_a_comparison_states_its_result() -> None:
    shown = gaussians.SampleComparison(0.012, 0.003, 0.5, 1000, 1.5, 2.25)
    assert shown.agrees and str(shown) == (
        "agrees: KS 0.0120 ± 0.0030, p = 0.5, 1000 rows, accepted length 1.50, 2.25 residual "
        "trials per image"
    )
    assert not gaussians.SampleComparison(0.1, 0.003, 0.9e-4, 1000, 1.5, 2.25).agrees
    assert gaussians.SampleComparison(0.1, 0.003, 1.1e-4, 1000, 1.5, 2.25).agrees


def test_a_token_sees_those_before_it_in_the_order_of_decoding() -> None:
    toy = gaussians.Toy(gaussians.Linear(1, 2), 3)
    tokens = torch.randn(2, 3, 2)
    order, known = torch.tensor([[2, 0, 1], [0, 1, 2]]), torch.tensor([1, 2])
    context = gaussians.Context(torch.arange(2), tokens, order, known, 2)
    places = torch.tensor([[1], [2]])
    found = toy.conditions(context, places, places + 1)
    for row in range(2):
        place = order[row, places[row, 0]]
        seen = tokens[row, : known[row]]
        expected = toy.offsets[place] + toy.weights[place, : known[row]] @ seen
        torch.testing.assert_close(found[row, 0], expected)
    loose = gaussians.Toy(gaussians.Linear(1, 2), 3, coupling=0.0)
    assert not loose.offsets.any() and not loose.weights.any()
    assert toy.offsets.any()


@pytest.mark.parametrize(("length", "coupling"), [(1, 0.0), (2, 0.4)])
def test_a_token_alone_does_not_depend_on_its_place(
    length: int, coupling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    heads: list[gaussians.ToyHead] = []
    toy = gaussians.Toy

    def spy(head: gaussians.ToyHead, length: int, coupling: float) -> gaussians.Toy:
        seen.append(coupling)
        heads.append(head)
        return toy(head, length, coupling)

    monkeypatch.setattr(gaussians, "Toy", spy)
    gaussians.check(None, gaussians.Linear(1, 1), length=length, rows=10)
    gaussians.draft_alone(gaussians.Linear(1, 1), length=length, rows=10)
    assert seen == [coupling] * 4
    _, draft, alone, _ = heads
    assert isinstance(draft, gaussians.Linear) and isinstance(alone, gaussians.Linear)
    assert draft.log_std.equal(alone.log_std), "the draft alone is that of the check"


def test_a_single_stage_ignores_the_noise_it_starts_from() -> None:
    one, three = gaussians.Linear(1, 2), gaussians.Linear(3, 2)
    assert not one.turn.any() and three.turn.any()
    assert not one.imitation(0.5).turn.any()
    same = three.imitation(0.5, same_std=True)
    assert same.log_std.equal(three.log_std) and not same.turn.equal(three.turn)
    assert not three.imitation(0.5).log_std.equal(three.log_std)


@pytest.mark.slow
def test_the_table_of_biases() -> None:
    lines = gaussians.biases(rows=3_000).splitlines()
    assert len(lines) == 11 and lines[0].count("|") == lines[1].count("|") == 7
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in lines[2:9]}
    assert [len(found) for found in cells.values()] == [5] * 7
    assert cells["cspd_published"][4] == cells["cspd_published exponent_temperature=1"][4] == "– |"
    assert all(found.endswith("(exact)") for found in cells["cspd_exact"][:4])
    assert not any("exact" in found for found in cells["the draft alone"][:4])
    assert lines[-1] == f"Each ± {(math.log(40) / 6_000) ** 0.5:.3f} (95 %), 3000 images."
