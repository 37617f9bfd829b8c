"""Names of runs in tables and figures: the method, and whatever a run changes in its preset."""

from collections.abc import Mapping
from typing import Any


def run_name(
    method: str,
    changes: Mapping[str, Any],
    delta: float | None = None,
    without: str | None = None,
    length: float | None = None,
) -> str:
    """A name such as `coolsd drafter=sjd δ=2`, or `coolsd drafter=sjd at 3.8`.

    Args:
        method: the method preset.
        changes: the choices and values that differ from the preset's.
        delta: δ, if the method has one.
        without: an option that the name leaves out.
        length: the accepted length that δ or another option was found for (`expected_length=`).
    """
    shown = [
        f"{name}={_short(value)}"
        for name, value in changes.items()
        if name not in ("delta", without)
    ]
    if length is not None:
        shown.append(f"at {length:g}")
    elif delta is not None and without != "delta":
        shown.append(f"δ={delta:g}")
    return " ".join([method, *shown])


def _short(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
