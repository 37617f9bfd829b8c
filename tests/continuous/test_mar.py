"""MAR: the official layout, the network against a plain computation, and all methods on a tiny
random one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from cases import slow_but
from paths import SUPPORT
from published_code.cspd import CSpDReferenceCode
from random_drafts import new_noise
from tiny_evaluation import Blocks
from tiny_targets import ldm_name
from torch import Tensor, nn

from tempera.continuous import diffusion, loop, residual_sampler
from tempera.continuous.diffusion import DiffusionSampling
from tempera.continuous.loop import Context, Parallel, Speculative, counts, draft_alone
from tempera.continuous.mar import MAR, SIZES, MARConfig, load_mar
from tempera.continuous.noise import normal_of
from tempera.continuous.rules import ContinuousVerdict, CSpD, DensityRule, PathCoupling
from tempera.continuous.target import GuidedHead, MARTarget, draft
from tempera.data.prompts import Prompt
from tempera.decoding.interfaces import ACCEPTED
from tempera.decoding.loop import Decoding, Output
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.replay import DraftLog, replays
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Pipeline
from tempera.exactness import gaussians
from tempera.image_tokenizers.kl import KLConfig, KLModel, load_kl, patchify, unpatchify
from tempera.image_tokenizers.vq import VQConfig
from tempera.runtime.pretrained import on_meta
from tempera.targets.conditioners import ClassLabels

SMALL = {"width": 16, "depth": 1, "heads": 2, "buffer": 2, "head_width": 16, "head_depth": 1}
TINY = MARConfig(grid=(3, 4), channels=4, classes=5, **SMALL)  # type: ignore[arg-type]
SAMPLING = DiffusionSampling(2.0, denoising_steps=4, denoising_start=300, last_noise=True)
SILENT = replace(SAMPLING, last_noise=False)
HALVES = {"encoder_multipliers": (1, 2), "decoder_multipliers": (1, 2)}
TINY_KL = KLConfig(VQConfig(channels=8, res_blocks=1, z_channels=4, norm_groups=4, **HALVES))
IDS = ["a", "b", "c"]


def network(config: MARConfig = TINY, seed: int = 0) -> MAR:
    torch.manual_seed(seed)
    made = MAR(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.eval().requires_grad_(False)


def target(seed: int = 0, sampling: DiffusionSampling = SAMPLING) -> MARTarget:
    return MARTarget(network(seed=seed), ClassLabels(5).encode, sampling)


Rule: TypeAlias = DensityRule | Callable[..., Decoding]


def speculative(
    made: MARTarget, rule: Rule, gamma: int = 2, prefill: float = 0.0, **options: Any
) -> Any:
    other = network()  # so near that some of its tokens are accepted
    other.head.final_layer.linear.bias += 0.01
    make = rule if callable(rule) else partial(Speculative, rule=rule)
    return make(draft(made, other), gamma=gamma, prefill=prefill, **options)


def decoded(
    method: Decoding, made: MARTarget, ids: list[str] = IDS, seed: int = 0, **options: Any
) -> Output:
    prompts = [str(IDS.index(name)) for name in ids]
    return method.decode(made, RandomStreams(seed, ids), prompts, **options)


# The layout


LAYOUTS = json.loads((SUPPORT / "mar_layouts.json").read_text())


@pytest.mark.parametrize("size", ["base", "large", "huge"])
def test_the_official_keys_and_no_others(size: Any) -> None:
    made, layout = on_meta(lambda: MAR(SIZES[size])), LAYOUTS[size]
    assert sum(parameter.numel() for parameter in made.parameters()) == layout["n_params"]
    shapes = {name: list(tensor.shape) for name, tensor in made.state_dict().items()}
    assert (shapes if size == "base" else len(shapes)) == layout["keys"]


def test_published_files_load_averaged_weights_first(tmp_path: Path) -> None:
    mean, last = (network(seed=seed).state_dict() for seed in (1, 2))
    torch.save({"model": last, "model_ema": mean}, tmp_path / "checkpoint-last.pth")
    files = ["mar-base.safetensors", "checkpoint-last.pth"]
    loaded = load_mar(str(tmp_path), files, "owner/name", config=TINY)
    assert torch.equal(loaded.z_proj.weight, mean["z_proj.weight"])


def test_kl16_loads_from_latent_diffusion_s_layout(tmp_path: Path) -> None:
    made = KLModel(TINY_KL)
    state = {ldm_name(name, 2): tensor for name, tensor in made.state_dict().items()}
    torch.save({"model": state}, tmp_path / "kl16.ckpt")
    loaded = load_kl(str(tmp_path), ["kl16.ckpt"], "owner/name", TINY_KL)
    images = torch.rand(1, 3, 8, 16) * 2 - 1
    tokens = loaded.encode(images)
    assert tokens.shape == (1, 4, 8, 4) and torch.equal(tokens, made.encode(images))
    assert torch.equal(loaded.decode_codes(tokens), made.decode_codes(tokens))


def test_patches_are_ordered_as_mar_s() -> None:
    latents = torch.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    tokens = patchify(latents, 2)
    assert tokens.shape == (2, 2, 3, 12) and torch.equal(unpatchify(tokens, 2), latents)
    assert torch.equal(tokens[0, 0, 0], latents[0, :2, :2].permute(2, 0, 1).flatten())


# The network


def plain_conditions(net: MAR, tokens: Tensor, known: list[int], label: int) -> Tensor:
    """MAR's own procedure for one image: tokens [T, D] by place in the image, `known` places in any
    order -> [T, W].
    """
    buffer, places = net.config.buffer, sorted(known)
    x = torch.cat([net.class_emb.weight[label].expand(buffer, -1), net.z_proj(tokens)])
    x = net.z_proj_ln(x + net.encoder_pos_embed_learned[0])
    x = x[[*range(buffer), *(buffer + place for place in places)]].unsqueeze(0)
    for block in net.encoder_blocks:
        x = block(x)
    x = net.decoder_embed(net.encoder_norm(x))[0]
    whole = net.mask_token[0].repeat(buffer + net.config.length, 1)
    whole[:buffer] = x[:buffer]
    for vector, place in zip(x[buffer:], places, strict=True):
        whole[buffer + place] = vector
    whole = (whole + net.decoder_pos_embed_learned[0]).unsqueeze(0)
    for block in net.decoder_blocks:
        whole = block(whole)
    return (net.decoder_norm(whole)[:, buffer:] + net.diffusion_pos_embed_learned)[0]


def test_rows_of_different_lengths_only_use_known_tokens() -> None:
    made = target(sampling=DiffusionSampling(denoising_steps=4))
    made.begin(["3", "0"])
    order = torch.rand(2, 12).argsort()
    tokens, known = torch.randn(2, 12, 4), torch.tensor([7, 2])
    places = known.unsqueeze(1) + torch.arange(2)
    got = made.conditions(Context(torch.arange(2), tokens, order, known, 7), places, places + 1)
    for row, label in enumerate((3, 0)):
        image = torch.zeros(12, 4).index_copy(0, order[row], tokens[row])
        wanted = plain_conditions(made.network, image, order[row, : known[row]].tolist(), label)
        assert torch.allclose(got[row], wanted[order[row, places[row]]], atol=1e-5)


def test_guidance_changes_the_noise_but_not_the_variance() -> None:
    made, t = network(), torch.tensor([3, 1, 0])
    head, warm = (GuidedHead(made.head, replace(SAMPLING, temperature=one)) for one in (1.0, 1.3))
    c, u, x, scale = (torch.randn(3, width) for width in (16, 16, 4, 1))
    got, warmer = (one.kernel(torch.cat([c, u, scale], -1), x, 3 - t) for one in (head, warm))
    conditional, null = (made.head(x, head.schedule.times[t], z) for z in (c, u))
    noise = null[:, :4] + scale * (conditional[:, :4] - null[:, :4])
    wanted = head.schedule.kernel(torch.cat([noise, conditional[:, 4:]], -1), x, t)
    assert torch.allclose(got.mean, wanted.mean, atol=1e-5) and torch.allclose(got.std, wanted.std)
    assert torch.allclose(warmer.mean, got.mean) and torch.allclose(warmer.std, 1.3 * got.std)


@pytest.mark.parametrize("rows", [1, 20, 150])
def test_modulations_computed_in_advance_are_the_same(rows: int) -> None:
    """One row has all its stages modulated at once, 20 have three of them, 150 one by one."""
    made = target(sampling=replace(SAMPLING, denoising_steps=7))
    condition, x = torch.cat([torch.randn(rows, 32), torch.rand(rows, 1)], -1), torch.randn(rows, 4)
    steps = list(made.denoiser.steps(condition))
    assert len(steps) == 7
    for stage, kernel_at in enumerate(steps):
        one_by_one = made.denoiser.kernel(condition, x, torch.full((rows,), stage))
        torch.testing.assert_close(kernel_at(x), one_by_one, rtol=1e-3, atol=1e-4)


# Decoding


@pytest.mark.parametrize(
    ("length", "steps", "first"),
    [(256, 256, [1, 1]), (256, 16, [2, 3]), (12, 3, [2, 4, 6]), (12, 1, [12])],
)
def test_the_cosine_schedule(length: int, steps: int, first: list[int]) -> None:
    taken = counts(length, steps)
    assert (len(taken), sum(taken), taken[: len(first)]) == (steps, length, first)
    assert min(taken) >= 1


def test_a_step_has_the_guidance_of_its_end_and_no_known_token_is_out_of_reach() -> None:
    """MAR's steps; and in CSpD's public code a whole round."""
    made, seen = target(), list[list[int]]()

    def watch(model: Any) -> None:
        conditions = model.conditions

        def spy(context: Context, places: Tensor, after: Tensor) -> Tensor:
            assert int(context.lengths.max()) <= context.reach <= 12
            seen.append(after[0].tolist())
            return conditions(context, places, after)

        model.conditions = spy

    watch(made)
    decoded(Parallel(3), made)
    assert seen == [[2] * 2, [6] * 4, [12] * 6]
    seen.clear()
    decoded(speculative(made, CSpDReferenceCode, 3), made)
    assert seen == [[1], [4] * 3, [7] * 3, [10] * 3, [12] * 2]
    method = speculative(made, CSpD(), 5)
    watch(method.drafter)
    decoded(method, made)
    assert not decoded(draft_alone(made, 3), made).trace.passes.any()


RULES: list[tuple[Rule, DiffusionSampling]] = [
    (CSpD(), SAMPLING),
    (CSpD(alignment=False), replace(SAMPLING, guidance=1.0)),
    (CSpDReferenceCode, SILENT),
    (partial(CSpDReferenceCode, alignment=False), SILENT),
    (PathCoupling(), SAMPLING),
    (PathCoupling(), SILENT),
]


@pytest.mark.parametrize(("rule", "sampling"), RULES)
@pytest.mark.parametrize(
    ("prefill", "steps"), slow_but([(0.0, None), (0.15, None), (0.15, 5)], (0.15, None))
)
def test_every_rule_generates_whole_images_that_do_not_depend_on_the_batch(
    rule: Rule, sampling: DiffusionSampling, prefill: float, steps: int | None
) -> None:
    made = target(sampling=sampling)
    method = speculative(made, rule, 3, prefill, steps=steps)
    output = decoded(method, made)
    trace: Any = output.trace
    fast = int(trace.rounds.argmin())  # the row that is ahead of the others
    alone = decoded(method, made, [IDS[fast]])
    sees_drafts = isinstance(rule, DensityRule)
    drafts = (trace.step == 1) * (1 + trace.proposed * sees_drafts)
    assert torch.equal(trace.passes, drafts.sum(-1))
    accepted = torch.where(trace.origin == ACCEPTED, trace.step, 0)
    assert torch.equal(trace.depth.gather(1, trace.order), accepted)
    assert output.tokens.isfinite().all() and (output.tokens != 0).all() and (trace.step > 0).all()
    assert trace.tested.shape == (3, method.depth(12)) and (trace.tested >= trace.accepted).all()
    assert torch.allclose(alone.tokens[0], output.tokens[fast], rtol=1e-3, atol=1e-2)
    assert torch.equal(alone.trace.depth[0], trace.depth[fast])
    if sees_drafts and rule != CSpD(alignment=False):
        assert trace.tau.max() > 0


@pytest.mark.parametrize("prefill", [0.0, 0.15])
@pytest.mark.parametrize("rule", [CSpD(), PathCoupling(), CSpDReferenceCode, None], ids=str)
def test_rows_take_other_prompts(rule: Rule | None, prefill: float) -> None:
    made, ids = target(), [str(number) for number in range(7)]
    method = Parallel(3) if rule is None else speculative(made, rule, 3, prefill)

    def images(rows: int | None) -> Output:
        labels = [str(int(name) % 5) for name in ids]
        return method.decode(made, RandomStreams(0, ids), labels, rows=rows)

    found, expected = images(2), images(None)
    torch.testing.assert_close(found.tokens, expected.tokens, atol=1e-4, rtol=1e-3)
    for name, values in expected.trace.tensors().items():
        assert found.trace.tensors()[name].equal(values), name


def test_a_batch_with_a_class_that_is_not_there_leaves_nothing_behind() -> None:
    """A draft that is the target, so that rows finish together and start in whole batches."""
    made = target()
    method = Speculative(draft(made, network()), CSpD(), 3, 0.15)

    def images(third: str, found: list[torch.Tensor]) -> list[torch.Tensor]:
        streams, labels = RandomStreams(0, list("abcd")), ["0", "1", third, "3"]
        for _, output in method.finished(made, streams, labels, rows=2):
            found += list(output.tokens)
        return found

    expected, found = images("2", []), list[torch.Tensor]()
    with pytest.raises(TemperaError, match="99"):
        images("99", found)
    torch.testing.assert_close(found, [*expected[:2], expected[3]], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("bound", [4, 100])
def test_a_redrawn_path_is_the_first_accepted_of_the_trials_in_order(bound: int) -> None:
    """However many run at once. An easy draft, of which a rejection needs many paths."""
    head, rows = gaussians.Linear(3, 1), 40
    other, noise = head.imitation(0.05), new_noise([str(row) for row in range(rows)])
    none, wanted = torch.zeros(rows, 1), torch.arange(rows) > 0
    found = residual_sampler.redraw_paths(
        residual_sampler.ConditionedHead(head, none),
        residual_sampler.ConditionedHead(other, none),
        wanted,
        noise,
        bound,
    )
    draws = noise.trials(torch.arange(rows), 1, 0, bound, 5)
    given = none.unsqueeze(1).expand(-1, bound, -1)
    path = diffusion.denoise(head, given, normal_of(draws[..., :4]).unsqueeze(-1))
    q = diffusion.kernels_along(other, given, path.states)
    ratio = residual_sampler.path_ratio(q, path.kernels, path.states, True)
    for row in range(rows):
        hits = (draws[row, :, 4] < 1 - ratio[row].exp()).nonzero().flatten().tolist()
        taken = (hits[0] if hits else bound - 1) if wanted[row] else 0
        torch.testing.assert_close(found.x[row], path.token[row, taken])
        assert int(found.trials[row]) == (taken + 1) * bool(wanted[row])
        assert bool(found.failed[row]) == (bool(wanted[row]) and not hits)
    assert int(found.trials.max()) > 20 if bound == 100 else bool(found.failed.any())


def test_a_replay_of_continuous_tokens_has_places_and_no_ids() -> None:
    made = target()
    method = speculative(made, PathCoupling(), 3, 0.15)
    pipeline, log = Pipeline(made, method, Blocks(), 0, made.device), DraftLog({"b"})
    prompts = [Prompt(name, str(label)) for label, name in enumerate(IDS)]
    output = pipeline.tokens(prompts)
    (row,) = replays(IDS, output, log, made.grid)
    assert row["id"] == "b" and not {"tokens", "logprob"} & set(row)
    assert sorted(row["order"]) == list(range(12)) and row["nodes"] == row["drafted"] == []
    prefilled = sum(number == 0 for number in row["proposed"])
    assert 0 < prefilled < 12
    assert row["proposed"] == [0] * prefilled + [3] * (12 - prefilled)
    for place, origin, proposed in zip(row["place"], row["origin"], row["proposed"], strict=True):
        assert place <= proposed + (origin != ACCEPTED)


@pytest.mark.parametrize("rule", [CSpD(), PathCoupling()])
def test_a_continuous_draft_equal_to_the_target_is_always_accepted(rule: DensityRule) -> None:
    """Its conditions must be the target's own with the drafts in place: every context is right. (In
    float64: an untrained head generates numbers so large that rounding differs between batches by
    more than the last stage's noise.)
    """
    made = MARTarget(network().double(), ClassLabels(5).encode, SAMPLING)
    method = Speculative(draft(made, network()), rule, gamma=3, prefill=0.0)
    assert decoded(method, made).trace.rounds.tolist() == [3, 3, 3]


# NaN


def sick(made: MARTarget) -> MARTarget:
    made.network.head.final_layer.linear.bias.data[0] = torch.nan
    return made


def test_nan_of_one_network_alone_is_its_own() -> None:
    for who, method, made in (
        ("target", Parallel(), sick(target())),
        ("draft", draft_alone(sick(target(seed=1))), target()),
    ):
        with pytest.raises(TemperaError, match=f"^the {who} gave NaN .* prompt 'a'"):
            decoded(method, made)


@pytest.mark.parametrize("rule", [CSpD(), CSpDReferenceCode, PathCoupling(64)])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_nan_ends_a_round_names_the_network_and_leaves_nothing(rule: Rule, who: str) -> None:
    """Not the whole image, whose tokens the target would replace one by one."""
    made, drawn = target(), list[int]()
    method = speculative(made, rule)
    fresh = decoded(method, made).tokens
    broken: Any = made if who == "target" else method.drafter
    bias = broken.network.head.final_layer.linear.bias.data
    sound = bias.clone()
    sick(broken)
    with pytest.raises(TemperaError, match=f"^the {who} gave NaN .* prompt 'a'"):
        decoded(method, made, watch=[lambda one: drawn.append(one.sequences.rounds)])
    assert len(drawn) < 4
    bias.copy_(sound)
    assert torch.equal(decoded(method, made).tokens, fresh)


def drafted_as(tokens: torch.Tensor) -> Any:
    """A proposal of these tokens."""
    return SimpleNamespace(path=SimpleNamespace(token=tokens))


def test_a_draft_that_gives_nan_past_the_end_of_an_image_is_not_noticed() -> None:
    streams = RandomStreams(0, ["a", "b"])
    batch = loop.ContinuousRows([target()], streams, ["0", "1"], depth=2)
    assert batch.begin()
    begun, places = torch.zeros(2, 12, 4), torch.zeros(2, 12, dtype=torch.int64)
    counts = torch.tensor([12, 3])
    batch.append(ContinuousVerdict(begun, places.to(torch.int8), counts, places, places), 1)
    assert batch.sequences.counts == [12, 3]
    drafted, none = torch.zeros(2, 2, 4), torch.zeros(2, 3, dtype=torch.int64)
    drafted[0, 1] = torch.nan
    ones = torch.ones(2, dtype=torch.int64)
    padded = nn.functional.pad(drafted, (0, 0, 0, 1))
    verdict = ContinuousVerdict(padded, none.to(torch.int8), ones, none, none)
    proposal = drafted_as(drafted)
    batch.append(verdict, 3, proposal)
    assert batch.sequences.counts == [12, 4]
    with pytest.raises(TemperaError, match="the draft gave NaN .* prompt 'b'"):
        batch.append(verdict, 3, drafted_as(drafted.flip(0)))
        assert batch.sequences.complete


@pytest.mark.parametrize("who", ["target", "draft"])
def test_nan_ends_the_search_for_a_path(who: str) -> None:
    sound, broken = gaussians.Linear(3, 1), gaussians.Linear(3, 1)
    broken.shift = broken.shift * torch.nan
    none, wanted = torch.zeros(1, 1), torch.tensor([True])
    noise = new_noise(["a"])
    mine, theirs = (broken, sound) if who == "target" else (sound, broken)
    redrawn = residual_sampler.redraw_paths(
        residual_sampler.ConditionedHead(mine, none),
        residual_sampler.ConditionedHead(theirs, none),
        wanted,
        noise,
        64,
    )
    assert redrawn.trials.tolist() == [1] and not redrawn.failed.any()


# What is refused


@pytest.mark.parametrize(
    ("sizes", "what"),
    [({"grid": (4, 4)}, "grid"), ({"channels": 8}, "token_channels"), ({"classes": 4}, "classes")],
)
def test_a_draft_of_another_family_is_refused(sizes: dict[str, Any], what: str) -> None:
    with pytest.raises(TemperaError, match=f"the draft has {what}="):
        draft(target(), network(replace(TINY, **sizes)))


def test_other_bad_input() -> None:
    made = target()
    fewer = MARTarget(network(replace(TINY, classes=4)), ClassLabels(5).encode, SAMPLING)
    with pytest.raises(TemperaError, match="has no smaller model"):
        draft(made, None)
    with pytest.raises(TemperaError, match="not a rule for continuous tokens"):
        speculative(made, object())  # type: ignore[arg-type]
    with pytest.raises(TemperaError, match="steps=13 is more than the 12 tokens"):
        decoded(Parallel(13), made)
    with pytest.raises(TemperaError, match="class 4 is not one of the network's 4"):
        fewer.begin(["4"])
