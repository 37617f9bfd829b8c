"""Compiled steps compute the same values as eager ones. Speed is not tested here."""

from dataclasses import replace

import pytest
import torch
from network_drafts import eagle, parallel
from tiny_networks import PROMPTS, captions, llamagen
from torch._dynamo.testing import CompileCounterWithBackend

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.trees import Tree
from tempera.drafters.none import NoDraft
from tempera.errors import TemperaError
from tempera.rules.standard import Exact
from tempera.targets import compiled
from tempera.targets.token_format import ModelSpec
from tempera.targets.transformer import TransformerTarget

CHAIN = Tree.chain(2)
DRAFTS = {
    "eagle": lambda target: eagle(target, CHAIN),
    "parallel": lambda target: parallel(target, CHAIN, features=(0,)),
    "half": lambda target: eagle(target, CHAIN, dtype=torch.bfloat16),
}


def decoded(model: str, compile: bool, batches: list[list[str]], device: str = "cpu"):
    """Decode with a tiny model: images, and each round's distributions of target and draft."""
    network = llamagen(num_hidden_layers=1).to(device)
    network.spec = ModelSpec(4, 4, 10, 0, ("{text}",), (), 99, line_end=10)
    sampling = Sampling(3.0, temperature=2.0, top_k=7)
    target = TransformerTarget(network, captions, sampling, granularity=4)
    if compile:
        target.pack()
        target.compile()
    drafter = NoDraft() if model == "ar" else DRAFTS[model](target)
    images, found, score = [], [], target.score

    def scored(draft, longest):
        scores = score(draft, longest)
        found.append((draft.q, scores.p, scores.hidden))
        return scores

    target.score = scored
    for number, prompts in enumerate(batches):
        target.sampling = replace(sampling, top_k=7 - 4 * number)  # it may change in between
        streams = RandomStreams(0, prompts, device)
        images.append(decode(target, drafter, Exact(), streams, prompts).tokens)
    return images, found, target


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


@pytest.mark.parametrize(("model", "steps"), [("ar", 4), ("eagle", 9), ("parallel", 8)])
def test_a_step_is_compiled_once_for_each_shape_and_writes_in_place(model, steps, counter):
    """The pass, logits and sampling of the target; the draft's step and, for other shapes than the
    target's, logits and sampling; and another sampling. Neither lengths nor prompts are constants.
    """
    batches = [PROMPTS[:2], PROMPTS[2:]]
    images, _, target = decoded(model, True, batches)
    assert counter.frame_count == steps
    cache = target.session.cache
    assert all(hasattr(entries, "_dynamo_static_input_type") for entries in cache.entries)
    writes = [graph.code.count(".index_copy_(") for graph in counter.graphs]
    assert sum(map(bool, writes)) == sum(writes) >= len(cache.entries)
    expected, _, _ = decoded(model, False, batches)
    assert all(torch.equal(one, other) for one, other in zip(images, expected, strict=True))


@pytest.mark.slow
def test_generated_code_decodes_like_eager_passes_and_writes_in_place(monkeypatch, tmp_path):
    """With the code that is generated for a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.utils import run_and_get_code

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # cached code is not compiled
    torch._dynamo.reset()
    batches = [PROMPTS[:2]]
    (images, found, _), sources = run_and_get_code(lambda: decoded("ar", True, batches))
    writing = [source for source in sources if "index_copy" in source or "index_put" in source]
    size = 2 * 4 * 2 * (4 + 20 + 1 + 64 + 3) * 8
    assert writing and not any(f"empty_strided_cpu(({size // 8}, 8)" in one for one in writing)
    expected_images, expected, _ = decoded("ar", False, batches)
    assert torch.equal(images[0], expected_images[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("model", DRAFTS)
def test_compiled_rounds_decode_like_eager_ones_on_a_gpu(model):
    batches = [PROMPTS[:2], PROMPTS[2:]]  # the second batch replays the first one's graphs
    images, found, _ = decoded(model, True, batches, "cuda")
    expected_images, expected, _ = decoded(model, False, batches, "cuda")
    if model != "half":  # whose rounding may flip a draw
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
