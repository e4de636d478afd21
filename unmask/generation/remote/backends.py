"""Backends that sample for reinforcement learning: the model in process, `unmask serve`, or a vLLM server.

A server gets the trained weights through a folder that both can read, and loses them when it dies. Every
rollout therefore names its weights, and a restarted server gets them again.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from unmask.config.rollout import RolloutConfig
from unmask.config.sampler import SamplerConfig
from unmask.console import is_first_process
from unmask.errors import GenerationError, first_line
from unmask.generation.output import CanvasStep, Generation, Trace, make_generation
from unmask.generation.remote.http import HttpClient, RemoteError
from unmask.generation.remote.protocol import (
    OPENAI_NAMES,
    OTHER_WEIGHTS,
    SERVER_SETTINGS,
    differences,
    model_facts,
)
from unmask.generation.remote.vllm_client import RemoteLM, check_nccl
from unmask.generation.requests import Request, longest_first, make_requests
from unmask.generation.sampler import generate
from unmask.models.adapters import has_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.variables import ADMIN_KEY, API_KEY

BAD_REQUEST, UNKNOWN_MODEL = 400, 404
TRIES = 3
REQUESTS_AT_ONCE = 2  # requests to `unmask serve`, so that one waits when another ends
FOREIGN_ADAPTERS = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices")
MOST_TOKENS = 50_000  # of the prompts of such a request, whose body may have 1 MiB


class Backend:
    """Samples for a trainer. In a distributed run every process has one, and all call `sync` at the same
    time."""

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
    ) -> Generation:
        """Complete prompts, as `unmask.generate`."""
        raise NotImplementedError

    def due(self, step: int | None) -> bool:
        """Whether weights must be sent before the rollout of this step. None: an evaluation, which always
        needs the current weights."""
        return False

    def sync(self, lm: DiffusionLM, step: int) -> None:
        """Sample from these weights from now on; `step` names them. Adapters are merged, unless only adapters
        are sent. The first process of a run sends them; the others wait for it before they sample."""

    def close(self) -> None:
        """Close connections; a server keeps running."""


def make_backend(config: RolloutConfig, lm: DiffusionLM, output_dir: str | Path) -> Backend:
    """The backend of a config, for the trained model. Weights for a server are written to the run's output
    folder unless the config names another. Raises GenerationError if the server is absent or holds another
    model, or vLLM cannot run the model."""
    if config.backend == "local":
        return LocalBackend(lm)
    folder = Path(config.folder or Path(output_dir) / "rollout_weights").resolve()
    return (ServerBackend if config.backend == "server" else VLLMBackend)(config, lm, folder)


class LocalBackend(Backend):
    """The trained model, in this process."""

    def __init__(self, lm: DiffusionLM):
        self.lm = lm

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
    ) -> Generation:
        return generate(self.lm, prompts, config, keys)


class AheadBackend(Backend):
    """A backend that can be asked in advance, for one list of prompts at a time, while the caller does other
    work."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.due, self.sync = backend.due, backend.sync  # type: ignore[method-assign]
        self.close = backend.close  # type: ignore[method-assign]
        self.asked: tuple[Sequence[int], AsyncResult[Generation]] | None = None  # with the keys

    def ask(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int]) -> None:
        """Begin to sample from the weights sent last, in a thread. `generate` with the same keys returns the
        completions."""
        thread = ThreadPool(1)  # a process that exits does not wait for it
        self.asked = keys, thread.apply_async(self.backend.generate, (prompts, config, keys))
        thread.close()

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
    ) -> Generation:
        """Complete prompts, or wait for the completions that were asked for with these keys, or raise the
        error that they met."""
        if self.asked is None or self.asked[0] != keys:
            return self.backend.generate(prompts, config, keys)
        (_, generation), self.asked = self.asked, None
        return generation.get()

    def wait(self) -> None:
        """Wait until the server has sampled what it was asked for, from the weights that it has. All
        processes do before any sends new ones."""
        if self.asked is not None:
            self.asked[1].wait()


class RemoteBackend(Backend):
    """The base of backends with a server: the weights that it should hold, and the folders from which it
    reads them."""

    def __init__(self, config: RolloutConfig, lm: DiffusionLM, folder: Path):
        self.config, self.lm, self.folder = config, lm, folder
        self.api_key = config.api_key or os.environ.get(API_KEY)
        self.version: str | None = None  # the name of the weights sent last
        self.source: Path | nn.Module = folder

    def due(self, step: int | None) -> bool:
        return self.version is None or step is None or step % self.config.sync_steps == 0

    def sync(self, lm: DiffusionLM, step: int) -> None:
        self.check_weights(lm)
        path = self.folder / f"step-{step}"
        self.version, self.source = str(path), lm.model if self.config.sync == "nccl" else path
        if not is_first_process():
            return
        if self.source is path:
            self.write(lm, path)
        self.send()
        for other in self.folder.glob("step-*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def write(self, lm: DiffusionLM, path: Path) -> None:
        """Write weights to a staging folder and rename it, so that no reader sees a part of them. Or raise
        RemoteError."""
        staging = path.with_name(f"{path.name}-unfinished")
        for old in (staging, path):
            shutil.rmtree(old, ignore_errors=True)
        try:
            if self.config.sync == "lora":
                lm.model.save_pretrained(staging, save_embedding_layers=False)
            else:
                lm.save(staging)
            staging.rename(path)
        except (OSError, SafetensorError) as error:
            remedy = "Make room there, or set rollout.folder to another folder that both sides can read"
            raise RemoteError(
                f"the weights cannot be written ({first_line(error)})", where=str(path), remedy=remedy
            ) from error

    def check_weights(self, lm: DiffusionLM) -> None:
        """Raise GenerationError for unmerged adapters, or for a model without adapters when these are to be
        sent."""
        if self.config.sync == "lora":
            check_adapters(lm)
        elif not isinstance(lm.model, PreTrainedModel):
            what = f"weights of a {type(lm.model).__name__} cannot be used without its base model"
            raise GenerationError(what, where="sync", remedy="Merge its adapters")
        elif lm.model.config.tie_word_embeddings != self.lm.model.config.tie_word_embeddings:
            what = "with these adapters embedding table and head differ, which are one in the server's model"
            raise GenerationError(
                what,
                where="sync",
                remedy="Sample in this process, or leave table and head out of the adapters",
            )

    def send(self) -> None:
        """Make the server load the weights."""
        raise NotImplementedError


def check_adapters(lm: DiffusionLM) -> None:
    """Raise GenerationError for a model without adapters, or with adapters that vLLM computes differently."""
    adapters = getattr(lm.model, "peft_config", None)
    if adapters is None:
        what = f"a {type(lm.model).__name__} has no adapters to send"
        raise GenerationError(what, where="sync", remedy="Train with lora, or set sync to disk")
    for config in adapters.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        foreign = [name for name in FOREIGN_ADAPTERS if getattr(config, name, None)]
        foreign += [f"peft_type {kind}"] if kind != "LORA" else []
        foreign += ["bias"] if getattr(config, "bias", "none") != "none" else []
        if foreign:
            what = f"vLLM does not compute adapters with {', '.join(foreign)} as they are trained"
            remedy = "Train plain LoRA adapters, or set sync to disk, which sends them merged"
            raise GenerationError(what, where="sync", remedy=remedy)


class ServerBackend(RemoteBackend):
    """`unmask serve`: any model, with the same tokens as in process. Weights go to servers that were started
    with `--weights-from`, by the key in UNMASK_ADMIN_KEY."""

    def __init__(self, config: RolloutConfig, lm: DiffusionLM, folder: Path):
        if lm.canvas and has_adapters(lm):
            what = (
                "a server gets whole weights, and the adapters of DiffusionGemma cannot be merged into them"
            )
            raise GenerationError(what, where="backend", remedy="Use backend 'local'")
        super().__init__(config, lm, folder)
        url = str(config.url)
        self.http = HttpClient(
            url,
            "`unmask serve`",
            timeout=config.timeout,
            patience=config.patience,
            queue_patience=config.timeout,
            api_key=self.api_key,
        )
        self._sending = Lock()
        card = self.served()
        self.model, self.most = card["id"], card["limits"]["sequences"]
        if differ := differences(card["facts"], model_facts(lm)):
            remedy = "Start `unmask serve` with the trained model"
            raise GenerationError(f"the server holds another model: {differ}", where=url, remedy=remedy)

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
    ) -> Generation:
        """Complete prompts, as `unmask.generate`; `agreement` and `prompt_reuse` are unknown. A request has
        at most `config.batch_size` prompts, and no more than the server lets wait. As many run at once as the
        server was started with."""
        if config.deterministic:
            what = "the sequences of all clients of a server share its forward passes"
            raise GenerationError(
                what, where="deterministic", remedy="Leave it out and start the server with --deterministic"
            )
        unconstrained = config.model_copy(update={"constraint": None})  # the server compiles it
        requests = make_requests(self.lm, prompts, unconstrained, keys)
        order = longest_first(requests)
        chunks = in_chunks(
            [requests[i] for i in order], min(config.batch_size, max(1, self.most // REQUESTS_AT_ONCE))
        )
        with ThreadPool(REQUESTS_AT_ONCE) as pool:  # a process that exits does not wait for its threads
            found = chain.from_iterable(pool.imap(partial(self._complete, config), chunks))
            traces = dict(zip(order, found, strict=True))
        return make_generation(self.lm, requests, [traces[i] for i in range(len(requests))], config)

    def send(self) -> None:
        if not (admin_key := os.environ.get(ADMIN_KEY)):
            remedy = f"Set {ADMIN_KEY} to the server's, which is started with --weights-from {self.folder}"
            raise GenerationError(
                "a server takes weights only with its admin key", where=str(self.config.url), remedy=remedy
            )
        body = {"model": self.model, "path": str(self.source), "version": self.version}
        headers = {"Authorization": f"Bearer {admin_key}"}
        self.http.call("POST", "/v1/weights", json=body, headers=headers)

    def close(self) -> None:
        self.http.close()

    def served(self) -> dict[str, Any]:
        """The server's model: its name, that of its weights, its facts and limits."""
        answer = self.http.call("GET", "/v1/models")
        names = self.http.read(answer, lambda answer: [card["id"] for card in answer["data"]])
        if self.config.model not in (None, *names):
            remedy = f"Set rollout.model to one of {', '.join(map(str, names))}"
            raise GenerationError(
                f"has no model {self.config.model!r}", where=str(self.config.url), remedy=remedy
            )

        def pick(answer: Any) -> dict[str, Any]:
            card = answer["data"][0 if self.config.model is None else names.index(self.config.model)]
            return {name: card[name] for name in ("id", "version")} | {
                name: dict(card[name]) for name in ("facts", "limits")
            }

        return self.http.read(answer, pick)

    def _complete(self, config: SamplerConfig, requests: Sequence[Request]) -> list[Trace]:
        settings = config.model_dump(
            mode="json", exclude_defaults=True, exclude={*OPENAI_NAMES, *SERVER_SETTINGS, "trace"}
        )
        keys = [request.key for request in requests]
        # with uniform noise the temperatures are settings of `diffusion`, which the other one would scale
        apart = {"top_log_probs", *(["temperature"] if self.lm.noise == "uniform" else [])}
        body = {
            "model": self.model,
            "prompt": [request.prompt for request in requests],
            **{theirs: getattr(config, ours) for ours, theirs in OPENAI_NAMES.items() if ours not in apart},
            "logprobs": config.top_log_probs or None,  # as completions name it
            "diffusion": {**settings, "keys": keys, "trace": True, "version": self.version},
        }
        try:
            answer = self.http.call("POST", "/v1/completions", json=body)
        except RemoteError as error:
            if error.status != OTHER_WEIGHTS:
                raise
            self._send_again()
            answer = self.http.call("POST", "/v1/completions", json=body)
        return self.http.read(
            answer, lambda answer: [read_trace(choice["diffusion"]["trace"]) for choice in answer["choices"]]
        )

    def _send_again(self) -> None:
        """Send the weights to a server that was restarted; once, though many requests find out."""
        with self._sending:
            if self.served()["version"] != self.version:
                self.send()


def read_trace(fields: dict[str, Any]) -> Trace:
    """A trace from JSON, where null stands for a log-probability of minus infinity."""

    def known(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            name: _with_infinity(value) if name.endswith("log_probs") else value
            for name, value in fields.items()
        }

    steps = [CanvasStep(**known(step)) for step in fields["canvas_steps"]]
    return Trace(**known(fields) | {"canvas_steps": steps})


def _with_infinity(values: Any) -> Any:
    """Log-probabilities, or lists of them."""
    if isinstance(values, list):
        return [_with_infinity(value) for value in values]
    return -math.inf if values is None else values


def in_chunks(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Requests in groups of at most `size`, and of at most MOST_TOKENS tokens, but for groups of one."""
    chunks: list[list[Request]] = []
    tokens = 0
    for request in requests:
        tokens += len(request.prompt)
        if not chunks or len(chunks[-1]) == size or tokens > MOST_TOKENS:
            chunks.append([])
            tokens = len(request.prompt)
        chunks[-1].append(request)
    return chunks


class VLLMBackend(RemoteBackend):
    """A vLLM server, for causal models. It draws tokens with its own random numbers; at temperature 0 they
    are the same as in process.

    Start it from a model that Unmask saved or exported, whose vocabulary has the mask token;
    docs/generation.md has the command.

    In the mode "processed_logprobs" the traces have the exact `sampled_log_probs`, and `log_probs` at
    temperatures 0 and 1 without filters, else NaN. In the server's default mode they have `sampled_log_probs`
    at temperature 0 and, but for the probability of the mask token, at temperature 1 without filters; else
    they are empty. `entropies` are empty.
    """

    def __init__(self, config: RolloutConfig, lm: DiffusionLM, folder: Path):
        if not lm.autoregressive:
            shift = "" if lm.logit_shift else " without logit shift"
            what = f"vLLM decodes token by token, and this model is {lm.attention}{shift}"
            raise GenerationError(what, where="backend", remedy="Use backend 'server' or 'local'")
        if config.sync == "lora":
            check_adapters(lm)
        if config.sync == "nccl":
            check_nccl()
        super().__init__(config, lm, folder)
        # runs with adapters may share a server
        self.adapter = f"unmask-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self.remote = RemoteLM(
            str(config.url),
            lm.tokenizer,
            config.model,
            eos_token_ids=lm.eos_token_ids,
            timeout=config.timeout,
            patience=config.patience,
            api_key=self.api_key,
        )
        self.processed = self._probe()

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
    ) -> Generation:
        generation = self._complete(prompts, config.model_copy(update={"trace": False}), keys)
        filters = (
            config.filters,
            config.repetition_penalty != 1,
            config.allowed_tokens,
            config.forbidden_tokens,
        )
        plain = config.temperature in (0, 1) and not any(filters)
        sampled: list[list[float]] | None = generation.log_probs if self.processed or plain else None
        if config.temperature == 0:
            sampled = [[0.0] * len(tokens) for tokens in generation.tokens]
        if self.processed and not plain:
            generation = replace(
                generation, log_probs=[[math.nan] * len(tokens) for tokens in generation.tokens]
            )
        if not config.trace:
            return generation
        traces = []
        for row, tokens in enumerate(generation.tokens):
            rest = config.max_new_tokens - len(tokens)
            canvas, steps = tokens + [self.lm.mask_token_id] * rest, generation.steps[row] + [-1] * rest
            drawn = sampled[row] + [0.0] * rest if sampled else []
            traces.append(
                Trace(
                    canvas, steps, generation.log_probs[row] + [0.0] * rest, drawn, forward_passes=len(tokens)
                )
            )
        return replace(generation, trace=traces)

    def send(self) -> None:
        if self.config.sync == "lora":
            if os.path.isabs(version := self.remote.weight_version):
                remedy = "Restart the server with the model that the run began with"
                raise GenerationError(
                    f"the server's own weights are from {version}", where=str(self.config.url), remedy=remedy
                )
            self.remote.load_adapter(self.adapter, str(self.source))
        else:
            self.remote.update_weights(self.source)
            self.remote.weight_version = str(self.version)

    def close(self) -> None:
        self.remote.close()

    def _complete(
        self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None
    ) -> Generation:
        """Completions from the weights sent last. A restarted server gets them again: it names other weights,
        or does not know the adapters, which are requested by name."""
        if self.config.sync == "lora" and self.version is not None:
            self.remote.model = self.adapter
        for _ in range(TRIES):
            try:
                generation = self.remote.generate(prompts, config, keys)
                if (
                    self.version is None
                    or self.config.sync == "lora"
                    or self.remote.weight_version == self.version
                ):
                    return generation
            except RemoteError as error:
                if self.version is None or error.status != UNKNOWN_MODEL:
                    raise
            self.send()
        raise self.remote.http.error(
            "the server does not keep the weights that it is sent", "Use one server per run"
        )

    def _probe(self) -> bool:
        """Whether the server returns log-probabilities of the distribution that it draws from, not of the
        model. Two tokens are drawn, each as the only allowed one: that has log-probability 0 when it is
        drawn, while under the model one of the two has at most log 1/2."""
        log_probs = []
        for token in [token for token in range(3) if token != self.lm.mask_token_id][:2]:
            config = SamplerConfig(
                max_new_tokens=1, temperature=1.0, allowed_tokens=[token], stop_at_eos=False
            )
            try:
                log_probs += self.remote.generate([[token]], config).log_probs[0]
            except RemoteError as error:
                if error.status != BAD_REQUEST:
                    raise
                what = f"the server does not know the mask token ({error.what})"
                remedy = "Start it from a model that Unmask saved, or exported with --layout hf"
                raise GenerationError(what, where=str(self.config.url), remedy=remedy) from error
        return max(map(abs, log_probs)) < 0.1
