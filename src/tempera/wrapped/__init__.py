"""Models of transformers that the user has in memory already; see `accelerated.accelerate`."""
