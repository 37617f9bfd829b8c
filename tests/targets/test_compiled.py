"""Compiled steps compute the same values as eager ones. Speed is not tested here."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_networks import PROMPTS, captions, llamagen, tiny_eagle, tiny_parallel, tiny_target

from tempera.decoding.loop import decode
from tempera.decoding.probabilities import Sampling
from tempera.decoding.random_streams import RandomStreams
from tempera.decoding.tape import TapeRecorder
from tempera.decoding.timing import no_clock
from tempera.decoding.trees import Tree
from tempera.drafters.eagle import EagleDraft
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


def eagle(target):
    return EagleDraft(tiny_eagle(target), target)


def parallel(target):
    return ParallelDraft(tiny_parallel(target), target, 3)


def half(target):
    return EagleDraft(tiny_eagle(target), target, dtype=torch.bfloat16)


def decoded(compile: bool, depth: int, batches: list[list[str]], device: str = "cpu", model=eagle):
    """Decode with a tiny model: images, and each round's distributions of target and draft."""
    forced = torch.full((20,), -1)
    forced[9] = 4
    target = TransformerTarget(
        llamagen().to(device),
        captions,
        Sampling(3.0, temperature=2.0, top_k=7),
        forced=forced,
        granularity=4,
    )
    if compile:
        target.fuse()
        target.compile()
    drafter = StaticTreeDrafter(model(target), Tree.chain(depth))
    images, laws = [], []
    score = target.score
    target.score = lambda draft: (
        laws.append((draft.q, (scores := score(draft)).p, scores.hidden)) or scores
    )
    for prompts in batches:
        images.append(
            decode(target, drafter, Exact(), RandomStreams(0, prompts, device), prompts).tokens
        )
    return target, images, laws


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_compiled_target_and_draft_decode_like_eager_ones_and_write_in_place(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # cached code is not compiled
    given, inner = [], torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: (
            given.append(function.__qualname__) or inner(function, **options)
        ),
    )
    from torch._inductor.utils import run_and_get_code

    (target, images, laws), sources = run_and_get_code(decoded, True, 1, [PROMPTS[:2]])
    writing = [source for source in sources if "index_copy" in source]
    assert len(writing) >= 2 and not any(
        "_copy_" in source.replace("_index_copy_", "") for source in writing
    )  # the cache is not copied
    plain, expected_images, expected_laws = decoded(False, 1, [PROMPTS[:2]])
    assert given == [
        "_decoder_layer",
        "_logits",
        "Sampling.distribution",
        "HiddenStateDraft._forward",
    ]
    assert torch.equal(images[0], expected_images[0])
    for found, expected in zip(laws, expected_laws, strict=True):
        torch.testing.assert_close(found, expected)
    assert (target.session.visible(), plain.session.visible()) == (4 + 20 + 4, 28)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_compiled_parallel_drafting_decodes_like_eager():
    _, images, laws = decoded(True, 3, [PROMPTS[:2]], model=parallel)
    _, expected_images, expected_laws = decoded(False, 3, [PROMPTS[:2]], model=parallel)
    assert torch.equal(images[0], expected_images[0])
    for found, expected in zip(laws, expected_laws, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_a_compiled_draft_in_half_precision_drafts_like_an_eager_one():
    """In the first round; later ones may follow other tokens."""
    found, expected = (
        decoded(compile, 3, [PROMPTS[:2]], model=half)[2][0] for compile in (True, False)
    )
    torch.testing.assert_close(found[0][:, 0], expected[0][:, 0], rtol=0.0, atol=0.03)
    torch.testing.assert_close(found[1][:, 0], expected[1][:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("model", [eagle, parallel])
def test_cuda_graphs_decode_like_eager_rounds_on_a_gpu(model):
    batches = [PROMPTS[:2], PROMPTS[2:]]  # the second batch replays the first one's graphs
    _, images, laws = decoded(True, 3, batches, "cuda", model)
    _, expected_images, expected_laws = decoded(False, 3, batches, "cuda", model)
    torch.testing.assert_close(laws, expected_laws, rtol=1e-3, atol=1e-3)
    assert all(
        torch.equal(found, expected)
        for found, expected in zip(images, expected_images, strict=True)
    )


def test_a_graph_replays_on_new_values_and_returns_copies(monkeypatch):
    """Uses stand-ins for CUDA graphs: replaying repeats the captured call in place."""
    calls = []

    def scaled(x, factor):
        calls.append((x, factor, x * factor))
        return calls[-1][2]

    class Graph:
        def replay(self):
            self.call[2].copy_(self.call[0] * self.call[1])

    class capture(nullcontext):
        def __init__(self, graph, stream):
            super().__init__()
            self.graph = graph

        def __exit__(self, *problem):
            self.graph.call = calls[-1]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    names = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
        "device": nullcontext,
    }
    for name, stand_in in {**names, "CUDAGraph": Graph, "graph": capture}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    step = compiled.cuda_graphed(scaled, torch.device("cuda"))
    first, second = step(torch.tensor([1.0, 2.0]), 3.0), step(torch.tensor([5.0, 7.0]), 3.0)
    assert first.tolist() == [3, 6] and second.tolist() == [15, 21]
    assert len(calls) == compiled.WARMUP + 1
    assert step(torch.tensor([1.0]), 3.0).tolist() == [3] and step(
        torch.tensor([1.0, 2.0]), 4.0
    ).tolist() == [4, 8]
    assert len(calls) == 3 * (compiled.WARMUP + 1)
    assert compiled.cuda_graphed(scaled, torch.device("cpu")) is scaled


def test_whole_rounds_are_recorded_in_one_pool_and_without_graphs_of_their_passes(monkeypatch):
    """Uses stand-ins for CUDA: a graph keeps what it was captured with."""
    done, streams, pinned = [], [], []

    class Stream:
        def wait_stream(self, other):
            done.append("recording waits" if self is streams[-1] else "caller waits")

    class Graph:
        def replay(self):
            done.append("replay")

    class capture(nullcontext):
        def __init__(self, graph, pool, stream):
            super().__init__()
            assert (pool, stream) == ("pool", streams[-1])
            done.append("capture")

    names = {
        "Stream": lambda: streams.append(Stream()) or streams[-1],
        "current_stream": Stream,
        "stream": nullcontext,
        "device": nullcontext,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": lambda: SimpleNamespace(
            record=lambda: done.append("sent"), synchronize=lambda: done.append("waited")
        ),
    }
    for name, stand_in in names.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    make = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory, **k: pinned.append(pin_memory) or make(*a, **k)
    )
    recorder = compiled.CudaRecorder(torch.device("cuda"))
    a_pass = compiled.cuda_graphed(lambda x: done.append("pass") or x, torch.device("cuda"))
    recorder.run(lambda clock: a_pass(torch.ones(1)), no_clock)
    assert done == ["recording waits", "pass", "caller waits"]
    done.clear()
    recording = recorder.record(lambda clock: a_pass(torch.ones(1)), None, [])
    assert done == ["capture", "pass", "replay"], "what is recorded runs, too"
    recording.replay(no_clock)
    assert done == ["capture", "pass", "replay", "replay"]
    done.clear()
    wait = recorder.send(torch.tensor([7, 3]))
    assert done == ["sent"] and wait() == [7, 3] and done == ["sent", "waited"] and pinned == [True]
    with pytest.raises(ZeroDivisionError):
        recorder.run(lambda clock: 1 / 0, no_clock)
    monkeypatch.setattr(compiled, "_CapturedGraph", lambda *a: SimpleNamespace(replay=list))
    assert len(a_pass(torch.ones(1))) == 1, "outside of a round a pass has its own graph"


def test_plain_rounds_are_recorded_on_a_cpu_and_compiled_ones_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compiled, "CudaRecorder", lambda device: device)
    target = tiny_target()
    assert isinstance(target.round_graphs().recorder, TapeRecorder)
    target.session.compiled = True
    assert target.round_graphs() is None
    target.device = torch.device("cuda")
    assert target.round_graphs().recorder == target.device
    target.session.compiled = False
    assert target.round_graphs() is None


@pytest.mark.slow
def test_a_failed_compilation_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no_such_compiler",))
    with pytest.raises(
        TemperaError,
        match=r"^the model cannot be compiled .*no_such_compiler.*C\+\+ compiler.* or go without$",
    ) as message:
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
