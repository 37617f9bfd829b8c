"""Drafters: who proposes the tokens."""
