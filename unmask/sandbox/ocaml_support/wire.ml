(* Plain data between the tests and the candidate, two processes connected by two pipes.

   Both sides are generated from the interface (proxy.ml), and call each other: the tests call the candidate's functions, the candidate calls
   functions that tests passed to it. What is read is checked: whatever bytes arrive, reading gives a value of its type or raises. *)

exception Bad of string
(* The other side ended, or sent something that is no value of its type. *)

type reader = { text : string; mutable at : int }
type 'a codec = { write : Buffer.t -> 'a -> unit; read : reader -> 'a }

(* The descriptors that worker.py passes to both programs. *)
let descriptor number : Unix.file_descr = Obj.magic (int_of_string Sys.argv.(number))
let outgoing = descriptor 1
let incoming = descriptor 2
let max_frame = 1 lsl 24

let take reader size =
  if size < 0 || size > String.length reader.text - reader.at then raise (Bad "an answer that is too short");
  reader.at <- reader.at + size;
  reader.at - size

let int64 =
  { write = (fun buffer number -> Buffer.add_int64_le buffer number); read = (fun reader -> String.get_int64_le reader.text (take reader 8)) }

let via codec out back = { write = (fun buffer value -> codec.write buffer (out value)); read = (fun reader -> back (codec.read reader)) }
let int = via int64 Int64.of_int Int64.to_int
let float = via int64 Int64.bits_of_float Int64.float_of_bits

let limited most =
  let back number = if number < 0 || number > most then raise (Bad "a number out of range") else number in
  via int (fun number -> number) back

let string =
  {
    write = (fun buffer text -> int.write buffer (String.length text); Buffer.add_string buffer text);
    read = (fun reader -> let size = int.read reader in String.sub reader.text (take reader size) size);
  }

let unit = { write = (fun _ () -> ()); read = (fun _ -> ()) }
let bool = via (limited 1) Bool.to_int (fun number -> number = 1)
let char = via (limited 255) Char.code Char.chr

let list item =
  {
    write = (fun buffer items -> int.write buffer (List.length items); List.iter (item.write buffer) items);
    read =
      (fun reader ->
        let rec more count items = if count = 0 then List.rev items else more (count - 1) (item.read reader :: items) in
        more ((limited max_frame).read reader) []);
  }

let pair one other =
  {
    write = (fun buffer (left, right) -> one.write buffer left; other.write buffer right);
    read = (fun reader -> let left = one.read reader in (left, other.read reader));
  }

let array item = via (list item) Array.to_list Array.of_list

let option item =
  {
    write = (fun buffer value -> bool.write buffer (value <> None); Option.iter (item.write buffer) value);
    read = (fun reader -> if bool.read reader then Some (item.read reader) else None);
  }

let result ok error =
  {
    write =
      (fun buffer value ->
        bool.write buffer (Result.is_ok value);
        match value with Ok value -> ok.write buffer value | Error value -> error.write buffer value);
    read = (fun reader -> if bool.read reader then Ok (ok.read reader) else Error (error.read reader));
  }

(* Values of a type variable. The candidate gets a copy, which it can compare and hash. What it returns is only looked up among the values
   that it was given, so that it cannot invent a value of a type that it does not know. *)

type 'a store = { mutable known : (string, 'a) Hashtbl.t; mutable same : 'a store option }

let store () = { known = Hashtbl.create 8; same = None }
let rec root store = match store.same with None -> store | Some other -> root other

let join one other =
  let one, other = (root one, root other) in
  if one != other then (
    Hashtbl.iter (Hashtbl.replace one.known) other.known;
    other.same <- Some one)

let bytes value = Marshal.to_string value [ Marshal.No_sharing ]

let known store =
  {
    write = (fun buffer value -> let text = bytes value in Hashtbl.replace (root store).known text value; string.write buffer text);
    read =
      (fun reader ->
        match Hashtbl.find_opt (root store).known (string.read reader) with
        | Some value -> value
        | None -> raise (Bad "a value that the candidate was not given"));
  }

type any = Obj.t

let any : any codec = via string bytes (fun text -> Marshal.from_string text 0)

(* Values of an abstract type stay with the candidate. The tests hold their numbers. *)

let table () =
  let values = Hashtbl.create 8 in
  let add value = Hashtbl.add values (Hashtbl.length values) value; Hashtbl.length values - 1 in
  via int add (Hashtbl.find values)

(* Frames: C name arguments (a call), F number arguments (a call of a passed function), R result, E exception text. *)

let rec write_all file text from =
  if from < String.length text then write_all file text (from + Unix.write_substring file text from (String.length text - from))

let send kind fill =
  let buffer = Buffer.create 64 in
  Buffer.add_char buffer kind;
  fill buffer;
  let size = Bytes.create 4 in
  Bytes.set_int32_be size 0 (Int32.of_int (Buffer.length buffer));
  if Buffer.length buffer > max_frame then raise (Bad "a frame that is too long");
  write_all outgoing (Bytes.to_string size ^ Buffer.contents buffer) 0

let read_all size =
  let text = Bytes.create size in
  let rec fill from =
    if from < size then
      match Unix.read incoming text from (size - from) with 0 -> raise (Bad "the candidate ended") | count -> fill (from + count)
  in
  fill 0;
  Bytes.to_string text

let receive () =
  let size = Int32.to_int (String.get_int32_be (read_all 4) 0) in
  if size < 1 || size > max_frame then raise (Bad "a frame of a wrong length");
  let text = read_all size in
  (text.[0], { text; at = 1 })

let names =
  [ ("Not_found", Not_found); ("Division_by_zero", Division_by_zero); ("End_of_file", End_of_file); ("Stack_overflow", Stack_overflow) ]

let describe = function
  | Failure text -> ("Failure", text)
  | Invalid_argument text -> ("Invalid_argument", text)
  | error -> (
      match List.find_opt (fun (_, known) -> known = error) names with
      | Some (name, _) -> (name, "")
      | None -> ("", Printexc.to_string error))

let exception_of name text =
  match name with
  | "Failure" -> Failure text
  | "Invalid_argument" -> Invalid_argument text
  | _ -> ( match List.assoc_opt name names with Some error -> error | None -> Bad text)

type handler = reader -> Buffer.t -> unit

let handlers : (string, handler) Hashtbl.t = Hashtbl.create 16
let functions : (int, handler) Hashtbl.t = Hashtbl.create 16

(* The failed assertions of the tests, which gate.ml knows. One within a function that a test passed is raised again after the call,
   whatever the candidate does with the exception, and its text, which has the expected value, is not sent. *)
let is_failure : (exn -> bool) ref = ref (fun _ -> false)
let failed : exn option ref = ref None

(* A call of this side: its result or exception goes to the other one. *)
let handle handler reader =
  match handler reader with
  | fill -> send 'R' fill
  | exception error ->
      let failure = !is_failure error in
      if failure then failed := Some error;
      let name, text = if failure then ("", "a failed assertion") else describe error in
      send 'E' (fun buffer -> string.write buffer name; string.write buffer text)

let find table key = match Hashtbl.find_opt table key with Some handler -> handler | None -> raise (Bad "an unknown function")

let rec answer () =
  match receive () with
  | 'R', reader -> reader
  | 'E', reader ->
      let name = string.read reader in
      raise (exception_of name (string.read reader))
  | 'C', reader -> handle (find handlers (string.read reader)) reader; answer ()
  | 'F', reader -> handle (find functions (int.read reader)) reader; answer ()
  | _ -> raise (Bad "a frame of an unknown kind")

let call name fill read =
  send 'C' (fun buffer -> string.write buffer name; fill buffer);
  let reader = try Ok (answer ()) with error -> Error error in
  match (!failed, reader) with
  | Some failure, _ -> failed := None; raise failure
  | None, Ok reader -> read reader
  | None, Error error -> raise error

let func handler read =
  {
    write =
      (fun buffer value ->
        let number = Hashtbl.length functions in
        Hashtbl.add functions number (handler value);
        int.write buffer number);
    read =
      (fun reader ->
        let number = int.read reader in
        read (fun fill back ->
            send 'F' (fun buffer -> int.write buffer number; fill buffer);
            back (answer ())));
  }

let count = ref 0

(* The beginning of the names of a functor's instance. *)
let instance () = incr count; string_of_int !count ^ "."

let register name handler = Hashtbl.replace handlers name handler

let serve () = match answer () with _ -> () | exception Bad _ -> ()
