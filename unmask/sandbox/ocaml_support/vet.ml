(* Exits with 1 if a program contains a word that could break the type system, end the process or reach outside it.

   The compiler's lexer separates words from comments and strings. Candidates are also compiled without these modules; this check comes
   first, with a plainer message. *)

let modules =
  [
    "Obj"; "Marshal"; "Callback"; "Lexing"; "Parsing"; "Printexc"; "Gc"; "Sys"; "Unix"; "UnixLabels"; "Dynlink"; "Thread"; "Mutex";
    "Condition"; "Event"; "Domain"; "Effect"; "Bigarray"; "Ephemeron"; "Weak"; "In_channel"; "Out_channel"; "Stdio"; "Caml";
    "Exported_for_specific_uses"; "Not_exposed_properly"; "Shadow_stdlib";
  ]

let values = [ "exit"; "at_exit"; "do_at_exit"; "input_value"; "output_value" ]

let refuse lexbuf what =
  Printf.eprintf "line %d: %s is not available\n" lexbuf.Lexing.lex_curr_p.Lexing.pos_lnum what;
  exit 1

let rec contains text part from =
  from + String.length part <= String.length text
  && (String.sub text from (String.length part) = part || contains text part (from + 1))

let check lexbuf name =
  let is_value = name.[0] = '_' || (name.[0] >= 'a' && name.[0] <= 'z') in
  let internal = List.exists (fun part -> contains name part 0) (if is_value then [ "unsafe" ] else [ "__"; "Camlinternal"; "unsafe" ]) in
  if internal || List.mem name modules || List.mem name values then refuse lexbuf name

let rec vet lexbuf =
  match Lexer.token lexbuf with
  | Parser.EOF -> ()
  | token ->
      (match token with
      | Parser.UIDENT name | Parser.LIDENT name | Parser.LABEL name | Parser.OPTLABEL name -> check lexbuf name
      | Parser.EXTERNAL -> refuse lexbuf "external"
      | Parser.LBRACKETPERCENT | Parser.LBRACKETPERCENTPERCENT | Parser.QUOTED_STRING_EXPR _ | Parser.QUOTED_STRING_ITEM _ ->
          refuse lexbuf "an extension"
      | _ -> ());
      vet lexbuf

let () =
  let lexbuf = Lexing.from_channel (open_in_bin Sys.argv.(1)) in
  Lexer.init ();
  match vet lexbuf with
  | () -> ()
  | exception Lexer.Error _ ->
      prerr_endline "a syntax error";
      exit 1
