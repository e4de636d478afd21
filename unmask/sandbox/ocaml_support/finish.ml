let () = Gate.finish ()
