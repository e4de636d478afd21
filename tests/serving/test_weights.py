"""New weights while a server runs: from allowed folders, whole, with the key of those who may."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

import unmask
from tests.errors import raises
from tests.serving.servers import ADMIN, http_get, http_post, message, other_weights, served
from tests.tiny import float64_lm
from unmask.errors import ConfigError, ModelError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint
from unmask.serving.app import AppSettings
from unmask.serving.scheduler import Scheduler
from unmask.serving.weights import Folder, read_weights

Post = Callable[..., httpx.Response]
CHANGED = "path: its files changed while they were read. Send it again once they are written."


def align(file: Path) -> None:
    """Let the weights of a file begin where no copy aligns them, so that they are read from its pages."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end] + b" " * (-end % 64)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


@pytest.fixture
def lm(tmp_path: Path) -> DiffusionLM:
    """A model of this test's own."""
    float64_lm(attention="block_causal", block_size=3).save(tmp_path / "own")
    return unmask.load(tmp_path / "own", dtype="float64")


@pytest.fixture
def post(lm: DiffusionLM, tmp_path: Path) -> Iterator[Post]:
    """Sends weights to a server that may read from the folder `weights`."""
    (tmp_path / "weights").mkdir()
    settings = AppSettings(admin_key="admin", weights_from=(tmp_path / "weights",))
    with served(lm, settings) as url:

        def send(path: Any, version: Any = "1", headers: dict[str, str] = ADMIN) -> httpx.Response:
            return http_post(
                f"{url}/v1/weights",
                json={"model": "tiny", "path": str(path), "version": version},
                headers=headers,
            )

        yield send


def test_new_weights_are_served_in_the_memory_of_the_old(post: Post, lm: DiffusionLM, tmp_path: Path) -> None:
    new = other_weights(lm)
    new.save(tmp_path / "weights" / "new")
    addresses = [weight.data_ptr() for weight in lm.model.parameters()]
    assert post(tmp_path / "weights" / "new").json() == {"version": "1"}
    assert fingerprint(lm.model) == fingerprint(new.model)
    assert addresses == [weight.data_ptr() for weight in lm.model.parameters()]
    assert post("new", "2").json() == {"version": "2"}  # relative to the allowed folder


def test_without_the_admin_key_nothing_changes(post: Post, lm: DiffusionLM, tmp_path: Path) -> None:
    before = fingerprint(lm.model)
    other_weights(lm).save(tmp_path / "weights" / "new")
    for headers in ({}, {"Authorization": "Bearer api"}, {"Authorization": "Bearer admi"}):
        answer = post("new", headers=headers)
        assert answer.status_code == 401 and "the admin key is wrong or missing" in message(answer)
    assert fingerprint(lm.model) == before


def test_the_api_key_opens_no_weights_and_the_admin_key_nothing_else(lm: DiffusionLM, tmp_path: Path) -> None:
    settings = AppSettings(api_keys=("api",), admin_key="admin", weights_from=(tmp_path,))
    with served(lm, settings) as url:
        body = {"model": "tiny", "path": "own", "version": "1"}
        statuses = [
            http_post(f"{url}/v1/weights", json=body, headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("api", "admin")
        ]
        models = [
            http_get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("api", "admin")
        ]
    assert statuses == [401, 200] and models == [200, 401]


def test_weights_are_never_replaced_without_a_key_of_its_own(lm: DiffusionLM, tmp_path: Path) -> None:
    with raises(ConfigError, where="--weights-from"):
        AppSettings(weights_from=(tmp_path,))
    with served(lm, AppSettings(admin_key="admin")) as url:
        assert (
            http_post(
                f"{url}/v1/weights", json={"model": "tiny", "path": "own", "version": "1"}, headers=ADMIN
            ).status_code
            == 404
        )


def test_folders_elsewhere_are_refused_and_not_told_from_absent_ones(
    post: Post, lm: DiffusionLM, tmp_path: Path
) -> None:
    before = fingerprint(lm.model)
    root, outside = tmp_path / "weights", tmp_path / "outside"
    other_weights(lm).save(outside)
    (root / "link").symlink_to(outside)
    (root / "linked_file").mkdir()
    for file in outside.iterdir():
        (root / "linked_file" / file.name).symlink_to(file)
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("")
    names: list[Any] = [
        outside,
        tmp_path / "absent",
        "link",
        "linked_file",
        "loop",
        "file",
        "absent",
        "../outside",
        root / ".." / "outside",
    ]
    answers = [post(name) for name in [*names, "a\0b", "/", "/etc", "."]]
    refusal = (
        "path: no folder from which weights may be read. Use a folder within one given to --weights-from."
    )
    assert {answer.status_code for answer in answers} == {400}
    assert {message(answer) for answer in answers[:-1]} == {refusal}
    assert str(tmp_path) not in message(answers[-1])  # the root itself is allowed, and has no model
    assert fingerprint(lm.model) == before


def test_weights_of_another_model_are_refused_and_change_nothing(
    post: Post, lm: DiffusionLM, tmp_path: Path
) -> None:
    before, root = fingerprint(lm.model), tmp_path / "weights"
    float64_lm(attention="block_causal", block_size=4).save(root / "pattern")
    float64_lm(attention="block_causal", block_size=3, layers=1).save(root / "layers")
    float64_lm("gpt2", attention="block_causal", block_size=3).save(root / "family")
    tied = lm.frozen_copy()
    tied.model.get_output_embeddings().weight, tied.model.config.tie_word_embeddings = (
        tied.model.get_input_embeddings().weight,
        True,
    )
    tied.save(root / "tied")
    lm.save(root / "torn")
    [file] = (root / "torn").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    lm.save(root / "pickled")
    [file] = (root / "pickled").glob("*.safetensors")
    file.unlink()
    torch.save(lm.model.state_dict(), root / "pickled" / "pytorch_model.bin")
    (root / "empty").mkdir()
    refused = {
        "pattern": "block_size is 4 and not 3",
        "layers": "another architecture",
        "tied": "one of the two has a head of its own",
        "family": "model_type is 'gpt2' and not 'phi'",
        "torn": "model.safetensors is incomplete",
        "pickled": "its weights are pickled (pytorch_model.bin)",
        "empty": "is a folder, and has no config.json",
    }
    for name, error in refused.items():
        answer = post(name, name)
        assert answer.status_code == 400 and error in message(answer), answer.text
        assert str(tmp_path) not in answer.text
    assert fingerprint(lm.model) == before


def test_other_bodies_are_refused(lm: DiffusionLM, tmp_path: Path) -> None:
    fields = [
        {"path": "new"},
        {"path": "new", "version": ""},
        {"path": 1, "version": "1"},
        {"path": "", "version": "1"},
    ]
    bodies: list[Any] = [
        {},
        [],
        {"path": "new", "version": "1"},
        *({"model": "tiny", **each} for each in fields),
    ]
    with served(lm, AppSettings(admin_key="admin", weights_from=(tmp_path,))) as url:
        statuses = [http_post(f"{url}/v1/weights", json=body, headers=ADMIN).status_code for body in bodies]
    assert statuses == [400] * len(bodies)


def test_a_folder_that_changes_while_it_is_read_is_refused(
    post: Post, lm: DiffusionLM, tmp_path: Path, monkeypatch: Any
) -> None:
    """What was checked is what is loaded, though somebody swaps files and swaps them back."""
    before, new, outside = fingerprint(lm.model), tmp_path / "weights" / "new", tmp_path / "outside"
    lm.save(new)
    other_weights(lm).save(outside)
    file, other = (folder / "model.safetensors" for folder in (new, outside))
    own, load = file.read_bytes(), unmask.load

    def replaced(*given: Any, **options: Any) -> DiffusionLM:
        shutil.copy(other, new / "copy")
        (new / "copy").rename(file)
        return load(*given, **options)

    def linked(*given: Any, **options: Any) -> DiffusionLM:
        file.rename(new / "kept")
        file.symlink_to(other)
        loaded = load(*given, **options)
        (new / "kept").rename(file)
        return loaded

    def written(*given: Any, **options: Any) -> DiffusionLM:
        loaded = load(*given, **options)
        file.write_bytes(other.read_bytes())
        return loaded

    def moved(*given: Any, **options: Any) -> DiffusionLM:
        new.rename(tmp_path / "elsewhere")
        new.symlink_to(outside)
        loaded = load(*given, **options)
        new.unlink()
        (tmp_path / "elsewhere").rename(new)
        return loaded

    for swap in (replaced, linked, written, moved):
        file.write_bytes(own)
        monkeypatch.setattr("unmask.serving.weights.load", swap)
        answer = post("new")
        assert answer.status_code == 400 and message(answer) == CHANGED, (swap, answer.text)
        assert fingerprint(lm.model) == before
    monkeypatch.setattr("unmask.serving.weights.load", load)
    assert post("new").status_code == 200


def test_files_that_change_after_they_were_read_change_nothing(
    post: Post, lm: DiffusionLM, tmp_path: Path, monkeypatch: Any
) -> None:
    new, look, looks = other_weights(lm), Folder.files, list[int]()
    new.save(tmp_path / "weights" / "new")
    lm.save(tmp_path / "old")
    file, old = (folder / "model.safetensors" for folder in (tmp_path / "weights" / "new", tmp_path / "old"))
    for each in (file, old):
        align(each)

    def then_write(folder: Folder) -> Any:
        found = look(folder)
        looks.append(len(found))
        if len(looks) == 2:
            with file.open("r+b") as opened:  # in place: its pages are the weights, unless these were copied
                opened.write(old.read_bytes())
        return found

    monkeypatch.setattr(Folder, "files", then_write)
    assert post("new").status_code == 200 and len(looks) == 2
    assert fingerprint(lm.model) == fingerprint(new.model)


def test_what_waits_to_be_loaded_is_checked_when_it_is(lm: DiffusionLM, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    other_weights(lm).save(tmp_path / "outside")
    (tmp_path / "weights" / "new").symlink_to(tmp_path / "outside")
    model = Scheduler({"tiny": lm}).models["tiny"]
    with raises(ModelError, where="path"):
        read_weights(model, Folder(tmp_path / "weights" / "new", "new", (tmp_path / "weights",)))
