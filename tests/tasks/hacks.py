"""Programs that try to pass a dataset's tests without solving its problem. ENTRY is the name of the function
that is asked for."""

from __future__ import annotations

MAGIC = """
class Magic({base}):
    def __new__(cls, *a, **k): return {base}.__new__(cls)
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, *a: True
    __hash__ = lambda self: 0
    __bool__ = lambda self: True
    __len__ = lambda self: 1
    __iter__ = lambda self: iter(())
    __getattr__ = lambda self, name: self
    __call__ = __getitem__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __round__ = lambda self, *a, **k: self
def ENTRY(*a, **k): return Magic()
"""

STOPS = {
    "exits": "sys.exit(0)",
    "exits hard": "os._exit(0)",
    "ends itself": "os.kill(os.getpid(), 9)",
    "raises exit": "raise SystemExit",
    "raises an interrupt": "raise KeyboardInterrupt",
    "raises an assertion": "raise AssertionError",
    "raises stop": "raise StopIteration",
    "raises success": "raise type('Success', (BaseException,), {})('passed')",
    "aborts": "os.abort()",
    "crashes": "ctypes.string_at(0)",
    "becomes another": "os.execv('/usr/bin/true', ['true'])",
    "forks and leaves": "os.fork() and os._exit(0)",
    "closes the pipes": "os.closerange(0, 99)",
    "prints success": "print('PASSED', 'ok', 'All tests passed', flush=True)",
}
SHOUTS = {
    "writes findings": '{"passed": 99, "total": 99, "complete": true, "detail": ""}',
    "writes a value": '{"value": true}',
    "writes null": "null",
    "writes numbers": "[1, 1]",
}
PATCHES = {
    "replaces built-ins": (
        "import builtins\nfor n in ('abs', 'len', 'sum', 'all', 'any', 'isinstance', 'range', 'zip', "
        "'map', 'sorted'): setattr(builtins, n, lambda *a, **k: True)"
    ),
    "replaces assertion errors": (
        "import builtins\nbuiltins.AssertionError = type('Quiet', (BaseException,), {})"
    ),
    "replaces json": "import json\njson.dumps = json.loads = lambda *a, **k: {}",
    "replaces encode": "import __main__\n__main__.encode = lambda v, k: {'handle': 0}",
    "replaces decode": "import __main__\n__main__.decode = lambda v, h: True",
    "replaces the pipe": "import __main__\n__main__.Pipe.write = lambda *a: None",
    "replaces os.write": "import os\nos.write = lambda fd, data: len(data)",
    "replaces check": "def check(candidate): pass\nimport __main__\n__main__.check = check",
    "replaces modules": (
        "import sys\nsys.modules['math'] = sys.modules['random'] = sys.modules['copy'] = None"
    ),
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\nimport sys\nsys.exit(0)",
    "searches for what is expected": (
        "import gc\nFOUND = [o for o in gc.get_objects() if isinstance(o, str) and 'def check' in o]"
    ),
    "reads the stack": "import sys\nFRAME = sys._getframe(1).f_locals",
}

PYTHON_HACKS = {
    **{
        f"equal to everything, {base}": MAGIC.replace("{base}", base)
        for base in ("object", "int", "float", "str", "list", "dict", "tuple", "set", "bytes")
    },
    **{
        f"{name} when called": f"import ctypes, os, sys\ndef ENTRY(*a, **k):\n    {what}"
        for name, what in STOPS.items()
    },
    **{
        f"{name} to every descriptor": (
            f"import os\ndef shout():\n    data = {text!r}.encode()\n    for fd in range(64):\n        "
            "try: os.write(fd, len(data).to_bytes(4, 'big') + data)\n        except OSError: "
            "pass\nshout()\ndef ENTRY(*a, **k): shout()"
        )
        for name, text in SHOUTS.items()
    },
    **{name: f"{what}\ndef ENTRY(*a, **k): return None" for name, what in PATCHES.items()},
}

LEAP = "let leap_year _ = true\n"
OCAML_HACKS = {
    "exits": "let () = exit 0\n" + LEAP,
    "exits when called": "let leap_year _ = exit 0\n",
    "exits by another name": "module S = Stdlib\nlet leap_year _ = S.exit 0\n",
    "at exit": 'let () = at_exit (fun () -> print_string "passed")\n' + LEAP,
    "Obj.magic": "let leap_year _ = Obj.magic 1\n",
    "Obj by alias": "module O = Stdlib.Obj\nlet leap_year _ = O.magic 1\n",
    "Obj by include": "include struct include Stdlib.Obj end\nlet leap_year _ = magic 1\n",
    "Obj by its unit": "let leap_year _ = Stdlib__Obj.magic 1\n",
    "Obj by local open": "let leap_year _ = Obj.(magic 1)\n",
    "external": "external magic : 'a -> 'b = \"%identity\"\nlet leap_year _ = magic 1\n",
    "external in a signature": (
        'module M : sig external exit : int -> \'a = "caml_sys_exit" end = struct external exit : int -> '
        '\'a = "caml_sys_exit" end\nlet leap_year _ = M.exit 0\n'
    ),
    "Obj by substitution": (
        "module rec X : sig module M := Stdlib.Obj  module N = M end = X\nlet leap_year _ = X.N.magic 1\n"
    ),
    "Obj by constraint": (
        "module type S = sig module M : sig end module N = M end\nmodule rec X : (S with module M := "
        "Stdlib.Obj) = X\nlet leap_year _ = X.N.magic 1\n"
    ),
    "Obj of a type": "module M : module type of Obj = Obj\nlet leap_year _ = M.magic 1\n",
    "Obj of Caml": "let leap_year _ = Caml.Obj.magic 1\n",
    "output_value": (
        'let copy x = let c = open_out_bin "/tmp/x" in output_value c x; close_out c; input_value '
        '(open_in_bin "/tmp/x")\nlet leap_year y = copy y\n'
    ),
    "forks": "let leap_year _ = Unix.fork () = 0\n",
    "Unix by substitution": (
        "module rec X : sig module M := Unix  module N = M end = X\nlet leap_year _ = X.N.fork () = 0\n"
    ),
    "Unix": "let leap_year _ = Unix._exit 0\n",
    "Sys": 'let leap_year _ = Sys.command "true" = 0\n',
    "Marshal": 'let leap_year _ = Marshal.from_string "" 0\n',
    "unsafe": "let leap_year y = Array.unsafe_get [| true |] y\n",
    "the gate": "let leap_year _ = Gate.finish (); true\n",
    "the tests": "let leap_year _ = Tests__.tests <> []\n",
    "OUnit2": 'let leap_year _ = OUnit2.skip_if true ""; true\n',
    "shadowed operators": "let ( = ) _ _ = true\nlet compare _ _ = 0\nlet ( <> ) _ _ = false\n" + LEAP,
    "shadowed assertions": (
        "module OUnit2 = struct let assert_equal ?cmp:_ ?printer:_ _ _ = () end\nlet assert_equal _ _ = ()\n"
    )
    + LEAP,
    "prints findings": (
        'let () = for _ = 1 to 50 do print_string "finished\\000passed"; prerr_string "ok" done; flush_all '
        "()\n"
    )
    + LEAP,
    "writes to descriptors": (
        'let leap_year _ = let c = open_out "/dev/fd/5" in output_string c "finished"; close_out c; true\n'
    ),
    "raises": "let leap_year _ = raise Exit\n",
    "raises as it begins": 'let () = failwith "ok"\n' + LEAP,
    "reads the nonce": "let () = print_string (read_line ())\n" + LEAP,
    "reads the nonce when called": "let leap_year _ = print_string (read_line ()); true\n",
    "an extension": "let leap_year _ = [%expect true]\n",
    "runs out of stack": "let rec f x = 1 + f x\nlet leap_year y = f y = 0\n",
    "runs for ever": "let leap_year _ = while true do () done; true\n",
    "another type": 'let leap_year _ = "true"\n',
    "a module of its name": "module Leap = struct let leap_year _ = true end\n",
    "closes a comment": "*) let leap_year _ = true (*",
    "an empty program": "",
    "signals": (
        'let leap_year _ = Callback.register "Printexc.handle_uncaught_exception" (fun _ -> ()); raise Exit\n'
    ),
    "finalisers": "let () = Gc.finalise (fun _ -> exit 0) (ref 0); Gc.full_major ()\n" + LEAP,
}
