"""Reward functions that hang, crash, or return what is no reward. Each is the body of a function of
`completions`; `n` is their number."""

from __future__ import annotations

VALUES = {
    "None for all": "None", "one number": "0.5", "text": "'1.0'", "a dict": "{}", "a set": "set()", "a generator": "(1.0 for _ in range(n))",
    "itself": "reward", "NaN": "[float('nan')] * n", "infinity": "[float('inf')] * n", "beyond the bound": "[1e300] * n",
    "an endless integer": "[10**9999] * n", "complex numbers": "[1j] * n", "decimals": "[Decimal(1)] * n", "words": "['good'] * n",
    "nested lists": "[[1.0]] * n", "bytes": "[b'1'] * n", "types": "[float] * n", "exceptions": "[ValueError('x')] * n", "lambdas": "[lambda: 1] * n",
    "too few": "[1.0] * (n - 1)", "too many": "[1.0] * (n + 1)", "nothing": "[]", "a tensor of two dimensions": "torch.zeros(n, 2)",
    "a tensor without dimensions": "torch.tensor(1.0)", "tensors of two": "[torch.zeros(2)] * n", "an array of objects": "np.array([object()] * n)",
    "verdicts of an unknown status": "[Verdict(1.0, 'good')] * n", "verdicts of a status that is a list": "[Verdict(1.0, ['ok'])] * n",
    "verdicts of words": "[Verdict('good', 'ok')] * n", "verdicts that are not finite": "[Verdict(float('nan'), 'ok')] * n",
    "verdicts without a value or status": "[Verdict(None, None)] * n", "booleans": "np.ones(n, dtype=bool)", "fractions": "[Fraction(1)] * n",
    "integers of numpy": "np.ones(n, dtype=np.int8)", "a tensor with a gradient": "torch.ones(n, requires_grad=True)", "bfloat16": "torch.ones(n).bfloat16()",
    "a tensor without data": "torch.ones(n, device='meta')", "dates": "np.array(['2020-01-01'] * n, dtype='datetime64[D]')",
    "a masked array": "np.ma.masked_all(n)", "a deque": "deque([1.0] * n)", "a view of a dict": "dict.fromkeys(range(n), 1.0).values()", "a mock": "Mock()",
    "an iterator of itself": "iter([1.0] * n)", "a function of none": "lambda: [1.0] * n",
}  # fmt: skip
STATEMENTS = {
    **{f"raises {error}": f"raise {error}('x')" for error in ("ValueError", "MemoryError", "RecursionError", "StopIteration", "SystemExit")},
    "raises KeyboardInterrupt": "raise KeyboardInterrupt", "raises GeneratorExit": "raise GeneratorExit", "raises another": "raise Odd",
    "raises a group": "raise ExceptionGroup('x', [ValueError(1)])",
    "exits": "sys.exit(3)", "recurses": "return reward(completions, **_)", "fails an assertion": "assert False", "sleeps": "time.sleep(60)",
    "loops": "while True: time.sleep(0)", "waits for a lock": "threading.Lock().acquire() and threading.Event().wait(60)",
    "forks": "return [1.0] * n if os.fork() else [9.0] * n", "forks and sleeps": "os.fork() or time.sleep(0.1)", "edits completions": "completions.clear()",
    "edits the data": "_['answer'].clear(); return [1.0]", "edits the state": "_['trainer_state'].max_steps = _['trainer_state'].global_step = 10**6",
    "logs nonsense": "_['log_metric'](3, 'x')",
    "logs without end": "_['log_extra']('x' * 10**6, [1.0] * n)", "closes stdin": "sys.stdin = None; raise OSError",
    "goes on in a thread": "threading.Thread(target=lambda: [time.sleep(0.01) or completions.clear() or _['log_metric']('late', 1.0) for _i in range(99)], daemon=True).start(); return [1.0] * n",
    "edits what it returned": "found = [1.0] * n; threading.Timer(0.01, found.clear).start(); return found", "raises a hostile group": "raise BaseExceptionGroup('x', [SystemExit(3), KeyboardInterrupt()])",
    "closes over the loggers": "reward.log = _['log_metric']; reward.log('a', 10**400)", "logs what is no number": "_['log_metric']('a', float('nan')); _['log_metric']('b', float('inf')); return [1.0] * n",
    "logs control characters": "_['log_metric']('a\\x1b[31m\\n', 1.0); _['log_extra']('b\\r\\x00', ['\\x1b'] * n); return [1.0] * n", "logs under names of its own": "_['log_metric']('loss', 9.0); _['log_metric']('reward', 9.0); _['log_extra']('prompt', [9] * n); return [1.0] * n",
    "logs columns of itself": "a = []; a.append(a); _['log_extra']('a', [a] * n); return [1.0] * n", "edits nested data": "[column[0].append(9) for column in _.values() if isinstance(column, list) and isinstance(column[0], list)]; return [1.0] * n",
    "raises an error with a cause without end": "e = ValueError(1); e.__cause__ = KeyError(2); e.__cause__.__context__ = e; raise e", "raises its own class": "raise Odd",
    "changes the signal handler": "signal.signal(signal.SIGUSR2, signal.SIG_IGN); return ['x'] * n",
}  # fmt: skip
BODIES = {f"returns {name}": f"return {value}" for name, value in VALUES.items()} | STATEMENTS
HEAD = """
import os, signal, sys, threading, time
from collections import deque
from fractions import Fraction
from unittest.mock import Mock
from unmask.rewards.verdict import Verdict
from decimal import Decimal
import numpy as np
import torch
class Odd(BaseException): pass
def reward(completions, **_):
    n = len(completions)
"""


def source(name: str) -> str:
    """The file of a hostile reward function, `reward`."""
    return f"{HEAD}    {BODIES[name]}\n"
