"""Prompts, and images with captions turned into codes."""
