(* Refuses a program that names what could break the type system, end the process or reach beyond it; says why and exits with 1.

   Names are enough: a module must be named once, somewhere, before it can be aliased, opened, included or handed on. *)

open Parsetree

let modules =
  [
    "Obj"; "Marshal"; "Callback"; "Lexing"; "Parsing"; "Printexc"; "Gc"; "Sys"; "Unix"; "UnixLabels"; "Dynlink"; "Thread"; "Mutex";
    "Condition"; "Event"; "Domain"; "Effect"; "Bigarray"; "Ephemeron"; "Weak"; "In_channel"; "Out_channel"; "Stdio"; "Caml";
    "Exported_for_specific_uses"; "Not_exposed_properly"; "Shadow_stdlib";
  ]

let values = [ "exit"; "at_exit"; "do_at_exit" ]

let refuse location what =
  let line = location.Location.loc_start.Lexing.pos_lnum in
  Printf.eprintf "line %d: %s is not available\n" line what;
  exit 1

let rec contains text part from =
  from + String.length part <= String.length text
  && (String.sub text from (String.length part) = part || contains text part (from + 1))

let word location name =
  let internal = contains name "__" 0 || contains name "Camlinternal" 0 || contains name "unsafe" 0 in
  if internal || List.mem name modules || List.mem name values then refuse location name

let rec name location = function
  | Longident.Lident last -> word location last
  | Longident.Ldot (path, last) -> name location path; word location last
  | Longident.Lapply (f, argument) -> name location f; name location argument

let at { Location.txt; loc } = name loc txt

let iterator =
  let open Ast_iterator in
  {
    default_iterator with
    expr =
      (fun self node ->
        (match node.pexp_desc with
        | Pexp_ident path | Pexp_new path | Pexp_construct (path, _) | Pexp_field (_, path) | Pexp_setfield (_, path, _) -> at path
        | Pexp_extension _ -> refuse node.pexp_loc "an extension"
        | _ -> ());
        default_iterator.expr self node);
    typ =
      (fun self node ->
        (match node.ptyp_desc with
        | Ptyp_constr (path, _) | Ptyp_class (path, _) | Ptyp_package (path, _) -> at path
        | _ -> ());
        default_iterator.typ self node);
    module_expr =
      (fun self node ->
        (match node.pmod_desc with Pmod_ident path -> at path | _ -> ());
        default_iterator.module_expr self node);
    module_type =
      (fun self node ->
        (match node.pmty_desc with Pmty_ident path | Pmty_alias path -> at path | _ -> ());
        default_iterator.module_type self node);
    open_description = (fun self node -> at node.popen_expr; default_iterator.open_description self node);
    value_description =
      (fun self node ->
        if node.pval_prim <> [] then refuse node.pval_loc "external";
        default_iterator.value_description self node);
  }

let () =
  let path = Sys.argv.(1) in
  let channel = open_in_bin path in
  let buffer = Lexing.from_channel channel in
  Location.init buffer path;
  match Parse.implementation buffer with
  | program -> iterator.structure iterator program
  | exception error ->
      prerr_endline (match error with Syntaxerr.Error _ -> "a syntax error" | _ -> Printexc.to_string error);
      exit 1
