"""Families of networks inside and outside the package."""

import sys
from types import ModuleType

import pytest

from tempera.errors import TemperaError
from tempera.targets import llamagen
from tempera.targets.network import family_module


def test_a_family_is_a_module_of_the_package_or_an_imported_one(monkeypatch):
    own = ModuleType("lab.models")
    monkeypatch.setitem(sys.modules, "lab.models", own)
    assert family_module("llamagen") is llamagen and family_module("lab.models") is own


@pytest.mark.parametrize("family", ["nothing", "this.module", "antigravity", "../llamagen"])
def test_another_name_imports_nothing(family):
    with pytest.raises(TemperaError, match="no draft for networks of the family"):
        family_module(family)
    assert family not in sys.modules
