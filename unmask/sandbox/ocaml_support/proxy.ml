(* Writes the two sides of an interface: what the tests call (stub.ml, the interface's own names), and what answers with the candidate
   (serve.ml). Exits with 1 if the interface has something that cannot pass between two processes.

   Usage: proxy INTERFACE.mli STUB.ml SERVE.ml *)

open Parsetree
open Asttypes

exception Unsupported of string

let spf = Printf.sprintf
let concat = String.concat
let indexed items = List.mapi (fun number item -> (spf "x%d" number, item)) items

type side = {
  out : Buffer.t;
  candidate : bool; (* serve.ml *)
  path : string; (* what names of types are written with *)
}

let rec flat = function
  | Longident.Lident name -> name
  | Longident.Ldot (path, name) -> flat path ^ "." ^ name
  | Longident.Lapply (functor_, argument) -> spf "%s(%s)" (flat functor_) (flat argument)

(* The abstract types with a parameter: their codecs take the store of its values. *)
let stored : string list ref = ref []

let mangled name = String.map (fun letter -> if letter = '.' then '_' else letter) name

(* An expression of the codec of a type. *)
let rec codec kind =
  match kind.ptyp_desc with
  | Ptyp_var name -> "var_" ^ name
  | Ptyp_alias (kind, _) | Ptyp_poly (_, kind) -> codec kind
  | Ptyp_tuple kinds ->
      let parts = indexed kinds in
      let names = concat ", " (List.map fst parts) in
      let writes = List.map (fun (name, kind) -> spf "%s.Wire.write buffer %s" (codec kind) name) parts in
      let reads = List.map (fun (name, kind) -> spf "let %s = %s.Wire.read reader in" name (codec kind)) parts in
      spf "{ Wire.write = (fun buffer (%s) -> %s); read = (fun reader -> %s (%s)) }" names (concat "; " writes) (concat " " reads) names
  | Ptyp_constr ({ txt = Lident name; _ }, [ { ptyp_desc = Ptyp_var variable; _ } ]) when List.mem name !stored ->
      spf "(codec_%s store_%s)" name variable
  | Ptyp_constr ({ txt; _ }, arguments) -> constructor (flat txt) (List.map codec arguments)
  | Ptyp_variant (fields, Closed, None) ->
      let case field =
        match field.prf_desc with
        | Rtag ({ txt; _ }, true, []) -> ("`" ^ txt, [])
        | Rtag ({ txt; _ }, false, [ kind ]) -> ("`" ^ txt, [ kind ])
        | _ -> raise (Unsupported "a polymorphic variant of other types")
      in
      cases (List.map case fields) ""
  | Ptyp_arrow _ ->
      let arguments, result = arrows kind in
      let name number = spf "x%d" number in
      let each write = concat "" (List.mapi write arguments) in
      let reads = each (fun number (_, kind) -> spf "let %s = %s.Wire.read reader in " (name number) (codec kind)) in
      let writes = each (fun number (_, kind) -> spf "%s.Wire.write buffer %s; " (codec kind) (name number)) in
      let names = each (fun number (label, _) -> passed label (name number)) in
      spf "(Wire.func (fun f reader -> %slet result = f%s in fun buffer -> %s.Wire.write buffer result) (fun ask -> fun%s -> ask (fun buffer -> %s()) %s.Wire.read))"
        reads names (codec result) names writes (codec result)
  | _ -> raise (Unsupported "a type that is not plain data")

and passed label name =
  match label with Nolabel -> " " ^ name | Labelled label -> spf " ~%s:%s" label name | Optional label -> spf " ?%s:%s" label name

(* The arguments of a function, an optional one as an option, and its result. *)
and arrows kind =
  match kind.ptyp_desc with
  | Ptyp_arrow (label, argument, rest) ->
      let arguments, result = arrows rest in
      let optional = { argument with ptyp_desc = Ptyp_constr ({ txt = Longident.Lident "option"; loc = argument.ptyp_loc }, [ argument ]) } in
      ((label, match label with Optional _ -> optional | _ -> argument) :: arguments, result)
  | _ -> ([], kind)

and constructor name arguments =
  let apply name = match arguments with [] -> name | _ -> spf "(%s)" (concat " " (name :: arguments)) in
  match name with
  | "int" | "int64" | "float" | "bool" | "char" | "string" | "unit" | "list" | "array" | "option" | "result" -> apply ("Wire." ^ name)
  | "Int64.t" | "Int.t" | "Float.t" | "Bool.t" | "Char.t" | "String.t" | "List.t" | "Array.t" | "Option.t" | "Result.t" ->
      apply ("Wire." ^ String.lowercase_ascii (Filename.remove_extension name))
  | "Map.M(String).t" | "Map.M(Char).t" | "Map.M(Int).t" ->
      let key = String.sub name 6 (String.length name - 9) in
      let pair = spf "(Wire.pair Wire.%s %s)" (String.lowercase_ascii key) (concat " " arguments) in
      spf "(Wire.via (Wire.list %s) Base.Map.to_alist (Base.Map.of_alist_exn (module Base.%s)))" pair key
  | _ -> apply ("codec_" ^ mangled name)

(* A codec of constructors with their arguments; the number of a constructor comes first. *)
and cases cases annotation =
  let case number (name, kinds) =
    let parts = indexed kinds in
    let pattern = match parts with [] -> name | _ -> spf "%s (%s)" name (concat ", " (List.map fst parts)) in
    let writes = concat "" (List.map (fun (name, kind) -> spf "; %s.Wire.write buffer %s" (codec kind) name) parts) in
    let reads = concat "" (List.map (fun (name, kind) -> spf "let %s = %s.Wire.read reader in " name (codec kind)) parts) in
    (spf "| %s -> Wire.int.Wire.write buffer %d%s" pattern number writes, spf "| %d -> %s(%s%s)" number reads pattern annotation)
  in
  let writes, reads = List.split (List.mapi case cases) in
  spf "{ Wire.write = (fun buffer value -> match (value%s) with %s); read = (fun reader -> match Wire.int.Wire.read reader with %s | _ -> raise (Wire.Bad \"a case that there is not\")) }"
    annotation (concat " " writes) (concat " " reads)

let variables declaration =
  List.map (fun (kind, _) -> match kind.ptyp_desc with Ptyp_var name -> name | _ -> "_") declaration.ptype_params

let is_abstract declaration = declaration.ptype_kind = Ptype_abstract && declaration.ptype_manifest = None

(* A type of the stub: as in the interface, but abstract ones are numbers. *)
let declare side declaration =
  let name = declaration.ptype_name.txt in
  if not (is_abstract declaration) then
    Buffer.add_string side.out (Format.asprintf "%a\n" Pprintast.structure [ Ast_helper.Str.type_ Recursive [ declaration ] ])
  else
    match variables declaration with
    | [] -> Buffer.add_string side.out (spf "type %s = int\n" name)
    | [ variable ] -> Buffer.add_string side.out (spf "type '%s %s = { number : int; store : '%s Wire.store }\n" variable name variable)
    | _ -> raise (Unsupported "an abstract type of two parameters")

let define side declaration =
  let name = declaration.ptype_name.txt in
  let kind = side.path ^ name in
  let parameters = concat "" (List.map (fun variable -> " var_" ^ variable) (variables declaration)) in
  let annotation =
    match variables declaration with
    | [] -> spf " : %s" kind
    | [ variable ] -> spf " : '%s %s" variable kind
    | several -> spf " : (%s) %s" (concat ", " (List.map (( ^ ) "'") several)) kind
  in
  let line =
    match (declaration.ptype_kind, declaration.ptype_manifest) with
    | Ptype_abstract, Some manifest -> spf "let codec_%s%s = %s" name parameters (codec manifest)
    | Ptype_abstract, None -> (
        match (side.candidate, variables declaration) with
        | true, [] -> spf "let codec_%s : %s Wire.codec = Wire.table ()" name kind
        | true, _ -> spf "let codec_%s = let table : Wire.any %s Wire.codec = Wire.table () in fun _ -> table" name kind
        | false, [] -> spf "let codec_%s : %s Wire.codec = Wire.int" name kind
        | false, _ ->
            spf "let codec_%s own = { Wire.write = (fun buffer value -> Wire.join own value.store; Wire.int.Wire.write buffer value.number); read = (fun reader -> { number = Wire.int.Wire.read reader; store = own }) }" name)
    | Ptype_record fields, _ ->
        let names = concat "; " (List.map (fun field -> field.pld_name.txt) fields) in
        let writes = List.map (fun field -> spf "%s.Wire.write buffer %s" (codec field.pld_type) field.pld_name.txt) fields in
        let reads = List.map (fun field -> spf "let %s = %s.Wire.read reader in" field.pld_name.txt (codec field.pld_type)) fields in
        spf "let rec codec_%s%s = { Wire.write = (fun buffer ({ %s }%s) -> %s); read = (fun reader -> %s ({ %s }%s)) }" name parameters names annotation
          (concat "; " writes) (concat " " reads) names annotation
    | Ptype_variant constructors, _ ->
        let case constructor =
          match constructor.pcd_args with
          | Pcstr_tuple kinds -> (constructor.pcd_name.txt, kinds)
          | Pcstr_record _ -> raise (Unsupported "a constructor with named fields")
        in
        spf "let rec codec_%s%s = %s" name parameters (cases (List.map case constructors) annotation)
    | Ptype_open, _ -> raise (Unsupported "an open type")
  in
  Buffer.add_string side.out (line ^ "\n")

(* The type variables of a type, each once. *)
let variables_of kind =
  let found = ref [] in
  let typ (self : Ast_iterator.iterator) kind =
    (match kind.ptyp_desc with Ptyp_var name when not (List.mem name !found) -> found := name :: !found | _ -> ());
    Ast_iterator.default_iterator.typ self kind
  in
  let iterator = { Ast_iterator.default_iterator with typ } in
  iterator.typ iterator kind;
  !found

(* The code before a call that makes the codecs of its type variables. *)
let with_variables side kinds =
  let names = List.sort_uniq compare (List.concat_map variables_of kinds) in
  let values = if side.candidate then ("()", spf "let var_%s = Wire.any in ") else ("Wire.store ()", fun name -> spf "let var_%s = Wire.known store_%s in " name name) in
  concat "" (List.map (fun name -> spf "let store_%s = %s in %s" name (fst values) (snd values name)) names)

let modtype name kind =
  let name = Location.mknoloc name in
  Format.asprintf "%a\n" Pprintast.signature [ Ast_helper.Sig.modtype (Ast_helper.Mtd.mk ~typ:kind name) ]

let quoted name = if name.[0] = '_' || (name.[0] >= 'a' && name.[0] <= 'z') then name else spf "( %s )" name

let value side name kind =
  let arguments, result = arrows kind in
  let numbered = List.mapi (fun number (label, kind) -> (spf "x%d" number, label, kind)) arguments in
  let variables = with_variables side (List.map snd arguments @ [ result ]) in
  let given = concat "" (List.map (fun (name, label, _) -> passed label name) numbered) in
  let each write = concat "" (List.map write numbered) in
  let line =
    if side.candidate then
      spf "let () = Wire.register (prefix ^ %S) (fun reader -> %s%slet result = M.%s%s in fun buffer -> %s.Wire.write buffer result)" name variables
        (each (fun (name, _, kind) -> spf "let %s = %s.Wire.read reader in " name (codec kind)))
        (quoted name) given (codec result)
    else
      spf "let %s =%s %sWire.call (prefix ^ %S) (fun buffer -> %s()) %s.Wire.read" (quoted name)
        (if given = "" then "" else spf " fun%s ->" given)
        variables name
        (each (fun (name, _, kind) -> spf "%s.Wire.write buffer %s; " (codec kind) name))
        (codec result)
  in
  Buffer.add_string side.out (line ^ "\n")

let rec item side known_types item =
  let add text = Buffer.add_string side.out text in
  match item.psig_desc with
  | Psig_attribute _ -> ()
  | Psig_value { pval_name; pval_type; _ } -> value side pval_name.txt pval_type
  | Psig_type (_, declarations) ->
      List.iter
        (fun declaration ->
          if is_abstract declaration && variables declaration <> [] then stored := declaration.ptype_name.txt :: !stored;
          if not side.candidate then declare side declaration;
          define side declaration)
        declarations
  | Psig_open { popen_expr; _ } -> if not side.candidate then add (spf "open %s\n" (flat popen_expr.txt))
  | Psig_modtype { pmtd_name; pmtd_type = Some kind; _ } ->
      Hashtbl.replace known_types pmtd_name.txt kind;
      if not side.candidate then add (modtype pmtd_name.txt kind)
  | Psig_module { pmd_name = { txt = Some name; _ }; pmd_type = { pmty_desc = Pmty_functor (Named ({ txt = Some own; _ }, parameter), body); _ }; _ } ->
      instances side known_types name own parameter body
  | _ -> raise (Unsupported "an item other than types, values and functors")

(* A functor over one module of an abstract type and functions on it: each instance has names of its own. *)
and instances side known_types name own parameter body =
  let rec signature kind =
    match kind.pmty_desc with
    | Pmty_signature items -> items
    | Pmty_ident { txt; _ } when Hashtbl.mem known_types (flat txt) -> signature (Hashtbl.find known_types (flat txt))
    | _ -> raise (Unsupported "a module type from elsewhere")
  in
  let add text = Buffer.add_string side.out text in
  let types, values =
    List.fold_right
      (fun item (types, values) ->
        match item.psig_desc with
        | Psig_type (_, [ declaration ]) when is_abstract declaration && variables declaration = [] -> (declaration.ptype_name.txt :: types, values)
        | Psig_value { pval_name; pval_type; _ } -> (types, (pval_name.txt, pval_type) :: values)
        | _ -> raise (Unsupported "a functor over more than abstract types and values"))
      (signature parameter) ([], [])
  in
  let codecs = concat "" (List.map (fun name -> spf "let codec_%s = codec_%s_%s in " name own name) types) in
  let body_items = signature body in
  if side.candidate then (
    add (spf "let () = Wire.register (prefix ^ %S) (fun reader ->\n" name);
    List.iter (fun kind -> add (spf "let codec_%s_%s = Wire.any in\n" own kind)) types;
    List.iter (fun (value, kind) -> add (spf "let given_%s = %s%s.Wire.read reader in\n" value codecs (codec kind))) values;
    add (spf "let module %s = struct\n" own);
    List.iter (fun kind -> add (spf "type %s = Wire.any\n" kind)) types;
    List.iter (fun (value, _) -> add (spf "let %s = given_%s\n" (quoted value) value)) values;
    add (spf "end in\nlet module Instance = struct\nmodule M = M.%s (%s)\nlet prefix = Wire.instance ()\n" name own);
    List.iter (item side known_types) body_items;
    add "end in fun buffer -> Wire.string.Wire.write buffer Instance.prefix)\n")
  else (
    add (modtype ("Of_" ^ name) parameter);
    add (spf "module %s (%s : Of_%s) = struct\n" name own name);
    List.iter (fun kind -> add (spf "let codec_%s_%s : %s.%s Wire.codec = Wire.known (Wire.store ())\n" own kind own kind)) types;
    let writes = List.map (fun (value, kind) -> spf "(%s%s).Wire.write buffer %s.%s; " codecs (codec kind) own (quoted value)) values in
    add (spf "let prefix = Wire.call (prefix ^ %S) (fun buffer -> %s()) Wire.string.Wire.read\n" name (concat "" writes));
    List.iter (item side known_types) body_items;
    add "end\n")

let write file text =
  let channel = open_out_bin file in
  output_string channel text;
  close_out channel

let () =
  let interface, stub, serve = (Sys.argv.(1), Sys.argv.(2), Sys.argv.(3)) in
  let channel = open_in_bin interface in
  let lexbuf = Lexing.from_channel channel in
  let name = String.capitalize_ascii (Filename.remove_extension (Filename.basename interface)) in
  match
    let items = Parse.interface lexbuf in
    let side candidate first =
      let side = { out = Buffer.create 4096; candidate; path = (if candidate then "M." else "") } in
      Buffer.add_string side.out (first ^ "let prefix = \"\"\n");
      List.iter (item side (Hashtbl.create 4)) items;
      side.out
    in
    write stub (Buffer.contents (side false ""));
    write serve (Buffer.contents (side true (spf "module M = %s\n" name)) ^ "let () = Wire.serve ()\n")
  with
  | () -> ()
  | exception Unsupported what ->
      prerr_endline ("the interface has " ^ what ^ ", which cannot pass between two processes");
      exit 1
  | exception Syntaxerr.Error _ ->
      prerr_endline "a syntax error in the interface";
      exit 1
