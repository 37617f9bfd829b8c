"""Images from the web, here from a server on loopback with every trouble that the web has."""

import io
from collections.abc import Iterator

import pytest
from image_server import ImageServer, jpeg
from PIL import Image

from tempera.data.downloads import Failure, Limits, download, kinds, usable
from tempera.errors import TemperaError

pytestmark = pytest.mark.slow

QUICK = Limits(concurrency=8, timeout=0.8, retries=1, max_bytes=1_000_000, min_side=8, size=32)
EXPECTED = {
    "good/a": None, "redirect/a": None, "flaky/a": None,
    "missing/a": "HTTP 404", "busy/a": "HTTP 429", "hang/a": "timed out", "slow/a": "timed out",
    "loop/a": "too many redirects", "html/a": "no image", "huge/a": "too large",
    "bomb/a": "too large", "noai/a": "training forbidden (X-Robots-Tag)", "cut/a": "broken off",
    "tiny/a": "too small",
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ImageServer() as started:
        assert isinstance(started, ImageServer)
        yield started


def test_every_trouble_has_its_kind_and_the_rest_arrives(server: ImageServer) -> None:
    addresses = [f"{server.url}/{path}" for path in EXPECTED]
    outcomes = download([*addresses, "http://127.0.0.1:1/x", "no address", "ftp://a/b"], QUICK)
    found = [outcome.kind if isinstance(outcome, Failure) else None for outcome in outcomes]
    assert dict(zip(EXPECTED, found, strict=False)) == EXPECTED
    assert found[len(EXPECTED) :] == ["unreachable", "no address", "no address"]
    assert kinds(outcomes)["too large"] == 2
    assert server.asked["/flaky/a"] == 2 and server.asked["/missing/a"] == 1
    image = Image.open(io.BytesIO(outcomes[0]))  # type: ignore[arg-type]
    assert image.format == "JPEG" and min(image.size) == 32


def test_robots_can_be_passed_over_and_other_crawlers_are_not_meant(server: ImageServer) -> None:
    outcome = download([f"{server.url}/noai/a"], Limits(robots=False, min_side=8))[0]
    assert isinstance(outcome, bytes)


def test_no_more_downloads_at_a_time_than_allowed(server: ImageServer) -> None:
    addresses = [f"{server.url}/good/{number}" for number in range(40)]
    outcomes = download(addresses, Limits(concurrency=3, min_side=8))
    assert all(isinstance(outcome, bytes) for outcome in outcomes)
    assert len(outcomes) == 40 == len(set(server.paths()))


def test_a_small_image_stays_as_large_as_it_is() -> None:
    body = usable(jpeg(size=(48, 40)), Limits(min_side=8, size=768))
    assert isinstance(body, bytes) and Image.open(io.BytesIO(body)).size == (48, 40)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"timeout": 0.0}, {"retries": -1}])
def test_impossible_limits(wrong: dict[str, float]) -> None:
    with pytest.raises(TemperaError, match="is too small|is not possible"):
        Limits(**wrong)  # type: ignore[arg-type]
