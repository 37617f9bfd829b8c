"""Continuous tokens (MAR): vectors that a diffusion head draws, and their speculative decoding."""
