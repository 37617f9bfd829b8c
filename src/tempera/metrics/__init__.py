"""Metrics of decoding and of image quality, and the networks that measure quality."""
