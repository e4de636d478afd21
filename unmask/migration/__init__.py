"""Conversion of other trainers' configurations into Unmask's: tables of old keys, and the code that reads
them."""
