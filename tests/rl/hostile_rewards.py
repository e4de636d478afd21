# ruff: noqa: E501 (tables)
"""Reward functions that hang, crash, or return what is no reward. Each is the body of a function of `completions`; `n` is their number."""

from __future__ import annotations

VALUES = {
    "None for all": "None", "one number": "0.5", "text": "'1.0'", "a dict": "{}", "a set": "set()", "a generator": "(1.0 for _ in range(n))",
    "itself": "reward", "NaN": "[float('nan')] * n", "infinity": "[float('inf')] * n", "beyond the bound": "[1e300] * n",
    "an endless integer": "[10**9999] * n", "complex numbers": "[1j] * n", "decimals": "[Decimal(1)] * n", "words": "['good'] * n",
    "nested lists": "[[1.0]] * n", "bytes": "[b'1'] * n", "types": "[float] * n", "exceptions": "[ValueError('x')] * n", "lambdas": "[lambda: 1] * n",
    "too few": "[1.0] * (n - 1)", "too many": "[1.0] * (n + 1)", "nothing": "[]", "a tensor of two dimensions": "torch.zeros(n, 2)",
    "a tensor without dimensions": "torch.tensor(1.0)", "tensors of two": "[torch.zeros(2)] * n", "an array of objects": "np.array([object()] * n)",
    **{f"methods that raise {error}": f"[odd({error}) for _ in range(n)]" for error in ("SystemExit", "KeyboardInterrupt", "ValueError", "Odd")},
    **{f"a sequence that raises {error}": f"oddly({error})" for error in ("SystemExit", "KeyboardInterrupt", "ValueError", "Odd")},
    "numbers that claim to be small": "[Small('inf') for _ in range(n)]",
}  # fmt: skip
STATEMENTS = {
    **{f"raises {error}": f"raise {error}('x')" for error in ("ValueError", "MemoryError", "RecursionError", "StopIteration", "SystemExit")},
    "raises KeyboardInterrupt": "raise KeyboardInterrupt", "raises GeneratorExit": "raise GeneratorExit", "raises another": "raise Odd",
    "raises a group": "raise ExceptionGroup('x', [ValueError(1)])", "raises what cannot be printed": "raise unprintable()",
    "exits": "sys.exit(3)", "recurses": "return reward(completions, **_)", "fails an assertion": "assert False", "sleeps": "time.sleep(60)",
    "loops": "while True: time.sleep(0)", "waits for a lock": "threading.Lock().acquire() and threading.Event().wait(60)",
    "forks": "return [1.0] * n if os.fork() else [9.0] * n", "forks and sleeps": "os.fork() or time.sleep(0.1)", "edits completions": "completions.clear()",
    "edits the data": "_['answer'].clear(); return [1.0]", "edits the state": "_['trainer_state'].max_steps = _['trainer_state'].global_step = 10**6",
    "logs nonsense": "_['log_metric'](3, 'x')", "logs what cannot be printed": "_['log_extra']('odd', [odd(SystemExit)] * n)",
    "logs without end": "_['log_extra']('x' * 10**6, [1.0] * n)", "closes stdin": "sys.stdin = None; raise OSError",
    "changes the signal handler": "signal.signal(signal.SIGUSR2, signal.SIG_IGN); return ['x'] * n",
}  # fmt: skip
BODIES = {f"returns {name}": f"return {value}" for name, value in VALUES.items()} | STATEMENTS
HEAD = """
import os, signal, sys, threading, time
from decimal import Decimal
import numpy as np
import torch
class Odd(BaseException): pass
def odd(error, base=float):
    def fail(self, *_): raise error
    names = ("repr", "str", "format", "float", "abs", "le", "lt", "ge", "gt", "bool", "len", "index", "int")
    return type("Hostile", (base,), {f"__{name}__": fail for name in names})()
def oddly(error): return odd(error, list)
def unprintable(): return type("Unprintable", (Exception,), {"__str__": lambda self: sys.exit(4), "__repr__": lambda self: sys.exit(4)})()
class Small(float):
    def __abs__(self): return 0.0
    def __le__(self, other): return True
def reward(completions, **_):
    n = len(completions)
"""


def source(name: str) -> str:
    """The file of a hostile reward function, `reward`."""
    return f"{HEAD}    {BODIES[name]}\n"
