"""The conditioning of LlamaGen (Sun et al. 2024): Flan-T5-XL features of a caption, or an ImageNet
class number.

Shapes: B prompts, T condition tokens (`length`), D width of the caption features.
"""

import hashlib
import html
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_plus

import torch
from torch import Tensor, nn

from tempera.errors import TemperaError, shortened
from tempera.runtime import huggingface
from tempera.runtime.pretrained import PretrainedFiles, load_pretrained
from tempera.targets.prompt_encoder import Tokenize, load_tokenize, numbered, too_long


class CaptionTokens:
    """Captions → tokens of T5, as LlamaGen's sampling script gives them.

    Args:
        tokenize: text → ids, without the end of text (1), which is appended.
        length: tokens of a caption, its end included.
        truncate: cut a caption that is too long, as the script does, instead of refusing it.
    """

    END = 1
    UNKNOWN = 2

    def __init__(self, tokenize: Tokenize, length: int = 120, truncate: bool = False) -> None:
        self.tokenize = tokenize
        self.length = length
        self.truncate = truncate

    def check(self, prompts: list[str]) -> list[list[int]]:
        """The tokens of every caption.

        Raises:
            TemperaError: a caption is empty, also after cleaning, or too long.
        """
        return [self._ids(prompt, where) for prompt, where in numbered(prompts)]

    def warnings(self, prompts: Sequence[str]) -> list[str]:
        """Which words the model does not read, in a sentence."""
        words = {word for prompt in prompts for word in prompt.split()}
        lost = sorted(word for word in words if self._is_lost(word))
        if not lost:
            return []
        few = ", ".join(shortened(word, 20) for word in lost[:5])
        return [f"the model ignores {len(lost)} words of these prompts, such as {few}"]

    def _is_lost(self, word: str) -> bool:
        """Whether nothing is left of a word, or what its vocabulary lacks."""
        ids = self.tokenize(clean_caption(clean_caption(word)))
        return self.UNKNOWN in ids or (not ids and not word.isascii())

    def _ids(self, prompt: str, where: str) -> list[int]:
        ids = self.tokenize(clean_caption(clean_caption(prompt)))
        if not ids:
            raise TemperaError(
                f"{where} is empty once web addresses, handles and Chinese text are removed: give "
                "it at least one word."
            )
        if len(ids) >= self.length and not self.truncate:
            raise too_long(where, len(ids) + 1, self.length)
        return [*ids[: self.length - 1], self.END]


class CaptionFeatures(nn.Module):
    """Captions → features of a T5 encoder, `tokens.length` tokens padded on the left with zeros, as
    LlamaGen's sampling script gives them.

    Args:
        encoder: a Hugging Face T5 encoder.
        tokens: captions → its tokens.
    """

    def __init__(self, encoder: Any, tokens: CaptionTokens) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokens = tokens

    def _apply(self, *args: Any, **options: Any) -> "CaptionFeatures":
        """What `to` calls. In float16 T5's `wo` overflows: it stays in float32."""
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]
        for name, module in self.encoder.named_modules():
            if name.endswith(".wo") and module.weight.dtype == torch.float16:
                module.float()
        return self

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Encode captions.

        Returns:
            features [B, T, D], and bool [B, T], which is False on padding.

        Raises:
            TemperaError: a caption is empty, or too long and `truncate` is False.
        """
        rows = self.tokens.check(prompts)
        length = self.tokens.length
        embedding = self.encoder.get_input_embeddings().weight
        device = embedding.device
        width = max(map(len, rows))
        counts = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(length, device=device) >= length - counts[:, None]
        features = embedding.new_zeros(len(rows), length, embedding.shape[-1])
        if embedding.is_meta:  # a dry run reads the sizes alone
            return features, mask
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        real = torch.arange(width, device=device) < counts[:, None]
        states = self.encoder(input_ids=ids, attention_mask=real.long()).last_hidden_state
        features[mask] = states[real]
        return features, mask


class RandomFeatures(nn.Module):
    """Random features seeded by the caption, to measure speed without a text encoder.

    Args:
        length: T.
        width: D.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.width = width
        self.register_buffer("like", torch.zeros(0), persistent=False)

    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Draw features [B, T, D]; the mask bool [B, T] is True everywhere."""
        seeds = [
            int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) >> 1 for prompt in prompts
        ]
        rows = [
            torch.randn(self.length, self.width, generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
        return torch.stack(rows).to(self.like), torch.ones(len(rows), self.length, dtype=torch.bool)  # type: ignore[arg-type]


class ClassLabels(nn.Module):
    """Reads prompts as class numbers.

    Args:
        classes: number of classes.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.classes = classes
        self._numbers = {str(number): number for number in range(classes)}

    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Prompts → labels int64 [B], and a mask bool [B, 1] that keeps them.

        Raises:
            TemperaError: a prompt names no class.
        """
        labels = torch.tensor(self.check(prompts))
        return labels, torch.ones(len(prompts), 1, dtype=torch.bool)

    def label(self, prompt: str) -> int | None:
        """The class that a prompt names; None for any other text."""
        digits = prompt.strip()
        return self._numbers.get(digits.lstrip("0") or digits[-1:])

    def refusal(self, where: str) -> TemperaError:
        """The error for a prompt that names no class; `where` quotes it."""
        return TemperaError(f"{where}, is not a class; give a number from 0 to {self.classes - 1}")

    def check(self, prompts: list[str]) -> list[int]:
        """The class of every prompt; errors as of `encode`."""
        labels = []
        for prompt, where in numbered(prompts):
            label = self.label(prompt)
            if label is None:
                raise self.refusal(f"{where}, {prompt[:40]!r}")
            labels.append(label)
        return labels


T5_FILES = ("model.safetensors",)
FLAN_T5_XL = {
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
    "vocab_size": 32128,
}


FLAN_T5 = {
    "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
}
"""What all sizes of Flan-T5 share; its positions are those of every T5."""


def load_flan_t5(
    weights: str,
    hub: str,
    length: int = 120,
    truncate: bool = False,
    sizes: dict[str, int] | None = None,
    width: int = 2048,
) -> CaptionFeatures | RandomFeatures:
    """Load the encoder of Flan-T5-XL (Chung et al. 2022) and its tokenizer.

    Args:
        weights, hub: see `tempera.runtime.pretrained.PretrainedFiles`; `weights="random"` returns
            `RandomFeatures`.
        length, truncate: see `CaptionFeatures`.
        sizes: arguments of the `T5Config`; by default those of Flan-T5-XL. Those of a `config.json`
            beside the weights come first.
        width: D of `RandomFeatures`.

    Raises:
        TemperaError: the files are missing or do not fit.
    """
    release = PretrainedFiles(weights, T5_FILES, hub)
    if release.random:
        return RandomFeatures(length, width)
    stated = release.stated({**FLAN_T5, **(sizes or FLAN_T5_XL)}, "t5", only={})
    config = huggingface.T5Config(**stated, tie_word_embeddings=False)
    tokens = load_caption_tokens(weights, hub, length, truncate)
    encoder: Any = load_pretrained(
        lambda: huggingface.T5EncoderModel(config),
        release,
        _share_embedding,
        ignore=("decoder.", "lm_head."),
    )
    encoder.encoder.embed_tokens.weight = encoder.shared.weight
    return CaptionFeatures(encoder, tokens)


def load_caption_tokens(
    weights: str, hub: str, length: int = 120, truncate: bool = False
) -> CaptionTokens:
    """What `load_flan_t5` makes of captions before its encoder reads them."""
    tokenize, _ = load_tokenize(PretrainedFiles(weights, ("tokenizer.json",), hub))
    return CaptionTokens(tokenize, length, truncate)


def _share_embedding(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """T5's weights with the word embedding under both of its names; a file has only one of them."""
    shared = state.get("shared.weight", state.get("encoder.embed_tokens.weight"))
    if shared is None:
        return state
    return state | {"shared.weight": shared, "encoder.embed_tokens.weight": shared}


_CLEANING: Sequence[tuple[str, str]] = (
    (r"\b(?:https?:|www[:.])\S+", ""),
    (r"<[^<>]+>", ""),
    (r"@\w+\b", ""),
    ("[\u31c0-\u31ff\u3200-\u33ff\u3400-\u4dbf\u4dc0-\u4dff\u4e00-\u9fff]+", ""),
    ("[\u002d\u058a\u2010-\u2015\u2212\u3030\ufe58\ufe63\uff0d]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),
    (r"#\d+\b", ""),
    (r"\b\d{6,}\b", ""),
    (r"\S+\.(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
    (r"\s+", " "),
)


def clean_caption(caption: str) -> str:
    """Clean a caption as in LlamaGen's training, up to rare patterns: lower case, without URLs,
    file names, Chinese characters and unusual punctuation.

    The original code (DeepFloyd's, via PixArt) also repairs encodings with ftfy and removes
    advertising phrases and letter-digit codes.
    """
    text = html.unescape(unquote_plus(str(caption))).strip().lower().replace("<person>", "person")
    for pattern, replacement in _CLEANING:
        text = re.sub(pattern, replacement, text)
    if len(re.findall(r"[-_]", text)) > 3:  # this-is-my-cute-cat
        text = re.sub(r"[-_]", " ", text)
    return re.sub(r"^[',:;_-]|[',:_+-]$", "", text.strip()).strip()
