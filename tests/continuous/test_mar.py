"""MAR: the official layout, the network against a plain computation, and all methods on a tiny
random one.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_rows_but
from paths import SUPPORT
from tiny_evaluation import Blocks
from tiny_targets import ldm_name
from torch import Tensor, nn

from tempera.continuous import diffusion, loop, residual_sampler
from tempera.continuous.diffusion import DiffusionSampling
from tempera.continuous.loop import (
    Context,
    ContinuousTrace,
    Parallel,
    Speculative,
    counts,
    draft_alone,
)
from tempera.continuous.mar import MAR, SIZES, MARConfig, initialise, load_mar
from tempera.continuous.noise import Noise, normal_of
from tempera.continuous.rules import (
    ContinuousVerdict,
    CSpD,
    CSpDReferenceCode,
    DensityRule,
    MaximalCoupling,
    PathCoupling,
)
from tempera.continuous.target import GuidedHead, MARTarget, draft
from tempera.data.prompts import Prompt
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.replay import DraftLog, replays
from tempera.decoding.trace import ACCEPTED
from tempera.errors import TemperaError
from tempera.evaluation.pipeline import Pipeline
from tempera.exactness import gaussians
from tempera.image_tokenizers.kl import KLConfig, KLModel, load_kl, patchify, unpatchify
from tempera.image_tokenizers.vq import VQConfig
from tempera.runtime.pretrained import on_meta
from tempera.targets.conditioners import ClassLabels

TINY = MARConfig(
    grid=(3, 4),
    channels=4,
    width=16,
    depth=1,
    heads=2,
    buffer=2,
    classes=5,
    head_width=16,
    head_depth=1,
)
WIDE = replace(TINY, channels=8)
SQUARE = replace(TINY, grid=(4, 4))
FEWER = replace(TINY, classes=4)
SAMPLING = DiffusionSampling(guidance=2.0, denoising_steps=4, last_noise=True)
TINY_KL = KLConfig(
    VQConfig(
        channels=8,
        encoder_multipliers=(1, 2),
        decoder_multipliers=(1, 2),
        res_blocks=1,
        z_channels=4,
        norm_groups=4,
    )
)
IDS = ["a", "b", "c"]


def network(config: MARConfig = TINY, seed: int = 0) -> MAR:
    torch.manual_seed(seed)
    made = MAR(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.eval().requires_grad_(False)


def target(
    seed: int = 0, sampling: DiffusionSampling = SAMPLING, config: MARConfig = TINY
) -> MARTarget:
    return MARTarget(network(config, seed), ClassLabels(config.classes).encode, sampling)


# The layout


LAYOUTS = json.loads((SUPPORT / "mar_layouts.json").read_text())


@pytest.mark.parametrize("size", ["base", "large", "huge"])
def test_the_official_keys_and_no_others(size: Any) -> None:
    made, layout = on_meta(lambda: MAR(SIZES[size])), LAYOUTS[size]
    assert sum(parameter.numel() for parameter in made.parameters()) == layout["n_params"]
    shapes = {name: list(tensor.shape) for name, tensor in made.state_dict().items()}
    assert (shapes if size == "base" else len(shapes)) == layout["keys"]


def test_published_files_load_averaged_weights_first(tmp_path: Path) -> None:
    mean, last = network(seed=1), network(seed=2)
    torch.save(
        {"model": last.state_dict(), "model_ema": mean.state_dict(), "epoch": 400},
        tmp_path / "checkpoint-last.pth",
    )
    loaded = load_mar(
        str(tmp_path), ["mar-base.safetensors", "checkpoint-last.pth"], "owner/name", config=TINY
    )
    assert torch.equal(loaded.z_proj.weight, mean.z_proj.weight)
    with pytest.raises(TemperaError, match="checkpoint-last.pth"):
        load_mar(
            str(tmp_path),
            ["checkpoint-last.pth"],
            "owner/name",
            config=MARConfig(grid=(3, 4), width=32, heads=2, depth=1),
        )


def test_kl16_loads_from_latent_diffusion_s_layout(tmp_path: Path) -> None:
    made = KLModel(TINY_KL)
    state = {ldm_name(name, 2): tensor for name, tensor in made.state_dict().items()}
    assert {
        "decoder.up.1.attn.0.q.weight",
        "encoder.down.0.downsample.conv.weight",
        "decoder.mid.attn_1.norm.weight",
    } < set(state)
    torch.save({"model": state}, tmp_path / "kl16.ckpt")
    loaded = load_kl(str(tmp_path), ["kl16.ckpt"], "owner/name", TINY_KL)
    images = torch.rand(1, 3, 8, 8) * 2 - 1
    assert torch.equal(loaded.encode(images), made.encode(images))
    official = {ldm_name(name, 5) for name in on_meta(lambda: KLModel(KLConfig())).state_dict()}
    assert {
        "encoder.down.4.attn.1.proj_out.bias",
        "decoder.up.4.attn.2.k.weight",
        "quant_conv.weight",
        "decoder.up.0.block.2.conv2.bias",
    } < official
    assert (
        "decoder.up.3.attn.0.q.weight" not in official
        and "decoder.up.0.upsample.conv.weight" not in official
    )


def test_tokens_of_an_image_and_back() -> None:
    made = KLModel(TINY_KL)
    tokens = made.encode(torch.zeros(2, 3, 8, 16), torch.zeros(2, 4, 4, 8))
    assert tokens.shape == (2, 4, 8, 4) and made.decode_codes(tokens).shape == (2, 3, 8, 16)
    assert torch.allclose(tokens, made.encode(torch.zeros(2, 3, 8, 16)))
    with pytest.raises(TemperaError, match="9×8 pixels does not divide into 2-pixel patches"):
        made.encode(torch.zeros(1, 3, 9, 8))


def test_patches_are_ordered_as_mar_s() -> None:
    latents = torch.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    tokens = patchify(latents, 2)
    assert tokens.shape == (2, 2, 3, 12) and torch.equal(unpatchify(tokens, 2), latents)
    assert tokens[0, 0, 0].tolist() == [
        int(latents[0, y, x, c]) for c in range(3) for y in range(2) for x in range(2)
    ]


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
    made = network()
    head = GuidedHead(made.head, SAMPLING)
    c, u, x, stage = (
        torch.randn(3, 16),
        torch.randn(3, 16),
        torch.randn(3, 4),
        torch.tensor([0, 2, 3]),
    )
    got = head.kernel(torch.cat([c, u, torch.tensor([[1.0], [2.0], [3.5]])], -1), x, stage)
    t = 3 - stage
    conditional, null = (made.head(x, head.schedule.times[t], z) for z in (c, u))
    noise = null[:, :4] + torch.tensor([[1.0], [2.0], [3.5]]) * (conditional[:, :4] - null[:, :4])
    wanted = head.schedule.kernel(torch.cat([noise, conditional[:, 4:]], -1), x, t)
    assert torch.allclose(got.mean, wanted.mean, atol=1e-5) and torch.allclose(got.std, wanted.std)
    warmer = GuidedHead(
        made.head, DiffusionSampling(guidance=2.0, denoising_steps=4, temperature=1.3)
    ).kernel(torch.cat([c, u, torch.ones(3, 1)], -1), x, stage)
    assert torch.allclose(warmer.std, 1.3 * got.std)


@pytest.mark.parametrize("rows", [1, 20, 150])
@pytest.mark.parametrize("first", [0, 3, 7])
def test_modulations_computed_in_advance_are_the_same(rows: int, first: int) -> None:
    """One row has all its stages modulated at once, 20 have three of them, 150 one by one."""
    made = target(sampling=replace(SAMPLING, denoising_steps=7))
    condition, x = torch.cat([torch.randn(rows, 32), torch.rand(rows, 1)], -1), torch.randn(rows, 4)
    steps = list(made.denoiser.steps(condition, first))
    assert len(steps) == 7 - first
    for stage, kernel_at in enumerate(steps, start=first):
        one_by_one = made.denoiser.kernel(condition, x, torch.full((rows,), stage))
        for ahead, wanted in zip(kernel_at(x), one_by_one, strict=True):
            assert torch.allclose(ahead, wanted, rtol=1e-3, atol=1e-4)


def test_a_new_head_outputs_zero() -> None:
    made = MAR(TINY)
    initialise(made)
    assert made.head(torch.randn(2, 4), torch.tensor([3, 900]), torch.randn(2, 16)).abs().max() == 0


# Decoding


@pytest.mark.parametrize(
    ("length", "steps", "first"),
    [
        (256, 256, [1, 1]),
        (256, 64, [1, 1, 1]),
        (256, 16, [2, 3]),
        (12, 3, [2, 4, 6]),
        (12, 1, [12]),
    ],
)
def test_the_cosine_schedule(length: int, steps: int, first: list[int]) -> None:
    taken = counts(length, steps)
    assert (
        len(taken) == steps
        and sum(taken) == length
        and min(taken) >= 1
        and taken[: len(first)] == first
    )


@pytest.mark.parametrize("steps", [None, 1, 3, 12])
def test_parallel_prediction(steps: int | None) -> None:
    output = Parallel(steps).decode(target(), RandomStreams(0, IDS), ["0", "1", "2"])
    assert (
        output.tokens.shape == (3, 12, 4)
        and output.tokens.isfinite().all()
        and (output.tokens != 0).all()
    )
    assert output.trace.rounds.tolist() == [steps or 12] * 3


RULES: list[tuple[DensityRule, DiffusionSampling]] = [
    (CSpD(), SAMPLING),
    (CSpD(alignment=False), DiffusionSampling(denoising_steps=4, last_noise=True)),
    (CSpDReferenceCode(), DiffusionSampling(guidance=2.0, denoising_steps=4)),
    (MaximalCoupling(), SAMPLING),
    (PathCoupling(), SAMPLING),
    (PathCoupling(), DiffusionSampling(guidance=2.0, denoising_steps=4)),
]


@pytest.mark.parametrize(("rule", "sampling"), RULES)
@pytest.mark.parametrize(
    ("prefill", "steps"), slow_rows_but([(0.0, None), (0.15, None), (0.15, 5)], (0.15, None))
)
def test_every_rule_generates_whole_images_that_do_not_depend_on_the_batch(
    rule: DensityRule, sampling: DiffusionSampling, prefill: float, steps: int | None
) -> None:
    made = target(sampling=sampling)
    method = Speculative(draft(made, network(seed=1)), rule, 3, prefill, steps)
    output = method.decode(made, RandomStreams(0, IDS), ["0", "1", "2"])
    trace = output.trace
    assert isinstance(trace, ContinuousTrace)
    assert output.tokens.isfinite().all() and (output.tokens != 0).all() and (trace.place > 0).all()
    assert (
        (trace.rounds <= 12).all()
        and trace.tested.shape == (3, method.depth(12))
        and (trace.tested >= trace.accepted).all()
    )
    alone = method.decode(made, RandomStreams(0, ["b"]), ["1"])
    assert torch.allclose(alone.tokens[0], output.tokens[1], rtol=1e-3, atol=1e-2)
    assert torch.equal(alone.trace.depth[0], trace.depth[1])


@pytest.mark.parametrize("bound", [3, 100])
def test_a_redrawn_path_is_the_first_accepted_of_the_trials_in_order(bound: int) -> None:
    """However many run at once. An easy draft, of which a rejection needs many paths."""
    head, rows = gaussians.Linear(3, 1), 40
    other, noise = head.imitation(0.05), Noise(RandomStreams(0, [str(row) for row in range(40)]))
    none, wanted = torch.zeros(rows, 1), torch.arange(rows) > 0
    found = residual_sampler.redraw_paths((head, none), (other, none), wanted, noise, bound)
    draws = noise.trials(torch.arange(rows), 1, 0, bound, 5)
    path = diffusion.denoise_all(
        head, none.unsqueeze(1).expand(-1, bound, -1), normal_of(draws[..., :4]).unsqueeze(-1)
    )
    q = diffusion.kernels_of_paths(other, none.unsqueeze(1).expand(-1, bound, -1), path.states)
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
    method = Speculative(draft(made, network(seed=1)), PathCoupling(), gamma=3, prefill=0.15)
    pipeline, log = Pipeline(made, method, Blocks(), 0, made.device), DraftLog()
    prompts = [Prompt(name, str(label)) for label, name in enumerate(IDS)]
    output = pipeline.tokens(prompts, drafts=log)
    (row,) = replays(IDS, output, log, made.grid, {"b"})
    assert row["id"] == "b"
    assert not {"tokens", "logprob"} & set(row)
    assert sorted(row["order"]) == list(range(12))
    assert row["nodes"] == row["drafted"] == []
    prefilled = sum(number == 0 for number in row["proposed"])
    assert row["proposed"] == [0] * prefilled + [3] * (12 - prefilled)
    assert 0 < prefilled < 12
    for place, origin, proposed in zip(row["place"], row["origin"], row["proposed"], strict=True):
        assert place <= proposed + (origin != ACCEPTED)


@pytest.mark.parametrize("rule", [CSpD(), MaximalCoupling(), PathCoupling()])
def test_a_continuous_draft_equal_to_the_target_is_always_accepted(rule: DensityRule) -> None:
    """Its conditions must be the target's own with the drafts in place: every context is right. (In
    float64: an untrained head generates numbers so large that rounding differs between batches by
    more than the last stage's noise.)
    """
    made = MARTarget(network().double(), ClassLabels(5).encode, SAMPLING)
    output = Speculative(draft(made, network()), rule, gamma=3, prefill=0.0).decode(
        made, RandomStreams(0, IDS), ["0", "1", "2"]
    )
    assert output.trace.rounds.tolist() == [3, 3, 3]


def test_without_last_noise_the_coupling_is_plain_decoding() -> None:
    made = target(sampling=DiffusionSampling(denoising_steps=4))
    output = Speculative(
        draft(made, network(seed=1)), MaximalCoupling(), gamma=2, prefill=0.0
    ).decode(made, RandomStreams(0, ["a"]), ["0"])
    assert output.trace.rounds.tolist() == [12]


def sick(made: MARTarget) -> MARTarget:
    made.network.head.final_layer.linear.bias.data[0] = torch.nan
    return made


def test_nan_is_reported_with_its_prompt() -> None:
    with pytest.raises(
        TemperaError, match="^the target gave NaN or infinite tokens for prompt 'a'"
    ):
        Parallel().decode(sick(target()), RandomStreams(0, IDS), ["0", "1", "2"])


def test_nan_of_a_draft_alone_is_the_draft_s() -> None:
    method = draft_alone(sick(target(seed=1)))
    with pytest.raises(TemperaError, match="^the draft gave NaN or infinite tokens for prompt 'a'"):
        method.decode(target(), RandomStreams(0, IDS), ["0", "1", "2"])


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize(
    "rule", [CSpD(), CSpDReferenceCode(), MaximalCoupling(), PathCoupling(trials=64)]
)
def test_nan_ends_a_round_and_names_the_network(rule: DensityRule, who: str) -> None:
    """Not the whole image, whose tokens the target would replace one by one."""
    made, drawn = target(), list[int]()
    small = draft(made, network(seed=1))
    sick(small if who == "draft" else made)
    with pytest.raises(
        TemperaError, match=f"^the {who} gave NaN or infinite tokens for prompt 'a'; check its"
    ):
        Speculative(small, rule, gamma=2, prefill=0.0).decode(
            made,
            RandomStreams(0, IDS),
            ["0", "1", "2"],
            observe=lambda images: drawn.append(images.written),
        )
    assert len(drawn) < 4


def test_a_draft_that_gives_nan_past_the_end_of_an_image_is_not_noticed() -> None:
    images = loop.Images(target(), Noise(RandomStreams(0, ["a", "b"])), 2)
    images.context = replace(images.context, known=torch.tensor([12, 3]))
    drafted, none = torch.zeros(2, 2, 4), torch.zeros(2, 3, dtype=torch.int64)
    drafted[0, 1] = torch.nan
    ones = torch.ones(2, dtype=torch.int64)
    verdict = ContinuousVerdict(torch.zeros(2, 3, 4), none, ones, none, none)
    images.append(verdict, 3, drafted)
    images.read()
    assert images.least == 4
    images.append(verdict, 3, drafted.flip(0))
    with pytest.raises(TemperaError, match="the draft gave NaN or infinite tokens for prompt 'b'"):
        images.read()


@pytest.mark.parametrize("rule", [CSpD(), CSpDReferenceCode(), MaximalCoupling(), PathCoupling(64)])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_a_batch_that_failed_leaves_nothing_to_the_next(
    rule: DensityRule, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN from the middle of an image on, then sound networks again."""
    made = target()
    method = Speculative(small := draft(made, network(seed=1)), rule, gamma=2, prefill=0.0)
    fresh = method.decode(made, RandomStreams(0, IDS), ["0", "1", "2"])
    broken = made if who == "target" else small

    def fails_later(context: Context, places: Tensor, after: Tensor) -> Tensor:
        found = MARTarget.conditions(broken, context, places, after)
        return found * torch.nan if context.reach > 4 else found

    with monkeypatch.context() as patch, pytest.raises(TemperaError, match=f"the {who} gave NaN"):
        patch.setattr(broken, "conditions", fails_later)
        method.decode(made, RandomStreams(1, IDS), ["3", "3", "3"])
    again = method.decode(made, RandomStreams(0, IDS), ["0", "1", "2"])
    assert torch.equal(again.tokens, fresh.tokens)
    for name, column in fresh.trace.columns().items():
        assert torch.equal(again.trace.columns()[name], column), name


@pytest.mark.parametrize("who", ["target", "draft"])
def test_nan_ends_the_search_for_a_path(who: str) -> None:
    sound, broken = gaussians.Linear(3, 1), gaussians.Linear(3, 1)
    broken.shift = broken.shift * torch.nan
    heads = (broken, sound) if who == "target" else (sound, broken)
    none, wanted = torch.zeros(1, 1), torch.tensor([True])
    noise = Noise(RandomStreams(0, ["a"]))
    target, draft = ((head, none) for head in heads)
    redrawn = residual_sampler.redraw_paths(target, draft, wanted, noise, 64)
    assert redrawn.trials.tolist() == [1] and not redrawn.failed.any()


# What is refused


def decode_with(**changes: Any) -> None:
    made = target()
    settings = {
        "draft": draft(made, network(seed=1)),
        "gamma": 2,
        "prefill": 0.0,
        "rule": MaximalCoupling(),
        "prompt": "0",
        **changes,
    }
    method = Speculative(
        settings["draft"], settings["rule"], settings["gamma"], settings["prefill"]
    )
    method.decode(made, RandomStreams(0, ["a"]), [settings["prompt"]])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 0}, "gamma=0 drafts nothing; give 1 or more"),
    ({"prefill": 1.0}, "prefill=1.0 is not a share of an image; give 0 or more, and less than 1"),
    ({"prefill": -0.1}, "prefill=-0.1 is not a share"),
    ({"prompt": "5"}, "is no class; give a number from 0 to 4"),
    ({"prompt": "a dog"}, "is no class; give a number from 0 to 4"),
    ({"rule": object()}, "no rule for continuous tokens"),
    (
        {"draft": target(config=SQUARE)},
        "the draft generates 4×4 tokens and the target 3×4; take a draft of the target's family",
    ),
    ({"draft": target(config=WIDE)}, "the draft's tokens have 8 channels and the target's 4"),
    (
        {"draft": target(sampling=DiffusionSampling(denoising_steps=5, last_noise=True))},
        "draft and target must have the same denoising steps",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_bad_input_raises_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TemperaError) as problem:
        decode_with(**changes)
    assert message in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [(SQUARE, "the draft generates 4×4 tokens and the target 3×4"), (WIDE, "8 channels and the")],
)
def test_a_draft_alone_has_the_target_s_tokens(config: MARConfig, message: str) -> None:
    with pytest.raises(TemperaError, match=message):
        draft_alone(target(config=config)).decode(target(), RandomStreams(0, ["a"]), ["0"])


def test_other_bad_input() -> None:
    with pytest.raises(TemperaError, match="steps=13 is more than the 12 tokens of an image"):
        Parallel(13).decode(target(), RandomStreams(0, ["a"]), ["0"])
    with pytest.raises(TemperaError, match="steps=0 makes no image"):
        Parallel(0)
    with pytest.raises(TemperaError, match="trials=0 is not possible"):
        MaximalCoupling(trials=0)
    with pytest.raises(TemperaError, match="exponent_temperature=0 is not possible"):
        CSpDReferenceCode(exponent_temperature=0)
    with pytest.raises(TemperaError, match="the draft has 4 classes and the target 5"):
        draft(target(), network(FEWER))
    with pytest.raises(TemperaError, match="class 4 is not one of the network's 4"):
        MARTarget(network(FEWER), ClassLabels(5).encode, SAMPLING).begin(["4"])
