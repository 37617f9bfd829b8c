"""Prompts, images and the embedded world."""
