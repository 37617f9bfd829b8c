"""Continuous tokens: vectors drawn by a diffusion head (MAR), and speculative decoding over them."""
