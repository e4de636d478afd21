"""A service in the process and thread of the tests: an engine that is run step by step in the event loop; and servers of it."""

from __future__ import annotations

import asyncio
import string
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from unmask.data.characters import character_tokenizer
from unmask.generation.engine.engine import Engine
from unmask.generation.frames import Watched
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.serving.limits import Limits
from unmask.serving.openai.errors import add_error_handlers
from unmask.serving.openai.routes import make_router
from unmask.serving.server import open_port
from unmask.serving.service import Event, OtherWeightsError, Work

Result = TypeVar("Result")
CHARACTERS = "".join(sorted(set(string.printable) - set("\x0b\x0c\r\t"))) + "é"
CONTEXT = 2048
HERMES = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that writes calls as Hermes does."""


@cache
def model(attention: str = "bidirectional", block_size: int | None = None, *, eos_bias: float = 0.0) -> DiffusionLM:
    """A random model of printable characters with a chat template."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = HERMES
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=CONTEXT, initializer_range=0.3, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    lm = make_diffusion(network, tokenizer, attention=attention, block_size=block_size)
    head = lm.model.get_output_embeddings()
    bias_V = torch.zeros(head.weight.shape[0], dtype=head.weight.dtype)
    bias_V[lm.eos_token_id] = eos_bias
    head.bias = nn.Parameter(bias_V, requires_grad=False)
    return lm


@cache
def byte_model() -> DiffusionLM:
    """A random block-causal model whose tokens are pieces of words, and bytes of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat, the end of the story, é ü 猫"] * 9, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)
    config = GPT2Config(vocab_size=len(wrapped), n_embd=16, n_layer=1, n_head=2, n_positions=256, eos_token_id=0, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return make_diffusion(network, wrapped, attention="block_causal", block_size=4)


class StepService:
    """The service of one model.

    Attributes:
        engine: runs a step whenever the event loop comes round.
        submitted: the owners, priorities and time limits of what was submitted.
    """

    def __init__(self, lm: DiffusionLM, name: str = "tiny", version: str | None = None):
        self.lm, self.name, self.version = lm, name, version
        self.engine = Engine(lm, batch_size=8)
        self.submitted: list[tuple[str, int, float | None]] = []
        self._open: dict[int, tuple[asyncio.Queue[Event | Exception], int, Watched | None]] = {}
        self._task: asyncio.Task[None] | None = None

    def submit(
        self, work: Sequence[Work], *, owner: str, priority: int = 0, timeout: float | None = None, version: str | None = None
    ) -> AsyncGenerator[Event, None]:
        if version not in (None, self.version):
            raise OtherWeightsError(f"the weights are {self.version!r}, not {version!r}", where="version", remedy="Send them")
        self.submitted.append((owner, priority, timeout))
        return self._events(work)

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        return function()

    async def _events(self, work: Sequence[Work]) -> AsyncGenerator[Event, None]:
        arrived: asyncio.Queue[Event | Exception] = asyncio.Queue()
        tickets = [self.engine.submit(each.request, each.config) for each in work]
        for index, (ticket, each) in enumerate(zip(tickets, work, strict=True)):
            self._open[ticket] = (arrived, index, Watched(each.request, self.lm.mask_token_id) if each.frames else None)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            left = len(work)
            while left:
                event = await arrived.get()
                if isinstance(event, Exception):
                    raise event
                left -= event.trace is not None
                yield event
        finally:
            for ticket in tickets:
                self.engine.cancel(ticket)
                self._open.pop(ticket, None)

    async def _run(self) -> None:
        while self._open:
            try:
                finished = self.engine.step()
            except Exception as error:
                for arrived, _, _ in self._open.values():
                    arrived.put_nowait(error)
                raise
            for ticket, trace in finished:
                arrived, index, watched = self._open.pop(ticket)
                arrived.put_nowait(Event(index, watched and watched.last(trace), trace, self.version))
            for ticket, (arrived, index, watched) in self._open.items():
                if watched is not None and (frame := watched.look(self.engine, ticket)):
                    arrived.put_nowait(Event(index, frame, None, self.version))
            await asyncio.sleep(0)


def make_app(service: StepService, limits: Limits | None = None) -> FastAPI:
    """An application with nothing but the routes."""
    app = FastAPI()
    add_error_handlers(app)
    app.include_router(make_router(service, limits or Limits()))
    return app


@contextmanager
def served(service: StepService, limits: Limits | None = None) -> Iterator[str]:
    """The address of a server with this service."""
    with open_port("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(service, limits), log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:  # until then the port refuses connections
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()
