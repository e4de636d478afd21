"""Terminal output: the progress of a run with the time left, and tables."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, TypeVar

from rich.console import Console
from rich.constrain import Constrain
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from unmask.redaction import shown

MAX_WIDTH = 100  # columns of lines and tables
PLAIN_LINE_EVERY = 10.0  # seconds between two lines if the output is not a terminal
BAR_WIDTH = 24
SHORT = 12  # characters of a cell whose text stays on one line
JOINT = " · "  # between the parts of a line
# weight of the expected times in the estimate of the time left: as much as this fraction of the run
PRIOR_WEIGHT = 0.05

Item = TypeVar("Item")


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first process of a run. Only this one prints and writes what the processes
    share."""
    return environ.get("RANK", "0") == "0"


def first_to_report(text: str = "", environ: Mapping[str, str] = os.environ) -> bool:
    """Whether no process that torchrun started with this one on this machine has reported this text, or,
    without one, how the run ended. From now on one has. Without torchrun each reports for itself."""
    if not (file := environ.get("TORCHELASTIC_ERROR_FILE")):
        return True
    try:
        Path(file).parents[1].joinpath(
            f"reported{hashlib.sha256(text.encode()).hexdigest() if text else ''}"
        ).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


class Phase:
    """One phase of a run: the fraction that is done and the latest value of each metric."""

    def __init__(self, name: str, changed: Callable[[], None]):
        self.name, self.fraction = name, 0.0
        self.metrics: dict[str, float] = {}
        self._changed = changed

    def update(self, fraction: float, **metrics: float | None) -> None:
        """Set the fraction of the phase that is done (0 to 1) and any metrics; None removes one, others keep
        their last value."""
        self.fraction = min(max(fraction, 0.0), 1.0)
        self.metrics = {name: value for name, value in (self.metrics | metrics).items() if value is not None}
        self._changed()

    def fitting(self, width: int) -> str:
        """Name and value of the first metrics, which matter most, as many as fit into `width` columns."""
        figures = [f"{name} {format_number(value)}" for name, value in self.metrics.items()]
        while len(JOINT.join(figures)) > width and figures:
            figures.pop()
        return JOINT.join(figures)


class Progress:
    """One display for a whole run: an overall bar with the time left, and the current phase with its latest
    metrics.

        with Progress([("pretrain", 75.0), ("convert", 95.0)]) as progress:
            with progress.phase("pretrain") as phase:
                phase.update(0.1, loss=2.3)

    On a terminal two bars stay at the bottom; elsewhere, and where NO_COLOR is set, a plain line is printed
    about every ten seconds and at the end of each phase.

    Args:
        phases: name and expected seconds of each phase, in the order in which they run. A name may occur more
            than once. Skipped phases count as not needed. The expected seconds of a single phase have no
            effect.
        stream: where to print (None: standard error).
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        phases: Sequence[tuple[str, float]],
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._names = [name for name, _ in phases]
        self._weights = [seconds for _, seconds in phases]
        self._stream = stream if stream is not None else sys.stderr
        self._clock, self._started, self._last_line = clock, clock(), clock()
        self._index, self._done_before, self._phase = -1, 0.0, Phase("", self._show)
        self._console = _console(self._stream)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = self._last_line = self._clock()
        if self._console.color_system is not None and not self._console.is_dumb_terminal:
            # Output printed meanwhile goes above the display, unless it is redirected to a file.
            self._live = Live(
                console=self._console,
                get_renderable=self._bars,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Enter the next phase called `name`. When the context ends without an error, the phase counts as
        done."""
        assert name in self._names[self._index + 1 :], f"no phase {name!r} is left of {self._names}"
        self._done_before, _ = self._done_and_left()
        self._index = self._names.index(name, self._index + 1)
        self._phase = phase = Phase(name, self._show)
        entered, outcome = self._clock(), "stopped after"
        try:
            yield phase
            phase.fraction, outcome = 1.0, "done in"
        finally:
            if phase.fraction or phase.metrics:  # an error before any work says enough by itself
                self._print(f"{outcome} {format_duration(self._clock() - entered)}")

    @property
    def fraction(self) -> float:
        """The fraction of the whole run that is done, by expected time."""
        done, left = self._done_and_left()
        return done / (done + left) if done + left else 1.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last phase ends, at the observed pace; None if nothing is observed
        yet."""
        done, left = self._done_and_left()
        prior = PRIOR_WEIGHT * (done + left) if len(self._names) > 1 else 0.0  # of the expected pace
        return left * (self._elapsed + prior) / (done + prior) if done + prior else None

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._started

    def _done_and_left(self) -> tuple[float, float]:
        """Expected seconds of the work that is done, and of the work that is left."""
        if self._index < 0:
            return 0.0, sum(self._weights)
        current, fraction = self._weights[self._index], self._phase.fraction
        return self._done_before + fraction * current, (1 - fraction) * current + sum(
            self._weights[self._index + 1 :]
        )

    def _times(self) -> str:
        left = self.seconds_left
        return (
            f"{format_duration(self._elapsed)} elapsed, {'?' if left is None else format_duration(left)} left"
        )

    def _show(self) -> None:
        if self._live is None and self._clock() - self._last_line >= PLAIN_LINE_EVERY:
            self._print(f"{self._phase.fraction:.0%}")

    def _print(self, state: str) -> None:
        width = _width(self._console)
        room = width - len(self._line(state, "")) - len(JOINT)
        line = self._line(state, self._phase.fitting(room))
        if self._live is not None:
            self._live.console.print(line[:width], markup=False, highlight=False)
        else:
            print(line[:width], file=self._stream, flush=True)
        self._last_line = self._clock()

    def _line(self, state: str, figures: str) -> str:
        return shown(
            JOINT.join(
                filter(None, [f"[{self.fraction:4.0%}] {self._phase.name} {state}", figures, self._times()])
            )
        )

    def _bars(self) -> Constrain:
        overall, name = "whole run", self._phase.name
        room = _width(self._console) - max(len(overall), len(name)) - BAR_WIDTH - len(" 100% ") - 1
        lines = [(overall, self.fraction, self._times())]
        if self._index >= 0:
            lines.append((name, self._phase.fraction, self._phase.fitting(room)))
        bars = Table.grid(
            Column(no_wrap=True),
            Column(),
            Column(),
            Column(no_wrap=True, overflow="ellipsis"),
            padding=(0, 1),
        )
        for name, fraction, text in lines:
            bar = ProgressBar(total=1.0, completed=fraction, width=BAR_WIDTH)
            bars.add_row(Text(shown(name)), bar, f"{fraction:4.0%}", Text(shown(text)))
        return Constrain(bars, MAX_WIDTH)


def _console(stream: TextIO) -> Console:
    """A console that writes control characters on a terminal with colors alone: rich would also where
    FORCE_COLOR is set, or NO_COLOR."""
    terminal = stream.isatty()
    plain = not terminal or bool(os.environ.get("NO_COLOR"))
    return Console(
        file=stream,
        force_terminal=terminal,
        width=None if terminal else MAX_WIDTH,
        color_system=None if plain else "auto",
    )


def _width(console: Console) -> int:
    return min(console.width, MAX_WIDTH)


def tracked(items: Iterable[Item], total: int, phase: Phase | None) -> Iterator[Item]:
    """The items, with the progress of a phase, if there is one, as each is done."""
    for number, item in enumerate(items, start=1):
        yield item
        if phase is not None:
            phase.update(number / total)


def format_number(value: float) -> str:
    """Format a number with four digits: 0.01234, 12,346."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Format seconds as 1:05, or 1:02:05 from one hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def for_stdout(text: str) -> str:
    """A text to print: as it is into a file or a pipe, and as `shown` on a terminal."""
    return shown(text) if sys.stdout.isatty() else text


def show_line(text: str) -> None:
    """Print a line, above the progress display (rich or tqdm) if there is one."""
    from tqdm import tqdm

    tqdm.write(text)


def show_table(rows: Iterable[Iterable[str]], title: str, head: Iterable[str] = ()) -> None:
    """Print a table, above the progress display (rich or tqdm) if there is one."""
    from tqdm import tqdm

    console, name = _console(sys.stdout), Text(shown(title), "table.title")
    header, *lines = [[Text(shown(cell)) for cell in row] for row in (head, *rows)]
    widths = _column_widths(console, [line for line in (header, *lines) if line])
    if not widths:  # a row in one cell
        named = [
            [(title, cell) for title, cell in zip(header or line, line, strict=True) if cell]
            for line in lines
        ]
        cells = [
            [Text.assemble(title, ": ", cell) if header and title else cell for title, cell in line]
            for line in named
        ]
        header, lines = [], [[Text("\n").join(line)] for line in cells]
        widths = _column_widths(console, lines)
    rule = "\n" in str(lines[0][0]) if lines else False
    table = Table(
        title=name, show_header=bool(header), show_lines=rule, min_width=min(name.cell_len, _width(console))
    )
    for cell, width in zip(header or [Text()] * len(widths), widths, strict=True):
        table.add_column(cell, overflow="fold", width=width)
    for line in lines:
        table.add_row(*line)
    with console.capture() as captured:
        console.print(Constrain(table, MAX_WIDTH))
    tqdm.write(captured.get(), end="")


def _column_widths(console: Console, rows: Sequence[Sequence[Text]]) -> list[int]:
    """The columns' widths, in characters: those of their texts. If these do not fit, the widest column whose
    words and short texts stay whole is narrowed. Empty: words that a line has room for would have to be
    broken. A longer one, such as a path, is."""
    columns = [
        [Measurement.get(console, console.options, cell) for cell in column]
        for column in zip(*rows, strict=True)
    ]
    widths = [max(cell.maximum for cell in column) for column in columns]
    words = [max(cell.minimum for cell in column) for column in columns]
    whole = [
        max(cell.maximum if cell.maximum <= SHORT else cell.minimum for cell in column) for column in columns
    ]
    borders, page = 3 * len(widths) + 1, _width(console)  # with the padding
    if len(widths) > 1 and sum(words) + borders > page and max(words) + 4 <= page:
        return []
    if sum(words) + borders <= page < sum(whole) + borders:
        whole = words
    excess = sum(widths) + borders - page
    for _ in range(min(excess, sum(widths) - len(widths))):
        movable = [i for i, width in enumerate(widths) if width > whole[i]] or range(len(widths))
        widths[max(movable, key=widths.__getitem__)] -= 1
    return widths
