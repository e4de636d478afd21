"""Functions in worker processes are found by path, killed on a timeout, and restarted."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import weakref

import pytest

from tests.errors import raises
from unmask.config.user_code import load_function
from unmask.errors import ConfigError, TrainingError
from unmask.rewards.workers import RewardWorker, WorkerDeathError, WorkerError, WorkerTimeoutError

REWARDS = """
import asyncio, os, sys, time
from unmask.errors import TrainingError
print("imported", flush=True)
NUMBER = 7
def length(completions, **_): return [float(len(text)) for text in completions]
def where(**_): return os.getpid()
def raises(**_): raise KeyError("no")
def wrong(**_): raise TrainingError("no", where="f", remedy="Mend it")
async def later_wrong(**_): wrong()
def twice(function): return lambda **given: 2 * function(**given)
def sleeps(**_): time.sleep(60)
def ends(**_): os._exit(7)
def unpicklable(**_): return lambda: 0
async def loop(**_): return id(asyncio.get_running_loop())
def columns(**columns): return columns
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return str(tmp_path / "my_rewards.py")


def test_a_file_that_raises_is_told(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    for _ in range(2):
        with raises(WorkerError, where=str(tmp_path / "broken.py:f")) as caught:
            RewardWorker(f"{tmp_path}/broken.py:f").start()
        assert type(caught.value) is WorkerError


ORDINARY = """
from __future__ import annotations
import dataclasses, pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
@dataclasses.dataclass
class Length:
    value: int
def length(text): return Length(len(text))
def f(completions):
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return [pickle.loads(pickle.dumps(each)).value for each in pool.map(length, completions)]
"""


def test_a_file_may_have_dataclasses_and_pickle_what_it_defines(tmp_path):
    """Loaded twice, as by two rewards of one file, and without hiding a module of its name."""
    path = tmp_path / "lengths.v2.py"
    path.write_text(ORDINARY)
    for function in [load_function(f"{path}:f") for _ in range(2)]:
        assert function(["ab", "c"]) == [2, 1]
    assert not {"lengths", "lengths.v2"} & {*sys.modules}
    worker = RewardWorker(f"{path}:f")
    assert worker.apply((["ab", "c"],), {}, 60) == [2, 1]
    worker.close()


@pytest.mark.parametrize("helper", ["my_helper.py", "my_helper/__init__.py"])
@pytest.mark.parametrize("target", ["{}/uses.py:f", "uses:f"])
def test_a_module_beside_it_that_is_not_imported_is_named_with_the_way_out(
    tmp_path, monkeypatch, target, helper
):
    tmp_path = tmp_path / "my rewards"
    (tmp_path / "my_helper").mkdir(parents=True)
    (tmp_path / helper).write_text("NUMBER = 7")
    (tmp_path / "uses.py").write_text(
        "import my_helper\nimport absent_module\ndef f(): return my_helper.NUMBER"
    )
    monkeypatch.chdir(tmp_path)
    target, way_out = target.format(tmp_path), f"PYTHONPATH='{tmp_path}'"
    with raises(ConfigError, where=target) as caught:
        load_function(target)
    assert way_out in caught.value.remedy
    with raises(WorkerError, where=target) as caught:
        RewardWorker(target).start()
    assert way_out in str(caught.value)
    monkeypatch.syspath_prepend(tmp_path)
    with raises(ConfigError, where=target) as caught:
        load_function(target)
    assert "absent_module" in caught.value.what and "PYTHONPATH" not in caught.value.remedy
    sys.modules.pop("my_helper")


def test_calls_are_answered_by_one_other_process(path):
    worker = RewardWorker(f"{path}:where")
    first = worker.apply((), {}, 60)
    assert first == worker.apply((), {}, 60) != os.getpid()
    worker.close()
    assert worker.apply((), {}, 60) != first
    worker.close()


def test_what_a_function_raises_is_told_and_the_worker_goes_on(path):
    worker = RewardWorker(f"{path}:raises")
    for _ in range(2):
        with raises(WorkerError, where=f"{path}:raises"):
            worker.apply((), {}, 60)
    worker.close()


@pytest.mark.parametrize("name", ["wrong", "later_wrong"])
def test_a_training_error_is_raised_here_as_it_is(path, name):
    worker = RewardWorker(f"{path}:{name}")
    with raises(TrainingError, where="f") as caught:
        worker.apply((), {}, 60)
    assert (caught.value.what, caught.value.where, caught.value.remedy) == ("no", "f", "Mend it")
    worker.close()


def test_what_is_served_may_be_wrapped(path):
    worker = RewardWorker(f"{path}:length", f"{path}:twice")
    assert worker.apply((), {"completions": ["ab"]}, 60) == [2.0, 2.0]
    worker.close()


def test_what_cannot_be_sent_back_is_told(path):
    worker = RewardWorker(f"{path}:unpicklable")
    with raises(WorkerError, where=f"{path}:unpicklable"):
        worker.apply((), {}, 60)
    worker.close()


def test_a_late_call_is_killed_and_the_next_one_is_served(path):
    worker = RewardWorker(f"{path}:sleeps")
    worker.start()
    process = worker.process
    with raises(WorkerTimeoutError, where=f"{path}:sleeps"):
        worker.apply((), {}, 0.2)
    assert process.poll() is not None
    worker.target = f"{path}:length"
    assert worker.apply((), {"completions": ["a"]}, 60) == [1.0]
    worker.close()


def test_a_call_that_ends_the_process_is_told_with_its_code(path):
    worker = RewardWorker(f"{path}:ends")
    with raises(WorkerDeathError, where=f"{path}:ends"):
        worker.apply((), {}, 60)
    with raises(WorkerDeathError, where=f"{path}:ends"):
        worker.apply((), {}, 60)


def test_a_worker_that_died_between_calls_is_started_again(path):
    worker = RewardWorker(f"{path}:length")
    worker.start()
    worker.process.kill()
    worker.process.wait()
    assert worker.apply((), {"completions": ["abc"]}, 60) == [3.0]
    worker.close()


def test_an_async_function_is_awaited_on_one_loop(path):
    worker = RewardWorker(f"{path}:loop")
    assert worker.apply((), {}, 60) == worker.apply((), {}, 60) > 0
    worker.close()


@pytest.mark.parametrize("target", ["os.path:basename", "unmask.rewards.math_worker:compare"])
def test_modules_in_the_current_folder_are_not_imported(tmp_path, monkeypatch, target):
    """They may lie beside data that someone downloaded. SymPy looks for modules that may be absent."""
    absent = [
        name
        for name in ("gmpy2", "flint", "antlr4", "python_flint")
        if importlib.util.find_spec(name) is None
    ]
    assert absent
    monkeypatch.chdir(tmp_path)
    for name in ("json", "resource", "asyncio", "struct", "numpy", "math_verify", "unmask", *absent):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    worker = RewardWorker(target)
    worker.start()
    worker.close()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", ["my_module", "my_package.part"])
def test_a_module_in_the_current_folder_is_found_after_all_others(tmp_path, monkeypatch, module):
    """In this process and in a worker, but nothing that lies beside it."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").write_text("from my_package.other import NUMBER")
    (tmp_path / "my_package/other.py").write_text("NUMBER = 7")
    tries = (
        "import resource\ntry: import absent_module\nexcept ImportError: pass\ndef f(): return "
        "resource.__name__, __name__"
    )
    for file in ("my_module.py", "my_package/part.py"):
        (tmp_path / file).write_text(tries)
    for name in ("resource", "absent_module"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    before = [*sys.path, *sys.meta_path]
    worker = RewardWorker(f"{module}:f")
    assert worker.apply((), {}, 60) == ("resource", module)
    worker.close()
    assert load_function(f"{module}:f")() == ("resource", module)
    assert [*sys.path, *sys.meta_path] == before and not (tmp_path / "ran").exists()


def test_arguments_may_have_any_name(path):
    worker = RewardWorker(f"{path}:columns")
    assert worker.apply((), {"timeout": 1, "self": 2}, 60) == {"timeout": 1, "self": 2}
    worker.close()


def test_a_worker_in_a_cycle_of_garbage_ends_its_process():
    """Collected in any order, with warnings as errors."""
    worker = RewardWorker("os:getpid")
    worker.start()
    process, worker.cycle = weakref.ref(worker.process), worker
    pid = worker.process.pid
    del worker
    gc.collect()
    assert process() is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
