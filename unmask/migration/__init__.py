"""Configurations of other trainers turned into ours: tables of old keys, and what reads them."""
