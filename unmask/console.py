"""What a terminal shows: the progress of a run with the time left, and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


TRUST_IN_WEIGHTS = 0.05  # expected times count as much as this share of the run, already observed


class Stage:
    """One stage of a run: how much of it is done and the latest of each metric."""

    def __init__(self, name: str, changed: Callable[[], None]):
        self.name, self.fraction = name, 0.0
        self.metrics: dict[str, float] = {}
        self._changed = changed

    def update(self, fraction: float, **metrics: float) -> None:
        """Set the share of the stage that is done (0 to 1) and any metrics; those not given keep their last value."""
        self.fraction = min(max(fraction, 0.0), 1.0)
        self.metrics.update(metrics)
        self._changed()

    def __str__(self) -> str:
        return " · ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())


class Progress:
    """One display for a whole run: an overall bar with the time left, and the current stage with its latest metrics.

        with Progress([("pretrain", 75.0), ("convert", 95.0)]) as progress:
            with progress.stage("pretrain") as stage:
                stage.update(0.1, loss=2.3)

    On a terminal two bars stay at the bottom; elsewhere a plain line appears every ten seconds or so and at the end of a stage.

    Args:
        stages: name and expected seconds of each, in the order in which they run; a name may occur again. Stages passed over
            count as not needed. Of a single stage only the share done matters, so any weight will do.
        stream: where to show it (None: standard error).
        clock: seconds that never go back.
    """

    def __init__(self, stages: Sequence[tuple[str, float]], *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._names = [name for name, _ in stages]
        self._weights = [seconds for _, seconds in stages]
        self._stream = stream if stream is not None else sys.stderr
        self._clock, self._started, self._last_line = clock, clock(), clock()
        self._at, self._done_before, self._stage = -1, 0.0, Stage("", self._show)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = self._last_line = self._clock()
        # By itself rich takes a file for a terminal when FORCE_COLOR is set.
        console = Console(file=self._stream, force_terminal=self._stream.isatty())
        if console.is_terminal and not console.is_dumb_terminal:
            # What is printed while the display stands goes above it, but what was sent to a file stays in the file.
            self._live = Live(
                console=console, get_renderable=self._bars, redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty()
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Enter the next stage called `name`; on leaving it counts as done, whatever it last reported."""
        assert name in self._names[self._at + 1 :], f"no stage {name!r} is left of {self._names}"
        self._done_before, _ = self._done_and_left()
        self._at = self._names.index(name, self._at + 1)
        self._stage = stage = Stage(name, self._show)
        entered, outcome = self._clock(), "stopped after"
        try:
            yield stage
            stage.fraction, outcome = 1.0, "done in"
        finally:
            self._print(f"{outcome} {format_duration(self._clock() - entered)}")

    @property
    def fraction(self) -> float:
        """The share of the whole run that is done, by expected time."""
        done, left = self._done_and_left()
        return done / (done + left) if done + left else 1.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last stage ends at the pace seen so far; None while nothing is known yet."""
        done, left = self._done_and_left()
        # A first guess: the run goes at the expected pace. What is observed soon outweighs it.
        guess = TRUST_IN_WEIGHTS * (done + left) if len(self._names) > 1 else 0.0
        return left * (self._elapsed + guess) / (done + guess) if done + guess else None

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._started

    def _done_and_left(self) -> tuple[float, float]:
        """Expected seconds of what is done and of what is still to do."""
        if self._at < 0:
            return 0.0, sum(self._weights)
        current, fraction = self._weights[self._at], self._stage.fraction
        return self._done_before + fraction * current, (1 - fraction) * current + sum(self._weights[self._at + 1 :])

    def _times(self) -> str:
        left = self.seconds_left
        return f"{format_duration(self._elapsed)} elapsed, {'?' if left is None else format_duration(left)} left"

    def _show(self) -> None:
        if self._live is None and self._clock() - self._last_line >= PLAIN_LINE_EVERY:
            self._print(f"{self._stage.fraction:.0%}")

    def _print(self, state: str) -> None:
        words = [f"[{self.fraction:4.0%}] {self._stage.name} {state}", str(self._stage), self._times()]
        line = " · ".join(filter(None, words))
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)
        self._last_line = self._clock()

    def _bars(self) -> Table:
        stage = self._stage
        rows = [("whole run", self.fraction, self._times())]
        if self._at >= 0:
            rows.append((stage.name, stage.fraction, str(stage)))
        bars = Table.grid(padding=(0, 1))
        for name, fraction, words in rows:
            bars.add_row(Text(name), ProgressBar(total=1.0, completed=fraction, width=32), f"{fraction:4.0%}", Text(words))
        return bars


def format_duration(seconds: float) -> str:
    """Seconds as clock time: 1:05, or 1:02:05 from an hour on."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def show_table(rows: Iterable[Iterable[str]], title: str, head: Iterable[str] = ()) -> None:
    """Print a table, above a progress display (of rich or of tqdm) where there is one."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text
    from tqdm import tqdm

    columns = [Column(Text(name), overflow="fold") for name in head]
    table = Table(*columns, title=Text(title, "table.title"), show_header=bool(columns))
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    tqdm.write(captured.get(), end="")
