"""OCaml candidates that read and write any memory, so that only their process bounds them: what they could
send to the tests.

Each takes over the pipes as it starts, and answers every frame of the tests with its own bytes. Those with
`PIPES` are compiled with Obj, Unix and everything else that candidates are refused. Those with `BLIT_PIPES`
use no refused word, but a hole in Base.
"""

from __future__ import annotations

import itertools

import pytest

from unmask.sandbox import ocaml

PIPES = """
let outgoing : Unix.file_descr = Obj.magic (int_of_string Sys.argv.(1))
let incoming : Unix.file_descr = Obj.magic (int_of_string Sys.argv.(2))
let put text =
  let size = Bytes.create 4 in
  Bytes.set_int32_be size 0 (Int32.of_int (String.length text));
  let data = Bytes.to_string size ^ text in
  ignore (Unix.write_substring outgoing data 0 (String.length data))
let get size =
  let text = Bytes.create size in
  let rec fill from = if from < size then match Unix.read incoming text from (size - from) with 0 -> exit 0 | n -> fill (from + n) in
  fill 0;
  Bytes.to_string text
let cast value = Obj.magic value
"""

BLIT_PIPES = """
module Anywhere = Base.Blit.Make (struct
  include Base.Bytes
  let create ~len = create len
  let length _ = max_int
end)
type ('a, 'b) cell = { mutable source : 'a; mutable target : 'b }
let cell source target = { source; target } [@@inline never]
(* A block lies before the one that was made before it: the fields of a cell are 24 and 32 bytes after the window. *)
let window () = Bytes.make 8 ' ' [@@inline never]
let move bytes from till = Anywhere.blit ~src:bytes ~src_pos:from ~dst:bytes ~dst_pos:till ~len:8
let cast value =
  let held = cell (Some value) None in
  move (window ()) 24 32;
  match held.target with Some value -> value | None -> raise Not_found
let address value =
  let held = cell value () in
  let bytes = window () in
  move bytes 24 0;
  ignore held.source;
  Bytes.get_int64_le bytes 0
let at address =
  let held = cell () Bytes.empty in
  let bytes = window () in
  Bytes.set_int64_le bytes 0 address;
  move bytes 0 32;
  held.target
let redirect channel file =
  let bytes = Bytes.create 8 in
  Anywhere.blit ~src:(at (address channel)) ~src_pos:8 ~dst:bytes ~dst_pos:0 ~len:8;
  let structure = at (Bytes.get_int64_le bytes 0) in
  Bytes.set_int32_le bytes 0 (Int32.of_int file);
  Anywhere.blit ~src:bytes ~src_pos:0 ~dst:structure ~dst_pos:0 ~len:4
let rec with_file file action = try action !file with Sys_error _ when !file < 64 -> incr file; with_file file action
let sink, source = ref 3, ref 3
let put text =
  let size = Bytes.create 4 in
  Bytes.set_int32_be size 0 (Int32.of_int (String.length text));
  output_bytes stdout size;
  with_file sink (fun file -> redirect stdout file; flush stdout);
  output_string stdout text;
  flush stdout
let get size = with_file source (fun file -> redirect stdin file; really_input_string stdin size)
"""
"""Copies bytes outside its own memory (`length` is not true of `Base.Bytes`): so it casts values, and makes
standard channels the pipes."""

ANSWERS = """
let int number = let text = Bytes.create 8 in Bytes.set_int64_le text 0 (Int64.of_int number); Bytes.to_string text
let text value = int (String.length value) ^ value
let frame () = get (Int32.to_int (String.get_int32_be (get 4) 0))
let rest text from = if from > String.length text then "" else String.sub text from (String.length text - from)
let arguments asked = if asked.[0] = 'C' then rest asked (9 + Int64.to_int (String.get_int64_le asked 1)) else rest asked 9
let many count value = String.concat "" (List.init count (fun _ -> value))
let first = ref ""
let () = while true do let asked = frame () in if !first = "" then first := asked; %s done
"""

REPLIES = {
    **{f"the number {number}": f'put ("R" ^ int ({number}))' for number in (0, 1, 2, -1, 255, 256, "max_int", "min_int", "1 lsl 24")},
    **{
        f"{count} bytes of {byte}": f'put ("R" ^ String.make {count} (Char.chr {byte}))'
        for count, byte in itertools.product((0, 1, 7, 9, 64), (0, 1, 255))
    },
    "what was asked": "put asked",
    "what was asked, as a result": 'put ("R" ^ asked)',
    "the arguments, as a result": 'put ("R" ^ String.sub asked 1 (String.length asked - 1))',
    "the last eight bytes": 'put ("R" ^ String.sub asked (String.length asked - 8) 8)',
    "a text": 'put ("R" ^ text "passed")',
    "a text of negative length": 'put ("R" ^ int (-1) ^ "passed")',
    "a text of the greatest length": 'put ("R" ^ int max_int ^ "passed")',
    "a text that is longer than the frame": 'put ("R" ^ int 100 ^ "passed")',
    "a list of the greatest length": 'put ("R" ^ int max_int)',
    "a list of sixteen million": 'put ("R" ^ int (1 lsl 24) ^ String.make 1000 (Char.chr 1))',
    **{
        f"the exception {name}": f'put ("E" ^ text "{name}" ^ text "{what}")'
        for name, what in (
            *(("Failure", ""), ("Failure", "ok"), ("Invalid_argument", "passed"), ("Not_found", ""), ("Exit", ""), ("Stack_overflow", "")),
            *(("OUnitTest.Skip", "skipped"), ("OUnit2.OUnit_failure", ""), ("Stdlib.Exit", ""), ("End_of_file", "x"), ("", "")),
            ("Division_by_zero", ""),
        )
    },
    "an exception without a text": 'put "E"',
    "an exception of a long name": 'put ("E" ^ text (String.make 100000 (Char.chr 65)) ^ text "")',
    **{f"a call of function {number}": f'put ("F" ^ int ({number}) ^ int 1)' for number in (0, 1, -1, "max_int")},
    "a call of the tests": 'put ("C" ^ text "twice" ^ int 2)',
    "a call of a functor": 'put ("C" ^ text "Make")',
    "calls without end": 'while true do put ("C" ^ text "x") done',
    "frames of an unknown kind": 'put "Z"',
    "an empty frame": 'put ""',
    "a frame of negative length": 'ignore (Unix.write_substring outgoing "\\255\\255\\255\\255" 0 4)',
    "a frame that is too long": 'ignore (Unix.write_substring outgoing "\\127\\255\\255\\255" 0 4)',
    "half a frame": 'ignore (Unix.write_substring outgoing "\\000\\000\\000\\100R" 0 5)',
    "nothing": "()",
    "two results at once": 'put ("R" ^ int 2); put ("R" ^ int 5)',
    "sixteen megabytes": 'put ("R" ^ String.make ((1 lsl 24) - 1) (Char.chr 1))',
    "the report of the gate": 'put {|{"passed": 2, "total": 2, "complete": true, "detail": ""}|}',
    "the report to every descriptor": '''
        let report = {|{"passed": 2, "total": 2, "complete": true, "detail": ""}|} in
        for file = 0 to 63 do
          try ignore (Unix.write_substring (Obj.magic file) ("\\000\\000\\000\\057" ^ report) 0 (4 + String.length report)) with _ -> ()
        done''',
    "a closed pipe": "Unix.close outgoing",
    "the end of the process": "exit 0",
    "the end by a signal": "Unix.kill (Unix.getpid ()) Sys.sigkill",
    "signals to all processes": "(try Unix.kill (-1) Sys.sigkill with _ -> ()); put (\"R\" ^ int 2)",
    "signals to the first processes":
        'for pid = 1 to 64 do if pid <> Unix.getpid () then try Unix.kill pid Sys.sigkill with _ -> () done; put ("R" ^ int 2)',
    "a forked process": "(try ignore (Unix.fork ()) with _ -> ()); put (\"R\" ^ int 2)",
    "the tests' program": '(try Unix.execv "/proc/1/exe" [| "x" |] with _ -> ()); put ("R" ^ int 2)',
    "a cast integer": 'put ("R" ^ int (Obj.magic "passed"))',
    "memory beyond a string": 'put ("R" ^ String.init 4096 (fun i -> String.unsafe_get asked (i - 2048)))',
    "the arguments alone": 'put ("R" ^ arguments asked)',
    "the arguments twice": 'put ("R" ^ many 2 (arguments asked))',
    "the arguments, and that there is one": 'put ("R" ^ int 1 ^ arguments asked)',
    "the arguments as each of a hundred": 'put ("R" ^ int 100 ^ many 100 (arguments asked))',
    "the arguments of the first question": 'put ("R" ^ arguments !first)',
    "the arguments in an exception": 'put ("E" ^ text "Failure" ^ text (arguments asked))',
    "what a function of the tests gives": 'put ("F" ^ int 0 ^ arguments asked); put (frame ())',
    "calls of many functions of the tests":
        'for i = 0 to 20 do put ("F" ^ int i ^ arguments asked); ignore (frame ()) done; put ("R" ^ int 1)',
    "not a number": 'put ("R" ^ int (-1 lsl 51))',
    "an infinite number": 'put ("R" ^ int (2047 lsl 52))',
    "a hundred results at once": 'for _ = 1 to 100 do put ("R" ^ int 1) done',
    "results without end": 'while true do put ("R" ^ int 1) done',
    "a text in the form of a result": 'put ("R" ^ text ("R" ^ int 1))',
    "a text in the form of the report": 'put ("R" ^ text {|{"passed": 2, "total": 2, "complete": true, "detail": ""}|})',
    "a list of a million": 'put ("R" ^ int 1_000_000 ^ String.make 8_000_000 (Char.chr 0))',
    "a value within a value, a million times": 'put ("R" ^ many 1_000_000 (int 1))',
    "the last of many handles": 'put ("R" ^ int 1000)',
    "a result, and the end of the process": 'put ("R" ^ int 1); exit 0',
    "a result, and a closed pipe": 'put ("R" ^ int 1); Unix.close outgoing',
    "a result byte by byte":
        'String.iter (fun byte -> ignore (Unix.write_substring outgoing (String.make 1 byte) 0 1)) ("\\000\\000\\000\\009R" ^ int 1)',
    "bytes without end": 'while true do ignore (Unix.write_substring outgoing (String.make 65536 (Char.chr 1)) 0 65536) done',
    "a random result": 'put ("R" ^ String.init 64 (fun _ -> Char.chr (Random.int 256)))',
}  # fmt: skip
"""What the candidate sends for a frame of the tests."""


def takeover(reply: str, interface: str, pipes: str = PIPES) -> str:
    """A program of this interface that takes over the pipes, and sends this reply for every frame."""
    program = f"module Taken = struct\n{pipes}{ANSWERS % reply}\nend\n"
    return f"{program}module type S = sig\n{interface}\nend\ninclude (val (Taken.cast () : (module S)))\n"


REFUSED = ("Obj", "Unix", "exit", "unsafe", "outgoing")
BLIT_REPLIES = [name for name, reply in REPLIES.items() if not any(word in reply for word in REFUSED)]
"""Those that need no refused word."""


def without_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates may use Obj, Unix and Sys: what they do to their own process is bounded by nothing."""
    given = ocaml.Toolchain.build_candidate

    def build(tools: ocaml.Toolchain, module: str) -> list[list[str]]:
        commands = given(tools, module)
        assert commands[2][0].endswith("/vet")
        start = commands[3].index("-nostdlib")
        unrestricted = [*commands[3][:start], *commands[3][start + 3 :]]
        return [*commands[:2], ["/bin/true"], unrestricted, *commands[4:]]

    monkeypatch.setattr(ocaml.Toolchain, "build_candidate", build)
