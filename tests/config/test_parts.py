"""Model and method of a configuration, as one object."""

import pytest

from tempera.config.compose import composed
from tempera.config.parts import META, Parts
from tempera.errors import TemperaError


def parts(*options: str) -> Parts:
    return Parts.of(composed("eval", [*options, "device=cpu"]))


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("method=coolsd", "delta", 3.0),
        ("method=lantern", "k", 7),
        ("method=optimal_rsd", "price", 0.2),
        ("method=coolsd", "depth", 3),
    ],
)
def test_another_value_of_an_option_is_that_of_the_command_line(
    method: str, option: str, value: float
) -> None:
    usual = parts(method)
    varied = usual.with_option(option, value)
    given = parts(method, f"{option}={value}")
    assert repr(varied.rule()) == repr(given.rule()) != repr(usual.rule())
    assert varied.tree.nodes == given.tree.nodes
    with pytest.raises(TemperaError, match=f"`{option}=abc`"):
        usual.with_option(option, "abc")


def test_parts_without_data_have_the_sizes_and_the_files() -> None:
    whole = parts("method=eagle", "dtype=bfloat16", "drafter.path=nowhere")
    with whole.sized() as (sized, files):
        assert sized.placement.device == META and sized.placement.dtype == whole.placement.dtype
        assert sized.draft == "random" and whole.draft == "nowhere"
        assert {one.device for one in sized.discrete_target().network.parameters()} == {META}
    assert isinstance(files, list)


def test_a_script_without_methods_decodes_plainly() -> None:
    train = Parts.of(composed("train_draft", []))
    assert (train.draft, train.draft_depth, train.tree.nodes, train.rule()) == (None, 0, 0, None)
    assert train.decoding_part.make().is_plain  # type: ignore[union-attr]
    with pytest.raises(TemperaError, match="this, but model=shapes_mar has continuous"):
        Parts.of(composed("train_draft", ["model=shapes_mar"]), discrete="this")
