"""A text as it is denoised, for people to watch: in a region of the terminal that changes, elsewhere as a
line for each step."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import canvas_texts
from unmask.generation.frames import Frame, replay, watch
from unmask.generation.output import Generation, end_of
from unmask.generation.requests import Request, make_infill_requests, make_requests, without_ends
from unmask.models.diffusion_lm import DiffusionLM
from unmask.redaction import shown

MAX_COLUMNS = 100
SECONDS_BETWEEN_PICTURES = 1 / 15  # on a terminal
HIDDEN, HIDDEN_IN_ASCII = "░", "_"
COLORS = ((0.9, "green"), (0.6, "cyan"), (0.3, "yellow"), (0.0, "red"))
"""The colors of drafted tokens, by their lowest probability."""
LEGEND = "drafted tokens by probability: " + ", ".join(f"{color} from {lowest:g}" for lowest, color in COLORS)

Show = Callable[["Canvas"], None]


class Piece(NamedTuple):
    """Some characters of a canvas: of one token, or of several that only together make whole characters."""

    text: str  # "" where hidden
    is_final: bool
    probability: float = 1.0  # of its least probable token when it was revealed

    @property
    def style(self) -> str:
        if not self.text:
            return "dim"
        if self.is_final:
            return ""
        return next(color for lowest, color in COLORS if self.probability >= lowest)


class Canvas:
    """A sequence that is being denoised. Of a completion only what follows the prompt is shown, up to its end
    token: with random tokens to one that is final, as any other may change."""

    def __init__(self, lm: DiffusionLM, request: Request):
        self.lm, self.request = lm, request
        self.ids, self.hidden = list(request.ids), list(request.hidden)
        self.log_probs = [0.0] * request.length
        self.step = self.num_final = 0

    def update(self, frame: Frame) -> None:
        """Apply the next frame."""
        self.ids = replay(self.ids, [frame], self.lm.mask_token_id)
        for position in frame.hidden:
            self.hidden[position] = True
        for each in frame.revealed:
            self.hidden[each.position], self.log_probs[each.position] = False, each.log_prob
        self.step, self.num_final = frame.step, frame.num_final

    def pieces(self) -> Iterator[Piece]:
        """What is to be seen, from left to right; each hidden token is a piece."""
        start, stop = self.request.start, self.request.end
        if self.request.stop_at_eos:
            settled = max(start, min(self.num_final, stop)) if self.lm.noise == "uniform" else stop
            known, ends = self.ids[start:settled], self.lm.eos_token_ids
            end = end_of(known, ends)
            stop = start + end if end and known[end - 1] in ends else stop
        texts = canvas_texts(
            self.lm.tokenizer, self.ids[:start], self.ids[start:stop], self.hidden[start:stop]
        )
        new: list[int] = []  # positions of a character of several tokens
        for position, text in enumerate(texts, start):
            if text is None:
                yield Piece("", False)
                new = []
                continue
            new.append(position)
            if text:
                is_final = all(place < self.num_final or not self.request.hidden[place] for place in new)
                yield Piece(text, is_final, math.exp(min(self.log_probs[place] for place in new)))
                new = []

    def plain(self, hidden: str = HIDDEN) -> str:
        """The text, with a placeholder for each hidden token."""
        return "".join(piece.text or hidden for piece in self.pieces())

    def styled(self, hidden: str = HIDDEN) -> tuple[Text, Text]:
        """The text for a terminal, and the beginning of it that is final."""
        pieces = list(self.pieces())
        text = Text(overflow="fold")
        for style, same in itertools.groupby(pieces, lambda piece: piece.style):
            text.append("".join(shown(piece.text) or hidden for piece in same), style)
        final = itertools.takewhile(lambda piece: piece.is_final, pieces)
        return text, text[: sum(len(shown(piece.text)) for piece in final)]


def denoise(
    lm: DiffusionLM,
    request: Request,
    config: SamplerConfig,
    show: Show,
    stopped: Callable[[], bool] = lambda: False,
) -> Generation | None:
    """The result of a request, whose canvas is shown after each step; None if it was stopped between two
    steps."""
    canvas = Canvas(lm, request)
    show(canvas)
    for item in watch(lm, request, config):
        if isinstance(item, Generation):
            return item
        canvas.update(item)
        show(canvas)
        if stopped():
            return None
    raise AssertionError("a watched sequence ends with its result")


def generate_visibly(
    lm: DiffusionLM, prompts: Sequence[Any], config: SamplerConfig, *, infill: bool, stream: TextIO
) -> Iterator[Generation]:
    """The results of `unmask.generate`, or `unmask.infill`, one prompt after the other, with the steps of
    each on a stream. The agreement of lossy settings is not measured. Errors as of those functions."""
    if infill:
        config = without_ends(lm, config)
    requests = (make_infill_requests if infill else make_requests)(lm, prompts, config)
    for number, request in enumerate(requests):
        started = time.monotonic()
        with display(stream) as show:
            generation = denoise(lm, request, config, show)
        assert generation is not None
        tokens = sum(request.hidden[request.start :][: len(generation.tokens[0])])
        line = statistics(tokens, generation.forward_passes[0], time.monotonic() - started)
        yield generation
        print(f"prompt {number}: {line}", file=stream, flush=True)


def statistics(tokens: int, passes: int, seconds: float) -> str:
    """What one text cost, in a line."""
    return f"{tokens} tokens · {passes} passes · {tokens / passes:.2f} tokens per pass · {seconds:.1f} s"


def terminal(stream: TextIO) -> Console | None:
    """A console of at most `MAX_COLUMNS`; None if the stream is no terminal, or one that cannot move its
    cursor."""
    # else FORCE_COLOR makes a file a terminal
    console = Console(file=stream, force_terminal=stream.isatty(), highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    console.width = min(console.width, MAX_COLUMNS)
    return console


@contextmanager
def display(stream: TextIO) -> Iterator[Show]:
    """Gives a function that shows canvases: in a region of the terminal that is empty again afterwards,
    elsewhere as a line for each."""
    console = terminal(stream)
    encoding = (console.encoding if console else stream.encoding) or ""
    hidden = HIDDEN if encoding.lower().startswith("utf") else HIDDEN_IN_ASCII
    if console is None:

        def print_line(canvas: Canvas) -> None:
            text = shown(canvas.plain(hidden)).replace("\n", "\\n").replace("\t", "\\t")
            print(f"step {canvas.step}: {text}", file=stream, flush=True)

        yield print_line
        return
    last = -math.inf
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:

        def draw(canvas: Canvas) -> None:  # not more often than can be seen
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_PICTURES:
                live.update(picture(canvas, console, hidden), refresh=True)
                last = time.monotonic()

        yield draw


def picture(canvas: Canvas, console: Console, hidden: str) -> Text:
    """The lines that fit, starting where the text is not final yet."""
    text, final = canvas.styled(hidden)
    lines, room = text.wrap(console, console.width), max(console.height - 2, 1)
    first = min(max(len(final.wrap(console, console.width)) - 1, 0), max(len(lines) - room, 0))
    return Text("\n").join(lines[first : first + room])
