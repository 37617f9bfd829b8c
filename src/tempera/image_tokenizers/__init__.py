"""Image tokenizers: from pictures to codes or latents, and back."""
