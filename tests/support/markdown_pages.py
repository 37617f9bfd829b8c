"""README, CONTRIBUTING, findings/ and docs/ as tests read them: their code blocks, commands, links
and names.
"""

import re
from pathlib import Path

from paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "findings" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", text_of(page))


def outside_fences(page: Path) -> list[str]:
    """Lines that are not in a fenced block."""
    return re.sub(r"(?ms)^```.*?^```$", "", text_of(page)).splitlines()


def commands(page: Path) -> list[str]:
    """The commands of indented blocks: these are run. Those in ```sh need weights or devices."""
    text = "\n".join(outside_fences(page)).replace("\\\n", " ")
    return [
        " ".join(part.split())
        for line in re.findall(r"(?m)^    ((?:pip|python) .*)$", text)
        for part in line.split("&&")
        if part.strip().startswith("python ")
    ]


def shown_commands(page: Path) -> list[str]:
    """The commands of ```sh blocks that start a script of ours, continued lines joined."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [line for line in text.splitlines() if re.search(r"(?:eval|train_draft)/\w+\.py", line)]
