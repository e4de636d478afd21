"""A hub in this process: a small HTTP server that speaks the protocol of huggingface_hub (repositories,
branches, uploads by commit and by LFS, downloads), and a client that is pointed to it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import huggingface_hub
import transformers.utils.hub
from huggingface_hub import constants

OWNER, TOKEN = "user", "hf_" + "a" * 20
WEIGHTS = (".safetensors", ".bin", ".pt")
"""Files that are uploaded by LFS."""


@dataclass
class Repository:
    """A repository: the files of each branch, and its commits, oldest first."""

    private: bool | None = None
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)  # branch, summary, paths
    snapshots: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of each commit

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a branch or commit."""
        if revision in self.snapshots:
            return revision, self.snapshots[revision]
        if (files := self.branches.get(revision)) is None:
            return None
        content = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.snapshots[commit] = dict(files)
        return commit, files


class Hub:
    """The repositories of a hub, by name, and the requests that it got."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock, self.url = Lock(), ""

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[name].branches[branch]

    def put(self, name: str, folder: Path, branch: str = "main") -> None:
        """A repository with the files of a folder."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        self.repositories.setdefault(name, Repository()).branches[branch] = files


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        sizes = {} if headers and "Content-Length" in headers else {"Content-Length": str(len(data))}
        for name, value in ({"Content-Type": "application/json"} | sizes | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def handle_one(self) -> None:
        url, hub = urlsplit(self.path), self.hub
        path, body = unquote(url.path), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        with hub.lock:
            signed = self.headers.get("authorization") == f"Bearer {TOKEN}" or path.startswith("/object/")
            if self.command in ("POST", "PUT") and not signed:
                self.refuse(401, "Unauthorized")
            else:
                self.dispatch(path, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def dispatch(self, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": OWNER, "type": "user"})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if match := re.fullmatch(r"/object/(\w+)", path):
            self.hub.objects[match[1]] = body
            return self.answer(200)
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body))
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(.*))?", path):
            return self.model(match[1], match[2] or "revision/main", body)
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)", path):
            return self.resolve(*match.groups())
        self.refuse(404, "RepoNotFound")

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        private = asked.get("visibility", "private" if asked.get("private") else None) == "private"
        known = name in self.hub.repositories
        self.hub.repositories.setdefault(name, Repository(private))
        self.answer(409 if known else 200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def batch(self, asked: dict[str, Any]) -> None:
        upload = lambda oid: {"upload": {"href": f"{self.hub.url}/object/{oid}"}}  # noqa: E731
        objects = [each | {"actions": upload(each["oid"])} for each in asked["objects"]]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def model(self, name: str, rest: str, body: bytes) -> None:
        if (repository := self.hub.repositories.get(name)) is None:
            return self.refuse(404, "RepoNotFound")
        verb, _, revision = rest.partition("/")
        if verb == "branch":
            if revision in repository.branches:
                return self.answer(409, {"error": "exists"})
            repository.branches[revision] = dict(repository.branches["main"])
            return self.answer(200)
        if (found := repository.at(revision.partition("/")[0])) is None:
            return self.refuse(404, "RevisionNotFound")
        commit, files = found
        if verb == "preupload":
            asked = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(WEIGHTS) else "regular" for path in asked}
            each = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in asked]
            return self.answer(200, {"files": each})
        if verb == "commit":
            return self.commit(repository, revision, [json.loads(line) for line in body.splitlines()])
        if verb == "tree":
            return self.answer(200, [self.entry(path, data) for path, data in files.items()])
        siblings = [{"rfilename": path} for path in files]
        self.answer(200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
        more = {"lfs": lfs} if path.endswith(WEIGHTS) else {}
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid} | more

    def commit(self, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        files, written, summary = repository.branches[branch], [], ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
            written += [value["path"]] if "path" in value else []
        repository.commits.append((branch, summary, written))
        commit, _ = repository.at(branch)
        url = f"{self.hub.url}/{OWNER}/name/commit/{commit}"
        self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url})

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (repository := self.hub.repositories.get(name)) is None:
            return self.refuse(404, "RepoNotFound")
        if (found := repository.at(revision)) is None:
            return self.refuse(404, "RevisionNotFound")
        commit, files = found
        if path not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            return self.answer(404, {"error": "EntryNotFound"}, headers)
        data = files[path]
        etag = hashlib.sha256(data).hexdigest() if path.endswith(WEIGHTS) else hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "X-Linked-Size": str(len(data))}
        self.answer(200, data, headers | {"Content-Type": "application/octet-stream"})


@contextmanager
def running(cache: Path) -> Iterator[Hub]:
    """A hub, and this process's client logged in to it, with its cache in a folder."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }
    api = huggingface_hub.HfApi(endpoint=hub.url)
    try:
        with (
            mock.patch.multiple(constants, **values),
            mock.patch.dict("os.environ", {"HF_TOKEN": TOKEN}),
            mock.patch.object(transformers.utils.hub, "_hf_api", api),
            mock.patch.object(huggingface_hub.hf_api.api, "endpoint", hub.url),
        ):
            yield hub
    finally:
        server.shutdown()
        server.server_close()
