"""`unmask chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig
from unmask.config.sampler import SamplerConfig
from unmask.models.model_paths import check_model


@spread_configs
def chat(
    model: ModelConfig,
    sampler: SamplerConfig,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Complete each line as plain text, without the model's chat template."),
    ] = False,
) -> None:
    """Talk to a model in the terminal and watch its answers being denoised; off a terminal, answer each line
    of stdin."""
    check_model(model.path)
    import unmask
    from unmask.cli.chat_session import Chat, run_chat

    run_chat(
        Chat(unmask.load(model.path, **model.load_arguments()), model.path, sampler, raw=raw, system=system)
    )
