"""The shipped model: a procedural world of coloured shapes, and networks trained on it."""
