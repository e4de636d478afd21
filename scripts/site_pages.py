"""A hook of mkdocs: the texts of the root and the notebooks become pages; links that leave docs/ become links
within the site, or text."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

REPOSITORY = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "index.md": "README.md",
    "security-policy.md": "SECURITY.md",
    "taking-part.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages that are written elsewhere, each with its file."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(!\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> None:
    """Headings get the anchors that code hosts give them, and that our links have."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is not a Markdown file of docs/."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(
            File.generated(
                config,
                page,
                content=notebook_page(json.loads(file.content_string), posixpath.basename(file.src_uri)),
            )
        )
    return files


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """A notebook as Markdown, with what its cells printed and a link to itself below the title."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", ())]
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n[Download this notebook]({name})\n{rest}"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with links as the site has them."""
    uri = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups(default="")
        moved = moved_link(uri, target)
        return (
            match[0]
            if moved is None
            else f"[{text}]({moved}{anchor})"
            if moved
            else f"{text} (`{from_root(uri, target)}`)"
        )

    markdown = IMAGE.sub(lambda match: f"{match[1]}({moved_link(uri, match[2]) or match[2]})", markdown)
    return LINK.sub(link, markdown)


def from_root(page: str, target: str) -> str:
    """The path in the repository of what a page links to."""
    written = OUTSIDE.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(written), target))


def moved_link(page: str, target: str) -> str | None:
    """The link from a page to a file of the repository: None if it stays as it is, "" if the site does not
    have the file."""
    path = from_root(page, target)
    if "://" in target or not (REPOSITORY / path).exists():
        return None  # mkdocs warns if it leads nowhere
    pages = {source: page for page, source in OUTSIDE.items()}
    inside = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
    if inside.endswith(".ipynb") and (shown := inside.removesuffix(".ipynb") + ".md") != page:
        inside = shown  # a notebook's own page offers the file
    return inside and posixpath.relpath(inside, posixpath.dirname(page) or ".")
