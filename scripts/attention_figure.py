"""Draw docs/attention.svg: which tokens each token sees under every attention pattern, from the masks that
models use.

python scripts/attention_figure.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from unmask.config.run import AttentionName
from unmask.models.attention import Layout, make_mask

TOKENS, BLOCK, CELL, GAP, TOP = 8, 4, 14, 36, 46
PANELS: list[tuple[str, str, AttentionName, bool, bool]] = [
    ("causal", "each token sees those before it", "causal", False, False),
    ("block-causal", "blocks of 4: its block, and those before", "block_causal", False, False),
    ("bidirectional", "each token sees all", "bidirectional", False, False),
    ("block-causal, in training", "noised tokens, then the clean ones", "block_causal", True, False),
    ("the same, with causal context", "clean tokens from left to right", "block_causal", True, True),
]
COLOURS = {True: "#3b6ea8", False: "#e9edf2"}
FIGURE = Path(__file__).resolve().parent.parent / "docs" / "attention.svg"


def panel(x: float, title: str, says: str, seen_QK: torch.Tensor) -> list[str]:
    """The cells of a mask, with its title above."""
    lines = [
        f'<text x="{x}" y="16" class="title">{title}</text>',
        f'<text x="{x}" y="32" class="says">{says}</text>',
    ]
    for query, row in enumerate(seen_QK.tolist()):
        for key, seen in enumerate(row):
            at = f'x="{x + key * CELL:g}" y="{TOP + query * CELL:g}"'
            lines.append(f'<rect {at} width="{CELL - 1}" height="{CELL - 1}" fill="{COLOURS[seen]}"/>')
    return lines


def figure() -> str:
    """The SVG: queries are rows, keys are columns, dark cells are seen."""
    lines, x, height = [], 0.0, 0
    for title, says, pattern, noised, causal_context in PANELS:
        layout = Layout.full(TOKENS, torch.device("cpu"))
        layout = layout.with_noised_copies() if noised else layout
        block = BLOCK if pattern == "block_causal" else None
        seen_QK = make_mask(pattern, block, layout, layout, causal_context=causal_context).allowed_B1QK[0, 0]
        lines += panel(x, title, says, seen_QK)
        x += max(len(seen_QK) * CELL, 216) + GAP
        height = max(height, TOP + len(seen_QK) * CELL)
    style = (
        "text{font-family:sans-serif;fill:#222}.title{font-size:13px;font-weight:600}.says{font-size:11px}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x - GAP:g} {height}" role="img">'
    return (
        "\n".join(
            [
                head,
                f"<style>{style}</style>",
                '<rect width="100%" height="100%" fill="white"/>',
                *lines,
                "</svg>",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
