"""Training of draft models."""
