"""Links from these pages to files of the repository beside docs/, such as notebooks: the site gets
a copy of each file, so the same link works here and beside the code. A hook of mkdocs.yml.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?:\.\./)+[\w./-]+(?=[)#])")
AS_THEY_ARE = (".ipynb", ".png", ".svg")
"""Other files are shown as text: a browser would save them, and MkDocs would make pages of them."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to copies under repository/."""

    def linked(link: re.Match[str]) -> str:
        path = (Path(page.file.abs_src_path).parent / link[0]).resolve()
        if not path.is_file() or path.is_relative_to(config.docs_dir):
            return link[0]
        name = f"repository/{path.relative_to(ROOT).as_posix()}"
        if path.suffix not in AS_THEY_ARE:
            name += ".txt"
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
        depth: int = page.file.src_uri.count("/")
        return "../" * depth + name

    return LINK.sub(linked, markdown)
