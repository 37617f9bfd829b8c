"""Modes that PyTorch keeps for a process or a thread do not reach into tempera, and are the
caller's again afterwards.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from cases import slow_but
from torch import Tensor

import tempera
from tempera.commands import scripts
from tempera.runtime.torch_modes import usual_modes


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    assert torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    assert torch.get_default_device().type == "meta"
    torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


@contextmanager
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
        assert torch.is_inference_mode_enabled()


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield
        assert torch.is_autocast_enabled("cpu")


def products(
    change: Callable[[], object], at: Callable[[], str]
) -> Callable[[], AbstractContextManager[object]]:
    """A precision of float32 products, which one call sets and another reads."""

    @contextmanager
    def mode() -> Iterator[None]:
        change()
        before = at(), torch.backends.mkldnn.matmul.fp32_precision
        yield
        assert (at(), torch.backends.mkldnn.matmul.fp32_precision) == before
        torch.backends.fp32_precision = torch.backends.mkldnn.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")

    return mode


BACKENDS = torch.backends
PRODUCTS = {
    **{
        f"products {name}": products(
            partial(torch.set_float32_matmul_precision, name), torch.get_float32_matmul_precision
        )
        for name in ("medium", "high")
    },
    "TF32": products(
        partial(setattr, BACKENDS.cuda.matmul, "allow_tf32", True),
        lambda: str(BACKENDS.cuda.matmul.allow_tf32),
    ),
    "bfloat16 on CPUs": products(
        partial(setattr, BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: BACKENDS.cuda.matmul.fp32_precision,
    ),
    "bfloat16 in oneDNN": products(
        partial(setattr, BACKENDS.mkldnn, "fp32_precision", "bf16"),
        lambda: BACKENDS.mkldnn.fp32_precision,
    ),
    "TF32 everywhere": products(
        partial(setattr, BACKENDS, "fp32_precision", "tf32"), lambda: BACKENDS.fp32_precision
    ),
}
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference mode": inference,
    "default dtype": default_dtype,
    "default device": default_device,
    "device context": lambda: torch.device("meta"),
    "autocast": autocast,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "deterministic": deterministic,
    "anomaly": torch.autograd.detect_anomaly,
    **PRODUCTS,
}


@pytest.fixture(params=slow_but(MODES, "inference mode", "default dtype", "autocast"))
def mode(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[object]]:
    return MODES[request.param]


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """After a test that fails, too."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def drawn(method: str) -> Tensor:
    loaded = tempera.load("shapes", method, dtype="float32", window=8)
    return loaded.generate("a large green star", seed=1).tokens


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return drawn("sjd")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_load_and_generate(
    mode: Callable[[], AbstractContextManager[object]], expected: Tensor
) -> None:
    """The same tokens inside; and what was loaded and used there works outside."""
    with mode():
        loaded = tempera.load("shapes", "sjd", dtype="float32", window=8)
        inside = loaded.generate("a large green star", seed=1).tokens
        first = next(iter(loaded.rounds("a large green star", seed=1))).tokens.clone()
        (picture,) = loaded.pictures(inside)
    assert torch.equal(inside, expected) and picture.size == (48, 48)
    states = [round.tokens.clone() for round in loaded.rounds("a large green star", seed=1)]
    assert torch.equal(states[0], first) and torch.equal(states[-1], expected)
    assert not states[-1].is_inference()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_command(
    mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in the usual modes, with gradients, which training needs."""

    class Command:
        @staticmethod
        def main(_: object) -> Tensor:
            weight = torch.ones(2, requires_grad=True)
            with torch.autograd.set_detect_anomaly(False):
                (weight @ torch.ones(2)).backward()
            assert weight.grad is not None
            return weight.grad

    monkeypatch.setattr(scripts, "import_module", lambda _: Command)
    config: Any = {}
    with mode():
        grad: Any = scripts.train(config)
    assert grad.device.type == "cpu" and grad.dtype == torch.float32 and not grad.is_inference()


def test_products_are_of_float32_inside_and_the_callers_between_two_rounds() -> None:
    torch.set_float32_matmul_precision("medium")
    loaded = tempera.load("shapes", "sjd", dtype="float32", window=8)
    for _ in loaded.rounds("a large green star"):
        assert torch.get_float32_matmul_precision() == "medium"
    seen = set()

    def look(_: object) -> None:
        seen.add((BACKENDS.cuda.matmul.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision))

    loaded.generate("a large green star", callback=look)
    assert seen == {("ieee", "ieee")} and torch.get_float32_matmul_precision() == "medium"


def test_two_threads_with_another_default_dtype() -> None:
    """Whoever is first to leave does not take float32 from the other."""
    torch.set_default_dtype(torch.float64)
    both, first_left = Barrier(2), Barrier(2)

    def work(first: bool) -> torch.dtype:
        with usual_modes():
            both.wait()
            if first:
                return torch.get_default_dtype()
            first_left.wait()
            return torch.get_default_dtype()

    with ThreadPoolExecutor(2) as threads:
        early, late = threads.submit(work, True), threads.submit(work, False)
        dtypes = [early.result()]
        first_left.wait()
        dtypes.append(late.result())
    assert dtypes == [torch.float32] * 2
    assert torch.get_default_dtype() == torch.float64
