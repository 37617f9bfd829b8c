"""Exactness: output laws of small models, by enumeration and through the real loop."""
