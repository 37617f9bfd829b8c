"""tempera: fast autoregressive image generation by speculative decoding."""
