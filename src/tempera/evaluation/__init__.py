"""Evaluation: generate images with a method, time it and measure it."""
