"""Compiled steps compute the same values as eager ones. Speed is not tested here."""

from functools import partial

import pytest
import torch
from tiny_networks import PROMPTS, captions, llamagen, tiny_eagle, tiny_parallel
from torch._dynamo.testing import CompileCounterWithBackend

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
from tempera.drafters.none import NoDraft
from tempera.drafters.parallel import ParallelDraft
from tempera.drafters.static_tree import StaticTreeDrafter
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.targets import compiled
from tempera.targets.transformer import TransformerTarget


@pytest.fixture
def _compiler() -> None:
    """torch.compile needs a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler")


def eagle(target, depth):
    draft = EagleDraft(tiny_eagle(target), target)
    return StaticTreeDrafter(draft, Tree.chain(depth))


def parallel(target, depth):
    draft = ParallelDraft(tiny_parallel(target), target, depth)
    return StaticTreeDrafter(draft, Tree.chain(depth))


def half(target, depth):
    draft = EagleDraft(tiny_eagle(target), target, dtype=torch.bfloat16)
    return StaticTreeDrafter(draft, Tree.chain(depth))


def tiny(compile: bool, device: str = "cpu") -> TransformerTarget:
    forced = torch.full((20,), -1)
    forced[9] = 4
    sampling = Sampling(3.0, temperature=2.0, top_k=7)
    network = llamagen().to(device)
    target = TransformerTarget(network, captions, sampling, forced=forced, granularity=4)
    if compile:
        target.fuse()
        target.compile()
    return target


def decoded(compile: bool, depth: int, batches: list[list[str]], device: str = "cpu", model=eagle):
    """Decode with a tiny model: images, and each round's distributions of target and draft."""
    target = tiny(compile, device)
    drafter = model(target, depth)
    images, found = [], []
    score = target.score

    def scored(draft):
        scores = score(draft)
        found.append((draft.q, scores.p, scores.hidden))
        return scores

    target.score = scored
    for prompts in batches:
        streams = RandomStreams(0, prompts, device)
        images.append(decode(target, drafter, Exact(), streams, prompts).tokens)
    return images, found


@pytest.fixture
def counter(monkeypatch) -> CompileCounterWithBackend:
    """Dynamo and AOTAutograd trace and functionalise every step, but no code is generated."""
    torch._dynamo.reset()
    made = CompileCounterWithBackend("aot_eager")
    inner = torch.compile

    def counted(function, *, mode, **options):
        assert mode == "reduce-overhead"
        return inner(function, backend=made, **options)

    monkeypatch.setattr(torch, "compile", counted)
    return made


def test_a_step_is_compiled_once_for_each_shape(counter):
    target = tiny(True)
    drafter = eagle(target, 3)

    def generate(drafter, prompts):
        return decode(target, drafter, Exact(), RandomStreams(0, prompts), prompts).tokens

    plain = tiny(False)
    expected = decode(
        plain, eagle(plain, 3), Exact(), RandomStreams(0, PROMPTS[:2]), PROMPTS[:2]
    ).tokens
    assert torch.equal(generate(drafter, PROMPTS[:2]), expected)
    first = counter.frame_count
    assert first == 7  # pass, logits and sampling of 4 positions and of 1, but of the target's pass
    generate(drafter, PROMPTS[2:])
    assert counter.frame_count == first  # neither lengths nor prompts are constants
    generate(NoDraft(), PROMPTS[:2])
    assert first < counter.frame_count <= first + 3  # the pass over one token


def test_compiled_passes_write_into_buffers_with_a_static_address(counter):
    target = tiny(True)
    decode(target, NoDraft(), Exact(), RandomStreams(0, PROMPTS[:2]), PROMPTS[:2])
    cache = target.session.cache
    assert all(hasattr(entries, "_dynamo_static_input_type") for entries in cache.entries)
    graphs = [graph for graph in counter.graphs if ".index_copy_(" in graph.code]
    assert len(graphs) == 1 and graphs[0].code.count(".index_copy_(") == len(cache.entries)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("model", [eagle, parallel])
def test_compiled_target_and_draft_decode_like_eager_ones_and_write_in_place(
    model, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # cached code is not compiled
    torch._dynamo.reset()
    from torch._inductor.utils import run_and_get_code

    run = partial(decoded, True, 2, [PROMPTS[:2]], model=model)
    (images, found), sources = run_and_get_code(run)
    writing = [source for source in sources if "index_copy" in source or "index_put" in source]
    size = 2 * 4 * 2 * (4 + 20 + 1 + 64 + 3) * 8
    assert writing and not any(f"empty_strided_cpu(({size // 8}, 8)" in one for one in writing)
    expected_images, expected = decoded(False, 2, [PROMPTS[:2]], model=model)
    assert torch.equal(images[0], expected_images[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_a_compiled_draft_in_half_precision_drafts_like_an_eager_one():
    """In the first round; later ones may follow other tokens."""
    found, expected = (
        decoded(compile, 3, [PROMPTS[:2]], model=half)[1][0] for compile in (True, False)
    )
    torch.testing.assert_close(found[0][:, 0], expected[0][:, 0], rtol=0.0, atol=0.03)
    torch.testing.assert_close(found[1][:, 0], expected[1][:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("model", [eagle, parallel])
def test_compiled_rounds_decode_like_eager_ones_on_a_gpu(model):
    batches = [PROMPTS[:2], PROMPTS[2:]]  # the second batch replays the first one's graphs
    images, found = decoded(True, 3, batches, "cuda", model)
    expected_images, expected = decoded(False, 3, batches, "cuda", model)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(images, expected_images, strict=True))


@pytest.mark.slow
def test_a_failed_compilation_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no_such_compiler",))
    with pytest.raises(TemperaError, match=r"no_such_compiler") as message:
        compiled.compile_step(lambda x: x.sin() * 3 + 1)(torch.ones(5))
    assert "\n" not in str(message.value)


def test_out_of_memory_in_compilation_is_raised_unchanged(monkeypatch):
    def refuse(*inputs):
        raise torch._dynamo.exc.BackendCompilerFailed(
            "inductor", torch.OutOfMemoryError("of 80 GiB"), None
        )

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    with pytest.raises(torch.OutOfMemoryError):
        compiled.compile_step(abs)(torch.ones(1))
