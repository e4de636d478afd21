(* Reports the results of the tests. It is linked after the candidate, which cannot name it, and before the tests.

   It sends "ready" once the candidate is initialised, then reads the nonce, and signs every result with it. *)

let control : Unix.file_descr = Obj.magic 3

let rec write text from =
  if from < String.length text then write text (from + Unix.write_substring control text from (String.length text - from))

let send words =
  let text = String.concat "\000" words in
  let size = Bytes.create 4 in
  Bytes.set_int32_be size 0 (Int32.of_int (String.length text));
  write (Bytes.to_string size ^ text) 0

let nonce =
  send [ "ready" ];
  let text = Bytes.create 32 in
  let rec read from = if from < 32 then read (from + Unix.read Unix.stdin text from (32 - from)) in
  read 0;
  Bytes.to_string text

let report kind name = send [ nonce; kind; name ]
let check passed = report (if passed then "passed" else "failed") ""
let finish () = report "finished" ""

let run suite =
  let name path = OUnitTest.string_of_path path in
  List.iter (fun path -> report "planned" (name path)) (OUnitTest.test_case_paths suite);
  let conf = OUnitConf.default ~preset:(OUnitChooser.preset (OUnitRunner.preset [])) () in
  let results = OUnitCore.perform_test conf OUnitLogger.null_logger OUnitRunner.sequential_runner (snd (OUnitChooser.choice conf)) suite in
  List.iter (fun (path, result, _) -> report (if result = OUnitTest.RSuccess then "passed" else "failed") (name path)) results

module OUnit2 = struct
  include OUnit2

  let run_test_tt_main ?exit:_ suite = run suite
end
