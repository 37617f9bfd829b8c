"""Metrics: quality of images, and the networks that measure it."""
