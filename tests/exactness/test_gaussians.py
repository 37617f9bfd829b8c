"""Laws of the rules for continuous tokens, through the real loop: what is exact agrees with its
law, the bias of the others is measured, faults are seen.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tempera.continuous.diffusion import Denoiser, Kernel
from tempera.continuous.noise import Noise, normal_of
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


HEADS = {
    "one stage": gaussians.Linear(1, 1),
    "three stages": LINEAR,
    "no noise in the last stage": gaussians.Linear(3, 2, last_noise=False),
    "not linear": gaussians.Wavy(),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_the_kernels_draw_is_standard_normal_once_whitened(name: str) -> None:
    head, rows, generator = HEADS[name], 20_000, torch.Generator().manual_seed(0)
    condition = torch.full((rows, head.channels), 0.4)
    x = torch.randn(rows, head.channels, generator=generator)
    for stage in range(head.stages):
        noise = torch.randn(x.shape, generator=generator)
        silent = stage == head.stages - 1 and not head.last_noise
        x = head.kernel(condition, x, torch.full((rows,), stage)).at(noise * (not silent))
    whitened = head.whiten(condition, x)
    for distance in gaussians.kolmogorov(whitened).tolist():
        assert gaussians._tail(distance * rows**0.5) > 1e-4
    correlation = whitened.T @ whitened / rows
    torch.testing.assert_close(
        correlation, torch.eye(head.channels, dtype=torch.float64), rtol=0, atol=0.04
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_the_law_by_quadrature_is_the_mean_over_what_earlier_stages_draw(stages: int) -> None:
    head = gaussians.Wavy(stages)
    nodes = torch.linspace(-6, 6, 201, dtype=torch.float64)
    weights = (-0.5 * nodes**2).softmax(0)
    tokens = torch.linspace(-3, 3, 13, dtype=torch.float64).unsqueeze(-1)
    x, mass = nodes, weights
    for stage in range(stages):
        condition, index = torch.full((len(x), 1), 0.3), torch.full((len(x),), stage)
        kernel = head.kernel(condition, x.unsqueeze(-1), index)
        law = mass @ torch.special.ndtr((tokens.T - kernel.mean) / kernel.std)
        x, mass = kernel.at(nodes).flatten(), (mass.unsqueeze(-1) * weights).flatten()
    found = torch.special.ndtr(head.whiten(torch.full((13, 1), 0.3), tokens)).flatten()
    torch.testing.assert_close(found, law, rtol=0, atol=1e-4)


def test_the_kernels_are_those_of_the_definition() -> None:
    linear, wavy = gaussians.Linear(2, 2), gaussians.Wavy(2)
    condition, x, stage = torch.randn(5, 2), torch.randn(5, 2), torch.tensor([0, 1, 1, 0, 1])
    found = linear.kernel(condition, x, stage)
    for row, k in enumerate(stage.tolist()):
        mean = linear.turn[k] @ x[row] + condition[row] + linear.shift[k]
        torch.testing.assert_close(found.mean[row], mean)
        torch.testing.assert_close(found.std[row], linear.log_std[k].exp())
    found, c, x = wavy.kernel(condition[:, :1], x[:, :1], stage), condition[:, 0], x[:, 0]
    mean = wavy.slope[stage] * x + wavy.wave[stage] * torch.sin(2 * x) + c
    std = wavy.log_std[stage].exp() * (1 + 0.4 * torch.cos(x))
    torch.testing.assert_close(found.mean, mean.unsqueeze(-1))
    torch.testing.assert_close(found.std, std.unsqueeze(-1))


@pytest.mark.parametrize(
    ("head", "names"),
    [
        (gaussians.Linear(200, 5), ("turn", "shift", "log_std")),
        (gaussians.Wavy(1_000), ("slope", "wave", "log_std")),
    ],
)
def test_an_imitation_is_off_by_the_spread(head: gaussians.ToyHead, names: tuple[str, ...]) -> None:
    other = head.imitation(0.25, 1)
    errors = [getattr(other, name) - getattr(head, name) for name in names]
    for name, error in zip(names, errors, strict=True):
        assert float(error.std()) == pytest.approx(0.25, rel=0.08), name
        assert abs(float(error.mean())) < 0.03, name
    assert not errors[1].equal(errors[2])


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
    assert (report := gaussians.check(rule, head, rows=20_000, **options)).agrees, report
    if name == "a perfect draft":
        assert report.accepted_length == 3.0


@pytest.mark.parametrize("rule", [MaximalCoupling(), PathCoupling()])
@pytest.mark.parametrize("last_noise", [True, False])
def test_a_coupling_is_exact_with_and_without_noise_in_the_last_stage(
    rule: MaximalCoupling | PathCoupling, last_noise: bool
) -> None:
    head = gaussians.Linear(3, 2, last_noise=last_noise)
    report = gaussians.check(rule, head, rows=10_000)
    assert report.agrees and (report.accepted_length > 1.2) == last_noise, report


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


def test_the_paper_s_rule_is_exact_for_a_single_stage() -> None:
    assert (report := gaussians.check(CSpD(), gaussians.Linear(1, 2), rows=20_000)).agrees, report


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
    report = gaussians.check(rule, head, rows=30_000)
    assert not report.agrees and low < report.distance < high, report


@pytest.mark.slow
def test_the_paper_s_rule_is_exact_where_the_variances_before_the_last_stage_agree() -> None:
    head = gaussians.Linear(3, 1)
    draft = head.imitation(0.25)
    draft.log_std = torch.cat([head.log_std[:-1], draft.log_std[-1:]])
    assert (report := gaussians.check(CSpD(), head, draft=draft, rows=20_000)).agrees, report


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
    assert not gaussians.check(rule, gaussians.Linear(3, 1), rows=40_000).agrees


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


def test_a_draft_is_no_longer_than_an_image() -> None:
    assert CSpD().drafted(0, 10**30, [1] * 36) == [1] * 36
    assert CSpD().drafted(35, 3, [1, 2, 2]) == [2] * 3


def test_rounds_of_the_public_code_end_at_multiples_of_gamma() -> None:
    rule, sizes = CSpDReferenceCode(), [1] * 64
    assert [len(rule.prefilled(share, sizes)) for share in (0, 0.05, 0.15, 1)] == [1, 4, 10, 64]
    step, rounds = 10, []
    while step < 64:
        rounds.append(range(64)[step : step + len(rule.drafted(step, 8, sizes))])
        step = rounds[-1].stop
    assert [(part[0], part[-1]) for part in rounds[:2]] == [(10, 16), (17, 24)]
    assert rounds[-1][-1] == 63


@pytest.mark.parametrize("bound", [10, 100, 3_000])
def test_a_residual_is_the_first_accepted_of_the_trials_in_order(bound: int) -> None:
    """However many run at once."""
    p, q = (
        Kernel(torch.zeros(50, 1), torch.ones(50, 1)),
        Kernel(torch.full((50, 1), 0.05), torch.ones(50, 1)),
    )
    noise = Noise(RandomStreams(0, [str(row) for row in range(50)]))
    wanted, scale = torch.arange(50) > 0, torch.full((50,), 0.01, dtype=torch.float64)
    found = reject_until(p, q, scale, wanted, noise, bound)
    draws = noise.trials(torch.arange(50), 1, 0, bound, 2)
    x = normal_of(draws[..., :1])
    keep = draws[..., 1] < 1 - ((x**2 - (x - 0.05) ** 2).squeeze(-1) / 2 - 0.01).exp()
    for row, hits in enumerate(keep):
        first = hits.nonzero().flatten().tolist()[:1]
        assert bool(found.failed[row]) == (bool(wanted[row]) and not first)
        if wanted[row]:
            assert int(found.trials[row]) == (first[0] + 1 if first else bound)
            assert not first or found.x[row] == x[row, first[0]]
    assert found.failed.any() or int(found.trials.max()) > 80


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
        "agrees: p = 0.5 (rejects below 0.0001), KS 0.0120 ± 0.0030, 1000 rows, accepted length "
        "1.50, 2.25 residual trials per image"
    )
    assert not gaussians.SampleComparison(0.1, 0.003, 1e-4, 1000, 1.5, 2.25).agrees
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


def test_a_single_stage_ignores_the_noise_it_starts_from() -> None:
    one, two, three = (gaussians.Linear(stages, 2) for stages in (1, 2, 3))
    assert not one.turn.any() and two.turn.any() and three.turn.any()
    assert not one.imitation(0.5).turn.any() and two.imitation(0.5).turn.any()
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
