(* Runs the tests and reports their results. Its process has no code of the candidate, which is asked over pipes (wire.ml). *)

let passed = ref 0
let total = ref 0
let complete = ref false
let detail = ref ""

let count name right =
  incr total;
  if right then incr passed else if !detail = "" then detail := name

let () = Wire.is_failure := function Assert_failure _ | OUnitTest.OUnit_failure _ -> true | _ -> false
let check test = count (Printf.sprintf "test %d" (!total + 1)) (try test () with _ -> false)
let finish () = complete := true

let run suite =
  let conf = OUnitConf.default ~preset:(OUnitChooser.preset (OUnitRunner.preset [])) () in
  let results = OUnitCore.perform_test conf OUnitLogger.null_logger OUnitRunner.sequential_runner (snd (OUnitChooser.choice conf)) suite in
  List.iter (fun (path, result, _) -> count (OUnitTest.string_of_path path) (result = OUnitTest.RSuccess)) results;
  let planned = List.length (OUnitTest.test_case_paths suite) in
  if List.length results <> planned then count "a test that was not run" false

module OUnit2 = struct
  include OUnit2

  let run_test_tt_main ?exit:_ suite = run suite
end

(* JSON of the results, when the process ends, however it ends. *)
let () =
  at_exit (fun () ->
      let letter character = if character < ' ' || character > '~' || character = '"' || character = '\\' then "?" else String.make 1 character in
      let text = String.concat "" (List.map letter (List.of_seq (String.to_seq !detail))) in
      let results = Printf.sprintf {|{"passed": %d, "total": %d, "complete": %b, "detail": "%s"}|} !passed !total !complete text in
      let size = Bytes.create 4 in
      Bytes.set_int32_be size 0 (Int32.of_int (String.length results));
      Wire.write_all (Wire.descriptor 3) (Bytes.to_string size ^ results) 0)
