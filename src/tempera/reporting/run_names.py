"""Names of runs in tables and figures."""

from collections.abc import Mapping
from typing import Any

USUAL = {
    "schedule": "exponential",
    "tree": "chain",
    "floor": 0,
    "residual": "optimal",
    "depth": 5,
    "nu": 0.7,
    "ell": 8,
}
USUAL |= {"price": 0.7, "expected_length": None}
USUAL |= {"gamma": 8, "prefill": 0.05, "alignment": True, "steps": None}
"""Default settings; names leave them out."""
IMPLIED: dict[str, dict[str, Any]] = {
    "uniform_rsd": {"schedule": "uniform"},
    "optimal_rsd": {"schedule": "constant_price"},
    "lantern": {"tree": "mc_sim_7b_63", "residual": "published"},
    "lanternpp": {"tree": "naive_extend_57", "residual": "published"},
    "gsd": {"residual": "published"},
}
"""Settings that a method implies; its names leave them out."""


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether a run is plain autoregression: method=ar with one token per step."""
    return settings.get("method") == "ar" and settings.get("steps") is None


def without_match(settings: Mapping[str, Any], matched: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings without the accepted length that was wanted (`expected_length=`) and the free
    parameter that was found for it.

    Args:
        settings: a run's settings.
        matched: what the run records about the search; None if nothing was matched.
    """
    found = {"expected_length", matched["option"]} if matched else set()
    return {name: value for name, value in settings.items() if name not in found}


def family_label(settings: Mapping[str, Any]) -> str:
    """The name of a curve: the method and its unusual settings except δ, as in `coolsd floor=1`."""
    method = str(settings.get("method", "run"))
    usual = USUAL | IMPLIED.get(method, {})
    unusual = {
        name: settings[name] for name in usual if settings.get(name) not in (None, usual[name])
    }
    named = [
        str(value) if name in ("schedule", "tree") else f"{name}={_short(value)}"
        for name, value in unusual.items()
    ]
    return " ".join([method, *named])


def method_label(settings: Mapping[str, Any]) -> str:
    """The family and δ, as in `coolsd δ=2`."""
    delta = settings.get("delta")
    return family_label(settings) + ("" if delta is None else f" δ={delta:g}")


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
