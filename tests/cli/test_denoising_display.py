"""What is shown of a text while it is denoised."""

from __future__ import annotations

import io
import itertools
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from tokenizers import decoders

from tests.diffusion_gemma import loaded
from tests.generation.cases import PATTERNS, configs, prompt_lists
from tests.generation.constraints.test_vocabulary import BYTE_LEVEL, SENTENCEPIECE, Named
from tests.helpers import partly_slow
from tests.test_console import Terminal
from tests.tiny import float64_lm
from unmask.cli.denoising_display import (
    HIDDEN,
    MAX_COLUMNS,
    Canvas,
    Piece,
    denoise,
    display,
    generate_visibly,
    statistics,
    terminal,
)
from unmask.config.sampler import SamplerConfig
from unmask.generation import sampler
from unmask.generation.frames import Frame, Revealed
from unmask.generation.requests import Request, make_requests

MASK = 99


def request(ids: list[int], start: int = 0) -> Request:
    hidden = [position >= start and token == MASK for position, token in enumerate(ids)]
    return Request(ids, ids, hidden, start, 0, [], None, stop_at_eos=True)


def canvas(decoder: decoders.Decoder, names: list[str], ids: list[int], start: int = 0) -> Canvas:
    """All positions from `start` on were hidden; those of `ids` that are not the mask token are revealed."""
    lm = Named(decoder, names)
    lm.mask_token_id = MASK
    watched = Canvas(lm, request([*ids[:start], *[MASK] * (len(ids) - start)], start))
    revealed = [
        Revealed(place, token, -0.1 * place)
        for place, token in enumerate(ids)
        if place >= start and token != MASK
    ]
    watched.update(Frame(1, revealed, [], start))
    return watched


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Sequence(SENTENCEPIECE[:3])])
def test_characters_of_several_tokens_stay_whole(decoder):
    names = (
        BYTE_LEVEL if isinstance(decoder, decoders.ByteLevel) else ["▁a", "<0xC3>", "<0xA9>", "<0x0A>", "x"]
    )
    pieces = list(canvas(decoder, names, [1, 2, 3, MASK, 5, 2]).pieces())
    assert [piece.text for piece in pieces] == [" a", "é", "", "x", "\ufffd"]
    assert [piece.probability for piece in pieces] == pytest.approx(
        [1, 2.718281828**-0.2, 1, 2.718281828**-0.4, 2.718281828**-0.5]
    )


def test_only_the_first_word_of_a_text_loses_its_space():
    watched = canvas(decoders.Sequence(SENTENCEPIECE), ["▁a", "▁b"], [1, 2, MASK, 1, 2])
    assert watched.plain("_") == "a b_ a b"
    assert (
        canvas(decoders.Sequence(SENTENCEPIECE), ["▁a", "▁b"], [2, 1, 2, MASK], start=1).plain("_") == " a b_"
    )
    assert canvas(decoders.Sequence(SENTENCEPIECE), ["▁a", "▁b"], [MASK, 1, 2, MASK]).plain("_") == "_ a b_"


def test_nothing_is_shown_from_the_end_token_on():
    watched = canvas(decoders.Fuse(), ["a", "b"], [2, 1, MASK, 0, 1, MASK], start=1)
    assert watched.plain("_") == "a_"
    assert [piece.is_final for piece in watched.pieces()] == [False, False]


def test_drafts_are_colored_by_probability_and_final_text_is_plain():
    lm = Named(decoders.Fuse(), ["a", "b", "c", "d", "e"])
    lm.mask_token_id = MASK
    watched = Canvas(lm, request([MASK] * 6))
    tokens = enumerate([(1, 0.0), (2, -0.05), (3, -0.4), (4, -1.0), (5, -4.0)])
    watched.update(Frame(3, [Revealed(place, token, log_prob) for place, (token, log_prob) in tokens], [], 1))
    text, final = watched.styled()
    assert text.plain == "abcde" + HIDDEN and final.plain == "a"
    assert [str(span.style) for span in text.spans] == ["green", "cyan", "yellow", "red", "dim"]
    watched.update(Frame(4, [], [1, 2], 1))  # hidden again
    assert watched.plain("_") == "a__de_"


@partly_slow("attention, block_size", PATTERNS, 2, 4)
@given(st.data())
def test_the_last_canvas_shows_the_text(attention, block_size, data):
    lm = float64_lm("phi", attention, block_size)
    config, [prompt, *_] = data.draw(configs(attention, block_size)), data.draw(prompt_lists(1))
    prompt = [token for token in prompt if token != lm.mask_token_id] or [4]
    [asked] = make_requests(lm, [prompt], config)
    seen: list[str] = []
    generation = denoise(lm, asked, config, lambda canvas: seen.append(canvas.plain()))
    assert seen[0] == HIDDEN * config.max_new_tokens
    assert (
        seen[-1].replace(HIDDEN, "") == generation.texts[0] == sampler.generate(lm, [prompt], config).texts[0]
    )


def test_a_random_end_token_ends_nothing_before_it_is_final():
    lm = Named(decoders.Fuse(), ["a", "b"])
    lm.mask_token_id, lm.noise = MASK, "uniform"
    watched = Canvas(lm, request([2, *[MASK] * 6], start=1))
    watched.update(Frame(1, [Revealed(place, [1, 0, 2][place % 3], -0.1) for place in range(1, 4)], [], 1))
    assert watched.plain("_") == "ba___" and not any(piece.is_final for piece in watched.pieces())
    watched.update(Frame(2, [Revealed(1, 1, -0.1), Revealed(2, 0, -0.1)], [], 4))
    assert watched.plain("_") == "a" and all(piece.is_final for piece in watched.pieces())


@pytest.fixture(scope="module", params=["bidirectional", "blocks", "whole canvases"])
def canvas_lm(request, tmp_path_factory):
    if request.param == "whole canvases":
        return loaded(tmp_path_factory.mktemp("model"))
    attention = ("bidirectional", None) if request.param == "bidirectional" else ("block_causal", 4)
    return float64_lm("phi", *attention, logit_shift=False, eos_bias=1.5).with_noise("uniform")


def test_a_canvas_of_random_tokens_is_seen_to_change(canvas_lm):
    """Tokens change from step to step, none that is shown as final does, and the last step shows the text."""
    changed, ends = 0, []

    def add(canvases: list[list[Piece]], canvas: Canvas) -> None:
        canvases.append([*canvas.pieces()])

    for prompt in ("abc", "f", "bead", "decade", "face", "cab"):
        config = SamplerConfig(max_new_tokens=29, max_denoising_steps=3, t_max=3.0)
        [asked] = make_requests(canvas_lm, [prompt], config)
        canvases: list[list[Piece]] = []
        generation = denoise(canvas_lm, asked, config, partial(add, canvases))
        [text] = generation.texts
        assert [piece.text for piece in canvases[0]] == [""] * 29
        assert "".join(piece.text for piece in canvases[-1]) == text
        assert all(piece.is_final for piece in canvases[-1] if piece.text)
        for before, after in itertools.pairwise(canvases):
            assert text.startswith("".join(piece.text for piece in before if piece.is_final))
            both = zip(before, after, strict=False)
            changed += any(old.text and old.text != new.text for old, new in both)
        ends.append(len(generation.tokens[0]) < 29)
    assert changed and any(ends)


def test_the_steps_of_several_prompts_on_canvases(canvas_lm):
    """What is counted is what is asked for, and not the canvas."""
    config, stream = SamplerConfig(max_new_tokens=13, max_denoising_steps=3, t_max=2.0), io.StringIO()
    results = list(generate_visibly(canvas_lm, ["abc", "f"], config, infill=False, stream=stream))
    expected = sampler.generate(canvas_lm, ["abc", "f"], config)
    assert [result.texts[0] for result in results] == expected.texts
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("prompt")]
    counts = zip(map(len, expected.tokens), expected.forward_passes, strict=True)
    assert [line.split(" · ")[:2] for line in lines] == [
        [f"prompt {number}: {tokens} tokens", f"{passes} passes"]
        for number, (tokens, passes) in enumerate(counts)
    ]


def test_it_can_be_stopped_between_steps():
    lm = float64_lm("phi", "bidirectional", None)
    config = SamplerConfig(max_new_tokens=6, stop_at_eos=False)
    [asked] = make_requests(lm, [[4, 5]], config)
    seen: list[int] = []
    assert denoise(lm, asked, config, lambda canvas: seen.append(canvas.step), lambda: len(seen) > 2) is None
    assert seen == [0, 1, 2]


def test_off_a_terminal_each_step_is_a_line():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    watched = canvas(decoders.Fuse(), ["a", "\n", "\x1b[1m"], [1, 2, 3, MASK])
    with display(stream) as show:
        show(watched)
    assert stream.buffer.getvalue().decode() == f"step 1: a\\n\\u001b[1m{HIDDEN}\n"
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with display(ascii_only) as show:
        show(watched)
    assert ascii_only.buffer.getvalue() == b"step 1: a\\n\\u001b[1m_\n"


@pytest.fixture
def xterm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def drawn(watched: Canvas) -> str:
    stream = Terminal()
    with display(stream) as show:
        show(watched)
    return stream.getvalue()


def test_on_a_terminal_it_is_a_region(xterm):
    xterm.setenv("COLUMNS", "300")
    watched = canvas(decoders.Fuse(), ["word ", "\x1b[31m"], [1, 2, *[1] * 80, MASK])
    output = drawn(watched)
    # red, as it is, dim
    assert "\x1b[31mword" in output and "\\u001b[31m" in output and f"\x1b[2m{HIDDEN}" in output
    assert all(cell_len(Text.from_ansi(line).plain) <= MAX_COLUMNS for line in output.splitlines())
    assert output.endswith("\x1b[2K") or "\x1b[1A\x1b[2K" in output  # it is removed
    xterm.setenv("NO_COLOR", "1")
    assert "\x1b[31mword" not in drawn(watched) and "word" in drawn(watched)


def test_a_long_text_is_shown_where_it_changes(xterm):
    xterm.setenv("COLUMNS", "20")
    xterm.setenv("LINES", "6")
    watched = canvas(decoders.Fuse(), ["ab cd ef gh ij kl mn\n", "now"], [*[1] * 30, 2, MASK, MASK])
    assert "now" not in drawn(watched)  # nothing is final yet, so that the first lines are shown
    watched.update(Frame(2, [], [], 30))
    assert "now" in drawn(watched)


def test_a_terminal_without_a_cursor_gets_lines(xterm):
    xterm.setenv("TERM", "dumb")
    assert terminal(Terminal()) is None and terminal(io.StringIO()) is None
    # of a stream without an encoding
    assert drawn(canvas(decoders.Fuse(), ["a"], [1, MASK])) == "step 1: a_\n"


@pytest.mark.parametrize("infill", [False, True])
def test_prompts_are_denoised_one_after_the_other(infill):
    lm = float64_lm("phi", "bidirectional", None)
    mask = lm.mask_token_id
    prompts = [[4, mask, mask, 5], [mask, 6], [4, mask, mask, 5]] if infill else [[4, 5], [6], [4, 5]]
    config, stream = SamplerConfig(max_new_tokens=6, tokens_per_step=2, temperature=1.0), io.StringIO()
    results = list(generate_visibly(lm, prompts, config, infill=infill, stream=stream))
    expected = (sampler.infill if infill else sampler.generate)(lm, prompts, config)
    assert [result.tokens[0] for result in results] == expected.tokens and [
        result.texts[0] for result in results
    ] == expected.texts
    last = [line for line in stream.getvalue().splitlines() if line.startswith("prompt")]
    assert len(last) == 3 and last[1].startswith("prompt 1: " + ("1 tokens · 1 passes" if infill else ""))
    assert statistics(12, 8, 0.456) == "12 tokens · 8 passes · 1.50 tokens per pass · 0.5 s"
