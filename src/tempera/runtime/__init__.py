"""Files, processes, tracking and weights: what every package above stands on."""
