"""Exactness: the output laws of small models, by enumeration and through the real loop."""

from tempera.exactness.tables import ExactnessReport, check

__all__ = ["ExactnessReport", "check"]
