"""A causal model on a vLLM server, with the interface of `unmask.generate`. docs/generation.md has the
command that starts the server."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from unmask.config.rollout import unread_by_vllm
from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.diffusion.rng import sequence_key
from unmask.errors import GenerationError
from unmask.generation.output import Generation
from unmask.generation.remote.http import HttpClient, RemoteError
from unmask.generation.requests import checked_keys, encode_all
from unmask.models.chat_template import turn_end
from unmask.models.model_files import read_tokenizer
from unmask.models.model_paths import fetched

BANNED = -100.0  # the lowest bias that a server accepts


class RemoteLM:
    """A causal model on a vLLM server.

    Args:
        url: such as http://localhost:8000.
        tokenizer: the model's, or its path.
        model: its name on the server; None: the only one.
        timeout: seconds to wait for an answer.
        patience: seconds to wait for a server that does not accept requests, at the start or after it died.
        api_key: the one that the server was started with, if any.
        eos_token_ids: the tokens that end a text, besides those that the server finds in the model's
            generation_config.json; None: the tokenizer's EOS and its chat template's end of turn.

    Raises:
        GenerationError: the server is absent, or holds several models and none is named.
    """

    def __init__(
        self,
        url: str,
        tokenizer: str | PreTrainedTokenizerBase,
        model: str | None = None,
        *,
        timeout: float = 300.0,
        patience: float = 30.0,
        api_key: str | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ):
        if isinstance(tokenizer, str):
            tokenizer = read_tokenizer(fetched(tokenizer, weights=False, model=False))
        self.tokenizer = tokenizer
        ends = (
            [self.tokenizer.eos_token_id, turn_end(self.tokenizer)]
            if eos_token_ids is None
            else eos_token_ids
        )
        self.eos_token_ids = [*dict.fromkeys(token for token in ends if token is not None)]
        self._sender: tuple[nn.Module, Any] | None = None
        self.http = HttpClient(url, "a vLLM server", timeout=timeout, patience=patience, api_key=api_key)
        models = self.http.read(self.http.call("GET", "/v1/models"), base_models)
        if model is None and len(models) != 1:
            raise GenerationError(
                f"serves {len(models)} models", where=url, remedy=f"Name one of {', '.join(models)}"
            )
        self.model = model or next(iter(models))
        self.context_length = models.get(self.model)

    def generate(
        self, prompts: Sequence[Any], config: SamplerConfig | None = None, keys: Sequence[int] | None = None
    ) -> Generation:
        """Complete prompts; arguments and result as in `unmask.generate`. The server draws its own random
        numbers, seeded for every prompt by `config.seed` and its key; log-probabilities are at temperature 1
        (the server's default mode).

        Raises:
            GenerationError: settings of diffusion only, or a request that the server refuses.
            RemoteError: the server accepts no requests or does not answer. Its `completed` holds the
                completions so far.
        """
        config = config or SamplerConfig()
        if (name := unread_by_vllm(config)) is not None:
            raise GenerationError("has no effect on a causal server", where=name, remedy="Leave it out")
        encoded = encode_all(self.tokenizer, prompts, "prompts")
        bodies = [
            self._body(ids, config, key)
            for ids, key in zip(encoded, checked_keys(encoded, keys), strict=True)
        ]
        pool = ThreadPoolExecutor(max(1, min(config.batch_size, len(bodies))))
        futures = [pool.submit(self._complete, body) for body in bodies]
        try:
            for future in as_completed(futures):
                future.result()  # raises the first error of any prompt
        except RemoteError as error:
            pool.shutdown(cancel_futures=True)
            error.completed = {
                i: f.result() for i, f in enumerate(futures) if not f.cancelled() and not f.exception()
            }
            error.args = (f"{error}; {len(error.completed)} of {len(bodies)} completions are done",)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        tokens = [future.result()[0] for future in futures]
        return Generation(
            prompts=encoded,
            texts=[
                text_after(self.tokenizer, *each, self.eos_token_ids)
                for each in zip(encoded, tokens, strict=True)
            ],
            tokens=tokens,
            log_probs=[future.result()[1] for future in futures],
            steps=[list(range(len(ids))) for ids in tokens],
            forward_passes=[len(ids) for ids in tokens],
        )

    def prompt_log_probs(self, ids: Sequence[int], top: int) -> list[dict[int, float]]:
        """For each position of a text the log-probabilities, at temperature 1, of its token and of the
        likeliest ones: {} for the first.

        Args:
            top: how many of the likeliest; -1: all.

        Raises:
            GenerationError: the server gives fewer.
            RemoteError: it accepts no requests, refuses this one or does not answer.
        """
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
        }
        try:
            answer = self.http.call("POST", "/v1/completions", json=body)
        except RemoteError as error:
            if error.status == 400 and "logprobs" in str(error):
                remedy = "Start it with --max-logprobs -1, or decode greedily with few forbidden tokens"
                raise GenerationError(
                    f"the server refuses {top} log-probabilities a token", where="verifier", remedy=remedy
                ) from error
            raise
        found = self.http.read(answer, read_prompt_log_probs)
        if fewer := [
            len(known) for known in found[1:] if len(known) < (len(self.tokenizer) - 1 if top == -1 else top)
        ]:
            remedy = "Start it with --max-logprobs -1" if top == -1 else "Decode with fewer forbidden tokens"
            raise GenerationError(
                f"the server gives {min(fewer)} log-probabilities of a token", where="verifier", remedy=remedy
            )
        return found

    def update_weights(self, source: str | Path | nn.Module, address: str = "127.0.0.1") -> None:
        """Send new weights to the server, and clear its prefix cache.

        Args:
            source: a folder that the server can read; or a model on a GPU, whose weights go over NCCL to the
                server's GPUs. That needs vLLM installed here, and a server started with
                `--weight-transfer-config '{"backend": "nccl"}'`.
            address: of this machine, as the server's workers reach it (NCCL).

        Raises:
            GenerationError: NCCL cannot be used here, or the server refuses.
            RemoteError: the server accepts no requests or does not answer.
        """
        if not isinstance(source, nn.Module):
            self.http.call(
                "POST",
                "/collective_rpc",
                json={"method": "reload_weights", "kwargs": {"weights_path": str(source)}},
            )
        else:
            if self._sender is None or self._sender[0] is not source:
                self._sender = (source, nccl_sender(source, self.http.call, address))
            self._sender[1].send_weights()
        self.reset_prefix_cache()

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Make the server load PEFT adapters, replacing earlier ones of this name; `model = name` completes
        with them. Needs a server started with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.

        Args:
            folder: one that the server can read; new weights need a new folder.

        Raises:
            RemoteError: the server refuses, accepts no requests or does not answer.
        """
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self.http.send("POST", "/v1/load_lora_adapter", json=body)
        self.reset_prefix_cache()

    @property
    def weight_version(self) -> str:
        """The name of the weights sent last; a restarted server has lost it, and the weights."""
        return self.http.read(
            self.http.call("GET", "/weight_info"), lambda answer: str(answer["weight_version"])
        )

    @weight_version.setter
    def weight_version(self, name: str) -> None:
        self.http.call("POST", "/update_weight_version", json={"new_version": name})

    def close(self) -> None:
        """Close connections; the server keeps running."""
        self.http.close()

    def __enter__(self) -> RemoteLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Clear the server's prefix cache, whose keys are those of earlier weights."""
        self.http.call("POST", "/reset_prefix_cache")

    def _body(self, ids: Sequence[int], config: SamplerConfig, key: int) -> dict[str, Any]:
        banned = {*(config.forbidden_tokens or ()), self.tokenizer.mask_token_id} - {None}
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "ignore_eos": not config.stop_at_eos,
            "stop_token_ids": self.eos_token_ids if config.stop_at_eos else None,
            "allowed_token_ids": config.allowed_tokens,
            "logit_bias": {str(token): BANNED for token in banned} or None,
            "seed": sequence_key([config.seed, key]),
            "logprobs": 0,
            "return_token_ids": True,
        }

    def _complete(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        choice = self.http.read(
            self.http.call("POST", "/v1/completions", json=body), lambda answer: dict(answer["choices"][0])
        )
        if choice.get("finish_reason") == "abort":
            raise self.http.error("the server aborted a completion", "Check the server's log")
        return self.http.read(
            choice, lambda answer: (list(answer["token_ids"]), list(answer["logprobs"]["token_logprobs"]))
        )


def read_prompt_log_probs(answer: Any) -> list[dict[int, float]]:
    """The log-probabilities of tokens at each position of a prompt."""
    return [
        {int(token): float(one["logprob"]) for token, one in (each or {}).items()}
        for each in answer["choices"][0]["prompt_logprobs"]
    ]


def base_models(answer: Any) -> dict[str, int | None]:
    """The models that a server lists, without adapters, each with its context length if the server says
    so."""
    return {card["id"]: card.get("max_model_len") for card in answer["data"] if not card.get("parent")}


class ControlPlane:
    """The steps of an update, as vLLM's sender calls them."""

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("POST", "/finish_weight_update")

    def shutdown_weight_transfer_engine(self) -> None:
        self._call("POST", "/shutdown_weight_transfer_engine")


def check_nccl() -> None:
    """Raise GenerationError without a GPU, or if vLLM is not installed here."""
    where, remedy = "update_weights", "Give a folder that the server can read instead (sync disk)"
    if not torch.cuda.is_available():
        raise GenerationError("NCCL needs a GPU on both sides", where=where, remedy=remedy)
    if importlib.util.find_spec("vllm") is None:
        raise GenerationError(
            "NCCL needs vLLM, which is not installed here", where=where, remedy=f"Install vllm, or {remedy}"
        )


def nccl_sender(model: nn.Module, call: Callable[..., Any], address: str) -> Any:
    """A sender whose `send_weights()` sends the model's current weights, whose names are those of the
    server's checkpoint. Errors as in `check_nccl`. `address`: of this machine, as the server's workers reach
    it."""
    check_nccl()
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    workers = call("GET", "/get_world_size")["world_size"]
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    facts = NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=1 + workers)
    return WeightTransferTrainerFactory.trainer_init(
        facts, client=ControlPlane(call), source=ModuleSource(model)
    )
