"""OCaml candidates that read and write any memory, so that only their process bounds them: what they could send to the tests.

They are compiled with Obj, Unix and everything else that candidates are refused. Each takes over the pipes as it starts, and answers every
frame of the tests with its own bytes.
"""

from __future__ import annotations

import itertools

TAKEOVER = """
let outgoing : Unix.file_descr = Obj.magic (int_of_string Sys.argv.(1))
let incoming : Unix.file_descr = Obj.magic (int_of_string Sys.argv.(2))
let put text =
  let size = Bytes.create 4 in
  Bytes.set_int32_be size 0 (Int32.of_int (String.length text));
  let data = Bytes.to_string size ^ text in
  ignore (Unix.write_substring outgoing data 0 (String.length data))
let rec get size =
  let text = Bytes.create size in
  let rec fill from = if from < size then match Unix.read incoming text from (size - from) with 0 -> exit 0 | n -> fill (from + n) in
  fill 0;
  Bytes.to_string text
let int number = let text = Bytes.create 8 in Bytes.set_int64_le text 0 (Int64.of_int number); Bytes.to_string text
let text value = int (String.length value) ^ value
let frame () = get (Int32.to_int (String.get_int32_be (get 4) 0))
let () = while true do let asked = frame () in ignore asked; %s done
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
    "signals to the first processes": "for pid = 1 to 64 do if pid <> Unix.getpid () then try Unix.kill pid Sys.sigkill with _ -> () done",
    "a forked process": "(try ignore (Unix.fork ()) with _ -> ()); put (\"R\" ^ int 2)",
    "the tests' program": '(try Unix.execv "/proc/1/exe" [| "x" |] with _ -> ()); put ("R" ^ int 2)',
    "a cast integer": 'put ("R" ^ int (Obj.magic "passed"))',
    "memory beyond a string": 'put ("R" ^ String.init 4096 (fun i -> String.unsafe_get asked (i - 2048)))',
    "a random result": 'put ("R" ^ String.init 64 (fun _ -> Char.chr (Random.int 256)))',
}  # fmt: skip
"""What the candidate sends for a frame of the tests."""


def takeover(reply: str) -> str:
    """A program that takes over the pipes and sends this reply for every frame."""
    return TAKEOVER % reply


UNSAFE_BLIT = """
module Forged = Base.Blit.Make (struct
  include Base.Bytes
  let create ~len = create len
  let length _ = max_int
end)
let buffer = Base.Bytes.make 8 'x'
let () = for offset = 0 to 4096 do
  try Forged.blit ~src:buffer ~src_pos:0 ~dst:(Base.Bytes.make 64 'x') ~dst_pos:(64 * offset) ~len:8 with _ -> ()
done
"""
"""Writes outside its own memory without a refused word (`length` is not true of `Base.Bytes`)."""
