"""The names of the metrics."""

NAMES = {
    "accepted_length": ("accepted length", "tokens a round; AR has 1.00", ".2f"),
    "tau": ("τ", "accepted drafted tokens a round", ".2f"),
    "acceptance_rate": ("α", "accepted ÷ tested drafted tokens", ".3f"),
    "residual_trials": ("residual trials", "an image", ".1f"),
    "trials_per_rejection": ("  a rejected token", "", ".2f"),
    "residual_failures": ("residual failures", "an image; the target drew instead", ".2f"),
    "tv": ("TV(p, q)", "draft against target", ".3f"),
    "tv_bound": ("TV bound", "summed over an image", ".2f"),
    "kl_per_token": ("KL per token", "nats, emitted law against target", ".4f"),
    "logprob_per_token": ("log-probability", "nats a token, under the target", ".3f"),
    "logprob_deviation": ("  its deviation", "over all tokens", ".3f"),
    "throughput": ("throughput", "tokens a second, in batches", ".0f"),
    "latency_ar": ("latency, AR", "seconds an image, batch 1", ".3f"),
    "latency": ("latency", "seconds an image, batch 1", ".3f"),
    "speedup": ("speed-up", "paired with AR", ".2f"),
    **{
        f"speedup_{size}": (f"  at batch {size}", "of an image's share", ".2f")
        for size in (8, 32, 128, 256)
    },
    "efficiency": ("speed-up ÷ accepted length", "1 is the limit", ".2f"),
    "fid": ("FID ↓", "", ".2f"),
    "kid": ("KID ↓", "", ".4f"),
    "precision": ("precision ↑", "", ".3f"),
    "recall": ("recall ↑", "", ".3f"),
    "clip_score": ("CLIP score ↑", "cosine", ".4f"),
    "attribute_accuracy": ("attribute accuracy ↑", "shape, colour, background", ".3f"),
    "shape_accuracy": ("  shape ↑", "", ".3f"),
    "colour_accuracy": ("  colour ↑", "", ".3f"),
    "background_accuracy": ("  background ↑", "", ".3f"),
    "size_accuracy": ("  size ↑", "", ".3f"),
    "relation_accuracy": ("  relation ↑", "", ".3f"),
    "pattern_accuracy": ("  pattern ↑", "", ".3f"),
}
"""Metrics in the order they are shown: name, explanation, format."""


BATCHES = (8, 32, 128, 256)
"""Larger batches that can be timed."""
