"""A family is an object that an option names."""

import pytest
from tiny_targets import composed

from tempera.config.parts import Parts
from tempera.errors import TemperaError
from tempera.targets import chameleon, emu3, emu3_5, glm_image, janus, qwen2
from tempera.targets.family import Family


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("anole", chameleon.CHAMELEON),
        ("lumina2", chameleon.CHAMELEON),
        ("emu3", emu3.EMU3),
        ("glm_image", glm_image.GLM_IMAGE),
        ("janus_pro_1b", janus.JANUS),
        ("simplear_05b", qwen2.QWEN2),
        ("emu3_5_image", emu3_5.EMU3_5),
    ],
)
def test_a_preset_names_its_family(model: str, family: Family) -> None:
    parts = Parts.of(composed(f"model={model}", "weights=random"))
    assert parts.network_part.options["family"] is family


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tempera.targets.emu3.EMU4", "EMU4"),
        ("lab.models.MINE", "No module named 'lab'"),
    ],
)
def test_another_name_is_refused_in_a_sentence(name: str, reason: str) -> None:
    with pytest.raises(TemperaError, match=f"`model.network.family={name}` is not .*{reason}"):
        Parts.of(composed("model=emu3", "weights=random", f"model.network.family={name}"))


def test_an_object_of_another_kind_is_refused() -> None:
    name = "model.network.family=tempera.targets.emu3.emu3"
    parts = Parts.of(composed("model=emu3", "weights=random", name))
    with pytest.raises(TemperaError, match="emu3 at .* is not a Family: give one such") as refusal:
        parts.target()
    assert refusal.value.option == "model.network.family"
