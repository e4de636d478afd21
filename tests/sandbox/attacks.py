"""Programs that attack the grader or the host. Each defines `f`, asked for twice its argument, and gives the
right answer only where its attack has succeeded: a verdict of `ok` is an escape."""

from __future__ import annotations

PREAMBLE = """
import ctypes, gc, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(attack):
    try:
        return bool(attack())
    except BaseException:
        return False
def read(path):
    with open(path, "rb") as file:
        return file.read(4096)
def answers(attack):
    worked = tried(attack)
    global f
    f = lambda x: 2 * x if worked else None
"""

FORGERIES = {
    "equal to everything": "class E:\n def __eq__(self, other): return True\ndef f(x): return E()",
    "a number equal to everything": (
        "class E(int):\n def __eq__(self, other): return True\n __hash__ = int.__hash__\ndef f(x): return "
        "E(7)"
    ),
    "text equal to everything": (
        "class E(str):\n def __eq__(self, other): return True\n __hash__ = str.__hash__\ndef f(x): return "
        "E('7')"
    ),
    "a list equal to everything": (
        "class E(list):\n def __eq__(self, other): return True\ndef f(x): return E()"
    ),
    "every comparison": (
        "class E(float):\n __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *a: True\ndef "
        "f(x): return E(1)"
    ),
    "exit as it is imported": "import sys\nsys.exit(0)",
    "hard exit as it is imported": "import os\nos._exit(0)",
    "exit when called": "import sys\ndef f(x): sys.exit(0)",
    "hard exit when called": "import os\ndef f(x): os._exit(0)",
    "an exception of success": "def f(x): raise SystemExit(0)",
    "an assertion of its own": "def f(x): raise AssertionError()",
    "prints that it passed": (
        "import sys\nprint('PASS ok 2 passed'); sys.stderr.write('OK')\ndef f(x):\n print('PASS'); return "
        "None"
    ),
    "writes findings to every descriptor": """
import os, json
data = json.dumps({"passed": 2, "total": 2, "complete": True, "detail": ""}).encode()
def shout():
    for fd in range(64):
        try: os.write(fd, len(data).to_bytes(4, "big") + data)
        except OSError: pass
shout()
def f(x): shout()
""",
    "answers before it is asked": """
import os, json, __main__
data = json.dumps({"value": True}).encode()
for fd in range(3, 16):
    try: os.write(fd, (len(data).to_bytes(4, "big") + data) * 8)
    except OSError: pass
def f(x): return True
""",
    "rewrites the worker": """
import __main__
__main__.encode = lambda value, keep: {"handle": 0}
__main__.Candidate.call = lambda *a: True
def f(x): return None
""",
    "rewrites json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return None",
    "rewrites the built-ins": """
import builtins
for name in ("int", "bool", "isinstance", "len", "all", "any", "AssertionError", "type", "repr"):
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return None
""",
    "walks the frames for what is expected": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if value == 2 * x and value is not x: return value
        frame = frame.f_back
""",
    "searches memory for the tests": """
import gc
def f(x):
    for thing in gc.get_objects():
        if isinstance(thing, (str, dict)) and "assert f(" in str(thing)[:100000]: return 2 * x
""",
    "answers with code": "def f(x): return (lambda: 2 * x).__code__",
    "answers with what cannot be decoded": (
        "class E(dict):\n def items(self): return [(self, self)]\ndef f(x): return E(a=1)"
    ),
    "a frame of garbage": """
import os, __main__
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b"\\x00\\x00\\x00\\x04\\xff\\xfe\\xfd\\xfc")
        except OSError: pass
""",
    "invalid text": "def f(x): return '\\udcff\\ud800' * 3",
    "a value that contains itself": "def f(x):\n a = []\n a.append(a)\n return a",
    "a value too deep": "def f(x):\n a = []\n for _ in range(100000): a = [a]\n return a",
    "not a number": "def f(x): return float('nan')",
    "a mutable that changes": (
        "class E(list):\n n = 0\n def __iter__(self): E.n += 1; return iter([E.n])\ndef f(x): return E()"
    ),
    "closes every descriptor": "import os\nos.closerange(0, 256)\ndef f(x): return 2 * x",
    "crashes the interpreter": "import ctypes\ndef f(x): return ctypes.string_at(0)",
    "is no program": "def f(x) return 2 * x",
    "is no text": "\x00\x00",
    "defines nothing": "",
    "is something else": "f = 6",
}

HOST = {
    "reads the host's accounts": "answers(lambda: read('/etc/passwd') or read('/etc/shadow'))",
    "reads a host file": "answers(lambda: read({canary!r}))",
    "writes a host file": "answers(lambda: open({canary!r}, 'a').write('pwned'))",
    "links to a host file": (
        "def go():\n os.symlink({canary!r}, '/tmp/link'); return read('/tmp/link')\nanswers(go)"
    ),
    "lists home": "answers(lambda: os.listdir('/root') + os.listdir('/home'))",
    "reads secrets of the environment": (
        "answers(lambda: os.environ.get('UNMASK_TEST_SECRET') or [k for k in os.environ if 'TOKEN' in k])"
    ),
    "reads /proc": (
        "answers(lambda: read('/proc/1/environ') or read('/proc/self/maps') or os.listdir('/proc'))"
    ),
    "connects by TCP": "answers(lambda: socket.create_connection(('127.0.0.1', {port}), 2))",
    "sends a datagram": (
        "answers(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', "
        "{port})))"
    ),
    "connects to an abstract socket": (
        "def go():\n s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}'); return "
        "s.send(b'x')\nanswers(go)"
    ),
    "resolves a name": "answers(lambda: socket.getaddrinfo('localhost', 80))",
    "kills its parent": "answers(lambda: os.kill(os.getppid(), 9) or os.getppid() > 2)",
    "kills everybody": "tried(lambda: os.kill(-1, 9))\ndef f(x): return None",
    "kills the test process": "answers(lambda: os.kill({pid}, 15) is None)",
    "makes a user namespace": "answers(lambda: libc.unshare(0x10000000) == 0)",
    "makes a mount namespace": (
        "answers(lambda: libc.unshare(0x00020000) == 0 or libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) "
        "== 0)"
    ),
    "traces a process": (
        "answers(lambda: libc.ptrace(0, 0, 0, 0) == 0 or libc.ptrace(16, os.getppid(), 0, 0) == 0)"
    ),
    "reads another's memory": "answers(lambda: libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) >= 0)",
    "changes its user": "answers(lambda: os.setuid(0) is None)",
    "changes its root": "answers(lambda: os.chroot('/tmp') is None)",
    "opens devices": (
        "answers(lambda: [d for d in os.listdir('/dev') if d in ('mem', 'kmsg', 'sda', 'vda', 'kvm')] or "
        "open('/dev/mem'))"
    ),
    "types into a terminal": "import fcntl\nanswers(lambda: fcntl.ioctl(0, 0x5412, b'x') is not None)",
    "has a terminal of its own": (
        "answers(lambda: tried(lambda: os.open('/dev/ptmx', os.O_RDWR)) or os.openpty())"
    ),
    "locks a file that the host sees": (
        "import fcntl\ndef go():\n"
        " for path in ('/sandbox/lock', '/sandbox/worker.pyc', '/usr/bin/env'):\n"
        "  for lock in (lambda file: fcntl.flock(file, 2 | 4), lambda file: fcntl.lockf(file, 1 | 4)):\n"
        "   if tried(lambda: lock(open(path)) is None): return True\nanswers(go)"
    ),
    "writes to /usr": "answers(lambda: open('/usr/lib/pwned', 'w'))",
    "writes to the worker": (
        "answers(lambda: open('/sandbox/worker.pyc', 'ab') or os.unlink('/sandbox/worker.pyc') is None)"
    ),
    "raises its limits": (
        "import resource\nanswers(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)) is None)"
    ),
    "loads a kernel program": (
        "answers(lambda: libc.syscall(321, 0, 0, 0) >= 0 or libc.syscall(425, 8, "
        "ctypes.create_string_buffer(256)) >= 0)"
    ),
    "keeps keys": "answers(lambda: libc.syscall(250, 0, -3, 0, 0, 0) > 0)",
    "shares memory": "answers(lambda: libc.shmget(1234, 4096, 0o1666) >= 0)",
    "finds what the last program left": (
        "left = os.path.exists('/tmp/left') or os.path.exists('/dev/shm/left')\n"
        "tried(lambda: open('/tmp/left', 'w'))\ntried(lambda: open('/dev/shm/left', "
        "'w'))\nanswers(lambda: left)"
    ),
    "finds other processes": (
        "answers(lambda: [pid for pid in range(4, 4000) if tried(lambda: os.kill(pid, 0) is None) and pid "
        "!= os.getpid()])"
    ),
}

GREED = {
    "a fork bomb": "while True:\n try: os.fork()\n except OSError: pass",
    "a thread bomb": (
        "while True:\n try: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n except "
        "RuntimeError: pass"
    ),
    "a daemon": (
        "if os.fork() == 0:\n tried(os.setsid)\n if os.fork() == 0:\n  signal.signal(signal.SIGTERM, "
        "signal.SIG_IGN)\n  time.sleep(600)\n os._exit(0)\n"
        "def f(x): return None"
    ),
    "all memory": "held = []\nwhile True: held.append(bytearray(1 << 24))",
    "memory of many processes": (
        "for _ in range(16):\n if os.fork() == 0:\n  held = bytearray(1 << 28); "
        "time.sleep(60)\ntime.sleep(1)\ndef f(x): return None"
    ),
    "all disk": "with open('/tmp/big', 'wb') as file:\n while True: file.write(bytes(1 << 20))",
    "many files": "for n in range(10**9):\n with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(4096))",
    "endless output": "while True: print('x' * 10**6)",
    "an enormous answer": "def f(x): return 'x' * (1 << 28)",
    "many answers": "def f(x): return list(range(10**7))",
    "a loop that ignores signals": (
        "for s in range(1, 64):\n try: signal.signal(s, signal.SIG_IGN)\n except (OSError, ValueError): "
        "pass\nwhile True: pass"
    ),
    "a loop when called": "def f(x):\n while True: pass",
    "sleep": "time.sleep(600)",
    "an enormous power": "def f(x): return 44**35**19",
    "endless recursion": "def f(x): return f(x)",
    "an enormous number": "def f(x): return 1 << (1 << 26)",
    "all descriptors": "held = []\nwhile True: held.append(os.open('/dev/null', 0))",
}
