"""Formulas of these pages as MathML, which browsers draw without scripts; site.css has the font. A
hook of mkdocs.yml.
"""

from typing import Any

from latex2mathml.converter import convert


def on_config(config: Any) -> Any:
    """Give blocks of ```math to `mathml`."""
    fence = {"name": "math", "class": "math", "format": mathml}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def mathml(source: str, *_: Any, **__: Any) -> str:
    """LaTeX as HTML."""
    return f'<div class="formula">{convert(source, display="block")}</div>'
