"""Amounts in units that people read."""


def duration(seconds: float) -> str:
    """Seconds in readable units."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{short(seconds / size)} {unit}"
    return f"{short(seconds)} s"


def amount(count: float) -> str:
    """Bytes in readable units."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{short(count / size)} {unit}"
    return f"{count:.0f} B"


def short(value: float) -> str:
    """A number with two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"
