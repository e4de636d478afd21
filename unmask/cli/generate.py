"""`unmask generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig
from unmask.config.sampler import SamplerConfig
from unmask.console import for_stdout
from unmask.errors import ConfigError, DataError
from unmask.models.model_paths import check_model

if TYPE_CHECKING:
    from unmask.generation.output import Generation


@spread_configs
def generate(
    model: ModelConfig,
    sampler: SamplerConfig,
    prompt: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="A prompt; repeatable; - reads one prompt per line of stdin."),
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message, for the model's chat template.")
    ] = False,
    infill: Annotated[
        bool,
        typer.Option("--infill", help="Fill in the mask tokens of the texts instead of completing them."),
    ] = False,
    max_gap: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "With --infill: also find the lengths of gaps that --gap-mark stands for, up to this many "
                "tokens."
            ),
        ),
    ] = None,
    gap_mark: Annotated[
        str, typer.Option(metavar="TEXT", help="What stands for a gap of unknown length.")
    ] = "<gap>",
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="With --max-gap: search for the lengths even if the model was trained to find them.",
        ),
    ] = False,
    show_steps: Annotated[
        bool,
        typer.Option(
            "--show-steps", help="Show on stderr what every step reveals; one prompt after the other."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines with tokens and log-probabilities.")
    ] = False,
) -> None:
    """Complete prompts, or fill in their mask tokens."""
    for name, given in (("--gap-mark", gap_mark != "<gap>"), ("--search", search)):
        if max_gap is None and given:
            raise ConfigError(
                "has no effect without --max-gap", where=name, remedy="Add --max-gap, or leave it out"
            )
    if max_gap is not None and not infill:
        raise ConfigError(
            "prompts are completed, and have no gaps",
            where="--max-gap",
            remedy="Add --infill, or leave it out",
        )
    if chat and infill:
        raise ConfigError(
            "a text to fill in is no message", where="--chat and --infill", remedy="Leave one of them out"
        )
    if show_steps and max_gap is not None:
        what, remedy = (
            "the steps are those of texts whose length is known",
            "Leave one of them out, or write mask tokens for the gap",
        )
        raise ConfigError(what, where="--show-steps and --max-gap", remedy=remedy)
    prompts = [
        line
        for text in prompt
        for line in ((line.removesuffix("\n") for line in sys.stdin) if text == "-" else [text])
    ]
    if not prompts:
        raise DataError("stdin holds no prompt", where="--prompt -", remedy="Write one prompt per line")
    check_model(model.path)
    import unmask

    texts: list[Any] = [[{"role": "user", "content": text}] for text in prompts] if chat else prompts
    lm = unmask.load(model.path, **model.load_arguments())
    results: Iterable[Generation]
    if show_steps:
        from unmask.cli.denoising_display import generate_visibly

        results = generate_visibly(lm, texts, sampler, infill=infill, stream=sys.stderr)
    elif max_gap is not None:
        length: Literal["auto", "search"] = "search" if search else "auto"
        results = [unmask.infill(lm, texts, sampler, length=length, max_gap=max_gap, gap_mark=gap_mark)]
    else:
        results = [(unmask.infill if infill else unmask.generate)(lm, texts, sampler)]
    left = iter(prompts)
    for result in results:
        if result.agreement is not None:
            typer.echo(
                f"{sampler.lossy}: {result.agreement:.1%} of the tokens are those of the exact sampler",
                err=True,
            )
        for row, (text, tokens, log_probs) in enumerate(
            zip(result.texts, result.tokens, result.log_probs, strict=True)
        ):
            line = {
                "prompt": next(left),
                "text": text,
                "tokens": list(map(int, tokens)),
                "log_probs": list(map(float, log_probs)),
            }
            if result.gaps is not None:
                line["gaps"] = [{"start": gap.start, "length": gap.length} for gap in result.gaps[row]]
            typer.echo(for_stdout(json.dumps(line, ensure_ascii=False) if as_json else text))
