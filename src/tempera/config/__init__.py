"""Configuration: Hydra's options, checked and turned into objects."""
