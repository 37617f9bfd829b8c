"""Names of runs in tables and figures: the method, and whatever a run changes in its preset."""

from collections.abc import Mapping
from typing import Any


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether a run is plain autoregression: method=ar with one token per step."""
    return settings.get("method") == "ar" and settings.get("steps") is None


def family_name(
    method: str, changes: Mapping[str, Any], matched: Mapping[str, Any] | None = None
) -> str:
    """The name of the curve that a run lies on, as in `coolsd drafter=sjd floor=1`: without δ,
    which tells its points apart.

    Args:
        method: the method preset.
        changes: the choices and values that differ from the preset's.
        matched: what the run records about a search for its accepted length (`expected_length=`),
            whose free parameter (`option`) tells its points apart as well.
    """
    apart = {"delta", (matched or {}).get("option")}
    shown = [f"{name}={_short(value)}" for name, value in changes.items() if name not in apart]
    return " ".join([method, *shown])


def run_name(
    method: str,
    changes: Mapping[str, Any],
    delta: float | None = None,
    matched: Mapping[str, Any] | None = None,
) -> str:
    """The family and δ, as in `coolsd δ=2`."""
    return family_name(method, changes, matched) + ("" if delta is None else f" δ={delta:g}")


def _short(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
