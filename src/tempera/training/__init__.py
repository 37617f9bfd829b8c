"""Training of draft models and of the embedded default."""
